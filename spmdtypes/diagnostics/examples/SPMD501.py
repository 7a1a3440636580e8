"""Noise from the rank's own seed on a replicated tensor."""

import torch
from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"tp": 2}, input_grads=False)
def wrong(mesh, x: Spmd[Tensor, "b d"]) -> Spmd[Tensor, "b d"]:
    torch.manual_seed(mesh.get_local_rank("tp"))
    return x + torch.randn_like(x)


@program(mesh={"tp": 2}, input_grads=False)
def right(x: Spmd[Tensor, "b d"]) -> Spmd[Tensor, "b d"]:
    torch.manual_seed(0)
    return x + torch.randn_like(x)
