"""A vision transformer under FSDP2 over "dp", tensor and sequence parallel over "tp".

Blocks are cut by `parallelize_module` and then `fully_shard`ed; `--bf16` computes in bfloat16 and reduces
gradients in float32. The global batch is fixed and cut by data rank; each rank takes its part in micro-
batches. Classes are weighted by their rarity in the global batch, and the loss is the weighted mean over it.

    torchrun --nproc-per-node 4 examples/fsdp2_tp.py --tp 2
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.patch = args.patch
        patches = (args.image // args.patch) ** 2
        self.embed = nn.Linear(3 * args.patch**2, args.dim)
        self.position = nn.Embedding(patches, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, args.classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        index = torch.arange(patches.size(1), device=images.device)
        x = self.embed(patches) + self.position(index[None])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def parallelize(model: VisionTransformer, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    ends = {
        "embed": ColwiseParallel(output_layouts=Shard(1)),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.proj": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def global_batch(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Noise around one random image a class: (batch, 3, image, image) and (batch,)."""
    generator = torch.Generator().manual_seed(step)
    prototypes = torch.randn(
        args.classes, 3, args.image, args.image, generator=torch.Generator().manual_seed(args.seed)
    )
    labels = torch.randint(args.classes, (args.batch,), generator=generator)
    noise = torch.randn(args.batch, 3, args.image, args.image, generator=generator)
    return prototypes[labels] + noise, labels


def train_step(
    model: FSDPModule, images: Tensor, labels: Tensor, args: argparse.Namespace, dp: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gradients of this step; the loss and the share of right answers in the global batch."""
    frequency = torch.bincount(labels, minlength=args.classes).float()
    dist.all_reduce(frequency, group=dp)
    weight = 1 / frequency.clamp(min=1)
    total_weight = weight[labels].sum()
    dist.all_reduce(total_weight, group=dp)

    metrics = torch.zeros(2, device=images.device)
    for micro in range(args.accumulate):
        x, y = images.chunk(args.accumulate)[micro], labels.chunk(args.accumulate)[micro]
        model.set_requires_gradient_sync(micro == args.accumulate - 1)
        logits = model(x).float()
        loss = F.cross_entropy(logits, y, weight, reduction="sum") / total_weight
        # fully_shard takes the mean of the gradients over dp, where the sum is wanted
        (loss * dp.size()).backward()
        metrics += torch.stack([loss.detach(), (logits.argmax(-1) == y).sum() / args.batch])
    dist.all_reduce(metrics, group=dp)
    return metrics.unbind()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--image", type=int, default=8)
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    dp_size = dist.get_world_size() // args.tp
    mesh = init_device_mesh(device, (dp_size, args.tp), mesh_dim_names=("dp", "tp"))
    dp_rank = dist.get_rank() // args.tp

    torch.manual_seed(args.seed)
    model = VisionTransformer(args).to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    parallelize(model, mesh, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    for step in range(args.steps):
        images, labels = (t.to(device).chunk(dp_size)[dp_rank] for t in global_batch(args, step))
        optimizer.zero_grad()
        loss, accuracy = train_step(model, images, labels, args, mesh.get_group("dp"))
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.6f}  accuracy {accuracy:.3f}  grad norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
