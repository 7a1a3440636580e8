"""A sum that only the root has, used on every rank."""

import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    total = x.sum(0)
    dist.reduce(total, dst=0, group=mesh.get_group("dp"))
    return total


@program(mesh={"dp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    total = x.sum(0)
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return total
