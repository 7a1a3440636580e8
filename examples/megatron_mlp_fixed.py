"""The feed-forward block of `megatron_mlp.py`, mended."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdtypes import Spmd, program


class CopyToTensorParallel(torch.autograd.Function):
    """Forward: identity. Backward: sum over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTensorParallel(torch.autograd.Function):
    """Forward: sum over the tensor-parallel ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@program(mesh={"dp": 2, "tp": 4}, grads={"dp": "avg"})
class FeedForward(nn.Module):
    """Norm, up, gelu, down; the width f is cut over tp."""

    scale: Spmd[nn.Parameter, "d"]
    up: Spmd[nn.Parameter, "f@tp d"]
    down: Spmd[nn.Parameter, "d f@tp"]

    def __init__(self, mesh: DeviceMesh, d: int, f: int) -> None:
        super().__init__()
        self.tp = mesh.get_group("tp")
        width = f // self.tp.size()
        self.scale = nn.Parameter(torch.ones(d))
        self.up = nn.Parameter(torch.randn(width, d) / d**0.5)
        self.down = nn.Parameter(torch.randn(d, width) / f**0.5)

    def forward(
        self, x: Spmd[Tensor, "b@dp s d"], target: Spmd[Tensor, "b@dp s d"]
    ) -> Spmd[Tensor, "[] | dp:P(avg)"]:
        h = F.rms_norm(x, self.scale.shape, self.scale)
        h = CopyToTensorParallel.apply(h, self.tp)
        h = F.gelu(F.linear(h, self.up))
        h = ReduceFromTensorParallel.apply(F.linear(h, self.down), self.tp)
        return F.mse_loss(x + h, target)
