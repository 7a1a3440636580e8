"""A classifier trained data parallel with Shampoo, its preconditioners distributed over the ranks.

DDP averages gradients. Weight matrices are cut into square blocks; each rank keeps the statistics of its
share of the blocks, computes their inverse roots and preconditions their gradients, and an all-gather
gives every rank the whole update, scaled per parameter to the norm of the gradient (grafting).

    torchrun --nproc-per-node 4 examples/shampoo.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clusters(Dataset):
    """Points around a centre per class, some classes rarer than others."""

    def __init__(self, size: int, dim: int, classes: int) -> None:
        self.size = size
        self.centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        classes, dim = self.centres.shape
        label = int(classes * torch.rand((), generator=generator) ** 2)
        return self.centres[label] + torch.randn(dim, generator=generator), label


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(self.norm(x)))


def classifier(dim: int, hidden: int, layers: int, classes: int) -> nn.Module:
    middle = [Residual(hidden) for _ in range(layers)]
    return nn.Sequential(nn.Linear(dim, hidden), *middle, nn.LayerNorm(hidden), nn.Linear(hidden, classes))


def inverse_fourth_root(matrices: Tensor, damping: float) -> Tensor:
    """Of symmetric matrices (..., n, n), damped relative to their largest eigenvalue."""
    values, vectors = torch.linalg.eigh(matrices)
    values = values.clamp(min=0.0) + damping * values.amax(-1, keepdim=True) + 1e-12
    return (vectors * values.pow(-0.25).unsqueeze(-2)) @ vectors.mT


class DistributedShampoo(torch.optim.Optimizer):
    """Shampoo for matrices, momentum for other parameters; needs the same gradients on all ranks."""

    def __init__(self, params, lr: float, block: int, momentum=0.9, decay=0.95, damping=1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.block, self.momentum, self.decay, self.damping = block, momentum, decay, damping
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.matrices = [p for p in self.params if p.ndim == 2]
        blocks = sum(p.numel() for p in self.matrices) // block**2
        self.per_rank = -(-blocks // self.world)
        device = self.matrices[0].device
        self.left = torch.zeros(self.per_rank, block, block, device=device)
        self.right = torch.zeros_like(self.left)
        self.steps = 0

    def _to_blocks(self, grads: list[Tensor]) -> Tensor:
        """(blocks, n, n), filled up with zeros to as many for each rank."""
        n = self.block
        cut = [g.view(g.shape[0] // n, n, -1, n).transpose(1, 2).reshape(-1, n, n) for g in grads]
        blocks = torch.cat(cut)
        filler = self.per_rank * self.world - len(blocks)
        return torch.cat([blocks, blocks.new_zeros(filler, n, n)]) if filler else blocks

    def _from_blocks(self, blocks: Tensor) -> list[Tensor]:
        n, out, first = self.block, [], 0
        for p in self.matrices:
            count = p.numel() // n**2
            cut = blocks[first : first + count].view(p.shape[0] // n, -1, n, n)
            out.append(cut.transpose(1, 2).reshape(p.shape))
            first += count
        return out

    def _precondition(self, grads: Tensor) -> Tensor:
        """This rank's blocks, preconditioned by their statistics up to now."""
        self.left.lerp_(grads @ grads.mT, 1 - self.decay)
        self.right.lerp_(grads.mT @ grads, 1 - self.decay)
        correction = 1 - self.decay**self.steps
        left = inverse_fourth_root(self.left / correction, self.damping)
        right = inverse_fourth_root(self.right / correction, self.damping)
        return left @ grads @ right

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        blocks = self._to_blocks([p.grad for p in self.matrices])
        mine = blocks[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]
        updates = torch.zeros_like(blocks)
        dist.all_gather_into_tensor(updates, self._precondition(mine).contiguous())
        preconditioned = dict(zip(self.matrices, self._from_blocks(updates)))
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if p in preconditioned:
                    update = preconditioned[p]
                    update = update * (p.grad.norm() / (update.norm() + 1e-12))
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(self.momentum).add_(update)
                p.add_(buffer, alpha=-group["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")

    torch.manual_seed(args.seed)
    model = classifier(args.dim, args.hidden, args.layers, args.classes).to(device)
    model = DistributedDataParallel(model)
    optimizer = DistributedShampoo(model.parameters(), args.lr, args.block)

    dataset = Clusters(4096, args.dim, args.classes)
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=use_cuda
    )
    sampler.set_epoch(0)
    class_weight = torch.linspace(0.5, 2.0, args.classes, device=device)  # rare classes count more

    for step, (points, labels) in zip(range(args.steps), loader):
        points, labels = points.to(device), labels.to(device)
        total = class_weight[labels].sum()
        dist.all_reduce(total)

        optimizer.zero_grad()
        logits = model(points)
        losses = F.cross_entropy(logits, labels, weight=class_weight, reduction="sum")
        loss = losses * world / total  # DDP takes the mean over the ranks
        loss.backward()
        optimizer.step()

        correct = (logits.argmax(-1) == labels).sum()
        logged = torch.stack([losses.detach() / total, correct.float(), logits.new_tensor(len(labels))])
        dist.all_reduce(logged)
        if rank == 0:
            average, right, count = logged.tolist()
            print(f"step {step} loss {average:.6f} accuracy {right / count:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
