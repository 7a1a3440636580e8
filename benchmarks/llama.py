"""Llama-3 with Megatron-style tensor parallelism, as the programs of `speed.py` use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes.contracts import Program
from spmdtypes.notation import Dim, Type


@dataclass(frozen=True)
class Shape:
    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    batch: int = 1024  # global
    seq: int = 2048


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class MaxOverTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        ctx.mark_non_differentiable(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, s: Shape, tp: int, group: Any) -> None:
        super().__init__()
        self.group, self.head = group, s.dim // s.heads
        self.heads, self.kv_heads = s.heads // tp, s.kv_heads // tp
        self.wq = nn.Parameter(torch.empty(s.dim // tp, s.dim))
        self.wk = nn.Parameter(torch.empty(self.kv_heads * self.head, s.dim))
        self.wv = nn.Parameter(torch.empty(self.kv_heads * self.head, s.dim))
        self.wo = nn.Parameter(torch.empty(s.dim, s.dim // tp))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = CopyToTP.apply(x, self.group)
        b, t, _ = x.shape
        q = F.linear(x, self.wq).view(b, t, self.heads, self.head).transpose(1, 2)
        k = F.linear(x, self.wk).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        v = F.linear(x, self.wv).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, -1)
        return ReduceFromTP.apply(F.linear(y, self.wo), self.group)


class MLP(nn.Module):
    def __init__(self, s: Shape, tp: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.w1 = nn.Parameter(torch.empty(s.ffn // tp, s.dim))
        self.w3 = nn.Parameter(torch.empty(s.ffn // tp, s.dim))
        self.w2 = nn.Parameter(torch.empty(s.dim, s.ffn // tp))

    def forward(self, x: Tensor) -> Tensor:
        x = CopyToTP.apply(x, self.group)
        y = F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3)
        return ReduceFromTP.apply(F.linear(y, self.w2), self.group)


class Block(nn.Module):
    def __init__(self, s: Shape, tp: int, group: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(s.dim), RMSNorm(s.dim)
        self.attention, self.mlp = Attention(s, tp, group), MLP(s, tp, group)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, mesh: Any, s: Shape) -> None:
        super().__init__()
        self.group, tp = mesh.get_group("tp"), mesh["tp"].size()
        self.first = mesh.get_local_rank("tp") * (s.vocab // tp)
        self.rows, self.head = s.vocab // tp, s.dim // s.heads
        self.embedding = nn.Parameter(torch.empty(self.rows, s.dim))
        self.blocks = nn.ModuleList(Block(s, tp, self.group) for _ in range(s.layers))
        self.norm = RMSNorm(s.dim)
        self.output = nn.Parameter(torch.empty(self.rows, s.dim))

    def embed(self, tokens: Tensor) -> Tensor:
        outside = (tokens < self.first) | (tokens >= self.first + self.rows)
        h = F.embedding((tokens - self.first).masked_fill(outside, 0), self.embedding)
        return ReduceFromTP.apply(h.masked_fill(outside.unsqueeze(-1), 0.0), self.group)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        peak = MaxOverTP.apply(logits.detach().amax(-1), self.group)
        logits = logits - peak.unsqueeze(-1)
        outside = (labels < self.first) | (labels >= self.first + self.rows)
        local = (labels - self.first).masked_fill(outside, 0)
        target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        target = ReduceFromTP.apply(target, self.group)
        total = ReduceFromTP.apply(logits.exp().sum(-1), self.group)
        return (total.log() - target).mean()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)
        where = torch.arange(tokens.shape[1])
        rates = 500000.0 ** (-torch.arange(0, self.head, 2) / self.head)
        angles = torch.outer(where, rates)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            h = block(h, cos, sin)
        h = CopyToTP.apply(self.norm(h), self.group)
        return self.loss(F.linear(h, self.output), labels)


def train_step(model: Llama, mesh: Any, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Forward, backward, gradient averaging over the data axes, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = model(tokens, labels)
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        for axis in ("dp", "pod"):
            dist.all_reduce(p.grad, group=mesh.get_group(axis))
        p.grad.div_(mesh["dp"].size() * mesh["pod"].size())
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def program(mesh: dict[str, int], s: Shape) -> Program:
    """The step as a `Program` on a mesh with axes pod, dp, tp."""

    def of(*dims: tuple[int, str], dtype: str = "f32") -> Type:
        return Type(tuple(Dim(n, tuple(a.split())) for n, a in dims), dtype)

    head = s.dim // s.heads
    block = {
        "norm1.weight": of((s.dim, "")),
        "norm2.weight": of((s.dim, "")),
        "attention.wq": of((s.dim, "tp"), (s.dim, "")),
        "attention.wk": of((s.kv_heads * head, "tp"), (s.dim, "")),
        "attention.wv": of((s.kv_heads * head, "tp"), (s.dim, "")),
        "attention.wo": of((s.dim, ""), (s.dim, "tp")),
        "mlp.w1": of((s.ffn, "tp"), (s.dim, "")),
        "mlp.w3": of((s.ffn, "tp"), (s.dim, "")),
        "mlp.w2": of((s.dim, ""), (s.ffn, "tp")),
    }
    params = {f"blocks.{i}.{k}": t for i in range(s.layers) for k, t in block.items()}
    params |= {"embedding": of((s.vocab, "tp"), (s.dim, "")), "output": of((s.vocab, "tp"), (s.dim, ""))}
    params["norm.weight"] = of((s.dim, ""))
    tokens = of((s.batch, "pod dp"), (s.seq, ""), dtype="i64")
    return Program(
        name=f"llama-{s.layers}",
        mesh=mesh,
        build=lambda device_mesh: Llama(device_mesh, s),
        inputs={"tokens": tokens, "labels": tokens},
        params=params,
        step=train_step,
    )
