"""Blocks like DeepSeek-V3's: latent attention, a router balanced by a bias, shared and routed experts.

Parallel: pipeline stages (pp), data (dp), attention heads and sequence (tp, as Megatron's sequence
parallelism). The experts of a stage are cut over dp and tp together, dp being the nodes and tp the ranks
in a node: tokens go to their node first, and then to their rank in it.

    torchrun --nproc-per-node 8 examples/deepseek_block.py --pp 2 --tp 2
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the parts of dimension 1."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks, of which each keeps its part of dimension 1."""
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=1)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


class Exchange(torch.autograd.Function):
    """One collective forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Exchange.apply(x, group, gather, scatter)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Exchange.apply(x, group, scatter, gather)


class Hop:
    """Takes rows to the ranks `target` of a group, and what was made of them back."""

    def __init__(self, target: Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.order = group, target.argsort(stable=True)
        counts = torch.bincount(target, minlength=group.size())
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self.sends, self.receives = counts.tolist(), arriving.tolist()

    def there(self, rows: Tensor) -> Tensor:
        return all_to_all_single_autograd(rows[self.order], self.receives, self.sends, self.group)

    def back(self, rows: Tensor) -> Tensor:
        return all_to_all_single_autograd(rows, self.sends, self.receives, self.group)[self.order.argsort()]


def weight(mesh: DeviceMesh, *shape: int, cut: tuple[str, ...] = ()) -> nn.Parameter:
    """Random [fan, ...], of which this rank keeps its part of the first dimension; remembers the cut."""
    full = torch.randn(shape) * 0.2
    for axis in cut:
        full = full.chunk(mesh[axis].size())[mesh[axis].get_local_rank()]
    parameter = nn.Parameter(full.clone())
    parameter.cut = cut
    return parameter


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of [batch, length, heads, head dim] from position 0 on."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class LatentAttention(nn.Module):
    """Queries, keys and values are read off small latents, made of this rank's part of the sequence."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tp, self.args = mesh.get_group("tp"), args
        heads, plain, rope = args.heads, args.head_dim, args.rope_dim
        self.q_down = weight(mesh, args.width, args.latent)
        self.kv_down = weight(mesh, args.width, args.latent + rope)
        self.q_norm, self.kv_norm = weight(mesh, args.latent), weight(mesh, args.latent)
        self.q_up = weight(mesh, heads * (plain + rope), args.latent, cut=("tp",))
        self.kv_up = weight(mesh, heads * 2 * plain, args.latent, cut=("tp",))
        self.out = weight(mesh, heads * plain, args.width, cut=("tp",))

    def forward(self, x: Tensor) -> Tensor:
        latent, plain, rope = self.args.latent, self.args.head_dim, self.args.rope_dim
        q = F.rms_norm(x @ self.q_down, (latent,), 1 + self.q_norm)
        kv, k_rope = (x @ self.kv_down).split([latent, rope], dim=-1)
        kv = F.rms_norm(kv, (latent,), 1 + self.kv_norm)
        latents = gather_sequence(torch.cat([q, kv, k_rope], dim=-1), self.tp)
        q, kv, k_rope = latents.split([latent, latent, rope], dim=-1)
        q = F.linear(q, self.q_up).unflatten(-1, (-1, plain + rope))
        q_plain, q_rope = q.split([plain, rope], dim=-1)
        k_plain, v = F.linear(kv, self.kv_up).unflatten(-1, (-1, 2 * plain)).chunk(2, dim=-1)
        k_rope = rotate(k_rope[:, :, None]).expand(-1, -1, k_plain.shape[2], -1)
        q = torch.cat([q_plain, rotate(q_rope)], dim=-1).transpose(1, 2)
        k = torch.cat([k_plain, k_rope], dim=-1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return scatter_sequence(y.transpose(1, 2).flatten(2) @ self.out, self.tp)


class MoE(nn.Module):
    """A shared expert and the top k of many; `bias` steers the choice, but not the weights, of experts."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.top_k = mesh, args.top_k
        self.in_node = args.experts // mesh["dp"].size()
        self.in_rank = self.in_node // mesh["tp"].size()
        self.router = weight(mesh, args.experts, args.width)
        self.shared_up = weight(mesh, args.width, args.expert_width)
        self.shared_down = weight(mesh, args.expert_width, args.width)
        self.up = weight(mesh, args.experts, args.width, args.expert_width, cut=("dp", "tp"))
        self.down = weight(mesh, args.experts, args.expert_width, args.width, cut=("dp", "tp"))
        self.register_buffer("bias", torch.zeros(args.experts))
        self.register_buffer("load", torch.zeros(args.experts, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = F.linear(tokens, self.router).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        gates = scores.gather(1, chosen)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        experts = chosen.flatten()
        self.load += torch.bincount(experts, minlength=len(self.load))

        to_node = Hop(experts // self.in_node, self.mesh.get_group("dp"))
        rows = to_node.there(tokens.repeat_interleave(self.top_k, dim=0))
        experts = to_node.there(experts)
        to_rank = Hop(experts % self.in_node // self.in_rank, self.mesh.get_group("tp"))
        done = self.run_experts(to_rank.there(rows), to_rank.there(experts) % self.in_rank)
        done = to_node.back(to_rank.back(done)).view(-1, self.top_k, x.shape[-1])
        shared = F.silu(tokens @ self.shared_up) @ self.shared_down
        return (shared + (done * gates[..., None]).sum(dim=1)).view_as(x)

    def run_experts(self, rows: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort(stable=True)
        parts = rows[order].split(torch.bincount(experts, minlength=self.in_rank).tolist())
        done = torch.cat([F.silu(t @ up) @ down for t, up, down in zip(parts, self.up, self.down)])
        return done[order.argsort()]

    @torch.no_grad()
    def balance(self, rate: float) -> Tensor:
        """Make busy experts less likely from now on; return the largest load over the mean one."""
        for axis in ("dp", "tp"):
            dist.all_reduce(self.load, group=self.mesh.get_group(axis))
        load = self.load.to(self.bias.dtype)
        self.bias += rate * torch.sign(load.mean() - load)
        self.load.zero_()
        return load.max() / load.mean()


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm1, self.norm2 = weight(mesh, args.width), weight(mesh, args.width)
        self.attention, self.moe = LatentAttention(args, mesh), MoE(args, mesh)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], 1 + self.norm1))
        return x + self.moe(F.rms_norm(x, x.shape[-1:], 1 + self.norm2))


class Stage(nn.Module):
    """Consecutive blocks on [batch, part of the sequence, width]; ids come in first, a loss goes out last."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.tp = mesh, mesh["tp"]
        stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        # every part has a seed of its own, so it starts the same wherever it lives
        torch.manual_seed(args.seed)
        if self.is_first:
            self.embedding = weight(mesh, args.vocab, args.width, cut=("tp",))
        torch.manual_seed(args.seed + 1)
        if self.is_last:
            self.head = weight(mesh, args.vocab, args.width)
        self.blocks = nn.ModuleDict()
        for layer in torch.arange(args.layers).chunk(stages)[stage].tolist():
            torch.manual_seed(args.seed + 2 + layer)
            self.blocks[str(layer)] = Block(args, mesh)

    def embed(self, ids: Tensor) -> Tensor:
        """Every rank looks up the tokens of its part of the vocabulary."""
        rows = ids - self.tp.get_local_rank() * len(self.embedding)
        ours = (rows >= 0) & (rows < len(self.embedding))
        x = F.embedding(rows.where(ours, 0), self.embedding) * ours[..., None]
        return scatter_sequence(x, self.tp.get_group())

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(x) if self.is_first else x
        for block in self.blocks.values():
            x = block(x)
        if not self.is_last:
            return x
        ours = targets.chunk(self.tp.size(), dim=1)[self.tp.get_local_rank()]
        logits = F.linear(F.rms_norm(x, x.shape[-1:]), self.head)
        return F.cross_entropy(logits.flatten(0, 1), ours.flatten(), reduction="sum")


def forward_backward(stage: Stage, batch: Tensor, size: int, tokens: int) -> Tensor:
    """GPipe: all microbatches forward, then all backward. Returns this rank's part of the mean loss."""
    step = dist.get_world_size() // stage.mesh["pp"].size()
    before, after = dist.get_rank() - step, dist.get_rank() + step
    held: list[tuple[Tensor, Tensor]] = []
    for part in batch.split(size):
        x = part[:, :-1]
        if not stage.is_first:
            width = next(stage.parameters()).shape[-1]
            x = torch.empty(size, x.shape[1] // stage.tp.size(), width, device=x.device, requires_grad=True)
            dist.recv(x.data, before)
        y = stage(x, part[:, 1:])
        if stage.is_last:
            y = y / tokens
        else:
            dist.send(y.detach(), after)
        held.append((x, y))
    for x, y in held:
        grad = None
        if not stage.is_last:
            dist.recv(grad := torch.empty_like(y), after)
        y.backward(grad)
        if not stage.is_first:
            dist.send(x.grad, before)
    return sum(y.detach() for _, y in held) if stage.is_last else torch.zeros((), device=batch.device)


def reduce_gradients(stage: Stage) -> None:
    """Sum over the axes that do not cut the parameter: each of their ranks saw other tokens."""
    for parameter in stage.parameters():
        for axis in ("dp", "tp"):
            if axis not in parameter.cut:
                dist.all_reduce(parameter.grad, group=stage.mesh.get_group(axis))


def clip_gradients(stage: Stage, limit: float) -> Tensor:
    """Clip by the norm of the whole model, parts of parameters and stages put together."""
    total = torch.zeros((), device=stage.mesh.device_type)
    for cut in sorted({p.cut for p in stage.parameters()}):
        squares = [p.grad.square().sum() for p in stage.parameters() if p.cut == cut]
        square = torch.stack(squares).sum()
        for axis in cut:
            dist.all_reduce(square, group=stage.mesh.get_group(axis))
        total = total + square
    dist.all_reduce(total, group=stage.mesh.get_group("pp"))
    for parameter in stage.parameters():
        parameter.grad.mul_((limit / (total.sqrt() + 1e-6)).clamp(max=1.0))
    return total.sqrt()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads and sequences")
    sizes = {"steps": 3, "batch-size": 8, "microbatch-size": 2, "seq-len": 16, "vocab": 64, "width": 32}
    sizes |= {"layers": 2, "heads": 4, "head-dim": 8, "rope-dim": 4, "latent": 16}
    sizes |= {"experts": 8, "expert-width": 16, "top-k": 2, "seed": 17}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bias-rate", type=float, default=0.02, help="how fast the router is balanced")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    shape = (args.pp, dist.get_world_size() // (args.pp * args.tp), args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    stage = Stage(args, mesh).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr)

    for step in range(args.steps):
        generator = torch.Generator().manual_seed(args.seed + step)
        batch = torch.randint(args.vocab, (args.batch_size, args.seq_len + 1), generator=generator)
        batch = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device)
        optimizer.zero_grad()
        loss = forward_backward(stage, batch, args.microbatch_size, args.batch_size * args.seq_len)
        reduce_gradients(stage)
        norm = clip_gradients(stage, 1.0)
        optimizer.step()
        busiest = torch.stack([block.moe.balance(args.bias_rate) for block in stage.blocks.values()]).max()

        dist.all_reduce(loss)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.6f} grad norm {norm:.6f} busiest expert {busiest:.6f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
