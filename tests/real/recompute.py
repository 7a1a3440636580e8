"""A tensor-parallel block whose activations are recomputed in backward, by PyTorch or by torch_remat."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmdtypes.contracts import Program
from spmdtypes.notation import parse
from tests.real.removal import no_all_reduce

HIDDEN, FFN, SEQ, BATCH = 16, 32, 6, 4


class Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """Pre-norm MLP with a residual, its width cut over tp."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.group, size = mesh.get_group("tp"), mesh["tp"].size()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Parameter(torch.zeros(FFN // size, HIDDEN))
        self.down = nn.Parameter(torch.zeros(HIDDEN, FFN // size))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(Copy.apply(self.norm(x), self.group), self.up)
        return x + Sum.apply(F.linear(self.activation(h), self.down), self.group)

    def activation(self, h: Tensor) -> Tensor:
        return F.gelu(h)


class Recomputed(nn.Module):
    """Two blocks under `torch.utils.checkpoint`."""

    reentrant = False
    block = Block

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.first, self.second = self.block(mesh), self.block(mesh)

    def wrap(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.wrap(self.second, self.wrap(self.first, x)), target)


class Reentrant(Recomputed):
    """The same with the reentrant implementation, which needs an input that requires a gradient."""

    reentrant = True

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x.requires_grad_(), target)


class RematBlock(Block):
    """Marks its activation for torch_remat."""

    def activation(self, h: Tensor) -> Tensor:
        import torch_remat

        # a saved region needs a PyTorch that can poison a storage, which 2.13 cannot
        return torch_remat.region(F.gelu, "gelu", recompute=True)(h)


class Rematerialised(Recomputed):
    """Two blocks under `torch_remat.checkpoint`."""

    block = RematBlock

    def wrap(self, block: nn.Module, x: Tensor) -> Tensor:
        import torch_remat

        return torch_remat.checkpoint(region_name=f"block{id(block)}")(block)(x)


def checkpointed() -> Program:
    return _program("torch.utils.checkpoint", Recomputed)


def checkpointed_reentrant() -> Program:
    return _program("torch.utils.checkpoint, reentrant", Reentrant)


def rematerialised() -> Program:
    return _program("torch_remat", Rematerialised)


def _program(name: str, build: Any) -> Program:
    block = {
        "norm.weight": f"f32[{HIDDEN}]",
        "norm.bias": f"f32[{HIDDEN}]",
        "up": f"f32[{FFN}@tp, {HIDDEN}]",
        "down": f"f32[{HIDDEN}, {FFN}@tp]",
    }
    x = parse(f"f32[{BATCH}, {SEQ}, {HIDDEN}]")
    return Program(
        name=name,
        mesh={"tp": 2},
        build=build,
        inputs={"x": x, "target": x},
        params={f"{which}.{key}": parse(t) for which in ("first", "second") for key, t in block.items()},
        output=parse("f32[]"),
    )


REMOVALS = {
    "sum in forward": partial(no_all_reduce, "Sum.forward"),
    "sum in backward": partial(no_all_reduce, "Copy.backward"),
}
