"""Two nested axes, gathered from the outside in."""

import torch
import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


@program(mesh={"dp": 2, "cp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b@dp@cp d"]) -> Spmd[Tensor, "b d"]:
    return gather(gather(x, mesh.get_group("dp")), mesh.get_group("cp"))


@program(mesh={"dp": 2, "cp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp@cp d"]) -> Spmd[Tensor, "b d"]:
    return gather(gather(x, mesh.get_group("cp")), mesh.get_group("dp"))
