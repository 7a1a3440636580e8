"""The ranks' parts of one tensor put together: how they lie in the global one, and what that is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from spmdtypes.core.simulate import coordinates
from spmdtypes.differential.layout import ShapeError, assemble
from spmdtypes.drive import short_dtype
from spmdtypes.notation import Dim, Type


@dataclass(frozen=True)
class Parts:
    """One tensor on every rank of a mesh, row-major."""

    values: tuple[Tensor, ...]
    mesh: Mapping[str, int]

    @property
    def differing(self) -> tuple[str, ...]:
        """Axes along which the values differ."""
        coords = coordinates(self.mesh)
        at = {tuple(c.items()): v for c, v in zip(coords, self.values)}
        out = []
        for axis in self.mesh:
            for c, v in zip(coords, self.values):
                first = at[tuple((c | {axis: 0}).items())]
                if first.shape != v.shape or not _same(first, v):
                    out.append(axis)
                    break
        return tuple(out)

    @property
    def even(self) -> bool:
        return len({tuple(v.shape) for v in self.values}) == 1


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass(frozen=True)
class Whole:
    """`type` with global sizes and the global `value`. `parted`: axes over which ranks hold different
    values although their parts should be the same."""

    type: Type
    value: Tensor
    parted: tuple[str, ...] = ()


def replicated(value: Tensor, parted: tuple[str, ...] = ()) -> Whole:
    return Whole(Type(tuple(Dim(n) for n in value.shape), short_dtype(value.dtype)), value, parted)


def parameter(parts: Parts, whole: Sequence[int], cut: int | None, likely: Sequence[str]) -> Whole | None:
    """A parameter whose shape on the mesh of ones is `whole`. `cut` is the dim said to be cut; `likely`
    are axes that cut other parameters. None: the shapes do not fit together."""
    first = parts.values[0]
    differing = parts.differing
    if tuple(first.shape) == tuple(whole):
        return replicated(first, differing)
    for dims in ways(parts, whole, cut, differing, likely):
        found = _put_together(parts, dims, whole)
        if found is not None:
            axes = {a for cut_by in dims for a in cut_by}
            left = tuple(a for a in differing if a not in axes)
            return Whole(found.type, found.value, left)
    return None


def ways(
    parts: Parts, whole: Sequence[int], cut: int | None, differing: Sequence[str], likely: Sequence[str]
) -> list[tuple[tuple[str, ...], ...]]:
    """Axes for every dim that explain the sizes, the most plausible first."""
    local = parts.values[0].shape
    if len(local) != len(whole):
        return []
    axes = [a for a, n in parts.mesh.items() if n > 1]
    options: list[list[tuple[str, ...]]] = []
    for n, total in zip(local, whole):
        fitting: list[tuple[str, ...]] = []
        for k in range(len(axes) + 1):
            for chosen in itertools.combinations(axes, k):
                blocks = prod(parts.mesh[a] for a in chosen)
                if (not chosen and n == total) or (chosen and n < total and -(-total // blocks) == n):
                    fitting.append(chosen)
        options.append(fitting)
    found = [c for c in itertools.product(*options) if len({a for d in c for a in d}) == sum(map(len, c))]

    def cost(dims: tuple[tuple[str, ...], ...]) -> tuple[int, int, int, int]:
        used = [a for d in dims for a in d]
        missing = sum(a not in used for a in differing)
        idle = sum(a not in differing for a in used)
        unlikely = sum(a not in likely for a in used)
        elsewhere = int(cut is not None and any(d and i != cut for i, d in enumerate(dims)))
        return missing, idle, unlikely, elsewhere

    return sorted(found, key=cost)


def _put_together(parts: Parts, dims: Sequence[Sequence[str]], whole: Sequence[int]) -> Whole | None:
    t = Type(tuple(Dim(n, tuple(a)) for n, a in zip(whole, dims)), short_dtype(parts.values[0].dtype))
    try:
        value = assemble(parts.values, t, parts.mesh).value
    except ShapeError:
        return None
    return Whole(t, value.to(parts.values[0].dtype))


def data(parts: Parts, native: Tensor | None, differing: Sequence[str]) -> Whole | None:
    """A batch: cut along its first dim over the axes along which it differs, and along others as the
    sizes of the native run on the mesh of ones say. None: leave it as that run has it."""
    first = parts.values[0]
    differing = list(differing)
    if not parts.even:
        return None
    if not differing:
        fits = native is not None and native.shape == first.shape
        return replicated(first) if fits and not _same(native.to(first.dtype), first) else None  # type: ignore[union-attr]
    if not first.ndim:
        return None
    cut = batch_dims(first.shape, native.shape if native is not None else None, differing, parts.mesh)
    if cut is None:
        return None
    dims, left = cut
    whole = [n * prod(parts.mesh[a] for a in axes) for n, axes in zip(first.shape, dims)]
    found = _put_together(parts, dims, whole)
    if found is None or native is None or not any(dims[1:]) or left:
        return found
    as_blocks = native.shape != found.value.shape or _same(native, found.value)
    return found if as_blocks else None  # else dealt in another order


def batch_dims(
    shape: Sequence[int], native: Sequence[int] | None, differing: Sequence[str], mesh: Mapping[str, int]
) -> tuple[list[list[str]], list[str]] | None:
    """Axes that cut each dim of a batch of at least one dim, and those of them that no size of the native
    run shows: these cut the first dim. None: no axes along which it differs explain a size."""
    dims: list[list[str]] = [[] for _ in shape]
    left = list(differing)
    if native is not None and len(native) == len(shape):
        for d, (n, total) in enumerate(zip(shape, native)):
            ratio = total // n if n and total % n == 0 else 0
            if ratio > 1:
                chosen = _product(left, ratio, mesh)
                if chosen is None:
                    return None
                dims[d] += chosen
                left = [a for a in left if a not in chosen]
    dims[0] = [a for a in mesh if a in dims[0] or a in left]
    return dims, left


def _product(axes: Sequence[str], ratio: int, mesh: Mapping[str, int]) -> list[str] | None:
    for k in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, k):
            if prod(mesh[a] for a in chosen) == ratio:
                return list(chosen)
    return None
