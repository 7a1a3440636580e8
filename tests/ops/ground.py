"""Placements by brute force: cut a tensor as a denotation says, put it together again, compare.

Nothing here uses the rules: a rule is sound when what it promises reassembles to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from spmdtypes.core.denotation import Denotation
from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.simulate import coordinates, local_indices, local_shape

Mesh = Mapping[str, int]
REDUCE = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


@dataclass(frozen=True)
class Placement:
    """Cuts per dim (axes outermost first; `strided[d]`: cut inside this many blocks) and what is pending."""

    cuts: tuple[tuple[int, tuple[str, ...]], ...] = ()
    strided: tuple[tuple[int, int], ...] = ()
    partial: tuple[str, ...] = ()
    op: str = ""
    scale: tuple[tuple[str, int], ...] = ()

    def denotation(self, shape: Sequence[int], mesh: Mesh) -> Denotation:
        """Raises LayoutError when the sizes do not divide."""
        inner: list[int] = []
        cuts: dict[int, tuple[str, ...]] = {}
        for d, n in enumerate(shape):
            blocks = dict(self.strided).get(d, 1)
            if n % blocks:
                raise LayoutError("blocks do not divide")
            inner += [blocks, n // blocks] if d in dict(self.strided) else [n]
            if d in dict(self.cuts):
                cuts[len(inner) - 1] = dict(self.cuts)[d]
        layout = Layout.sharded(inner, cuts, mesh)
        if self.strided:
            parts = [prod(mesh[a] for a in cuts.get(k, ())) for k in range(len(inner))]
            local, k = [], 0
            for d in range(len(shape)):
                wide = 2 if d in dict(self.strided) else 1
                local.append(prod(inner[j] // parts[j] for j in range(k, k + wide)))
                k += wide
            layout = layout.reshape(local, shape, mesh)
        return Denotation(layout, frozenset(self.partial), self.op, self.scale)

    def __str__(self) -> str:
        cut = [
            f"S{d}@{'@'.join(a)}" + (f"/{k}" if (k := dict(self.strided).get(d)) else "")
            for d, a in self.cuts
        ]
        scale = "".join(f"*{a}^{k}" for a, k in self.scale)
        return (
            " ".join(cut + ([f"P({self.op})@{','.join(self.partial)}{scale}"] if self.partial else [])) or "R"
        )


def placements(t: Tensor, mesh: Mesh, *, uneven: bool = False) -> list[Placement]:
    """Every placement on one axis; on two axes also every pairing of them, in both orders."""
    found: list[Placement] = []
    axes = list(mesh)
    for choice in product(*(_on_axis(t, a) for a in axes)):
        for order in [axes] if len(axes) == 1 else [axes, axes[::-1]]:
            p = _combined(dict(zip(axes, choice)), order)
            if p is not None and p not in found:
                found.append(p)
    for d, n in enumerate(t.shape):
        found += [Placement(((d, (a,)),), ((d, 2),)) for a in axes if n % (2 * mesh[a]) == 0 and n > 2]
    return [p for p in found if _fits(p, t.shape, mesh, uneven)]


def _on_axis(t: Tensor, axis: str) -> list[Any]:
    pending = ["sum", "avg", "max", "min"] if t.dtype.is_floating_point else []
    return ["R", *range(t.ndim), *pending]


def _combined(choice: dict[str, Any], order: Sequence[str]) -> Placement | None:
    cuts: dict[int, list[str]] = {}
    for a in order:
        if isinstance(choice[a], int):
            cuts.setdefault(choice[a], []).append(a)
    pending = {a: c for a, c in choice.items() if isinstance(c, str) and c != "R"}
    ops = {"sum" if c == "avg" else c for c in pending.values()}
    if len(ops) > 1:
        return None
    scale = tuple(sorted((a, -1) for a, c in pending.items() if c == "avg"))
    op = ops.pop() if ops else ""
    return Placement(
        tuple(sorted((d, tuple(a)) for d, a in cuts.items())), (), tuple(sorted(pending)), op, scale
    )


def _fits(p: Placement, shape: Sequence[int], mesh: Mesh, uneven: bool) -> bool:
    for d, axes in p.cuts:
        k = prod(mesh[a] for a in axes)
        if shape[d] < k or (shape[d] % k and not uneven):
            return False
    return True


@lru_cache(maxsize=4096)
def _indices(layout: Layout, coords: tuple[tuple[str, int], ...]) -> Tensor:
    return torch.tensor(local_indices(layout, dict(coords)), dtype=torch.int64)


def cut(t: Tensor, den: Denotation, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """One local tensor per rank (row-major) that `den` reads as `t`."""
    axes = [a for a in mesh if a in den.partial]
    parts = _contributions(
        t / den.scale_in(mesh) if den.scale else t, prod(mesh[a] for a in axes), den.op, generator
    )
    out = []
    for coords in coordinates(mesh):
        which = 0
        for a in axes:
            which = which * mesh[a] + coords[a]
        index = _indices(den.layout, tuple(coords.items()))
        out.append(parts[which].reshape(-1)[index].reshape(local_shape(den.layout, coords)).clone())
    return out


def _contributions(t: Tensor, n: int, op: str, generator: torch.Generator) -> list[Tensor]:
    whole = t.dtype.is_floating_point and bool((t == t.round()).all())

    def noise() -> Tensor:
        x = torch.randn(t.shape, generator=generator, dtype=t.dtype)
        return (x * 2).round() if whole else x  # whole numbers meet and cancel

    if n == 1:
        return [t]
    if op == "sum":
        rest = [noise() for _ in range(n - 1)]
        return [*rest, t - sum(rest)]
    if op == "prod":
        rest = [2 ** noise() for _ in range(n - 1)]
        return [*rest, t / prod(rest)]
    owner = torch.randint(n, t.shape, generator=generator)
    sign = -1 if op == "max" else 1
    return [torch.where(owner == r, t, t + sign * noise().abs()) for r in range(n)]


def assemble(
    den: Denotation, locals_: Sequence[Tensor], mesh: Mesh, reference: Tensor | None = None
) -> Tensor | None:
    """What the ranks' values denote; None when replicas disagree or a shape does not fit.

    Positions that no rank holds (a piece of the reference) are taken from `reference`.
    """
    opened = {d: b for d, a, b in den.layout.open if a != b}
    for d in opened:
        if any(
            x.ndim != den.ndim or not x.shape[d] or not same(x, x.narrow(d, 0, 1).expand_as(x))
            for x in locals_
        ):
            return None
        locals_ = [x.narrow(d, 0, 1) for x in locals_]
    layout = replace(
        den.layout, open=tuple((d, *((1, 1) if d in opened else (a, b))) for d, a, b in den.layout.open)
    )
    axes = [a for a in mesh if a in den.partial]
    wholes: dict[tuple[int, ...], Tensor] = {}
    written: dict[tuple[int, ...], Tensor] = {}
    size = prod(layout.ref_shape)
    for coords, x in zip(coordinates(mesh), locals_):
        if tuple(x.shape) != local_shape(layout, coords):
            return None
        key = tuple(coords[a] for a in axes)
        whole = wholes.setdefault(key, torch.zeros(size, dtype=x.dtype))
        done = written.setdefault(key, torch.zeros(size, dtype=torch.bool))
        index, flat = _indices(layout, tuple(coords.items())), x.reshape(-1)
        again = done[index]
        if not same(whole[index][again], flat[again]):
            return None
        whole[index], done[index] = flat, True
    if not layout.fixed and not all(bool(d.all()) for d in written.values()):
        return None
    stacked = torch.stack(list(wholes.values()))
    value = (
        REDUCE[den.op](stacked.double() if stacked.dtype == torch.bool else stacked) if axes else stacked[0]
    )
    value = value * den.scale_in(mesh) if den.scale else value
    if layout.fixed and reference is not None:
        held = torch.stack(list(written.values())).all(0)
        value = torch.where(held, value, reference.reshape(-1).to(value.dtype))
    value = value.reshape(layout.ref_shape)
    return value.expand([opened.get(d, n) for d, n in enumerate(value.shape)])


def same(a: Tensor, b: Tensor, largest: float = 0.0) -> bool:
    """Equal up to rounding; `largest`: magnitude of what was added up."""
    if a.shape != b.shape:
        return False
    if not a.is_complex():
        a, b = a.double(), b.double()
    return torch.allclose(a, b, rtol=1e-7, atol=1e-9 + 1e-12 * largest, equal_nan=True)


def readings(reference: Tensor, locals_: Sequence[Tensor], n: int) -> list[str]:
    """Every placement on one axis of size n under which the ranks' values read as the reference."""
    found: list[str] = []
    one = locals_[0]
    if any(x.shape != one.shape for x in locals_) or one.ndim != reference.ndim:
        return found
    if one.shape == reference.shape:
        stacked = torch.stack([x.double() if not x.is_complex() else x for x in locals_])
        target = reference if reference.is_complex() else reference.double()
        if all(same(x, reference) for x in locals_):
            found.append("R")
        ops = REDUCE if not reference.is_complex() else {"sum": REDUCE["sum"]}
        found += [k for k, f in ops.items() if same(f(stacked), target)]
        if same(stacked.sum(0) / n, target):
            found.append("avg")
    for d in range(reference.ndim):
        if reference.shape[d] == n * one.shape[d] and reference.shape[d] > 1:
            found += _shards(reference, locals_, n, d)
    return found


def _shards(reference: Tensor, locals_: Sequence[Tensor], n: int, d: int) -> Iterator[str]:
    shape, width = list(locals_[0].shape), locals_[0].shape[d]
    for blocks in (k for k in range(1, width + 1) if width % k == 0):
        split = [x.reshape(shape[:d] + [blocks, width // blocks] + shape[d + 1 :]) for x in locals_]
        whole = torch.stack(split, d + 1).reshape(shape[:d] + [n * width] + shape[d + 1 :])
        if same(whole, reference):
            yield f"S{d}" if blocks == 1 else f"S{d}/{blocks}"
            return
