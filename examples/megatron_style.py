"""A GPT with tensor parallelism by hand, as Megatron does it: a mesh of data x tensor ranks.

Weights are cut by columns and rows, embedding and cross-entropy by vocabulary, all with autograd
functions over plain torch.distributed. `--sequence-parallel` keeps activations between the parallel
regions cut along the sequence. Gradients are averaged over the data ranks after the backward pass.

    torchrun --nproc-per-node 4 examples/megatron_style.py --tp 2 --sequence-parallel
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

RNG = torch.cuda if torch.cuda.is_available() else torch
TP_GROUP: dist.ProcessGroup
DP_GROUP: dist.ProcessGroup
STREAMS: "RandomStreams"


def init_groups(tp: int) -> None:
    """Neighbouring ranks form a tensor group; ranks at equal places of the tensor groups a data group."""
    global TP_GROUP, DP_GROUP
    rank, world = dist.get_rank(), dist.get_world_size()
    for first in range(0, world, tp):
        group = dist.new_group(list(range(first, first + tp)))
        if rank // tp == first // tp:
            TP_GROUP = group
    for place in range(tp):
        group = dist.new_group(list(range(place, world, tp)))
        if rank % tp == place:
            DP_GROUP = group


# Sequences are the first dim of activations, (s, b, h), so that their parts are contiguous.


def all_reduce(x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=TP_GROUP)
    return x


def gather_first(x: Tensor) -> Tensor:
    tp = dist.get_world_size(TP_GROUP)
    out = x.new_empty(tp * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=TP_GROUP)
    return out


def reduce_scatter_first(x: Tensor) -> Tensor:
    tp = dist.get_world_size(TP_GROUP)
    out = x.new_empty(x.shape[0] // tp, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=TP_GROUP)
    return out


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad)


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherSequence(torch.autograd.Function):
    """Gathers the sequence; each rank then computes a different part, so gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return gather_first(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(grad)


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter_first(x)

    @staticmethod
    def backward(ctx, grad):
        return gather_first(grad)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss of each token from logits (..., vocab / tp) of this rank's part of the vocabulary."""

    @staticmethod
    def forward(ctx, logits, targets):
        logits = logits.float()
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=TP_GROUP)
        logits = logits - peak.unsqueeze(-1)
        first = dist.get_rank(TP_GROUP) * logits.shape[-1]
        outside = (targets < first) | (targets >= first + logits.shape[-1])
        local = (targets - first).masked_fill(outside, 0)
        predicted = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        dist.all_reduce(predicted, group=TP_GROUP)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=TP_GROUP)
        ctx.save_for_backward(exp / total.unsqueeze(-1), outside, local)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, grad):
        softmax, outside, local = ctx.saved_tensors
        here = (~outside).to(softmax.dtype).unsqueeze(-1)
        out = softmax.scatter_add(-1, local.unsqueeze(-1), -here)
        return out * grad.unsqueeze(-1), None


class RandomStreams:
    """Besides the default stream, equal within a tensor group, one that differs from rank to rank."""

    def __init__(self, seed: int) -> None:
        seed += 1000 * dist.get_rank(DP_GROUP)
        RNG.manual_seed(seed + 1 + dist.get_rank(TP_GROUP))
        self.state = RNG.get_rng_state()
        RNG.manual_seed(seed)

    @contextlib.contextmanager
    def own(self):
        outer = RNG.get_rng_state()
        RNG.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = RNG.get_rng_state()
            RNG.set_rng_state(outer)


