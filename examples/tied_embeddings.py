"""A GPT with tied input and output embedding, tensor parallel by hand in Megatron's manner, under DDP.

One weight, cut over the vocabulary, looks tokens up and gives the logits; the cross entropy is taken on
the cut logits. DDP averages gradients over the data ranks only. Every weight is drawn whole and then cut,
so that a seed means the same model for any number of ranks.

    torchrun --nproc-per-node 4 examples/tied_embeddings.py --tp 2
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

Group = dist.ProcessGroup


class CopyToRanks(torch.autograd.Function):
    """Identity whose gradient is summed: what follows sees only this rank's part of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumFromRanks(torch.autograd.Function):
    """Sum over the ranks, whose gradient is the same for all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def cut_weight(rows: int, columns: int, dim: int, group: Group) -> nn.Parameter:
    whole = torch.empty(rows, columns)
    nn.init.normal_(whole, std=0.1)
    weight = nn.Parameter(whole.chunk(group.size(), dim)[group.rank()].clone())
    weight.tensor_parallel = True
    return weight


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = cut_weight(outputs, inputs, 0, group)
        self.bias = nn.Parameter(torch.zeros(outputs // group.size()))
        self.bias.tensor_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = cut_weight(outputs, inputs, 1, group)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return SumFromRanks.apply(F.linear(x, self.weight), self.group) + self.bias


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, group: Group) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query_key_value = ColumnParallelLinear(dim, 3 * dim, group)
        self.dense = RowParallelLinear(dim, dim, group)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim))  # head by head, then q, k, v
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, group: Group) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.attention = Attention(args.dim, args.heads, group)
        self.up = ColumnParallelLinear(args.dim, 4 * args.dim, group)
        self.down = RowParallelLinear(4 * args.dim, args.dim, group)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class TiedGPT(nn.Module):
    def __init__(self, args: argparse.Namespace, group: Group) -> None:
        super().__init__()
        self.group = group
        self.embedding = cut_weight(args.vocab, args.dim, 0, group)
        self.first = group.rank() * self.embedding.size(0)  # of the tokens this rank has rows for
        self.position = nn.Parameter(0.1 * torch.randn(args.seq, args.dim))
        self.blocks = nn.ModuleList(Block(args, group) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's part of the table, and where they are not in it."""
        rows = tokens - self.first
        absent = (rows < 0) | (rows >= self.embedding.size(0))
        return rows.masked_fill(absent, 0), absent

    def embed(self, tokens: Tensor) -> Tensor:
        rows, absent = self.own(tokens)
        found = F.embedding(rows, self.embedding).masked_fill(absent[..., None], 0.0)
        return SumFromRanks.apply(found, self.group)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of (batch, seq, vocab / tp) logits: one value a token, the same on all ranks."""
        top = logits.detach().amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        logits = logits - top[..., None]
        total = SumFromRanks.apply(logits.exp().sum(-1), self.group)
        rows, absent = self.own(targets)
        at_target = logits.gather(-1, rows[..., None])[..., 0].masked_fill(absent, 0.0)
        return total.log() - SumFromRanks.apply(at_target, self.group)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(CopyToRanks.apply(self.norm(x), self.group), self.embedding)
        return self.cross_entropy(logits, targets).mean()


def clip_grad_norm(model: nn.Module, max_norm: float, group: Group) -> Tensor:
    """Parameters every rank has whole count once, those of first rank; the norm before clipping."""
    parameters = list(model.parameters())
    squares = torch.zeros((), device=parameters[0].device)
    for p in parameters:
        if hasattr(p, "tensor_parallel") or group.rank() == 0:
            squares += p.grad.square().sum()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    for p in parameters:
        p.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


class Ramps(Dataset[Tensor]):
    """Sequences of seq + 1 tokens that count up by a stride of their own."""

    def __init__(self, length: int, seq: int, vocab: int) -> None:
        self.length, self.seq, self.vocab = length, seq, vocab

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return (7 * index + (1 + index % 5) * torch.arange(self.seq + 1)) % self.vocab


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="of each data rank")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    tp_group, _ = dist.new_subgroups(args.tp)
    columns = [list(range(i, world, args.tp)) for i in range(args.tp)]
    dp_group, _ = dist.new_subgroups_by_enumeration(columns)
    dp_rank = dp_group.rank()

    torch.manual_seed(args.seed)
    net = TiedGPT(args, tp_group).to(device)
    model = DistributedDataParallel(net, process_group=dp_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataset = Ramps(args.samples, args.seq, args.vocab)
    sampler = DistributedSampler(dataset, num_replicas=dp_group.size(), rank=dp_rank, seed=args.seed)
    loader = DataLoader(dataset, args.batch, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed + 1 + dp_rank)  # one mask for all ranks that hold one activation

    for step, text in zip(range(args.steps), loader):
        text = text.to(device)
        loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm(net, args.clip, tp_group)
        optimizer.step()
        mean_loss = loss.detach() / dp_group.size()
        dist.all_reduce(mean_loss, group=dp_group)
        if rank == 0:
            print(f"step {step}  loss {mean_loss.item():.6f}  grad norm {norm.item():.6f}")
    dist.barrier(group=dp_group)  # reductions still under way would keep the wrapper from closing its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
