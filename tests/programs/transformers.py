"""Clean transformers in plain `torch.distributed`, written the way training code writes them.

They are the originals of the mutation test and the programs of the larger end-to-end tests.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from spmdtypes.contracts import Program
from spmdtypes.notation import parse


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def gather_dim(x, dim, group):
    world = dist.get_world_size(group)
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(world * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out.movedim(0, dim)


def reduce_scatter_dim(x, dim, group):
    world = dist.get_world_size(group)
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(x.shape[0] // world, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.movedim(0, dim)


class GatherSequence(torch.autograd.Function):
    """all-gather of dim 1 forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_dim(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_dim(grad, 1, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """reduce-scatter of dim 1 forward, all-gather backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_dim(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return gather_dim(grad, 1, ctx.group), None


class VocabEmbedding(nn.Module):
    def __init__(self, vocab, dim, group):
        super().__init__()
        self.group = group
        self.rows = vocab // dist.get_world_size(group)
        self.first = dist.get_rank(group) * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, dim))

    def forward(self, ids):
        foreign = (ids < self.first) | (ids >= self.first + self.rows)
        local = (ids - self.first).masked_fill(foreign, 0)
        out = F.embedding(local, self.weight).masked_fill(foreign.unsqueeze(-1), 0.0)
        return ReduceFromTP.apply(out, self.group)


class VocabCrossEntropy(torch.autograd.Function):
    """Mean token loss of vocabulary-sharded logits [tokens, vocab/tp]; gradient by hand."""

    @staticmethod
    def forward(ctx, logits, labels, group):
        rows = logits.shape[-1]
        first = dist.get_rank(group) * rows
        peak = logits.max(-1).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        logits = logits - peak.unsqueeze(-1)
        foreign = (labels < first) | (labels >= first + rows)
        local = (labels - first).masked_fill(foreign, 0)
        hit = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        dist.all_reduce(hit, group=group)
        exp = logits.exp()
        norm = exp.sum(-1)
        dist.all_reduce(norm, group=group)
        ctx.save_for_backward(exp / norm.unsqueeze(-1), foreign, local)
        return (norm.log() - hit).mean()

    @staticmethod
    def backward(ctx, grad):
        probs, foreign, local = ctx.saved_tensors
        own = torch.zeros_like(probs).scatter_(
            -1, local.unsqueeze(-1), 1.0 - foreign.unsqueeze(-1).to(probs.dtype)
        )
        return (probs - own) * (grad / probs.shape[0]), None, None


class GPTBlock(nn.Module):
    def __init__(self, dim, heads, group):
        super().__init__()
        tp = dist.get_world_size(group)
        self.group, self.heads, self.width = group, heads // tp, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim // tp, bias=False)
        self.proj = nn.Linear(dim // tp, dim, bias=False)
        self.proj_bias = nn.Parameter(torch.empty(dim))
        self.up = nn.Linear(dim, 4 * dim // tp)
        self.down = nn.Linear(4 * dim // tp, dim, bias=False)

    def attention(self, x):
        b, s, _ = x.shape
        # rows of qkv are grouped by head: [head, 3, width]
        q, k, v = self.qkv(x).view(b, s, self.heads, 3, self.width).permute(3, 0, 2, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(o.transpose(1, 2).reshape(b, s, -1))

    def forward(self, x):
        h = CopyToTP.apply(self.norm1(x), self.group)
        x = x + ReduceFromTP.apply(self.attention(h), self.group) + self.proj_bias
        h = CopyToTP.apply(self.norm2(x), self.group)
        return x + ReduceFromTP.apply(self.down(F.gelu(self.up(h))), self.group)


class GPT(nn.Module):
    """Vocabulary- and tensor-parallel GPT; the mean loss of this rank's sequences."""

    def __init__(self, mesh, vocab, seq, dim, heads, layers):
        super().__init__()
        self.group = mesh.get_group("tp")
        self.embed = VocabEmbedding(vocab, dim, self.group)
        self.positions = nn.Parameter(torch.empty(seq, dim))
        self.blocks = nn.ModuleList(GPTBlock(dim, heads, self.group) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Parameter(torch.empty(vocab // dist.get_world_size(self.group), dim))

    def forward(self, ids, labels):
        x = self.embed(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        x = CopyToTP.apply(self.norm(x), self.group)
        logits = F.linear(x, self.head)
        return VocabCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.group)


def _types(spec):
    return {name: parse(text) for name, text in spec.items()}


def gpt(dp=2, tp=2, vocab=16, seq=4, dim=8, heads=4, layers=2, batch=4):
    params = {"embed.weight": f"f32[{vocab}@tp {dim}]", "positions": f"f32[{seq} {dim}]"}
    for i in range(layers):
        b = f"blocks.{i}."
        for n in ("norm1", "norm2"):
            params |= {f"{b}{n}.weight": f"f32[{dim}]", f"{b}{n}.bias": f"f32[{dim}]"}
        params |= {
            f"{b}qkv.weight": f"f32[{3 * dim}@tp {dim}]",
            f"{b}proj.weight": f"f32[{dim} {dim}@tp]",
            f"{b}proj_bias": f"f32[{dim}]",
            f"{b}up.weight": f"f32[{4 * dim}@tp {dim}]",
            f"{b}up.bias": f"f32[{4 * dim}@tp]",
            f"{b}down.weight": f"f32[{dim} {4 * dim}@tp]",
        }
    params |= {"norm.weight": f"f32[{dim}]", "norm.bias": f"f32[{dim}]", "head": f"f32[{vocab}@tp {dim}]"}
    return Program(
        name="gpt",
        mesh={"dp": dp, "tp": tp},
        build=lambda mesh: GPT(mesh, vocab, seq, dim, heads, layers),
        inputs=_types(
            {"ids": f"i64[{batch}@dp {seq}] < {vocab}", "labels": f"i64[{batch}@dp {seq}] < {vocab}"}
        ),
        params=_types(params),
        output=parse("f32[] | avg@dp"),
        grads={"dp": "avg"},
    )


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class LlamaBlock(nn.Module):
    """Sequence parallel between the blocks, tensor parallel within."""

    def __init__(self, dim, heads, kv_heads, ffn, group):
        super().__init__()
        tp = dist.get_world_size(group)
        self.group, self.width = group, dim // heads
        self.heads, self.kv_heads = heads // tp, kv_heads // tp
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.wq = nn.Linear(dim, self.heads * self.width, bias=False)
        self.wk = nn.Linear(dim, self.kv_heads * self.width, bias=False)
        self.wv = nn.Linear(dim, self.kv_heads * self.width, bias=False)
        self.wo = nn.Linear(self.heads * self.width, dim, bias=False)
        self.w1 = nn.Linear(dim, ffn // tp, bias=False)
        self.w3 = nn.Linear(dim, ffn // tp, bias=False)
        self.w2 = nn.Linear(ffn // tp, dim, bias=False)

    def split(self, x, heads):
        return x.unflatten(-1, (heads, self.width)).transpose(1, 2)

    def attention(self, x, cos, sin):
        q, k, v = (
            self.split(self.wq(x), self.heads),
            self.split(self.wk(x), self.kv_heads),
            self.split(self.wv(x), self.kv_heads),
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).flatten(2))

    def forward(self, x, cos, sin):
        h = GatherSequence.apply(self.attention_norm(x), self.group)
        x = x + ScatterSequence.apply(self.attention(h, cos, sin), self.group)
        h = GatherSequence.apply(self.ffn_norm(x), self.group)
        return x + ScatterSequence.apply(self.w2(F.silu(self.w1(h)) * self.w3(h)), self.group)


class Llama(nn.Module):
    def __init__(self, mesh, vocab, seq, dim, heads, kv_heads, ffn, layers):
        super().__init__()
        self.group = mesh.get_group("tp")
        self.embed = VocabEmbedding(vocab, dim, self.group)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, ffn, self.group) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Parameter(torch.empty(vocab // dist.get_world_size(self.group), dim))
        width = dim // heads
        freq = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(seq), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        # every norm sees a sequence shard only
        for name, p in self.named_parameters():
            if "norm" in name:
                p.register_post_accumulate_grad_hook(self.sum_over_tp)

    def sum_over_tp(self, p):
        dist.all_reduce(p.grad, group=self.group)

    def forward(self, ids, labels):
        x = self.embed(ids)
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        x = SplitSequence.apply(x, world, rank, self.group)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        x = GatherSequence.apply(self.norm(x), self.group)
        logits = F.linear(x, self.head)
        return VocabCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.group)


class SplitSequence(torch.autograd.Function):
    """This rank's chunk of a replicated sequence; backward all-gathers."""

    @staticmethod
    def forward(ctx, x, world, rank, group):
        ctx.group = group
        return x.chunk(world, dim=1)[rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return gather_dim(grad, 1, ctx.group), None, None, None


def llama(dp=2, tp=2, vocab=16, seq=4, dim=16, heads=4, kv_heads=2, ffn=16, layers=2, batch=4):
    kv = dim // heads * kv_heads
    params = {
        "embed.weight": f"f32[{vocab}@tp {dim}]",
        "norm.weight": f"f32[{dim}]",
        "head": f"f32[{vocab}@tp {dim}]",
    }
    for i in range(layers):
        b = f"layers.{i}."
        params |= {
            f"{b}attention_norm.weight": f"f32[{dim}]",
            f"{b}ffn_norm.weight": f"f32[{dim}]",
            f"{b}wq.weight": f"f32[{dim}@tp {dim}]",
            f"{b}wk.weight": f"f32[{kv}@tp {dim}]",
            f"{b}wv.weight": f"f32[{kv}@tp {dim}]",
            f"{b}wo.weight": f"f32[{dim} {dim}@tp]",
            f"{b}w1.weight": f"f32[{ffn}@tp {dim}]",
            f"{b}w3.weight": f"f32[{ffn}@tp {dim}]",
            f"{b}w2.weight": f"f32[{dim} {ffn}@tp]",
        }
    return Program(
        name="llama",
        mesh={"dp": dp, "tp": tp},
        build=lambda mesh: Llama(mesh, vocab, seq, dim, heads, kv_heads, ffn, layers),
        inputs=_types(
            {"ids": f"i64[{batch}@dp {seq}] < {vocab}", "labels": f"i64[{batch}@dp {seq}] < {vocab}"}
        ),
        params=_types(params),
        output=parse("f32[] | avg@dp"),
        grads={"dp": "avg"},
    )


class GatherKV(torch.autograd.Function):
    """Keys or values of the whole sequence [b, s, d]; backward sums over the context ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_dim(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_dim(grad, 1, ctx.group), None


class ContextBlock(nn.Module):
    def __init__(self, dim, heads, group):
        super().__init__()
        self.group, self.heads = group, heads
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        s = x.shape[1]
        h = self.norm(x)
        k, v = GatherKV.apply(self.k(h), self.group), GatherKV.apply(self.v(h), self.group)
        rows = torch.arange(s).unsqueeze(1) + dist.get_rank(self.group) * s
        visible = torch.arange(k.shape[1]).unsqueeze(0) <= rows
        o = F.scaled_dot_product_attention(
            self.split(self.q(h)), self.split(k), self.split(v), attn_mask=visible
        )
        return x + self.o(o.transpose(1, 2).flatten(2))


class ContextModel(nn.Module):
    """Context parallel: the sequence is sharded, keys and values are gathered; one optimizer step."""

    def __init__(self, mesh, dim, heads, layers):
        super().__init__()
        self.group = mesh.get_group("cp")
        self.blocks = nn.ModuleList(ContextBlock(dim, heads, self.group) for _ in range(layers))
        self.count = mesh.size()

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return (x - y).square().sum() / (y.numel() * self.count)


def context_step(model, mesh, x, y):
    loss = model(x, y)
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for p in model.parameters():
        for axis in ("dp", "cp"):
            dist.all_reduce(p.grad, group=mesh.get_group(axis))
    optimizer.step()
    return dict(model.named_parameters()) | {"loss": loss.detach()}


def context(dp=2, cp=2, seq=8, dim=8, heads=2, layers=2, batch=4):
    params = {}
    for i in range(layers):
        params |= {f"blocks.{i}.norm.weight": f"f32[{dim}]"}
        params |= {f"blocks.{i}.{n}.weight": f"f32[{dim} {dim}]" for n in "qkvo"}
    return Program(
        name="context",
        mesh={"dp": dp, "cp": cp},
        build=lambda mesh: ContextModel(mesh, dim, heads, layers),
        inputs=_types({"x": f"f32[{batch}@dp {seq}@cp {dim}]", "y": f"f32[{batch}@dp {seq}@cp {dim}]"}),
        params=_types(params),
        step=context_step,
        results=_types({"loss": "f32[] | sum@dp, sum@cp"}),
    )


PROGRAMS = {"gpt": gpt, "llama": llama, "context": context}
