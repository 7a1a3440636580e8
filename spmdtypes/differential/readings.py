"""Which placements relate the ranks' values of one node to its value in the reference program.

Nothing here is derived: a reading is reported because the numbers satisfy it on every rank and for
every seed looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from spmdtypes.core.denotation import Denotation, RuleError, scale_of_ratio
from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.simulate import coordinates

PROBE = 32  # elements looked at first
MAX_STRIDED = 48  # layouts tried per dim cut by strided axes
FLOOR = 1e-14  # absolute: what is left of terms that cancel
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


@dataclass(frozen=True, eq=False)
class Observation:
    """One value, seen once: on every rank of `mesh` (row-major), and in the reference program."""

    mesh: Mapping[str, int]
    locals: tuple[Tensor, ...]
    reference: Tensor
    tolerance: float = 1e-8
    memo: dict[tuple[frozenset[str], str], list[tuple[dict[str, int], Tensor]]] = field(default_factory=dict)

    @cached_property
    def coords(self) -> list[dict[str, int]]:
        return coordinates(self.mesh)

    @cached_property
    def parts(self) -> list[Tensor]:
        return [t.double() for t in self.locals]

    @cached_property
    def whole(self) -> Tensor:
        return self.reference.double()

    @cached_property
    def even(self) -> bool:
        """All ranks have the same shape, of as many dims as the reference."""
        shapes = {tuple(t.shape) for t in self.locals}
        return len(shapes) == 1 and self.locals[0].ndim == self.reference.ndim

    @cached_property
    def slack(self) -> float:
        """Absolute difference that rounding explains."""
        return max(FLOOR, self.tolerance * max(_top(self.whole), *(_top(p) for p in self.parts)))

    def close(self, a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape:
            return False
        if a.numel() == 0:
            return True
        fits = ((a - b).abs() <= self.slack) | (a == b) | (a.isnan() & b.isnan())
        return bool(fits.all())

    @cached_property
    def equal_over(self) -> frozenset[str]:
        """Axes over which all ranks hold the same."""
        out = set()
        for axis in self.mesh:
            first = {tuple(v for a, v in c.items() if a != axis): p for c, p in self._reversed}
            if all(
                self.close(first[tuple(v for a, v in c.items() if a != axis)], p)
                for c, p in zip(self.coords, self.parts)
            ):
                out.add(axis)
        return frozenset(out)

    @property
    def _reversed(self) -> list[tuple[dict[str, int], Tensor]]:
        return list(reversed(list(zip(self.coords, self.parts))))

    def reduced(self, axes: frozenset[str], op: str) -> list[tuple[dict[str, int], Tensor]]:
        """One reduced value for each combination of the other coordinates; none when shapes differ."""
        if (axes, op) not in self.memo:
            self.memo[axes, op] = self._reduce(axes, op)
        return self.memo[axes, op]

    def _reduce(self, axes: frozenset[str], op: str) -> list[tuple[dict[str, int], Tensor]]:
        if not axes:
            return list(zip(self.coords, self.parts))
        groups: dict[tuple[tuple[str, int], ...], list[Tensor]] = {}
        for c, p in zip(self.coords, self.parts):
            groups.setdefault(tuple((a, v) for a, v in c.items() if a not in axes), []).append(p)
        if any(len({t.shape for t in v}) > 1 for v in groups.values()):
            return []
        return [(dict(k), OPS[op](torch.stack(v))) for k, v in groups.items()]


def holds(den: Denotation, seen: Observation) -> bool | None:
    """Do the observed values satisfy a reading? None: it says nothing that can be looked up."""
    if den.varying or den.guard is not None:
        return None
    if any(a not in seen.mesh for a in den.layout.axes | den.partial):
        return None
    if den.layout.open_dims:
        return _holds_open(den, seen)
    if den.ref_shape != tuple(seen.reference.shape):
        return False
    scale = den.scale_in(seen.mesh)
    flat = seen.whole.reshape(-1)
    reduced = seen.reduced(den.partial, den.op or "sum")
    for coords, value in reduced:
        key = tuple((a, coords[a]) for a, _ in den.layout.axis)
        index = positions(den.layout, key)
        if tuple(index.shape) != tuple(value.shape):
            return False
        if not seen.close(value * scale, flat[index]):
            return False
    return bool(reduced)


def _holds_open(den: Denotation, seen: Observation) -> bool | None:
    """Along an open dim the value must be constant, on the ranks and in the reference."""
    opened = den.layout.open_dims
    if not seen.even or seen.reference.ndim != den.ndim:
        return False
    for x in (*seen.parts, seen.whole):
        for d in opened:
            if x.shape[d] and not seen.close(x, x.narrow(d, 0, 1).expand_as(x)):
                return False
    if any(t.shape[d] == 0 for t in (*seen.locals, seen.reference) for d in opened):
        return None
    rest = [d for d in range(den.ndim) if d not in opened]
    try:
        layout = den.layout.restrict(rest)
    except LayoutError:
        return None
    thin = replace(
        seen,
        locals=tuple(_first(t, opened) for t in seen.locals),
        reference=_first(seen.reference, opened),
        memo={},
    )
    return holds(replace(den, layout=layout), thin)


def _first(x: Tensor, dims: Mapping[int, object]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.select(d, 0)
    return x


@lru_cache(4096)
def positions(layout: Layout, coords: tuple[tuple[str, int], ...]) -> Tensor:
    """The flat reference index of every local element of the rank at `coords`."""
    sizes = layout.sizes
    fixed = dict(layout.fixed)
    at = dict(coords)
    value: dict[int, Tensor | int] = dict(fixed)
    for axis, digits in layout.axis:
        rest = at[axis]
        for g in reversed(digits):
            rest, value[g] = divmod(rest, sizes[g])
    local = list(layout.local_shape)
    for d, whole in layout.uneven:
        chunk = local[d]
        local[d] = max(0, min(chunk, whole - at[layout.axes_of(d)[0]] * chunk))
    for d, n in enumerate(local):
        place: Tensor = torch.arange(n).reshape([-1 if i == d else 1 for i in range(len(local))])
        for g in reversed(layout.local[d]):
            value[g] = place % sizes[g]
            place = torch.div(place, sizes[g], rounding_mode="floor")
    flat = torch.zeros(local, dtype=torch.int64)
    stride = 1
    for d in reversed(range(layout.ndim)):
        index: Tensor | int = 0
        for g in layout.home_digits[d]:
            index = index * sizes[g] + value[g]
        flat = flat + index * stride
        stride *= layout.ref_shape[d]
    return flat


def search(seen: Sequence[Observation], limit: int = 6) -> list[Denotation]:
    """All placements found that hold in every observation, simplest first."""
    first = max(seen, key=_variety)
    found: list[Denotation] = []
    for den in candidates(first):
        if len(found) >= limit:
            break
        if den not in found and all(holds(den, s) for s in seen):
            found.append(den)
    return found


def _variety(seen: Observation) -> int:
    """How telling an observation is: distinct values, up to a point."""
    return int(torch.unique(seen.whole.reshape(-1)[:512]).numel())


def candidates(seen: Observation) -> Iterator[Denotation]:
    """Readings that one observation suggests (not yet verified)."""
    for layout in layouts(seen):
        free = [a for a in seen.mesh if seen.mesh[a] > 1 and a not in layout.axes]
        differing = frozenset(a for a in free if a not in seen.equal_over)
        if not differing:
            yield from _scaled(Denotation(layout), seen)
        for op in OPS:
            for extra in _subsets([a for a in free if a not in differing]):
                axes = differing | frozenset(extra)
                if axes and (op == "sum" or not extra):
                    fits = _scaled(Denotation(layout, axes, op), seen)
                    yield from (d for d in fits if not (extra and d.scale))


def _subsets(items: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for k in range(len(items) + 1):
        yield from itertools.combinations(items, k)


def _scaled(den: Denotation, seen: Observation) -> Iterator[Denotation]:
    """The reading with the scale under which the first rank's value fits, if there is one."""
    reduced = seen.reduced(den.partial, den.op or "sum")
    if not reduced:
        return
    coords, value = reduced[0]
    index = positions(den.layout, tuple((a, coords[a]) for a, _ in den.layout.axis))
    if tuple(index.shape) != tuple(value.shape):
        return
    whole = seen.whole.reshape(-1)
    if not _may_fit(value.reshape(-1)[:PROBE], whole[index.reshape(-1)[:PROBE]], seen.slack):
        return
    want = whole[index]
    if seen.close(value, want):
        yield den
        return
    norm = float((value * value).sum())
    if not norm > 0 or not math.isfinite(norm):
        return
    c = float((value * want).sum()) / norm
    if c == 0 or not math.isfinite(c) or not seen.close(value * c, want):
        return
    ratio = Fraction(c).limit_denominator(1 << 20)
    scale = scale_of_ratio(ratio, seen.mesh, den.partial or frozenset(seen.mesh))
    if scale is not None:
        yield replace(den, scale=scale)


