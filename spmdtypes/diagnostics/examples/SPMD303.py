"""A masked loss divided by the own count, averaged over ranks."""

import torch.distributed as dist
from torch import Tensor, nn

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, grads={"dp": "avg"})
def wrong(
    x: Spmd[Tensor, "b@dp d"], valid: Spmd[Tensor, "i64[b@dp] < 2"], w: Spmd[nn.Parameter, "d"]
) -> Spmd[Tensor, "[] | dp:P(avg)"]:
    losses = (x @ w).square() * valid
    return losses.sum() / valid.sum().clamp(min=1)


@program(mesh={"dp": 2}, grads={"dp": "sum"})
def right(
    mesh, x: Spmd[Tensor, "b@dp d"], valid: Spmd[Tensor, "i64[b@dp] < 2"], w: Spmd[nn.Parameter, "d"]
) -> Spmd[Tensor, "[] | dp:P"]:
    losses, count = (x @ w).square() * valid, valid.sum()
    dist.all_reduce(count, group=mesh.get_group("dp"))
    return losses.sum() / count.clamp(min=1)
