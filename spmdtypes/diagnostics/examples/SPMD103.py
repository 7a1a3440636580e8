"""A bias that is added on every rank before the sum."""

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
def wrong(
    mesh, x: Spmd[Tensor, "b f@tp"], w: Spmd[nn.Parameter, "d f@tp"], bias: Spmd[nn.Parameter, "d"]
) -> Spmd[Tensor, "b d"]:
    return Reduce.apply(F.linear(x, w, bias), mesh.get_group("tp"))


@program(mesh={"tp": 2})
def right(
    mesh, x: Spmd[Tensor, "b f@tp"], w: Spmd[nn.Parameter, "d f@tp"], bias: Spmd[nn.Parameter, "d"]
) -> Spmd[Tensor, "b d"]:
    return Reduce.apply(F.linear(x, w), mesh.get_group("tp")) + bias
