"""A metric of the own batch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdtypes import Spmd, program


class Net(nn.Module):
    mean: Spmd[Tensor, "d"]

    def __init__(self, d):
        super().__init__()
        self.register_buffer("mean", torch.zeros(d))


@program(mesh={"dp": 2}, model=Net, results={"distance": "[]"})
def wrong(model, x: Spmd[Tensor, "b@dp d"]):
    return {"distance": (x - model.mean).square().mean()}


@program(mesh={"dp": 2}, model=Net, results={"distance": "[]"})
def right(model, mesh, x: Spmd[Tensor, "b@dp d"]):
    distance = (x - model.mean).square().mean()
    dist.all_reduce(distance, group=mesh.get_group("dp"))
    return {"distance": distance / mesh["dp"].size()}
