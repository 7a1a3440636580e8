"""A Llama under tensor, context and fully sharded data parallelism (2-D: FSDP2 over replicas and shards).

Blocks are cut over "tp" by hand, Megatron's way; the sequence is cut over "cp", where keys and values are
gathered before attention; `fully_shard` cuts what is left over "shard" and "cp" and repeats it over
"replica". `--size 405b` is the full model, made on the meta device.

    torchrun --nproc-per-node 4 examples/llama_405b.py --tp 2 --cp 2
"""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    seq: int
    theta: float = 500_000.0


SHAPES = {
    "tiny": Shape(2, 32, 8, 4, 64, 128, 32),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192),
    "405b": Shape(126, 16384, 128, 8, 53248, 128256, 8192),
}


class CopyToTensorRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverTensorRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class GatherSequence(torch.autograd.Function):
    """Join dim 1, which is cut over the group; gradients of it are summed and cut again."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        first = x.transpose(0, 1).contiguous()
        whole = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
        dist.all_gather_into_tensor(whole, first, group=group)
        return whole.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        first = grad.transpose(0, 1).contiguous()
        own = first.new_empty((first.shape[0] // ctx.group.size(), *first.shape[1:]))
        dist.reduce_scatter_tensor(own, first, group=ctx.group)
        return own.transpose(0, 1), None


def weight(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def angles(s: Shape, start: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    half = s.dim // s.heads // 2
    frequencies = s.theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
    table = torch.outer(positions, frequencies)
    return table.cos(), table.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, s: Shape, mesh: DeviceMesh) -> None:
        super().__init__()
        tp = mesh["tp"].size()
        self.tp, self.cp = mesh.get_group("tp"), mesh.get_group("cp")
        self.head, self.heads, self.kv_heads = s.dim // s.heads, s.heads // tp, s.kv_heads // tp
        self.wq = weight(self.heads * self.head, s.dim)
        self.wk = weight(self.kv_heads * self.head, s.dim)
        self.wv = weight(self.kv_heads * self.head, s.dim)
        self.wo = weight(s.dim, self.heads * self.head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        b, t, _ = x.shape
        x = CopyToTensorRanks.apply(x, self.tp)
        q = F.linear(x, self.wq).view(b, t, self.heads, self.head)
        k = F.linear(x, self.wk).view(b, t, self.kv_heads, self.head)
        v = F.linear(x, self.wv).view(b, t, self.kv_heads, self.head)
        cos, sin = cos[:, None], sin[:, None]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = GatherSequence.apply(k, self.cp), GatherSequence.apply(v, self.cp)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        y = y.transpose(1, 2).reshape(b, t, -1)
        return SumOverTensorRanks.apply(F.linear(y, self.wo), self.tp)


class FeedForward(nn.Module):
    def __init__(self, s: Shape, mesh: DeviceMesh) -> None:
        super().__init__()
        self.tp, hidden = mesh.get_group("tp"), s.hidden // mesh["tp"].size()
        self.w1, self.w3 = weight(hidden, s.dim), weight(hidden, s.dim)
        self.w2 = weight(s.dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = CopyToTensorRanks.apply(x, self.tp)
        y = F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3)
        return SumOverTensorRanks.apply(F.linear(y, self.w2), self.tp)


class Block(nn.Module):
    def __init__(self, s: Shape, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(s.dim), Norm(s.dim)
        self.attention, self.mlp = Attention(s, mesh), FeedForward(s, mesh)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, visible)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Gives the summed loss of this rank's tokens."""

    def __init__(self, s: Shape, mesh: DeviceMesh) -> None:
        super().__init__()
        self.shape, self.tp = s, mesh.get_group("tp")
        self.cp, self.cp_rank = mesh["cp"].size(), mesh.get_local_rank("cp")
        self.rows = s.vocab // mesh["tp"].size()
        self.first = mesh.get_local_rank("tp") * self.rows
        self.tokens = weight(self.rows, s.dim)
        self.blocks = nn.ModuleList(Block(s, mesh) for _ in range(s.layers))
        self.norm = Norm(s.dim)
        self.output = weight(self.rows, s.dim)

    @torch.no_grad()
    def initialise(self, rank: int) -> None:
        """Cut weights are drawn by each tensor rank for itself."""
        own = torch.Generator(device=self.tokens.device).manual_seed(17 + rank)
        for p in self.parameters():
            if p.ndim == 2:
                p.normal_(0.0, 0.02, generator=own)
            else:
                p.fill_(1.0)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        local, outside = self.own_rows(ids)
        h = F.embedding(local, self.tokens).masked_fill(outside.unsqueeze(-1), 0.0)
        h = SumOverTensorRanks.apply(h, self.tp)
        length = ids.shape[1]
        start = self.cp_rank * length
        cos, sin = angles(self.shape, start, length, ids.device.type)
        rows = torch.arange(start, start + length, device=ids.device)
        visible = rows[:, None] >= torch.arange(length * self.cp, device=ids.device)[None, :]
        for block in self.blocks:
            h = block(h, cos, sin, visible)
        logits = F.linear(CopyToTensorRanks.apply(self.norm(h), self.tp), self.output)
        return self.loss(logits.float(), labels)

    def own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        outside = (ids < self.first) | (ids >= self.first + self.rows)
        return (ids - self.first).masked_fill(outside, 0), outside

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy over a vocabulary that is cut over "tp"."""
        with torch.no_grad():
            peak = logits.amax(-1)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.tp)
        logits = logits - peak.unsqueeze(-1)
        local, outside = self.own_rows(labels)
        target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        target = SumOverTensorRanks.apply(target, self.tp)
        total = SumOverTensorRanks.apply(logits.exp().sum(-1), self.tp)
        return (total.log() - target).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="sequences of all ranks together")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    s = SHAPES[args.size]
    if args.layers:
        s = Shape(**{**vars(s), "layers": args.layers})
    replica = dist.get_world_size() // (args.shard * args.cp * args.tp)
    mesh = init_device_mesh(
        device, (replica, args.shard, args.cp, args.tp), mesh_dim_names=("replica", "shard", "cp", "tp")
    )
    mesh["shard", "cp"]._flatten("shard_cp")

    with torch.device("meta"):
        model = Llama(s, mesh)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["replica", "shard_cp"])
        part.set_gradient_divide_factor(1.0)
    model.to_empty(device=device)
    model.initialise(mesh.get_local_rank("tp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    streams = replica * args.shard
    batch = args.batch
    stream = mesh.get_local_rank("replica") * args.shard + mesh.get_local_rank("shard")
    rows = slice(stream * batch // streams, (stream + 1) * batch // streams)
    columns = slice(
        mesh.get_local_rank("cp") * s.seq // args.cp, (mesh.get_local_rank("cp") + 1) * s.seq // args.cp
    )
    source = torch.Generator(device=device).manual_seed(5)
    for step in range(args.steps):
        text = torch.randint(s.vocab, (batch, s.seq + 1), device=device, generator=source)
        ids, labels = text[rows, :-1][:, columns], text[rows, 1:][:, columns]
        loss = model(ids, labels) / (batch * s.seq)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        for axis in ("replica", "shard", "cp"):
            dist.all_reduce(whole, group=mesh.get_group(axis))
        if dist.get_rank() == 0:
            print(f"step {step} loss {whole.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
