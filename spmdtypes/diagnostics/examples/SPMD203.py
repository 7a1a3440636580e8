"""A gather that keeps only the own gradient, before ranks use its result differently."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes import Spmd, program


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return parts


class Gather(torch.autograd.Function):
    """All-gather; reduce-scatter in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return torch.cat(gather(x, group))

    @staticmethod
    def backward(ctx, grad):
        own = torch.empty_like(grad[: len(grad) // ctx.group.size()])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


@program(mesh={"tp": 2})
def wrong(mesh, x: Spmd[Tensor, "s@tp d"], w: Spmd[nn.Parameter, "f@tp d"]) -> Spmd[Tensor, "s f@tp"]:
    parts = gather(x, mesh.get_group("tp"))
    parts[mesh.get_local_rank("tp")] = x
    return F.linear(torch.cat(parts), w)


@program(mesh={"tp": 2})
def right(mesh, x: Spmd[Tensor, "s@tp d"], w: Spmd[nn.Parameter, "f@tp d"]) -> Spmd[Tensor, "s f@tp"]:
    return F.linear(Gather.apply(x, mesh.get_group("tp")), w)
