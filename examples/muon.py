"""A GPT trained with Muon on parameters sharded by FSDP2 (optionally replicated as well: HSDP).

Muon orthogonalises the momentum of whole matrices, but every rank holds some rows of each. Matrices of
one shape are stacked; one all-to-all brings each rank its share of whole matrices, Newton-Schulz runs
on those, and a second all-to-all returns the rows to where they belong. All other parameters get AdamW.

    torchrun --nproc-per-node 4 examples/muon.py --replicate 2
"""

import argparse
import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self, vocab: int, seq: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Approximately the orthogonal factor of each matrix of `x` (..., rows, columns)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon on matrices that are sharded by rows over `group`."""

    def __init__(self, params, group: dist.ProcessGroup, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.group, self.ranks = group, dist.get_world_size(group)

    def _to_whole(self, rows: Tensor) -> Tensor:
        """(matrices, rows / ranks, columns) of all matrices -> (matrices / ranks, rows, columns)."""
        matrices, local, columns = rows.shape
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
        received = received.view(self.ranks, matrices // self.ranks, local, columns)
        return received.transpose(0, 1).reshape(-1, self.ranks * local, columns)

    def _to_rows(self, whole: Tensor) -> Tensor:
        """The inverse of `_to_whole`."""
        mine, rows, columns = whole.shape
        sent = whole.view(mine, self.ranks, rows // self.ranks, columns).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.view(-1, rows // self.ranks, columns)

    @torch.no_grad()
    def step(self) -> None:
        for options in self.param_groups:
            stacks = defaultdict(list)
            for p in options["params"]:
                stacks[p.shape].append(p)
            for shape, params in stacks.items():
                self._step_stack(shape, params, options["lr"], options["momentum"])

    def _step_stack(self, shape: torch.Size, params: list, lr: float, beta: float) -> None:
        updates = []
        for p in params:
            grad = p.grad.to_local()
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grad)
            state["momentum"].lerp_(grad, 1 - beta)
            updates.append(grad.lerp(state["momentum"], beta))
        filler = -len(updates) % self.ranks
        stacked = torch.stack(updates + [torch.zeros_like(updates[0])] * filler)
        ortho = self._to_rows(newton_schulz(self._to_whole(stacked)))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for p, update in zip(params, ortho):
            p.to_local().add_(update, alpha=-lr * scale)


class Sequences(Dataset):
    """Sequences that repeat a motif of a few tokens; the i-th is drawn from a seed of its own."""

    def __init__(self, size: int, seq: int, vocab: int, seed: int) -> None:
        self.size, self.seq, self.vocab, self.seed = size, seq, vocab, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.size + i)
        length = int(torch.randint(2, 6, (), generator=generator))
        motif = torch.randint(self.vocab, (length,), generator=generator)
        tokens = motif.repeat(self.seq // length + 2)[: self.seq + 1]
        return tokens[:-1], tokens[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicate", type=int, default=1, help="groups of ranks with a copy of the shards")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon")
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if use_cuda else "cpu"
    mesh = init_device_mesh(
        device, (args.replicate, world // args.replicate), mesh_dim_names=("replicate", "shard")
    )

    torch.manual_seed(args.seed)  # the same on all ranks: fully_shard keeps each rank's rows
    model = GPT(args.vocab, args.seq, args.dim, args.heads, args.layers).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    muon = Muon(matrices, mesh.get_group("shard"), lr=args.lr)
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.01)

    dataset = Sequences(1024, args.seq, args.vocab, args.seed)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    for step, (ids, targets) in zip(range(args.steps), loader):
        ids, targets = ids.to(device), targets.to(device)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        muon.step()
        adam.step()
        model.zero_grad()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        if rank == 0:
            print(f"step {step} loss {logged.item() / world:.6f} grad norm {norm.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
