"""Process groups as products of mesh axes, and the names of reduce operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

_REDUCE_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "MAX": "max",
    "MIN": "min",
    "PRODUCT": "prod",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "premul_sum",
}


def reduce_name(op: Any) -> str:
    """The canonical name of a torch ReduceOp; "unknown" when it cannot be told."""
    for name, canonical in _REDUCE_NAMES.items():
        known = getattr(dist.ReduceOp, name, None)
        try:
            if known is not None and op == known:
                return canonical
        except TypeError:
            continue
    return "unknown"


resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported


class Groups:
    """Process groups as products of mesh axes."""

    def __init__(self, mesh: Mapping[str, int], names: dict[str, tuple[str, ...]]) -> None:
        self.mesh = dict(mesh)
        self.names = names
        self._known: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    def locate(self, group: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """(axes, ranks) of a group object or name."""
        if not isinstance(group, str):
            group = group.group_name
        found = self._known.get(group)
        if found is None:
            pg = resolve(group)
            ranks = tuple(dist.get_process_group_ranks(pg))
            found = self._known[group] = (self.names.get(group) or self.axes(ranks), ranks)
        return found

    def axes(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The axes whose product `ranks` is, outermost first; () when it is none."""
        coords = [self.coords(r) for r in ranks]
        varied = [i for i in range(len(self.mesh)) if any(c[i] != coords[0][i] for c in coords)]
        sizes = list(self.mesh.values())
        full = math.prod(sizes[i] for i in varied) == len(ranks) and len(set(coords)) == len(ranks)
        return tuple(list(self.mesh)[i] for i in varied) if full else ()

    def coords(self, rank: int) -> tuple[int, ...]:
        out = []
        for n in reversed(list(self.mesh.values())):
            out.append(rank % n)
            rank //= n
        return (*reversed(out), rank)


def group_axes(device_mesh: Any) -> dict[str, tuple[str, ...]]:
    """Group name -> mesh axes, for the groups a DeviceMesh made itself. Axes of size 1 need this.

    A group that serves several axes (the world, when it has one rank) stands for all of them.
    """
    names: dict[str, tuple[str, ...]] = {}
    axes = tuple(device_mesh.mesh_dim_names or ())
    for axis in axes:
        name = device_mesh.get_group(axis).group_name
        names[name] = (*names.get(name, ()), axis)
    world = dist.group.WORLD
    if world is not None and dist.get_world_size() == device_mesh.size():
        names.setdefault(world.group_name, axes)
    return names
