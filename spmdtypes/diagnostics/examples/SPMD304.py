"""A batch norm in data-parallel training, and normalisation that does not depend on the batch."""

import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, grads={"dp": "avg"})
def wrong(x: Spmd[Tensor, "b@dp d"], w: Spmd[nn.Parameter, "d"]) -> Spmd[Tensor, "[] | dp:P(avg)"]:
    return (F.batch_norm(x, None, None, w, training=True) * x).mean()


@program(mesh={"dp": 2}, grads={"dp": "avg"})
def right(x: Spmd[Tensor, "b@dp d"], w: Spmd[nn.Parameter, "d"]) -> Spmd[Tensor, "[] | dp:P(avg)"]:
    return (F.layer_norm(x, x.shape[-1:], w) * x).mean()
