"""A loss divided by the local count under a wrapper that averages already, for one term only."""

from torch import Tensor, nn

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, grads={"dp": "avg"})
def wrong(
    mesh, x: Spmd[Tensor, "b@dp d"], w: Spmd[nn.Parameter, "d"], v: Spmd[nn.Parameter, "d"]
) -> Spmd[Tensor, "[] | dp:P(avg)"]:
    scaled = v.detach() + (v - v.detach()) / mesh["dp"].size()
    return (x * w).square().mean() + (x * scaled).square().mean()


@program(mesh={"dp": 2}, grads={"dp": "avg"})
def right(
    x: Spmd[Tensor, "b@dp d"], w: Spmd[nn.Parameter, "d"], v: Spmd[nn.Parameter, "d"]
) -> Spmd[Tensor, "[] | dp:P(avg)"]:
    return (x * w).square().mean() + (x * v).square().mean()
