"""Gated feed-forward blocks trained with Adafactor whose factored statistics span sharded weights.

The mesh is data x tensor. Samples are cut over both axes; within a block the tensor ranks gather them,
each computes with its part of the hidden units, and a reduce-scatter returns the samples. Adafactor
keeps a mean of squares per row and per column; the means that cross the cut are taken over the ranks.

    torchrun --nproc-per-node 4 examples/adafactor.py --tp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def cut(whole: Tensor, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """The part along `dim` that this tensor rank holds."""
    part = whole.chunk(mesh["tp"].size(), dim)[mesh.get_local_rank("tp")]
    param = nn.Parameter(part.clone())
    param.cut_dim = dim
    return param


class GatedBlock(nn.Module):
    def __init__(self, dim: int, hidden: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group("tp")
        self.norm = nn.RMSNorm(dim)
        self.gate = cut(torch.randn(hidden, dim) * dim**-0.5, 0, mesh)
        self.up = cut(torch.randn(hidden, dim) * dim**-0.5, 0, mesh)
        self.down = cut(torch.randn(dim, hidden) * hidden**-0.5, 1, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Samples of this rank (n, dim)."""
        y = funcol.all_gather_tensor_autograd(self.norm(x), gather_dim=0, group=self.group)
        y = F.linear(F.gelu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)
        return x + funcol.reduce_scatter_tensor_autograd(y, "sum", scatter_dim=0, group=self.group)


class Regressor(nn.Module):
    def __init__(self, inputs: int, outputs: int, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, args.dim)
        self.blocks = nn.ModuleList(GatedBlock(args.dim, args.hidden, mesh) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.leave = nn.Linear(args.dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))


class Adafactor(torch.optim.Optimizer):
    """Adafactor with relative steps; parameters with a `cut_dim` are sharded over `group` along it."""

    def __init__(self, params, group, lr=0.02, eps=(1e-30, 1e-3), clip=1.0, decay=0.8) -> None:
        super().__init__(params, {"lr": lr})
        self.group, self.eps, self.clip, self.decay = group, eps, clip, decay

    def _across(self, mean: Tensor) -> Tensor:
        """The mean over the ranks of means over parts of equal size."""
        return funcol.all_reduce(mean, "sum", self.group) / dist.get_world_size(self.group)

    def _rms(self, x: Tensor, is_cut: bool) -> Tensor:
        square = x.square().mean()
        if is_cut:
            square = self._across(square)
        return square.sqrt()

    def _factored(self, grad: Tensor, state: dict, beta: float, cut_dim: int | None) -> Tensor:
        square = grad.square() + self.eps[0]
        rows, columns = square.mean(1), square.mean(0)
        if cut_dim == 0:  # this rank has some of the rows, and of each column a part
            columns = self._across(columns)
        elif cut_dim == 1:
            rows = self._across(rows)
        state["rows"] = beta * state.get("rows", torch.zeros_like(rows)) + (1 - beta) * rows
        state["columns"] = beta * state.get("columns", torch.zeros_like(columns)) + (1 - beta) * columns
        average = state["rows"].mean()
        if cut_dim == 0:
            average = self._across(average)
        return grad * (state["rows"] / average).rsqrt()[:, None] * state["columns"].rsqrt()

    @torch.no_grad()
    def step(self) -> None:
        for options in self.param_groups:
            for p in options["params"]:
                state, cut_dim = self.state[p], getattr(p, "cut_dim", None)
                state["step"] = state.get("step", 0) + 1
                beta = 1 - state["step"] ** -self.decay
                if p.ndim == 2:
                    update = self._factored(p.grad, state, beta, cut_dim)
                else:
                    square = p.grad.square() + self.eps[0]
                    state["square"] = beta * state.get("square", torch.zeros_like(p)) + (1 - beta) * square
                    update = p.grad * state["square"].rsqrt()
                update = update / (self._rms(update, cut_dim is not None) / self.clip).clamp(min=1.0)
                size = self._rms(p, cut_dim is not None).clamp(min=self.eps[1])
                p.sub_(options["lr"] * size * update)


@torch.no_grad()
def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Sums each gradient over the ranks that hold other samples of it; returns the norm of them all."""
    data, tensor = mesh.get_group("dp"), mesh.get_group("tp")
    cut_square = whole_square = torch.zeros((), device=mesh.device_type)
    for p in model.parameters():
        p.grad.copy_(funcol.all_reduce(p.grad, "sum", data))
        if hasattr(p, "cut_dim"):  # has seen the samples of all tensor ranks
            cut_square = cut_square + p.grad.square().sum()
        else:
            p.grad.copy_(funcol.all_reduce(p.grad, "sum", tensor))
            whole_square = whole_square + p.grad.square().sum()
    return (funcol.all_reduce(cut_square, "sum", tensor) + whole_square).sqrt()


def batches(args: argparse.Namespace, inputs: int, outputs: int, device: str):
    """This rank's part of each global batch of a noisy teacher."""
    generator = torch.Generator().manual_seed(args.seed)
    teacher = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    while True:
        x = torch.randn(args.global_batch, inputs, generator=generator)
        y = torch.sin(2 * x @ teacher.T) + 0.1 * torch.randn(args.global_batch, outputs, generator=generator)
        rank, world = dist.get_rank(), dist.get_world_size()
        yield x.chunk(world)[rank].to(device), y.chunk(world)[rank].to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05, help="relative to the size of a parameter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = "cuda" if use_cuda else "cpu"
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(args.seed)
    inputs, outputs = 16, 8
    model = Regressor(inputs, outputs, args, mesh).to(device)
    optimizer = Adafactor(model.parameters(), mesh.get_group("tp"), lr=args.lr)

    for step, (x, y) in zip(range(args.steps), batches(args, inputs, outputs, device)):
        loss = (model(x) - y).square().mean(1).sum() / args.global_batch
        optimizer.zero_grad()
        loss.backward()
        norm = reduce_gradients(model, mesh)
        optimizer.step()
        logged = funcol.all_reduce(loss.detach(), "sum", dist.group.WORLD)
        if dist.get_rank() == 0:
            print(f"step {step} loss {logged.item():.6f} grad norm {norm.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
