"""A reduction that the first rank alone takes part in."""

import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
    if mesh.get_local_rank("dp") == 0:
        total = x.sum()
        dist.all_reduce(total, group=mesh.get_group("dp"))
    return x * 2


@program(mesh={"dp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
    total = x.sum()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return x * 2
