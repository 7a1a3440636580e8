"""Group-relative policy optimisation on multi-turn rollouts, data parallel in two ways.

The dp axis cuts prompts; the gp axis cuts the rollouts of one prompt, so the mean and the deviation of a
group's rewards are taken across ranks. Only what the policy itself said carries loss, and the loss is the
mean over all such tokens of the global batch.

    torchrun --nproc-per-node 4 examples/grpo.py --gp 2
"""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, -1).transpose(1, 2)
        # two heads of queries share one of keys and values
        k, v = self.kv(h).view(b, t, 2, self.heads // 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.positions = nn.Embedding(args.seq_len, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Log-probabilities of tokens 1.. given those before them, [rollouts, length - 1]."""
        inputs = ids[:, :-1]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x))).float()
        return torch.gather(logits.log_softmax(dim=-1), 2, ids[:, 1:, None]).squeeze(2)


@dataclass
class Rollouts:
    ids: Tensor  # [rollouts, length]
    mask: Tensor  # [rollouts, length - 1], 1 where the policy said the token
    rewards: Tensor  # [prompts, rollouts of a prompt]


def collect(step: int, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Rollouts:
    """This rank's rollouts: prompt, then answers of the policy in turn with replies of a tool."""
    generator = torch.Generator().manual_seed(args.seed + step)
    shape = (args.prompts, args.group)
    ids = torch.randint(args.vocab, (*shape, args.seq_len), generator=generator)
    turns = torch.randint(1, args.seq_len // 3, (*shape, 4), generator=generator)
    ends = (2 + turns).cumsum(dim=-1)
    turn = (torch.arange(1, args.seq_len) >= ends[..., None]).sum(dim=2)
    mask = (turn % 2).to(torch.get_default_dtype())
    # stands for an environment: likes small tokens, and is noisy
    rewards = (ids < args.vocab // 4).to(mask.dtype).mean(dim=-1)
    rewards = rewards + 0.1 * torch.randn(shape, generator=generator)

    def ours(t: Tensor) -> Tensor:
        for dim, axis in enumerate((mesh["dp"], mesh["gp"])):
            t = t.chunk(axis.size(), dim=dim)[axis.get_local_rank()]
        return t.to(device)

    return Rollouts(ours(ids).flatten(0, 1), ours(mask).flatten(0, 1), ours(rewards))


def total(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over the ranks of a group, or over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


def advantages(rewards: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rewards relative to all rollouts of their prompt, in units of their deviation."""
    count = total(torch.tensor(float(rewards.shape[1]), device=rewards.device), group)
    mean = total(rewards.sum(dim=1, keepdim=True), group) / count
    square = total((rewards - mean).square().sum(dim=1, keepdim=True), group)
    return (rewards - mean) / ((square / (count - 1)).sqrt() + 1e-4)


class AdaptivePenalty:
    """The weight of the divergence from the reference policy, steered towards a target."""

    def __init__(self, weight: float, target: float) -> None:
        self.weight, self.target = weight, target

    def update(self, divergence: Tensor) -> None:
        error = (divergence / self.target - 1).clamp(-0.2, 0.2)
        self.weight *= 1 + 0.5 * error.item()


def divergence(new: Tensor, reference: Tensor) -> Tensor:
    """An estimate of the divergence from the reference policy, never negative, token by token."""
    return torch.exp(reference - new) - (reference - new) - 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gp", type=int, default=1, help="ranks that share the rollouts of a prompt")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps on the same rollouts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="rollouts of one prompt")
    parser.add_argument("--seq-len", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--penalty", type=float, default=0.05)
    parser.add_argument("--target", type=float, default=0.5, help="divergence that is aimed at")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    shape = (dist.get_world_size() // args.gp, args.gp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "gp"))

    torch.manual_seed(args.seed)
    policy, reference = Policy(args).to(device), Policy(args).to(device)
    reference.requires_grad_(False)
    for parameter in policy.parameters():
        # losses are shares of a global mean, so gradients add up
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    penalty = AdaptivePenalty(args.penalty, args.target)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)

    for step in range(args.steps):
        rollouts = collect(step, args, mesh, device)
        ids, mask = rollouts.ids, rollouts.mask
        tokens = total(mask.sum())
        weights = advantages(rollouts.rewards, mesh.get_group("gp")).flatten()[:, None]
        with torch.no_grad(), autocast:
            old, base = policy(ids), reference(ids)
        drift = total((divergence(old, base) * mask).sum()) / tokens
        penalty.update(drift)

        for update in range(args.updates):
            with autocast:
                new = policy(ids)
            ratio = torch.exp(new - old)
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gain = torch.minimum(ratio * weights, clipped * weights)
            cost = penalty.weight * divergence(new, base) - gain
            loss = (cost * mask).sum() / tokens

            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.25)
            optimizer.step()

            mean_loss = total(loss)
            if dist.get_rank() == 0:
                print(f"step {step}.{update} loss {mean_loss:.6f} norm {norm:.6f} divergence {drift:.6f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
