"""Noise from one seed on the blocks of a sharded tensor."""

import torch
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, input_grads=False)
def wrong(x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
    torch.manual_seed(0)
    return x + torch.randn_like(x)


@program(mesh={"dp": 2}, input_grads=False)
def right(mesh, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
    torch.manual_seed(mesh.get_local_rank("dp"))
    return x + torch.randn_like(x)
