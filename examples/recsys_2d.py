"""A recommender (DLRM) with two-dimensional sparse parallelism.

Rank r is shard r % S of replica r // S of the embedding tables: ranks of a replica group hold different
rows and exchange ids and pooled vectors, equal shards of different replicas sum their gradients. Dense
layers are data parallel over all ranks, each of which reads its own samples.

    torchrun --nproc-per-node 4 examples/recsys_2d.py --shards 2
"""

import argparse
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Sample = tuple[Tensor, Tensor, Tensor]


class Clicks(Dataset[Sample]):
    """Dense features, ids for each table (a bag padded with -1), and whether there was a click."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        self.dense = torch.randn(args.samples, args.dense, generator=generator)
        bags = []
        for rows in args.rows:
            # popular ids are much more frequent than others
            draws = torch.rand(args.samples, args.bag, generator=generator) ** 2
            ids = (draws * rows).long()
            lengths = torch.randint(1, args.bag + 1, (args.samples, 1), generator=generator)
            bags.append(ids.where(torch.arange(args.bag) < lengths, -1))
        self.ids = torch.stack(bags, dim=1)
        odds = self.dense[:, 0] + (self.ids[:, 0, 0] % 3 - 1)
        self.labels = (odds + torch.randn(args.samples, generator=generator) > 0.5).to(self.dense.dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.dense[index], self.ids[index], self.labels[index]


def gather_samples(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The samples of all ranks, in the order of the ranks."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class SumAndKeepOwn(torch.autograd.Function):
    """Sum over the ranks what they have for everyone's samples; each keeps its own samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [part.contiguous() for part in x.chunk(group.size())]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=group)
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_samples(grad, ctx.group), None


class ShardedTables(nn.Module):
    """Embedding tables of which every rank of the shard axis holds consecutive rows; bags are averaged."""

    def __init__(self, rows: Iterable[int], width: int, shards: DeviceMesh) -> None:
        super().__init__()
        self.shards = shards
        self.tables = nn.ParameterList()
        for count in rows:
            whole = torch.randn(count, width) / width**0.5
            self.tables.append(nn.Parameter(whole.chunk(shards.size())[shards.get_local_rank()].clone()))

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, tables, bag] -> [batch, tables, width]."""
        group = self.shards.get_group()
        everyones = gather_samples(ids, group)
        sums = []
        for table, bags in zip(self.tables, everyones.unbind(dim=1)):
            local = bags - self.shards.get_local_rank() * len(table)
            ours = (local >= 0) & (local < len(table)) & (bags >= 0)
            vectors = F.embedding(local.where(ours, 0), table) * ours[..., None]
            sums.append(vectors.sum(dim=1))
        pooled = SumAndKeepOwn.apply(torch.stack(sums, dim=1), group)
        return pooled / (ids >= 0).sum(dim=2, keepdim=True)


class Dense(nn.Module):
    """Bottom network, pairwise products of all vectors, top network."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        vectors = len(args.rows) + 1
        self.bottom = nn.Sequential(
            nn.Linear(args.dense, 32), nn.ReLU(), nn.Linear(32, args.width), nn.ReLU()
        )
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(args.width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.cat([x[:, None], sparse], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row, for tables of which several replicas exist.

    Losses are means over the samples of a rank. A table got the gradients of all ranks of its replica,
    so after the sum over replicas it is divided by the number of ranks to be that of the mean loss.
    """

    def __init__(self, tables: Iterable[nn.Parameter], lr: float, replicas: dist.ProcessGroup) -> None:
        super().__init__(tables, {"lr": lr, "initial": 1e-8, "eps": 1e-8})
        self.replicas = replicas

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for table in group["params"]:
                state, grad = self.state[table], table.grad
                dist.all_reduce(grad, group=self.replicas)
                grad /= dist.get_world_size()
                if not state:
                    state["sum"] = grad.new_full((len(grad), 1), group["initial"])
                state["sum"] += grad.square().mean(dim=1, keepdim=True)
                table.addcdiv_(grad, state["sum"].sqrt() + group["eps"], value=-group["lr"])


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (world // args.shards, args.shards)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))

    torch.manual_seed(args.seed)
    tables = ShardedTables(args.rows, args.width, mesh["shard"]).to(device)
    dense = DistributedDataParallel(Dense(args).to(device))
    dense_optimizer = torch.optim.Adam(dense.parameters(), lr=args.lr)
    table_optimizer = RowWiseAdagrad(tables.parameters(), args.table_lr, mesh.get_group("replica"))

    data = Clicks(args)
    sampler: DistributedSampler[Sample] = DistributedSampler(data, world, rank, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    for step, batch in zip(range(args.steps), loader):
        features, ids, labels = (t.to(device) for t in batch)
        logits = dense(features, tables(ids))
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        dense_optimizer.zero_grad()
        table_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        table_optimizer.step()

        # calibration: predicted clicks over real ones
        sums = torch.stack([loss.detach(), logits.detach().sigmoid().sum(), labels.sum()])
        dist.all_reduce(sums)
        mean, calibration = sums[0] / world, sums[1] / sums[2]
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} calibration {calibration.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=1, help="ranks that hold a replica of the tables")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of one rank")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--dense", type=int, default=8, help="dense features")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 32, 128], help="of each table")
    parser.add_argument("--bag", type=int, default=4, help="most ids a sample has for a table")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--table-lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=31)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
