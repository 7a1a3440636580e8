"""Clipping by the norm of the own shard."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes import Spmd, program


class Net(nn.Module):
    w: Spmd[nn.Parameter, "f@tp d"]

    def __init__(self, mesh, f, d):
        super().__init__()
        self.w = nn.Parameter(torch.empty(f // mesh.size(), d))


@program(mesh={"tp": 2}, model=Net)
def wrong(model, x: Spmd[Tensor, "b d"]):
    F.linear(x, model.w).square().sum().backward()
    norm = model.w.grad.square().sum().sqrt()
    with torch.no_grad():
        model.w -= 0.1 * model.w.grad / norm.clamp(min=1)
    return {"w": model.w}


@program(mesh={"tp": 2}, model=Net)
def right(model, mesh, x: Spmd[Tensor, "b d"]):
    F.linear(x, model.w).square().sum().backward()
    squares = model.w.grad.square().sum()
    dist.all_reduce(squares, group=mesh.get_group("tp"))
    with torch.no_grad():
        model.w -= 0.1 * model.w.grad / squares.sqrt().clamp(min=1)
    return {"w": model.w}
