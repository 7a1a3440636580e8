"""A causal language model with sequence parallelism in the manner of Ulysses.

Ranks of a sequence group hold consecutive parts of the same sequences. Around attention an all-to-all
trades the cut of the sequence for a cut of the heads and back. All ranks average their gradients (DDP).

    torchrun --nproc-per-node 4 examples/ulysses.py --sp 2
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def all_to_all(x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    """Cut dimension `scatter` over the group and join dimension `gather`, which was cut."""
    size = dist.get_world_size(group)
    sent = torch.stack(x.chunk(size, dim=scatter)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, gather).flatten(gather, gather + 1)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
        ctx.scatter, ctx.gather, ctx.group = scatter, gather, group
        return all_to_all(x, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(grad, ctx.gather, ctx.scatter, ctx.group), None, None, None


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [batch, length, heads, head dim]."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = positions[:, None, None].to(x.dtype) * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, args: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.heads, self.dropout, self.group = args.heads, args.dropout, group
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        start = dist.get_rank(self.group) * t
        positions = torch.arange(start, start + t, device=x.device)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        q, k = rotate(q, positions), rotate(k, positions)
        # [batch, local length, heads, head dim] -> [batch, length, local heads, head dim]
        q, k, v = (AllToAll.apply(h, 2, 1, self.group) for h in (q, k, v))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y = AllToAll.apply(y.transpose(1, 2), 1, 2, self.group)
        return self.out(y.reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(args.width), nn.RMSNorm(args.width)
        self.attention = Attention(args, group)
        self.gate = nn.Linear(args.width, 2 * args.width, bias=False)
        self.up = nn.Linear(args.width, 2 * args.width, bias=False)
        self.down = nn.Linear(2 * args.width, args.width, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        h = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


class Decoder(nn.Module):
    def __init__(self, args: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(Block(args, group) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this rank's tokens."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class RandomText(Dataset[Tensor]):
    """Sequences of one token more than the model reads."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        shape = (args.samples, args.seq_len + 1)
        self.ids = torch.randint(args.vocab, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def sequence_groups(sp: int) -> dist.ProcessGroup:
    """Neighbouring ranks form a group; every rank takes part in making all of them."""
    mine = None
    for first in range(0, dist.get_world_size(), sp):
        ranks = list(range(first, first + sp))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return mine


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % args.sp or args.heads % args.sp or args.seq_len % args.sp:
        raise SystemExit("--sp has to divide the number of ranks, --heads and --seq-len")
    group = sequence_groups(args.sp)

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Decoder(args, group).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=args.steps)
    # no two ranks hold the same tokens or heads: each drops its own
    torch.manual_seed(args.seed + 1 + rank)

    data = RandomText(args)
    # the ranks of a sequence group read the same sequences
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        data, num_replicas=world // args.sp, rank=rank // args.sp, seed=args.seed
    )
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers)

    for step, batch in zip(range(args.steps), loader):
        part = dist.get_rank(group)
        ids = batch[:, :-1].chunk(args.sp, dim=1)[part].to(device)
        targets = batch[:, 1:].chunk(args.sp, dim=1)[part].to(device)
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= world
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} grad norm {norm.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of a sequence group")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
