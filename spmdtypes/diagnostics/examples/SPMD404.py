"""Positions that start at 0 on every rank."""

import torch
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"cp": 2}, input_grads=False)
def wrong(x: Spmd[Tensor, "b s@cp"]) -> Spmd[Tensor, "b s@cp"]:
    return x * torch.arange(x.size(1))


@program(mesh={"cp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b s@cp"]) -> Spmd[Tensor, "b s@cp"]:
    first = mesh.get_local_rank("cp") * x.size(1)
    return x * torch.arange(first, first + x.size(1))
