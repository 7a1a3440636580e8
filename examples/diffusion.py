"""A small diffusion transformer under FSDP2, with an averaged copy for sampling.

The global batch is cut by rank; each rank draws timesteps, noise and dropped labels of its samples from a
stream of its own. Latents are scaled to unit deviation by the first batch of all ranks. Losses are weighted
by the running mean loss of their range of timesteps. Scalar gains cannot be sharded: they stay whole, and
their gradients are averaged by hand.

    torchrun --nproc-per-node 4 examples/diffusion.py
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """Attention and feed-forward, shifted and scaled by the condition."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(dim, 4 * dim)
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.gain = nn.Parameter(torch.tensor(1.0))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, shift2, scale2 = self.modulation(F.silu(condition))[:, None].chunk(4, -1)
        x = x + self.gain * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + self.gain * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Noise in (batch, channels, size, size) latents at times in 0..1, given a label; label 0 is none."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.patch, self.channels, self.dim = args.patch, args.channels, args.dim
        width, tokens = args.channels * args.patch**2, (args.size // args.patch) ** 2
        self.embed = nn.Linear(width, args.dim)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, args.dim))
        self.time = nn.Sequential(nn.Linear(args.dim, args.dim), nn.SiLU(), nn.Linear(args.dim, args.dim))
        self.label = nn.Embedding(args.classes + 1, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.out = nn.Linear(args.dim, width)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        size = x.shape[-2:]
        frequency = torch.exp(-8 * torch.linspace(0, 1, self.dim // 2, device=x.device))
        angle = 1000 * time[:, None] * frequency
        condition = self.time(torch.cat([angle.cos(), angle.sin()], -1)) + self.label(label)
        tokens = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        h = self.embed(tokens) + self.position
        for block in self.blocks:
            h = block(h, condition)
        return F.fold(self.out(self.norm(h)).transpose(1, 2), size, self.patch, stride=self.patch)


def shard(model: DiffusionTransformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params={block.gain})
    fully_shard(model, mesh=mesh, ignored_params={block.gain for block in model.blocks})


class LossTable:
    """Running mean loss of equal ranges of timesteps, over the samples of all ranks."""

    def __init__(self, ranges: int, momentum: float, device: str) -> None:
        self.mean, self.momentum = torch.ones(ranges, device=device), momentum

    @torch.no_grad()
    def weights(self, time: Tensor, losses: Tensor) -> Tensor:
        """Takes the losses in and returns each sample's weight."""
        index = (time * len(self.mean)).long()
        total = torch.zeros_like(self.mean).index_add_(0, index, losses)
        count = torch.zeros_like(self.mean).index_add_(0, index, torch.ones_like(losses))
        dist.all_reduce(total)
        dist.all_reduce(count)
        seen = count > 0
        latest = torch.where(seen, total / count.clamp(min=1), self.mean)
        self.mean = torch.lerp(latest, self.mean, self.momentum)
        return 1 / self.mean[index]


def deviation(x: Tensor) -> Tensor:
    """Standard deviation of the elements of all ranks."""
    moments = torch.stack([x.sum(), x.square().sum(), torch.tensor(float(x.numel()), device=x.device)])
    dist.all_reduce(moments)
    total, squares, count = moments
    return (squares / count - (total / count).square()).sqrt()


def average_whole(model: nn.Module) -> None:
    for p in model.parameters():
        if not isinstance(p, DTensor):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    parameters = list(model.parameters())
    squares = sum(p.grad.to_local().square().sum() for p in parameters if isinstance(p, DTensor))
    dist.all_reduce(squares)
    squares += sum(p.grad.square() for p in parameters if not isinstance(p, DTensor))
    norm = squares.sqrt()
    for p in parameters:
        p.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    for mine, its in zip(average.parameters(), model.parameters()):
        mine.lerp_(its.full_tensor() if isinstance(its, DTensor) else its, 1 - decay)


def draw(latents: Tensor, args: argparse.Namespace, stream: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Time, noise and whether the label is dropped, of each sample."""
    device = latents.device
    time = torch.rand(len(latents), generator=stream, device=device)
    noise = torch.randn(latents.shape, generator=stream, device=device)
    return time, noise, torch.rand(len(latents), generator=stream, device=device) < args.drop_label


def global_batch(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Latents of waves, as long as their label says, and labels from 1."""
    generator = torch.Generator().manual_seed(100 + step)
    label = torch.randint(1, args.classes + 1, (args.batch,), generator=generator)
    phase = 6.3 * torch.rand(args.batch, args.channels, 1, 1, generator=generator)
    x = torch.arange(args.size)
    wave = torch.sin(phase + (x + x[:, None]) / label[:, None, None, None])
    return 3 * wave * torch.rand(args.batch, 1, 1, 1, generator=generator), label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="samples of all ranks together")
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranges", type=int, default=4)
    parser.add_argument("--drop-label", type=float, default=0.2)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    torch.manual_seed(args.seed)
    model = DiffusionTransformer(args).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    shard(model, init_device_mesh(device, (world,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    table = LossTable(args.ranges, 0.5, device)
    stream = torch.Generator(device).manual_seed(args.seed + 1 + rank)
    share = args.batch // world
    scale = None

    for step in range(args.steps):
        latents, labels = (t.to(device) for t in global_batch(args, step))
        latents = latents[rank * share : (rank + 1) * share]
        labels = labels[rank * share : (rank + 1) * share]
        if scale is None:
            scale = 1 / deviation(latents)
        time, noise, dropped = draw(latents, args, stream)
        signal = torch.cos(time * torch.pi / 2)[:, None, None, None]
        noisy = signal * scale * latents + (1 - signal.square()).sqrt() * noise
        guess = model(noisy, time, labels.masked_fill(dropped, 0))
        losses = (guess - noise).square().mean((1, 2, 3))
        loss = (table.weights(time, losses.detach()) * losses).mean()
        optimizer.zero_grad()
        loss.backward()
        average_whole(model)
        norm = clip_grad_norm(model, args.clip)
        optimizer.step()
        follow(average, model, args.decay)
        metrics = torch.stack([loss.detach(), losses.detach().mean()]) / world
        dist.all_reduce(metrics)
        if rank == 0:
            line = "loss {:.6f}  error {:.6f}".format(*metrics.tolist())
            print(f"step {step}  {line}  grad norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
