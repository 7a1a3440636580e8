"""Block-local learning: each convolution block has a head and a loss of its own; no gradient crosses blocks.

Data parallel with everything by hand: batch statistics over the samples of all ranks, one bucket of
gradients per block that is averaged as soon as the block's own backward pass is done, an AdamW per block.
Runs in bfloat16 autocast unless --float32 is given.

    torchrun --nproc-per-node 4 examples/local_losses.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, on which the losses of all of them depend."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class GlobalBatchNorm(nn.Module):
    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel over all samples of all ranks."""
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = SumOverRanks.apply(x.sum((0, 2, 3))) / count
        centred = x - mean.view(1, -1, 1, 1)
        return mean, SumOverRanks.apply(centred.square().sum((0, 2, 3))) / count

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.training:
            mean, var = self._statistics(x)
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(var.detach(), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - mean * scale).view(1, -1, 1, 1)


class Block(nn.Module):
    """A convolution and the head that judges it."""

    def __init__(self, inputs: int, outputs: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = GlobalBatchNorm(outputs)
        self.head = nn.Linear(4 * outputs, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features for the next block and logits of this one's head."""
        y = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(y, 2), self.head(F.adaptive_avg_pool2d(y, 2).flatten(1))


class Gratings(IterableDataset):
    """Endless noisy stripes whose direction is the class; each rank takes every `world`-th image."""

    def __init__(self, size: int, classes: int, rank: int, world: int) -> None:
        self.size, self.classes, self.rank, self.world = size, classes, rank, world

    def __iter__(self):
        place = torch.arange(self.size, dtype=torch.float32)
        y, x = torch.meshgrid(place, place, indexing="ij")
        i = self.rank
        while True:
            generator = torch.Generator().manual_seed(i)
            label = int(torch.randint(self.classes, (), generator=generator))
            angle = torch.tensor(torch.pi * label / self.classes)
            phase = 6.28 * torch.rand((), generator=generator)
            image = torch.sin(x * angle.cos() + y * angle.sin() + phase)
            yield image + 0.5 * torch.randn(3, self.size, self.size, generator=generator), label
            i += self.world


def average_gradients(module: nn.Module) -> None:
    """One all-reduce for the gradients of a block and its head."""
    grads = [p.grad for p in module.parameters()]
    bucket = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    for grad, averaged in zip(grads, bucket.split([g.numel() for g in grads])):
        grad.copy_(averaged.view_as(grad))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--size", type=int, default=16, help="of an image")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 32])
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")

    torch.manual_seed(args.seed)
    widths = [3, *args.channels]
    network = nn.ModuleList(Block(m, n, args.classes) for m, n in zip(widths, args.channels)).to(device)
    optimizers = [torch.optim.AdamW(block.parameters(), lr=args.lr) for block in network]
    loader = DataLoader(Gratings(args.size, args.classes, rank, world), args.batch_size)

    for step, (images, labels) in zip(range(args.steps), loader):
        x, labels = images.to(device), labels.to(device)
        logged = []
        for block, optimizer in zip(network, optimizers):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not args.float32):
                features, logits = block(x)
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(block)
            optimizer.step()
            x = features.detach()
            logged.append(loss.detach())

        losses = torch.stack(logged)
        dist.all_reduce(losses)
        if rank == 0:
            print(f"step {step} losses", *(f"{v:.6f}" for v in (losses / world).tolist()), flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
