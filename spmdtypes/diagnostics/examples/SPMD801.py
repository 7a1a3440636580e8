"""Summands that are rounded before the sum."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"tp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b f@tp"], w: Spmd[Tensor, "d f@tp"]) -> Spmd[Tensor, "b d"]:
    y = F.linear(x, w).round()
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return y


@program(mesh={"tp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b f@tp"], w: Spmd[Tensor, "d f@tp"]) -> Spmd[Tensor, "b d"]:
    y = F.linear(x, w)
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return y.round()
