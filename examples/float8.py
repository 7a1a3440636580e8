"""Classification by a residual network whose linear layers multiply in float8, under dp and tp.

Inputs, weights and gradients are scaled by the largest magnitude of the whole tensor, wherever its parts
are, so that float8 is used in full and rounding does not depend on how many ranks there are. The two
layers of a block are cut over tp in Megatron's manner; everything else is in full precision.

    torchrun --nproc-per-node 4 examples/float8.py --tp 2
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantise(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """x in float8 and its scale (float8 = x * scale), common to the ranks that hold parts of x."""
    amax = x.detach().abs().amax()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    limit = torch.finfo(dtype).max
    scale = limit / amax.clamp(min=1e-12)
    return (x * scale).clamp(-limit, limit).to(dtype), scale


def multiply(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """The product of float8 matrices, summed in the default precision, over the product of their scales."""
    dtype = torch.get_default_dtype()
    return (a.to(dtype) @ b.to(dtype)) / scale


class Float8Linear(torch.autograd.Function):
    """x @ w.T of [rows, in] and [out, in]; a group each says who holds parts of x, w and the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
        x8, x_scale = quantise(x, E4M3, groups[0])
        w8, w_scale = quantise(w, E4M3, groups[1])
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.group = groups[2]
        return multiply(x8, w8.t(), x_scale * w_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantise(grad, E5M2, ctx.group)
        grad_x = multiply(g8, w8, g_scale * w_scale)
        grad_w = multiply(g8.t(), x8, g_scale * x_scale)
        return grad_x, grad_w, None, None, None


class Copy(torch.autograd.Function):
    """The same on all ranks forward; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """The sum over the ranks; all of them get its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """Norm, up, gelu, down, residual. `up` is cut by its outputs, `down` by its inputs."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.dp, self.tp = mesh.get_group("dp"), mesh.get_group("tp")
        part, parts = mesh["tp"].get_local_rank(), mesh["tp"].size()
        up = torch.randn(args.hidden, args.width) / args.width**0.5
        down = torch.randn(args.width, args.hidden) / args.hidden**0.5
        self.norm = nn.LayerNorm(args.width)
        self.up = nn.Parameter(up.chunk(parts, dim=0)[part].clone())
        self.up_bias = nn.Parameter(torch.zeros(args.hidden // parts))
        self.down = nn.Parameter(down.chunk(parts, dim=1)[part].clone())
        self.down_bias = nn.Parameter(torch.randn(args.width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = Copy.apply(self.norm(x), self.tp)
        h = F.gelu(Float8Linear.apply(h, self.up, self.dp, self.tp, None) + self.up_bias)
        h = Float8Linear.apply(h, self.down, None, self.tp, self.dp)
        h = Reduce.apply(h, self.tp)
        return x + h + self.down_bias


class Classifier(nn.Module):
    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.stem = nn.Linear(args.features, args.width)
        self.blocks = nn.Sequential(*(Block(args, mesh) for _ in range(args.layers)))
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, args.classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def dataset(args: argparse.Namespace) -> TensorDataset:
    """Points of different size, labelled by the nearest of random directions."""
    generator = torch.Generator().manual_seed(args.seed)
    directions = torch.randn(args.features, args.classes, generator=generator)
    points = torch.randn(args.samples, args.features, generator=generator)
    points *= torch.rand(args.samples, 1, generator=generator) * 2
    return TensorDataset(points, (points @ directions).argmax(dim=1))


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """All reductions under way at once, then the division."""
    works = [dist.all_reduce(p.grad, group=group, async_op=True) for p in model.parameters()]
    for work, parameter in zip(works, model.parameters()):
        work.wait()
        parameter.grad /= group.size()


def clip_gradients(model: nn.Module, limit: float, tp: dist.ProcessGroup) -> Tensor:
    cut, whole = [], []
    for name, parameter in model.named_parameters():
        is_cut = name.endswith((".up", ".up_bias", ".down"))
        (cut if is_cut else whole).append(parameter.grad.square().sum())
    square = torch.stack(cut).sum()
    dist.all_reduce(square, group=tp)
    norm = (square + torch.stack(whole).sum()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of one data rank")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=29)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    dp = dist.get_world_size() // args.tp
    mesh = init_device_mesh(device.type, (dp, args.tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(args.seed)
    model = Classifier(args, mesh).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    data = dataset(args)
    replica = mesh["dp"].get_local_rank()
    sampler: DistributedSampler[Any] = DistributedSampler(data, dp, replica, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler)

    for step, (points, labels) in zip(range(args.steps), loader):
        logits = model(points.to(device))
        loss = F.cross_entropy(logits, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, mesh.get_group("dp"))
        norm = clip_gradients(model, 1.0, mesh.get_group("tp"))
        optimizer.step()

        metrics = torch.stack([loss.detach(), (logits.argmax(dim=1) == labels.to(device)).to(loss).mean()])
        dist.all_reduce(metrics, group=mesh.get_group("dp"))
        mean_loss, accuracy = (metrics / dp).tolist()
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean_loss:.6f} accuracy {accuracy:.4f} grad norm {norm.item():.6f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
