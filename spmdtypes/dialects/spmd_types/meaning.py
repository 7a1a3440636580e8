"""What the types of spmd_types say, in our notation.

R        replicated; its gradient is a pending sum        (nothing)
I        replicated, and so is its gradient               axis:I
V        the ranks differ, nothing more is said           axis:V
P        a pending sum; its gradient is replicated        axis:P
S(dim)   V, and the ranks' values are blocks of that dim  dim@axis
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any

from spmdtypes.capture.groups import Groups
from spmdtypes.notation import Dim, Type


@dataclass(frozen=True)
class Annotation:
    """What one tensor is said to be: a letter per mesh axis, and per dim the axes that cut it, outermost
    first. Axes that are cut have the letter "V"; of an axis without a letter nothing is said."""

    letters: Mapping[str, str]
    cuts: tuple[tuple[str, ...], ...] | None = None

    @property
    def cut_axes(self) -> frozenset[str]:
        return frozenset(a for axes in self.cuts or () for a in axes)

    @property
    def families(self) -> tuple[str, ...]:
        """Axes along which the ranks are only said to differ."""
        return tuple(a for a, x in self.letters.items() if x == "V" and a not in self.cut_axes)

    def without_cuts(self, axes: Iterable[str]) -> Annotation:
        """The same without the dims that these axes cut: they are V."""
        gone = set(axes)
        if self.cuts is None or not gone & self.cut_axes:
            return self
        return replace(self, cuts=tuple(tuple(a for a in c if a not in gone) for c in self.cuts))

    def type(self, shape: Sequence[int], mesh: Mapping[str, int]) -> Type:
        """As a type with global sizes, of a tensor whose local shape is `shape`."""
        cuts = self.cuts or ((),) * len(shape)
        dims = tuple(Dim(n * prod(mesh[a] for a in axes), axes) for n, axes in zip(shape, cuts, strict=True))
        written = {"P": "sum", "I": "I", "V": "V"}
        partial = tuple(
            (a, written[x]) for a, x in self.letters.items() if x in written and a not in self.cut_axes
        )
        return Type(dims, None, partial)

    def gradient(self) -> Annotation:
        """What its gradient must be, as spmd_types has it: R and P are each other's, I, V and S their own."""
        dual = {"R": "P", "P": "R"}
        return Annotation({a: dual.get(x, x) for a, x in self.letters.items()}, self.cuts)


def contradiction(old: Annotation, new: Annotation, needs_grad: bool) -> str | None:
    """What two annotations of one value cannot both say. A V may become a P or get a dim; R and I differ
    for a gradient only."""
    for axis, x in new.letters.items():
        y = old.letters.get(axis, x)
        if x != y and (y, x) != ("V", "P") and (needs_grad or {x, y} != {"R", "I"}):
            return f"{axis}: {y} before, {x} now"
    for d, (a, b) in enumerate(zip(old.cuts or (), new.cuts or ())):
        if a and b and a != b:
            return f"dim {d} is cut over {'@'.join(a)} before, over {'@'.join(b)} now"
    cut = {a: d for d, axes in enumerate(old.cuts or ()) for a in axes}
    again = {a: d for d, axes in enumerate(new.cuts or ()) for a in axes}
    moved = [a for a in again if cut.get(a, again[a]) != again[a]]
    return f"{moved[0]} cuts dim {cut[moved[0]]} before, dim {again[moved[0]]} now" if moved else None


class Axes:
    """Their mesh axes (sets of ranks) as ours (names)."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = dict(mesh)
        self._groups = Groups(mesh, {})
        self._known: dict[Any, tuple[str, ...]] = {}

    def names(self, axis: Any) -> tuple[str, ...]:
        """The axes of our mesh that `axis` (a MeshAxis) spans, outermost first; () when it is none."""
        found = self._known.get(axis)
        if found is None:
            found = self._known[axis] = self._groups.axes(ranks_of(axis))
        return found

    def annotation(self, local_type: Mapping[Any, Any], spec: Any, ndim: int) -> Annotation | None:
        """Their two attributes as one. None when an axis is no axis of our mesh."""
        letters: dict[str, str] = {}
        for axis, letter in local_type.items():
            names = self.names(axis)
            if not names:
                return None
            letters |= dict.fromkeys(names, letter.value)
        cuts: list[tuple[str, ...]] = [()] * ndim
        for dim, entry in enumerate(spec or ()):
            for axis in entry if isinstance(entry, tuple) else () if entry is None else (entry,):
                names = self.names(axis)
                if not names:
                    return None
                letters |= dict.fromkeys(names, "V")
                cuts[dim] += names
        return Annotation(letters, tuple(cuts) if spec is not None else None)


@lru_cache(maxsize=1024)
def ranks_of(axis: Any) -> tuple[int, ...]:
    """The ranks of a MeshAxis, seen from rank 0."""
    shape, stride = axis.layout.shape, axis.layout.stride
    pairs = zip(*((x,) if isinstance(x, int) else tuple(x) for x in (shape, stride)), strict=True)
    ranks = [0]
    for size, step in pairs:
        ranks = [r + k * step for r in ranks for k in range(size)]
    return tuple(ranks)


def read(tensor: Any, axes: Axes) -> Annotation | None:
    """What is written on a tensor. None when nothing is, or it speaks of another mesh."""
    api = import_module("spmd_types")
    if not api.has_local_type(tensor):
        return None
    return axes.annotation(api.get_local_type(tensor), api.get_partition_spec(tensor), tensor.ndim)
