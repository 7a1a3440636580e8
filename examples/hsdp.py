"""Contrastive training of an image and a text tower under HSDP.

`fully_shard` on a 2-D mesh cuts the parameters over "dp_shard" and keeps a copy for each "dp_replicate";
every rank of both axes reads its own image-text pairs from a stream. Each pair is told from the pairs of
all ranks, so features are gathered with their gradient.

    torchrun --nproc-per-node 4 examples/hsdp.py --shard 2
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset


class GatherFeatures(torch.autograd.Function):
    """All ranks' rows, in rank order. Every rank's loss depends on them, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class Tower(nn.Module):
    """(batch, seq, dim) to one normalised feature each."""

    def __init__(self, embed: nn.Module, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                args.dim,
                args.heads,
                2 * args.dim,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.dim)
        self.project = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.project(self.norm(x).mean(1)), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.image = Tower(nn.Linear(args.pixels, args.dim), args)
        self.text = Tower(nn.Embedding(args.vocab, args.dim), args)
        self.log_scale = nn.Parameter(torch.full((1,), 2.0))  # one element, as a scalar cannot be sharded

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), self.log_scale.exp()


def shard(model: TwoTowers, mesh: DeviceMesh) -> None:
    for layer in model.image.layers:
        fully_shard(layer, mesh=mesh)
    for layer in model.text.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def contrastive_loss(
    image: Tensor, text: Tensor, scale: Tensor, spread: float, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Loss of this rank's pairs, numbered from `first` among those of all ranks, and how many images find
    their text."""
    images, texts = GatherFeatures.apply(image, group), GatherFeatures.apply(text, group)
    target = first + torch.arange(image.size(0), device=image.device)
    by_image, by_text = scale * image @ texts.T, scale * text @ images.T
    loss = (F.cross_entropy(by_image, target) + F.cross_entropy(by_text, target)) / 2
    # features shall spread around the sphere, so their mean is drawn to the centre
    loss = loss + spread * (images.mean(0).square().sum() + texts.mean(0).square().sum())
    return loss, (by_image.argmax(1) == target).sum()


class Pairs(IterableDataset[tuple[Tensor, Tensor]]):
    """An endless stream of pairs that share a topic; this rank reads every `world`-th."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        self.args, self.rank, self.world = args, rank, world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        args, index = self.args, self.rank
        while True:
            generator = torch.Generator().manual_seed(index)
            topic = index * 5 % args.vocab
            image = torch.randn(args.seq, args.pixels, generator=generator) + topic / args.vocab
            text = (topic + torch.randint(4, (args.seq,), generator=generator)) % args.vocab
            yield image, text
            index += self.world


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", type=int, default=1, help="ranks over which parameters are cut")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="pairs of each rank")
    parser.add_argument("--seq", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(
        device, (world // args.shard, args.shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )

    torch.manual_seed(0)
    model = TwoTowers(args).to(device)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    loader = DataLoader(Pairs(args, rank, world), args.batch)

    group = dist.group.WORLD
    first = dist.get_rank(group) * args.batch

    for step, (images, texts) in zip(range(args.steps), loader):
        image, text, scale = model(images.to(device), texts.to(device))
        loss, found = contrastive_loss(image, text, scale, args.spread, first, group)
        optimizer.zero_grad()
        loss.backward()
        norms = [p.grad.norm().full_tensor() for p in model.parameters()]
        norm = torch.stack(norms).norm()
        for p in model.parameters():
            p.grad.mul_((args.clip / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        metrics = torch.stack([loss.detach(), found / args.batch])
        dist.all_reduce(metrics)
        if rank == 0:
            mean_loss, recall = (metrics / world).tolist()
            print(f"step {step}  loss {mean_loss:.6f}  recall {recall:.3f}  grad norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
