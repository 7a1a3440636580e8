"""Blocks of two tensors that are cut over different axes."""

from torch import Tensor

from spmdtypes import Spmd, program


@program(mesh={"dp": 2, "tp": 2}, input_grads=False)
def wrong(x: Spmd[Tensor, "b@dp d"], y: Spmd[Tensor, "b@tp d"]) -> Spmd[Tensor, "b@dp d"]:
    return x + y


@program(mesh={"dp": 2, "tp": 2}, input_grads=False)
def right(x: Spmd[Tensor, "b@dp d"], y: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
    return x + y
