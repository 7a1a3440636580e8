"""Difference target propagation, data parallel with reductions by hand.

Every layer learns an inverse beside its forward map. The output's gradient gives the last hidden layer a
target, inverses carry it down, and each layer moves towards its own target with a local loss. Gradients
of a layer are all-reduced in one bucket as soon as its local loss is known and awaited before the step.

    torchrun --nproc-per-node 4 examples/target_propagation.py
"""

import argparse
import os
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.map = nn.Linear(inputs, outputs)
        self.inverse = nn.Linear(outputs, inputs)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h))

    def invert(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inverse(h))


class Network(nn.Module):
    def __init__(self, sizes: list[int], classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(m, n) for m, n in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], classes)

    def activities(self, x: Tensor) -> list[Tensor]:
        """The input and what each layer makes of it, none connected to the one before."""
        out = [x]
        for layer in self.layers:
            out.append(layer(out[-1]).detach())
        return out


class Reducer:
    """Sums gradients over all ranks, a bucket per local loss, while others are still computed."""

    def __init__(self) -> None:
        self.pending: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []

    def backward(self, loss: Tensor, module: nn.Module) -> None:
        params = list(module.parameters())
        bucket = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])
        self.pending.append((params, bucket, dist.all_reduce(bucket, async_op=True)))

    def finish(self) -> None:
        for params, bucket, work in self.pending:
            work.wait()
            for p, grad in zip(params, bucket.split([p.numel() for p in params])):
                p.grad = grad.view_as(p)
        self.pending.clear()


def standardise(x: Tensor) -> Tensor:
    """Every feature with mean 0 and variance 1 over the samples of all ranks."""
    moments = torch.stack([x.sum(0), x.square().sum(0)]) / (len(x) * dist.get_world_size())
    dist.all_reduce(moments)
    mean, square = moments
    return (x - mean) / (square - mean.square() + 1e-5).sqrt()


def first_target(head: nn.Module, h: Tensor, labels: Tensor, step: float, limit: float) -> Tensor:
    """Activities with a smaller loss, each sample's by its own gradient; none moves by more than `limit`."""
    leaf = h.clone().requires_grad_()
    loss = F.cross_entropy(head(leaf), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, leaf)
    shift = step * gradient
    largest = shift.norm(dim=1).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return h - shift * torch.clamp(limit / largest, max=1.0)


def train_inverses(net: Network, h: list[Tensor], noise: float, samples: int) -> Tensor:
    """Sets the gradients of all inverses but the first, which no target passes; the error on this rank."""
    reducer, total = Reducer(), h[0].new_zeros(())
    for layer, below in list(zip(net.layers, h))[1:]:
        corrupted = below + noise * torch.randn_like(below)
        restored = layer.invert(layer(corrupted).detach())
        loss = (restored - corrupted).square().sum() / samples
        reducer.backward(loss, layer.inverse)
        total += loss.detach()
    reducer.finish()
    return total


def train_maps(net: Network, h: list[Tensor], y: Tensor, args: argparse.Namespace, samples: int) -> Tensor:
    """Sets the gradients of forward maps and head; the loss of the head on this rank."""
    reducer = Reducer()
    head_loss = F.cross_entropy(net.head(h[-1]), y, reduction="sum") / samples
    reducer.backward(head_loss, net.head)
    target = first_target(net.head, h[-1], y, args.target_step, args.target_limit)
    for i in reversed(range(len(net.layers))):
        layer, below, above = net.layers[i], h[i], h[i + 1]
        local = (layer(below) - target).square().sum() / samples
        reducer.backward(local, layer.map)
        if i > 0:
            with torch.no_grad():
                target = below + layer.invert(target) - layer.invert(above)
    reducer.finish()
    return head_loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--inputs", type=int, default=32)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64, 32])
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--target-step", type=float, default=0.5)
    parser.add_argument("--target-limit", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--inverse-lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")

    torch.manual_seed(args.seed)
    net = Network([args.inputs, *args.hidden], args.classes).to(device)
    labels = torch.randint(args.classes, (2048,))
    points = 3 * torch.randn(args.classes, args.inputs)[labels] + torch.randn(2048, args.inputs) + 1
    torch.manual_seed(args.seed + 1 + rank)  # from here on every rank has noise of its own

    maps = [p for layer in net.layers for p in layer.map.parameters()] + list(net.head.parameters())
    inverses = [p for layer in net.layers[1:] for p in layer.inverse.parameters()]
    optimizer = torch.optim.SGD(maps, lr=args.lr, momentum=0.9)
    inverse_optimizer = torch.optim.SGD(inverses, lr=args.inverse_lr, momentum=0.9)

    data = TensorDataset(points, labels)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    for step, (x, y) in zip(range(args.steps), loader):
        samples = args.batch_size * world
        h = net.activities(standardise(x.to(device)))
        restored = train_inverses(net, h, args.noise, samples)
        inverse_optimizer.step()
        loss = train_maps(net, h, y.to(device), args, samples)
        optimizer.step()

        logged = torch.stack([loss, restored])
        dist.all_reduce(logged)
        if rank == 0:
            print("step {} loss {:.6f} inverse error {:.6f}".format(step, *logged.tolist()), flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
