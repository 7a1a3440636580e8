"""A sum of the ranks' means where their mean is meant."""

import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    mean = x.mean(0)
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    return mean


@program(mesh={"dp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    mean = x.mean(0)
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    return mean / mesh["dp"].size()
