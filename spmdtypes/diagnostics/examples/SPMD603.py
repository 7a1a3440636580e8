"""A sum that is divided while it is still on its way."""

import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    total = x.square().sum(0)
    work = dist.all_reduce(total, group=mesh.get_group("dp"), async_op=True)
    scale = total.sqrt()
    work.wait()
    return scale


@program(mesh={"dp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "d"]:
    total = x.square().sum(0)
    work = dist.all_reduce(total, group=mesh.get_group("dp"), async_op=True)
    work.wait()
    return total.sqrt()
