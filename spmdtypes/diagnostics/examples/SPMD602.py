"""Two sums of equal shape, in another order on the first rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    count, total = torch.ones_like(x).sum(0), x.sum(0)
    first = mesh.get_local_rank("dp") == 0
    for t in (count, total) if first else (total, count):
        dist.all_reduce(t, group=mesh.get_group("dp"))
    return total / count


@program(mesh={"dp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    count, total = torch.ones_like(x).sum(0), x.sum(0)
    for t in (count, total):
        dist.all_reduce(t, group=mesh.get_group("dp"))
    return total / count
