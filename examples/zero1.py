"""A small language model trained with a hand-written ZeRO optimizer over all ranks.

Parameters live in one flat buffer in their own precision. Gradients are summed in float32 over the
ranks (stage 1: all-reduce, stage 2: reduce-scatter), each rank keeps float32 masters and AdamW moments
of its own shard of the buffer only, and the new parameters are gathered again.

    torchrun --nproc-per-node 4 examples/zero1.py --stage 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocab: int, seq: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class ZeroAdamW:
    """AdamW whose float32 state is sharded over `group`; owns the storage of all parameters."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        stage: int = 2,
        max_norm: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.stage = group, stage
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.lr, self.max_norm, self.betas, self.eps = lr, max_norm, betas, eps

        params = list(model.parameters())
        numel = sum(p.numel() for p in params)
        padded = -(-numel // self.world) * self.world
        device = params[0].device
        self.flat = torch.zeros(padded, dtype=params[0].dtype, device=device)
        self.main_grad = torch.zeros(padded, dtype=torch.float32, device=device)
        decay = torch.zeros(padded, device=device)
        offset = 0
        for p in params:
            end = offset + p.numel()
            view = self.flat[offset:end].view_as(p)
            view.copy_(p.detach())
            p.data = view
            decay[offset:end] = weight_decay if p.ndim > 1 else 0.0
            self._accumulate_into(p, self.main_grad[offset:end].view_as(p))
            offset = end
        dist.broadcast(self.flat, src=0, group=group)

        self.per_rank = padded // self.world
        self.lo, self.hi = self.rank * self.per_rank, (self.rank + 1) * self.per_rank
        self.master = self.flat[self.lo : self.hi].detach().float().clone()
        self.decay = decay[self.lo : self.hi].clone()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.steps = 0

    @staticmethod
    def _accumulate_into(param: nn.Parameter, main_grad: Tensor) -> None:
        def hook(p: Tensor) -> None:
            main_grad.add_(p.grad.float())
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)

    def zero_grad(self) -> None:
        self.main_grad.zero_()

    def _reduced_shard(self) -> Tensor:
        """The mean over the ranks of this rank's shard of the gradient."""
        if self.stage >= 2:
            shard = torch.empty_like(self.master)
            dist.reduce_scatter_tensor(shard, self.main_grad, group=self.group)
        else:
            dist.all_reduce(self.main_grad, group=self.group)
            shard = self.main_grad[self.lo : self.hi]
        return shard / self.world

    @torch.no_grad()
    def step(self) -> Tensor:
        """One update; returns the norm of the whole gradient before clipping."""
        grad = self._reduced_shard()
        total = grad.square().sum()
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        grad = grad * torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)

        self.steps += 1
        beta1, beta2 = self.betas
        self.exp_avg.lerp_(grad, 1 - beta1)
        self.exp_avg_sq.lerp_(grad.square(), 1 - beta2)
        step_size = self.lr / (1 - beta1**self.steps)
        denom = (self.exp_avg_sq / (1 - beta2**self.steps)).sqrt() + self.eps
        self.master.mul_(1 - self.lr * self.decay)
        self.master.addcdiv_(self.exp_avg, denom, value=-step_size)

        updated = self.master.to(self.flat.dtype)
        dist.all_gather_into_tensor(self.flat, updated, group=self.group)
        return norm


def batches(args: argparse.Namespace, rank: int, world: int, device: torch.device):
    """This rank's slice of each global batch: sequences that step through the vocabulary evenly."""
    generator = torch.Generator().manual_seed(args.seed)
    local = args.global_batch // world
    while True:
        start = torch.randint(args.vocab, (args.global_batch, 1), generator=generator)
        stride = torch.randint(1, 5, (args.global_batch, 1), generator=generator)
        tokens = (start + stride * torch.arange(args.seq + 1)) % args.vocab
        tokens = tokens[rank * local : (rank + 1) * local].to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=2, help="micro batches per step")
    parser.add_argument("--global-batch", type=int, default=16, help="sequences per micro batch, all ranks")
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")

    torch.manual_seed(args.seed + rank)
    model = LanguageModel(args.vocab, args.seq, args.dim, args.heads, args.layers)
    model.to(device=device, dtype=getattr(torch, args.dtype))
    optimizer = ZeroAdamW(model, args.lr, args.weight_decay, args.stage, args.max_norm)
    data = batches(args, rank, world, device)

    for step in range(args.steps):
        optimizer.zero_grad()
        logged = torch.zeros((), device=device)
        for _ in range(args.accumulate):
            ids, targets = next(data)
            logits = model(ids).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / args.accumulate
            loss.backward()
            logged += loss.detach()
        norm = optimizer.step()
        dist.all_reduce(logged)
        if rank == 0:
            print(f"step {step} loss {logged.item() / world:.6f} grad norm {norm.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