def cut_parameter(shape: tuple[int, ...], dim: int, std: float = 0.02) -> nn.Parameter:
    """This rank's part along `dim` of a parameter that all ranks draw whole, so that any tp starts alike."""
    whole = torch.randn(shape) * std
    part = whole.chunk(dist.get_world_size(TP_GROUP), dim)[dist.get_rank(TP_GROUP)]
    param = nn.Parameter(part.clone())
    param.tensor_parallel = True
    return param


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = cut_parameter((outputs, inputs), 0)
        self.bias = cut_parameter((outputs,), 0)
        self.enter = (GatherSequence if sequence_parallel else CopyToRegion).apply

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = cut_parameter((outputs, inputs), 1)
        self.bias = nn.Parameter(0.02 * torch.randn(outputs))
        self.leave = (ReduceScatterSequence if sequence_parallel else ReduceFromRegion).apply

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, self.weight)) + self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab: int, dim: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = cut_parameter((vocab, dim), 0)
        self.leave = (ReduceScatterSequence if sequence_parallel else ReduceFromRegion).apply

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - dist.get_rank(TP_GROUP) * self.weight.shape[0]
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight)
        return self.leave(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        dim, sp = args.dim, args.sequence_parallel
        self.sequence_parallel, self.p = sp, args.dropout
        self.head_dim = dim // args.heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = ColumnParallelLinear(dim, 3 * dim, sp)  # rows ordered (heads, 3, head_dim)
        self.out = RowParallelLinear(dim, dim, sp)
        self.up = ColumnParallelLinear(dim, 4 * dim, sp)
        self.down = RowParallelLinear(4 * dim, dim, sp)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, -1, 3, self.head_dim).permute(3, 1, 2, 0, 4)
        scores = q @ k.mT / self.head_dim**0.5
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        with STREAMS.own():  # each rank has heads of its own
            weights = F.dropout(weights, self.p, self.training)
        return self.out((weights @ v).permute(2, 0, 1, 3).reshape(s, b, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + hidden_dropout(self.attention(self.norm1(x)), self)
        return x + hidden_dropout(self.down(F.gelu(self.up(self.norm2(x)))), self)


def hidden_dropout(x: Tensor, module: nn.Module) -> Tensor:
    """Equal on the ranks of a tensor group where they hold equal activations, and only there."""
    stream = STREAMS.own() if module.sequence_parallel else contextlib.nullcontext()
    with stream:
        return F.dropout(x, module.p, module.training)


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        sp = args.sequence_parallel
        self.sequence_parallel, self.p = sp, args.dropout
        self.tokens = VocabParallelEmbedding(args.vocab, args.dim, sp)
        self.positions = nn.Parameter(0.02 * torch.randn(args.seq, 1, args.dim))
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.enter = (GatherSequence if sp else CopyToRegion).apply
        if sp:  # whole parameters whose gradients hold this rank's part of the sequence only
            for p in self.parameters():
                p.sequence_parallel = not hasattr(p, "tensor_parallel")

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token, (s, b), from tokens (s, b)."""
        x = self.tokens(ids)
        first = dist.get_rank(TP_GROUP) * x.shape[0] if self.sequence_parallel else 0
        x = hidden_dropout(x + self.positions[first : first + x.shape[0]], self)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.enter(self.norm(x)), self.tokens.weight)
        return VocabParallelCrossEntropy.apply(logits, targets)


def reduce_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sums the tensors over the group in one collective."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)
    for t, reduced in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(reduced.view_as(t))


def finish_gradients(model: nn.Module) -> None:
    params = list(model.parameters())
    sequence = [p.grad for p in params if getattr(p, "sequence_parallel", False)]
    if sequence:
        reduce_together(sequence, TP_GROUP)
    reduce_together([p.grad for p in params], DP_GROUP)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Clips by the norm of the whole gradient, in which replicated parameters count once; returns it."""
    first = dist.get_rank(TP_GROUP) == 0
    counted = [p.grad for p in model.parameters() if hasattr(p, "tensor_parallel") or first]
    total = torch.stack([g.float().square().sum() for g in counted]).sum()
    dist.all_reduce(total, group=TP_GROUP)
    norm = total.sqrt()
    for p in model.parameters():
        p.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def get_batch(args: argparse.Namespace, generator: torch.Generator, device: torch.device) -> Tensor:
    """Tokens (s + 1, b) of this data rank, -1 after the end of a sequence; read by one rank per group."""
    local = args.global_batch // dist.get_world_size(DP_GROUP)
    mine = torch.empty(args.seq + 1, local, dtype=torch.long, device=device)
    if dist.get_rank(TP_GROUP) == 0:
        start = torch.randint(args.vocab, (args.global_batch,), generator=generator)
        length = torch.randint(args.seq // 4, args.seq + 2, (args.global_batch,), generator=generator)
        place = torch.arange(args.seq + 1).unsqueeze(1)
        tokens = ((start + 3 * place) % args.vocab).masked_fill(place >= length, -1)
        mine.copy_(tokens.chunk(dist.get_world_size(DP_GROUP), 1)[dist.get_rank(DP_GROUP)])
    dist.broadcast(mine, dist.get_global_rank(TP_GROUP, 0), group=TP_GROUP)
    return mine


def main() -> None:
    global STREAMS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    init_groups(args.tp)

    torch.manual_seed(args.seed)
    model = GPT(args).to(device)
    STREAMS = RandomStreams(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(args.seed)

    for step in range(args.steps):
        tokens = get_batch(args, generator, device)
        ids, targets = tokens[:-1].clamp(min=0), tokens[1:]
        mask = (targets >= 0).float()
        count = mask.sum()
        dist.all_reduce(count, group=DP_GROUP)

        loss = (model(ids, targets.clamp(min=0)) * mask).sum() / count
        optimizer.zero_grad()
        loss.backward()
        finish_gradients(model)
        norm = clip_gradients(model, args.max_norm)
        optimizer.step()

        logged = loss.detach().clone()
        dist.all_reduce(logged, group=DP_GROUP)
        if dist.get_rank() == 0:
            print(f"step {step} loss {logged.item():.6f} grad norm {norm.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