def _may_fit(value: Tensor, want: Tensor, slack: float) -> bool:
    """A quick look at the first elements: can one be a multiple of the other?"""
    if len(value) == 0 or not bool((value.isfinite() & want.isfinite()).all()):
        return True
    size, at = value.abs().max(0)
    if float(size) <= slack:
        return True
    c = float(want[at]) / float(value[at])
    return float((value * c - want).abs().max()) <= 4 * slack * max(1.0, abs(c)) * len(value)


def layouts(seen: Observation) -> Iterator[Layout]:
    """Layouts that fit the shapes: axes cut the dims whose local and reference sizes differ."""
    whole = tuple(seen.reference.shape)
    mesh = {a: n for a, n in seen.mesh.items() if n > 1}
    if not seen.even:
        yield from _uneven(seen, whole, mesh)
        return
    local = tuple(seen.locals[0].shape)
    if local == whole:
        yield Layout.replicated(whole)
        return
    if any(n == 0 for n in local) or any(w % n for n, w in zip(local, whole)):
        yield from _uneven(seen, whole, mesh)
        return
    cut = {d: w // n for d, (n, w) in enumerate(zip(local, whole)) if w != n}
    for assignment in _assignments(list(cut.items()), tuple(mesh), mesh):
        yield from _cuts(local, whole, assignment, mesh)


def _assignments(
    cut: Sequence[tuple[int, int]], axes: tuple[str, ...], mesh: Mapping[str, int]
) -> Iterator[dict[int, tuple[str, ...]]]:
    """Axes for every cut dim, sizes multiplying to its ratio, no axis twice; in every order."""
    if not cut:
        yield {}
        return
    (dim, ratio), *rest = cut
    for k in range(1, len(axes) + 1):
        for chosen in itertools.permutations(axes, k):
            if math.prod(mesh[a] for a in chosen) == ratio:
                left = tuple(a for a in axes if a not in chosen)
                for more in _assignments(rest, left, mesh):
                    yield {dim: chosen, **more}


def _cuts(
    local: tuple[int, ...],
    whole: tuple[int, ...],
    cut: Mapping[int, tuple[str, ...]],
    mesh: Mapping[str, int],
) -> Iterator[Layout]:
    """Contiguous blocks first, then strided ones."""
    dims = list(cut)
    plain = Layout.sharded(whole, cut, mesh)
    yield plain
    splits = [list(itertools.islice(_splits(local[d], len(cut[d])), MAX_STRIDED)) for d in dims]
    for choice in itertools.islice(itertools.product(*splits), 1, 4 * MAX_STRIDED):
        layout = _strided(local, whole, tuple(zip(dims, choice)), tuple(cut.items()), tuple(mesh.items()))
        if layout is not None and layout != plain:
            yield layout


def _splits(size: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Local factors standing before each of the axes, (1, ..., 1) first."""
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    found = [c for c in itertools.product(divisors, repeat=axes) if size % math.prod(c) == 0]
    yield from sorted(found, key=lambda c: (sum(k > 1 for k in c), c))


@lru_cache(4096)
def _strided(
    local: tuple[int, ...],
    whole: tuple[int, ...],
    splits_of: tuple[tuple[int, tuple[int, ...]], ...],
    axes_of: tuple[tuple[int, tuple[str, ...]], ...],
    sizes: tuple[tuple[str, int], ...],
) -> Layout | None:
    splits, cut, mesh = dict(splits_of), dict(axes_of), dict(sizes)
    shape: list[int] = []
    cuts: dict[int, tuple[str, ...]] = {}
    for d, n in enumerate(local):
        rest = n
        for k, axis in zip(splits.get(d, ()), cut.get(d, ())):
            shape.append(k)
            cuts[len(shape)] = (axis,)
            shape.append(mesh[axis])
            rest //= k
        shape.append(rest)
    try:
        return Layout.sharded(shape, cuts, mesh).reshape(local, whole, mesh)
    except (LayoutError, RuleError):
        return None


def _uneven(seen: Observation, whole: tuple[int, ...], mesh: Mapping[str, int]) -> Iterator[Layout]:
    """Chunks of one dim over one axis, the last ones smaller."""
    if any(t.ndim != len(whole) for t in seen.locals):
        return
    for d, n in enumerate(whole):
        if all(t.shape[d] == n for t in seen.locals):
            continue
        for axis in mesh:
            if n % mesh[axis]:
                yield Layout.sharded(whole, {d: (axis,)}, mesh)


def _top(x: Tensor) -> float:
    return float(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0
