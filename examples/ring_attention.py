"""A causal language model whose sequences are cut over the ranks of a context-parallel ring.

Every rank keeps its block of queries; keys and values travel around the ring by send and receive, and
the softmax is taken online, block by block. The remaining ranks are data parallel.

    torchrun --nproc-per-node 4 examples/ring_attention.py --cp 2
"""

import argparse
import math
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Ring:
    """Passes tensors to the next rank of a group and takes those of the previous one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self.previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def shift(self, *tensors: Tensor) -> list[Tensor]:
        if self.size == 1:
            return list(tensors)
        tensors = tuple(t.contiguous() for t in tensors)
        received = [torch.empty_like(t) for t in tensors]
        ops = []
        for ours, theirs in zip(tensors, received):
            ops.append(dist.P2POp(dist.isend, ours, self.next, self.group))
            ops.append(dist.P2POp(dist.irecv, theirs, self.previous, self.group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received


def scores(q: Tensor, k: Tensor, q_block: int, k_block: int) -> Tensor:
    """Scaled dot products of a block of queries with a block of keys, causally masked."""
    length = q.shape[-2]
    positions = torch.arange(length, device=q.device)
    q_positions = q_block * length + positions
    k_positions = k_block * length + positions
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return s.masked_fill(k_positions[None, :] > q_positions[:, None], float("-inf"))


class RingAttention(torch.autograd.Function):
    """Causal attention of [batch, heads, local length, head dim], exact over the whole sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        keys, values = k, v
        out = torch.zeros_like(q)
        top = q.new_full((*q.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(top)
        for step in range(ring.size):
            s = scores(q, keys, ring.rank, (ring.rank - step) % ring.size)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            p = torch.exp(s - new_top)
            rescale = torch.exp(top - new_top)
            out = out * rescale + p @ values
            total = total * rescale + p.sum(-1, keepdim=True)
            top = new_top
            if step + 1 < ring.size:
                keys, values = ring.shift(keys, values)
        out = out / total
        ctx.save_for_backward(q, k, v, out, top + total.log())
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q)
        # the gradients of a block of keys and values travel with the block and collect their shares
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for step in range(ring.size):
            p = torch.exp(scores(q, k, ring.rank, (ring.rank - step) % ring.size) - lse)
            grad_s = p * (grad_out @ v.transpose(-1, -2) - delta) / math.sqrt(q.shape[-1])
            grad_q += grad_s @ k
            grad_k += grad_s.transpose(-1, -2) @ q
            grad_v += p.transpose(-1, -2) @ grad_out
            k, v, grad_k, grad_v = ring.shift(k, v, grad_k, grad_v)
        return grad_q, grad_k, grad_v, None


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ring: Ring) -> None:
        super().__init__()
        self.heads, self.ring = heads, ring
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = RingAttention.apply(q, k, v, self.ring)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace, ring: Ring) -> None:
        super().__init__()
        self.ring = ring
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.positions = nn.Embedding(args.seq_len, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, ring) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of this rank's part of the sequence, [batch, local length, vocab]."""
        length = ids.shape[1]
        start = self.ring.rank * length
        x = self.tokens(ids) + self.positions(torch.arange(start, start + length, device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def local_batch(step: int, args: argparse.Namespace, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This rank's rows and positions of the global batch; targets are cut after they are shifted."""
    generator = torch.Generator().manual_seed(args.seed + step)
    ids = torch.randint(args.vocab, (args.batch_size, args.seq_len), generator=generator)
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    # sequences are padded to different lengths; padding carries no loss
    lengths = torch.randint(args.seq_len // 2, args.seq_len + 1, (args.batch_size, 1), generator=generator)
    targets[torch.arange(args.seq_len) >= lengths - 1] = -100
    dp, cp = mesh["dp"], mesh["cp"]

    def cut(t: Tensor) -> Tensor:
        rows = t.chunk(dp.size(), dim=0)[dp.get_local_rank()]
        return rows.chunk(cp.size(), dim=1)[cp.get_local_rank()]

    return cut(ids), cut(targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in the global batch")
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // args.cp, args.cp), mesh_dim_names=("dp", "cp"))

    torch.manual_seed(args.seed)
    model = GPT(args, Ring(mesh.get_group("cp"))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    for step in range(args.steps):
        ids, targets = (t.to(device) for t in local_batch(step, args, mesh))
        # the mean is over the tokens of all ranks, which hold different numbers of them
        tokens = (targets != -100).sum()
        dist.all_reduce(tokens)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens

        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step} loss {total.item():.6f} grad norm {norm.item():.6f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
