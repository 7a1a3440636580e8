"""The forward-forward algorithm on a mesh of data x unit ranks.

A layer learns to have a high goodness, the mean square of its units, for samples that carry their own
label and a low one for samples that carry another. The units of a layer are cut over ranks: goodness and
the length by which activities are normalised are summed over them, the next layer's input is gathered.
Gradients stay within a layer and are averaged over the data ranks.

    torchrun --nproc-per-node 4 examples/forward_forward.py --unit-ranks 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class SumOverUnits(torch.autograd.Function):
    """A sum over ranks that all use alike: the gradient of the sum is that of each rank's term."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Layer(nn.Module):
    def __init__(self, inputs: int, units: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, ranks, place = mesh.get_group("units"), mesh["units"].size(), mesh.get_local_rank("units")
        self.units, self.ranks = units, ranks
        whole = torch.randn(units, inputs) * (2 / inputs) ** 0.5
        self.weight = nn.Parameter(whole.chunk(ranks)[place].clone())
        self.bias = nn.Parameter(torch.zeros(units // ranks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's units (b, units / ranks) and the goodness of the layer (b,)."""
        h = F.relu(F.linear(x, self.weight, self.bias))
        return h, SumOverUnits.apply(h.square().sum(1), self.group) / self.units

    @torch.no_grad()
    def pass_on(self, h: Tensor, goodness: Tensor) -> Tensor:
        """All units, scaled to a mean square of 1: the next layer cannot read goodness off the length."""
        scaled = h / (goodness.unsqueeze(1) + 1e-6).sqrt()
        parts = [torch.empty_like(scaled) for _ in range(self.ranks)]
        dist.all_gather(parts, scaled, group=self.group)
        return torch.cat(parts, dim=1)


def with_label(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    return torch.cat([F.one_hot(labels, classes).to(x.dtype), x], dim=1)


def average_over_data(layer: Layer, group: dist.ProcessGroup) -> None:
    works = [dist.all_reduce(p.grad, group=group, async_op=True) for p in layer.parameters()]
    for work, p in zip(works, layer.parameters()):
        work.wait()
        p.grad /= dist.get_world_size(group)


def batches(args: argparse.Namespace, data_rank: int, device: str):
    """Samples of a data rank: points, their labels, and other labels."""
    centres = torch.randn(args.classes, args.inputs, generator=torch.Generator().manual_seed(args.seed))
    generator = torch.Generator().manual_seed(100 + args.seed + data_rank)
    while True:
        labels = torch.randint(args.classes, (args.batch_size,), generator=generator)
        points = centres[labels] + 0.5 * torch.randn(args.batch_size, args.inputs, generator=generator)
        shift = torch.randint(1, args.classes, (args.batch_size,), generator=generator)
        yield points.to(device), labels.to(device), ((labels + shift) % args.classes).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit-ranks", type=int, default=1, help="ranks over which units are cut")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per data rank")
    parser.add_argument("--inputs", type=int, default=24)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--units", type=int, nargs="+", default=[64, 64, 64])
    parser.add_argument("--threshold", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = "cuda" if use_cuda else "cpu"
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    shape = (dist.get_world_size() // args.unit_ranks, args.unit_ranks)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "units"))
    data = mesh.get_group("data")

    torch.manual_seed(args.seed)
    widths = [args.classes + args.inputs, *args.units]
    layers = nn.ModuleList(Layer(m, n, mesh) for m, n in zip(widths, args.units)).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=args.lr)

    for step, batch in zip(range(args.steps), batches(args, mesh.get_local_rank("data"), device)):
        points, labels, others = batch
        good, bad = with_label(points, labels, args.classes), with_label(points, others, args.classes)
        x = torch.cat([good, bad])
        losses, margins = [], []
        optimizer.zero_grad()
        for layer in layers:
            h, goodness = layer(x)
            positive, negative = goodness.chunk(2)
            loss = F.softplus(args.threshold - positive).mean() + F.softplus(negative - args.threshold).mean()
            loss.backward()
            average_over_data(layer, data)
            x = layer.pass_on(h, goodness)
            losses.append(loss.detach())
            margins.append((positive - negative).detach().mean())
        optimizer.step()

        logged = torch.stack([torch.stack(losses).sum(), torch.stack(margins).mean()])
        dist.all_reduce(logged, group=data)
        loss, margin = (logged / dist.get_world_size(data)).tolist()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.6f} margin {margin:.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
