"""Hugging Face's ViT as an image classifier under DistributedDataParallel, with an averaged teacher.

The features pass a batch norm whose statistics are those of the batches of all ranks. Worker processes make
and augment the images; forward runs in bfloat16 where autocast allows it. A moving average of the weights is
evaluated at the end, each rank taking its share of a validation set that does not divide evenly.

    torchrun --nproc-per-node 4 examples/hf_vit.py
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from transformers import ViTConfig, ViTModel


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4, help="images per step and rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--image", type=int, default=16)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=0.9, help="of the moving average")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Stripes(Dataset[tuple[Tensor, int]]):
    """Noisy stripes whose direction is the class; shifted and flipped at random in training."""

    def __init__(self, args: argparse.Namespace, count: int, train: bool) -> None:
        self.args, self.count, self.train = args, count, train

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        args = self.args
        generator = torch.Generator().manual_seed(2 * (args.seed * 100_003 + index) + self.train)
        label = int(torch.randint(args.classes, (), generator=generator))
        angle = torch.tensor(torch.pi * label / args.classes)
        y, x = torch.meshgrid(torch.arange(args.image), torch.arange(args.image), indexing="ij")
        image = torch.sin(x * angle.cos() + y * angle.sin()).expand(3, -1, -1)
        image = image + 0.3 * torch.randn(image.shape, generator=generator)
        if self.train:
            shift = torch.randint(4, (2,), generator=generator).tolist()
            image = image.roll(shift, dims=(1, 2)) * (1 - 2 * torch.rand((), generator=generator).round())
        return image, label


class GlobalBatchNorm(nn.Module):
    """Normalizes features by mean and variance over the batches of all ranks."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.running_mean) * (self.running_var + self.eps).rsqrt()
        count = torch.full((1, x.shape[1]), float(len(x)), device=x.device)
        sums = torch.cat([x.sum(0, keepdim=True), x.square().sum(0, keepdim=True), count])
        sums = collectives.all_reduce(sums)
        mean = sums[0] / sums[2]
        variance = sums[1] / sums[2] - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt()


class Classifier(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            intermediate_size=2 * args.hidden,
            image_size=args.image,
            patch_size=args.patch,
            attn_implementation="eager",
        )
        self.backbone = ViTModel(config, add_pooling_layer=False)
        self.norm = GlobalBatchNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(pixel_values=images).last_hidden_state[:, 0]
        return self.head(self.norm(features.float()))


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    for kept, new in zip(average.parameters(), model.parameters()):
        kept.lerp_(new, 1 - decay)
    for kept, new in zip(average.buffers(), model.buffers()):
        kept.copy_(new)


@torch.no_grad()
def accuracy(model: nn.Module, images: Dataset[tuple[Tensor, int]], device: torch.device) -> float:
    """The share of all `images` classified rightly; each rank looks at every n-th of them."""
    model.eval()
    mine = Subset(images, range(dist.get_rank(), len(images), dist.get_world_size()))
    right = torch.zeros(2, device=device)
    for batch, labels in DataLoader(mine, batch_size=8):
        hits = model(batch.to(device)).argmax(-1) == labels.to(device)
        right += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    dataset = Stripes(args, 256, train=True)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)

    # the wrapper hands rank 0's weights to all
    torch.manual_seed(args.seed + rank)
    module = Classifier(args).to(device)
    model = DistributedDataParallel(module, device_ids=[device] if cuda else None)
    average = copy.deepcopy(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    for step, (images, labels) in zip(range(args.steps), loader):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images.to(device))
        loss = F.cross_entropy(logits.float(), labels.to(device), label_smoothing=args.smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_average(average, module, args.decay)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / world:.6f}", flush=True)
    share = accuracy(average, Stripes(args, 50, train=False), device)
    if rank == 0:
        print(f"accuracy {share:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
