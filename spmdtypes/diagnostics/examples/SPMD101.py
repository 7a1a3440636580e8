"""A row-parallel matmul without its sum."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes import Spmd, program


class Reduce(torch.autograd.Function):
    """Sum over the ranks; identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@program(mesh={"tp": 2})
def wrong(x: Spmd[Tensor, "b f@tp"], w: Spmd[nn.Parameter, "d f@tp"]) -> Spmd[Tensor, "b d"]:
    return F.linear(x, w)


@program(mesh={"tp": 2})
def right(mesh, x: Spmd[Tensor, "b f@tp"], w: Spmd[nn.Parameter, "d f@tp"]) -> Spmd[Tensor, "b d"]:
    return Reduce.apply(F.linear(x, w), mesh.get_group("tp"))
