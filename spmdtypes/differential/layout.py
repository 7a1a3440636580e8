"""Cuts global tensors into the ranks' blocks and puts blocks together again, as a `Type` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmdtypes.core.simulate import coordinates
from spmdtypes.notation import Type

Mesh = Mapping[str, int]
Coords = Mapping[str, int]


def global_shape(type_: Type) -> tuple[int, ...]:
    """Raises ValueError when a size is still a name."""
    shape = []
    for d in type_.dims or ():
        if not isinstance(d.size, int):
            raise ValueError(f"the size of {d.size!r} is not known")
        shape.append(d.size)
    return tuple(shape)


def span(size: int, axes: Sequence[str], coords: Coords, mesh: Mesh) -> tuple[int, int]:
    """[start, end) of a rank's block of a dim cut by `axes`, outermost first, in chunks as torch.chunk."""
    start, end = 0, size
    for a in axes:
        step = -(-(end - start) // mesh[a])
        start, end = min(start + coords[a] * step, end), min(start + (coords[a] + 1) * step, end)
    return start, end


def block(type_: Type, coords: Coords, mesh: Mesh) -> tuple[slice, ...]:
    return tuple(
        slice(*span(size, d.axes, coords, mesh)) for size, d in zip(global_shape(type_), type_.dims or ())
    )


def local_shape(type_: Type, coords: Coords, mesh: Mesh) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in block(type_, coords, mesh))


def reduce_over(locals_: Sequence[torch.Tensor], axis: str, op: str, mesh: Mesh) -> list[torch.Tensor]:
    """Every rank's value after a reduction over one axis, in rank order."""
    coords = coordinates(mesh)
    done: dict[tuple[Any, ...], torch.Tensor] = {}
    out = []
    for c in coords:
        key = tuple(v for a, v in c.items() if a != axis)
        if key not in done:
            peers = [t for t, d in zip(locals_, coords) if all(d[a] == c[a] for a in mesh if a != axis)]
            done[key] = _fold(torch.stack([p.double() for p in peers]), op)
        out.append(done[key])
    return out


def _fold(x: torch.Tensor, op: str) -> torch.Tensor:
    if op in ("sum", "avg"):
        return x.sum(0) / (x.shape[0] if op == "avg" else 1)
    if op == "prod":
        return x.prod(0)
    return x.amax(0) if op == "max" else x.amin(0)


@dataclass(frozen=True)
class Whole:
    """The global value, and the largest disagreement between ranks that should hold the same part."""

    value: torch.Tensor
    spread: float


class ShapeError(ValueError):
    """A rank's value has not the shape its type says."""


def assemble(locals_: Sequence[torch.Tensor], type_: Type, mesh: Mesh) -> Whole:
    """Raises `ShapeError`."""
    coords = coordinates(mesh)
    parts = [t.detach().double() for t in locals_]
    for axis, op in type_.partial:
        if op not in ("I", "V"):
            parts = reduce_over(parts, axis, op, mesh)
    shape = tuple(parts[0].shape) if type_.dims is None else global_shape(type_)
    whole = torch.zeros(shape, dtype=torch.float64)
    for rank, (c, t) in enumerate(zip(coords, parts)):
        want = shape if type_.dims is None else local_shape(type_, c, mesh)
        if tuple(t.shape) != want:
            raise ShapeError(f"{list(t.shape)} on rank {rank} where {list(want)} is declared")
        whole[_where(type_, c, mesh)] = t
    spread = max(distance(whole[_where(type_, c, mesh)], t) for c, t in zip(coords, parts))
    return Whole(whole, spread)


def _where(type_: Type, coords: Coords, mesh: Mesh) -> tuple[Any, ...]:
    return (...,) if type_.dims is None else block(type_, coords, mesh)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; NaN equals NaN and an infinity equals itself."""
    if a.numel() == 0:
        return 0.0
    gap = (a - b).abs()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(gap), gap)
    return float(torch.nan_to_num(gap, nan=float("inf")).max())
