"""The root of a sum that is still pending."""

import torch.distributed as dist
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"tp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b d@tp"]) -> Spmd[Tensor, "b"]:
    norm = x.square().sum(-1).sqrt()
    dist.all_reduce(norm, group=mesh.get_group("tp"))
    return norm


@program(mesh={"tp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b d@tp"]) -> Spmd[Tensor, "b"]:
    squares = x.square().sum(-1)
    dist.all_reduce(squares, group=mesh.get_group("tp"))
    return squares.sqrt()
