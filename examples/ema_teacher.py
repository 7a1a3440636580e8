"""Self-distillation: a student under DDP learns the outputs of its own moving average, the teacher.

The teacher's outputs are centred by a running mean over the batches of all ranks, and the student's mean
assignment, again over all ranks, is kept spread over the prototypes. The teacher is no part of the wrapper:
it stays the same on all ranks because it starts the same and follows the same student.

    torchrun --nproc-per-node 4 examples/ema_teacher.py
"""

import argparse
import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MeanOverRanks(torch.autograd.Function):
    """Every rank's loss holds the whole term made of the mean, and DDP takes the mean of the gradients: this
    rank's share of the mean's gradient is then the gradient as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x / dist.get_world_size()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Backbone and projection onto normalised prototypes."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.stem = nn.Linear(args.features, args.dim)
        self.layers = nn.Sequential(*(Residual(args.dim) for _ in range(args.layers)))
        self.bottleneck = nn.Linear(args.dim, args.dim // 2)
        self.prototypes = nn.Parameter(torch.randn(args.prototypes, args.dim // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.bottleneck(self.layers(self.stem(x))), dim=-1)
        return x @ F.normalize(self.prototypes, dim=-1).T


class DistillationLoss(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.register_buffer("center", torch.zeros(args.prototypes))

    def forward(self, student: list[Tensor], teacher: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Of the outputs for each view: the loss, and the teacher's mean entropy on this rank."""
        args = self.args
        targets = [F.softmax((t - self.center) / args.teacher_temperature, -1) for t in teacher]
        guesses = [F.log_softmax(s / args.student_temperature, -1) for s in student]
        # each view of the student is to tell what the teacher makes of the other one
        loss = sum(-(p * q).sum(-1).mean() for p, q in zip(targets, reversed(guesses))) / len(targets)
        mean = MeanOverRanks.apply(torch.cat(guesses).exp().mean(0))
        loss = loss + args.spread * (mean * mean.log()).sum()
        entropy = -sum((p * p.clamp(min=1e-12).log()).sum(-1).mean() for p in targets) / len(targets)
        self.update_center(torch.cat(teacher))
        return loss, entropy

    @torch.no_grad()
    def update_center(self, outputs: Tensor) -> None:
        total = outputs.sum(0)
        dist.all_reduce(total)
        mean = total / (len(outputs) * dist.get_world_size())
        self.center.lerp_(mean, 1 - self.args.center_momentum)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    for mine, its in zip(teacher.parameters(), student.parameters()):
        mine.mul_(momentum).add_(its, alpha=1 - momentum)


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy views of each sample."""

    def __init__(self, length: int, features: int) -> None:
        self.length, self.features = length, features

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        sample = 2.0 * torch.randn(self.features, generator=generator)
        first, second = 0.5 * torch.randn(2, self.features, generator=generator)
        return sample + first, sample + second


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prototypes", type=int, default=24)
    parser.add_argument("--student-temperature", type=float, default=0.1)
    parser.add_argument("--teacher-temperature", type=float, default=0.05)
    parser.add_argument("--center-momentum", type=float, default=0.8)
    parser.add_argument("--momentum", type=float, default=0.9, help="of the teacher, grows to 1")
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    torch.manual_seed(args.seed + rank)  # the wrapper sends rank 0's weights to all
    student = DistributedDataParallel(Network(args).to(device))
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    criterion = DistillationLoss(args).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr)

    dataset = Views(args.samples, args.features)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, args.batch, sampler=sampler, drop_last=True)
    for step, views in zip(range(args.steps), loader):
        both = torch.cat([view.to(device) for view in views])
        with torch.no_grad():
            targets = teacher(both)
        loss, entropy = criterion(student(both).chunk(2), targets.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(student.parameters(), args.clip)
        optimizer.step()
        momentum = 1 - (1 - args.momentum) * (math.cos(math.pi * step / args.steps) + 1) / 2
        follow(teacher, student.module, momentum)
        metrics = torch.stack([loss.detach(), entropy]) / world
        dist.all_reduce(metrics)
        if rank == 0:
            line = "loss {:.6f}  teacher entropy {:.6f}".format(*metrics.tolist())
            print(f"step {step}  {line}  grad norm {norm.item():.6f}")
    dist.barrier()  # reductions still under way would keep the wrapper from closing its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
