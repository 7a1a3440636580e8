"""A moving average of the own batch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdtypes import Spmd, program


class Net(nn.Module):
    mean: Spmd[Tensor, "d"]

    def __init__(self, d):
        super().__init__()
        self.register_buffer("mean", torch.zeros(d))


@program(mesh={"dp": 2}, model=Net)
def wrong(model, x: Spmd[Tensor, "b@dp d"]):
    model.mean.lerp_(x.mean(0), 0.1)
    return {"mean": model.mean}


@program(mesh={"dp": 2}, model=Net)
def right(model, mesh, x: Spmd[Tensor, "b@dp d"]):
    mean = x.mean(0)
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    model.mean.lerp_(mean / mesh["dp"].size(), 0.1)
    return {"mean": model.mean}
