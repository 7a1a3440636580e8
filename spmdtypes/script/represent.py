"""What parameters and data denote, from a few ranks of a large mesh and without their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from spmdtypes.drive import short_dtype
from spmdtypes.notation import Dim, Type
from spmdtypes.script import stitch
from spmdtypes.script.axes import axes_named
from spmdtypes.script.contract import CERTAIN, Contract, placed_dims
from spmdtypes.script.facts import Facts, Held, Key
from spmdtypes.script.fakes import Captured, meta
from spmdtypes.script.stitch import Parts, Whole

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Representatives:
    """Rank `first` and others of `mesh`, with their coordinates."""

    mesh: Mapping[str, int]
    first: Captured
    others: tuple[tuple[Mapping[str, int], Captured], ...]
    coords: Mapping[str, int]

    def apart(self, key: Key | str) -> tuple[str, ...]:
        """Axes along which an arrival, or a parameter, differs, as far as the others tell."""
        own = self.first.prints.get(key)
        steps = []
        for coords, other in self.others:
            if key in other.prints and other.prints[key] != own:
                steps.append([a for a in self.mesh if coords[a] != self.coords[a]])
        return tuple(a for a in self.mesh if [a] in steps)


@dataclass(frozen=True)
class _Shapes(Parts):
    """Parts of which only one is known, and only its shape."""

    apart: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[str, ...]:
        return self.apart


def contract(seen: Representatives, native: Facts, sites: Mapping[str, tuple[str, ...]]) -> Contract:
    """`native` is the run on the mesh of ones, `sites` what groups stand for."""
    found = Contract(seen.mesh)
    _held(found, seen, native, sites)
    _data(found, seen, native)
    return found


# ---- parameters


def _held(
    found: Contract, seen: Representatives, native: Facts, sites: Mapping[str, tuple[str, ...]]
) -> None:
    likely: Counter[str] = Counter()
    guessed: list[str] = []
    for name, held in seen.first.facts.held.items():
        whole = native.held.get(name)
        if whole is None:
            continue
        ordered = [a for a, _ in likely.most_common()]
        t = parameter_type(held, _shape(whole), seen.mesh, sites, ordered, seen.apart(name))
        if t is None:
            if not held.buffer:
                found.unplaced.append(name)
            continue
        if held.buffer and held.value.shape != whole.value.shape:
            continue  # a cache of its own
        cut = [a for d in t.dims or () for a in d.axes]
        stated = {a for p, q in held.placements or () if q != "R" for a in axes_named(p, seen.mesh, sites)}
        if set(cut) - stated and held.cut is None:
            guessed.append(name)
        likely.update(cut)
        found.held[name] = Whole(t, meta([int(d.size) for d in t.dims or ()], held.value.dtype))
    found.read_off_sizes(guessed)


def _shape(h: Held) -> Shape:
    return h.shape if h.placements is not None else tuple(h.value.shape)


def parameter_type(
    held: Held,
    whole: Shape,
    mesh: Mapping[str, int],
    sites: Mapping[str, tuple[str, ...]],
    likely: Sequence[str],
    apart: Sequence[str] = (),
) -> Type | None:
    """How a parameter is cut: as its placements say, and where a DTensor is itself a part of the whole (a
    wrapper took a local tensor), its sizes. None: the sizes do not fit."""
    dtype = short_dtype(held.value.dtype)
    if held.placements is None:
        outer = _by_sizes(held.value, whole, mesh, held.cut, likely, apart)
        return None if outer is None else Type(tuple(Dim(n, a) for n, a in zip(whole, outer)), dtype)
    inner = placed_dims(held, mesh, sites)
    if inner is None:
        return None
    stated = {a for axis, _ in held.placements for a in axes_named(axis, mesh, sites)}
    rest = {a: n for a, n in mesh.items() if a not in stated}
    outer = _by_sizes(meta(held.shape, held.value.dtype), whole, rest, held.cut, likely, apart)
    if outer is None:
        return None
    return Type(tuple(Dim(n, (*o, *i)) for n, o, i in zip(whole, outer, inner)), dtype)


def _by_sizes(
    part: Tensor,
    whole: Shape,
    mesh: Mapping[str, int],
    cut: int | None,
    likely: Sequence[str],
    apart: Sequence[str],
) -> tuple[tuple[str, ...], ...] | None:
    if tuple(part.shape) == whole:
        return ((),) * len(whole)
    ways = stitch.ways(_Shapes((part,), mesh), whole, cut, apart, likely)
    return next((w for w in ways if _even(w, whole, mesh)), None)


def _even(ways: Sequence[Sequence[str]], whole: Shape, mesh: Mapping[str, int]) -> bool:
    return all(n % prod(mesh[a] for a in axes) == 0 for n, axes in zip(whole, ways))


# ---- data


def _data(found: Contract, seen: Representatives, native: Facts) -> None:
    """What is made of nothing but numbers of the script is left to the rules: those numbers tell all."""
    theirs = {a.key: a for a in native.arrivals}
    apart: dict[int, set[str]] = {}
    for a in seen.first.facts.arrivals:
        apart.setdefault(a.group, set()).update(seen.apart(a.key))
    for a in seen.first.facts.arrivals:
        there = theirs.get(a.key)
        if a.value is None or a.key.op.startswith(CERTAIN):
            continue
        whole = tuple(there.value.shape) if there is not None and there.value is not None else None
        t = data_type(a.value, whole, [x for x in seen.mesh if x in apart[a.group]], seen.mesh)
        if t is None:
            continue
        value = meta([int(d.size) for d in t.dims or ()], a.value.dtype)
        found.name_data(a.key, a.line, Whole(t, value))


def data_type(
    part: Tensor, whole: Shape | None, differing: Sequence[str], mesh: Mapping[str, int]
) -> Type | None:
    """A batch: cut along its first dim over the axes along which it differs, and along others as the sizes
    of the run on the mesh of ones say. None: leave it as that run has it."""
    left = [a for a in differing if mesh[a] > 1]
    shape = tuple(part.shape)
    if not left:
        return Type(tuple(Dim(n) for n in shape), short_dtype(part.dtype)) if whole == shape else None
    if not shape:
        return None
    cut = stitch.batch_dims(shape, whole, left, mesh)
    if cut is None:
        return None
    dims, _ = cut
    sizes = [n * prod(mesh[a] for a in axes) for n, axes in zip(shape, dims)]
    return Type(tuple(Dim(n, tuple(a)) for n, a in zip(sizes, dims)), short_dtype(part.dtype))
