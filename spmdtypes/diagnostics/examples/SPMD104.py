"""A product of two sums that are still pending."""

import torch
import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"tp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b d@tp"], y: Spmd[Tensor, "b d@tp"]) -> Spmd[Tensor, "b"]:
    product = x.sum(-1) * y.sum(-1)
    dist.all_reduce(product, group=mesh.get_group("tp"))
    return product


@program(mesh={"tp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b d@tp"], y: Spmd[Tensor, "b d@tp"]) -> Spmd[Tensor, "b"]:
    sums = torch.stack([x.sum(-1), y.sum(-1)])
    dist.all_reduce(sums, group=mesh.get_group("tp"))
    return sums[0] * sums[1]
