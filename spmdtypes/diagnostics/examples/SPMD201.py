"""A replicated activation enters a column-parallel matmul."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes import Spmd, program


class Copy(torch.autograd.Function):
    """Identity; sum over the ranks in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@program(mesh={"tp": 2})
def wrong(x: Spmd[Tensor, "b d"], w: Spmd[nn.Parameter, "f@tp d"]) -> Spmd[Tensor, "b f@tp"]:
    return F.linear(x, w)


@program(mesh={"tp": 2})
def right(mesh, x: Spmd[Tensor, "b d"], w: Spmd[nn.Parameter, "f@tp d"]) -> Spmd[Tensor, "b f@tp"]:
    return F.linear(Copy.apply(x, mesh.get_group("tp")), w)
