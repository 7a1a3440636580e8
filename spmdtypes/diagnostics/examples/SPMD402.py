"""A sum over dp where it is pending over tp."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2, "tp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp f@tp"], w: Spmd[Tensor, "d f@tp"]) -> Spmd[Tensor, "b@dp d"]:
    y = F.linear(x, w)
    dist.all_reduce(y, group=mesh.get_group("dp"))
    return y


@program(mesh={"dp": 2, "tp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp f@tp"], w: Spmd[Tensor, "d f@tp"]) -> Spmd[Tensor, "b@dp d"]:
    y = F.linear(x, w)
    dist.all_reduce(y, group=mesh.get_group("tp"))
    return y
