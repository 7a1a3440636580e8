"""A small convolutional classifier: DistributedDataParallel, mixed precision, gradient accumulation.

Batch statistics are those of the batch of all ranks (`SyncedBatchNorm`, which unlike nn.SyncBatchNorm also
runs on a CPU). Each rank reads its part of the data set through a DistributedSampler and loader workers;
gradients are averaged with the last micro-batch only, unscaled, and clipped.

    torchrun --nproc-per-node 4 examples/ddp_amp.py --amp fp16
"""

import argparse
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class SumOverRanks(torch.autograd.Function):
    """Every rank's loss depends on the sum, so the gradients of all ranks are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncedBatchNorm(nn.BatchNorm2d):
    """Normalises by mean and variance over the samples and pixels of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = values.new_full((1,), values.numel() / values.size(1))
        local = torch.cat([values.sum((0, 2, 3)), values.square().sum((0, 2, 3)), count])
        total, squares, count = SumOverRanks.apply(local).split([x.size(1), x.size(1), 1])
        mean = total / count
        var = squares / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return (values * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, SyncedBatchNorm(outputs), nn.ReLU())


class Classifier(nn.Module):
    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = convolution(3, width)
        self.body = nn.Sequential(convolution(width, 2 * width, 2), convolution(2 * width, 2 * width))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(self.stem(images)).mean((2, 3))
        return self.head(self.dropout(features))


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy stripes, as wide as their class: (3, size, size)."""

    def __init__(self, length: int, classes: int, size: int = 8) -> None:
        self.length, self.classes, self.size = length, classes, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % self.classes
        noise = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(index))
        return noise + (torch.arange(self.size) // (label + 1) % 2), label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", choices=list(AMP), default="none")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="of each rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    torch.manual_seed(args.seed + rank)  # ranks drop different features; the wrapper sends rank 0's weights
    net = Classifier(args.width, args.classes, args.dropout).to(device)
    nn.init.trunc_normal_(net.head.weight, std=0.02)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=args.amp == "fp16")

    dataset = Shapes(args.samples, args.classes)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(dataset, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    metrics = torch.zeros(2, device=device)
    for i, (images, labels) in zip(range(args.steps * args.accumulate), loader):
        images, labels = images.to(device), labels.to(device)
        sync = (i + 1) % args.accumulate == 0
        with nullcontext() if sync else model.no_sync():
            with torch.autocast(device, AMP[args.amp], enabled=args.amp != "none"):
                logits = model(images)
                loss = F.cross_entropy(logits, labels) / args.accumulate
            scaler.scale(loss).backward()
        right = (logits.argmax(-1) == labels).float().mean() / args.accumulate
        metrics += torch.stack([loss.detach(), right])
        if (i + 1) % args.accumulate:
            continue
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dist.all_reduce(metrics)
        metrics /= world
        if rank == 0:
            step, (mean_loss, accuracy) = i // args.accumulate, metrics.tolist()
            print(f"step {step}  loss {mean_loss:.6f}  accuracy {accuracy:.3f}  grad norm {norm.item():.6f}")
        metrics.zero_()
    dist.barrier()  # reductions still under way would keep the wrapper from closing its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
