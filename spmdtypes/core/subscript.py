"""Reading an operand at subscripts: what is left of its layout, dim by dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from spmdtypes.core.layout import Layout, LayoutError, _Work, axes_for_ratio
from spmdtypes.core.ranks import steps_of_blocks
from spmdtypes.core.spec import ONE, At, Expr, Var, Window
from spmdtypes.graph import Lit


@dataclass(frozen=True, slots=True)
class Num:
    """A literal seen from both programs: local = base + sum(step * coordinate)."""

    local: Any
    ref: Any
    steps: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, x: Any, aligned: bool = True) -> Num:
        """`aligned`: a plain number is the reference's too; else the reference's is unknown (None)."""
        if not isinstance(x, Lit):
            return cls(x, x if aligned else None)
        if not x.affine:
            raise LayoutError("a number that differs between ranks in no regular way", unsupported=True)
        return cls(x.local, x.ref, tuple((a, s) for a, s in x.rank if s))

    @property
    def fixed(self) -> bool:
        return self.ref in (None, self.local) and not self.steps

    def at(self, ref: int) -> Num:
        """With this reference value where it was unknown."""
        return self if self.ref is not None else Num(self.local, ref, self.steps)


def read(
    layout: Layout, subs: Sequence[Any], mesh: Mapping[str, int], aligned: bool | None = True
) -> tuple[Layout, tuple[Var, ...]]:
    """The layout over the subscripts' variables, in order. Data-dependent subscripts take the whole dim.

    `aligned`: the reference has the same op, with the same plain numbers; False: it has no such op; None:
    there is no reference to compare with. Raises LayoutError when a subscript reads other elements than
    the reference does.
    """
    if len(subs) != layout.ndim:
        raise LayoutError(f"{len(subs)} subscripts for {layout.ndim} dims", unsupported=True)
    if all(isinstance(s, Var) for s in subs):
        return layout, tuple(subs)
    w = _Work.of(layout)
    kept: list[int] = []
    vars: list[Var] = []
    for d, s in enumerate(subs):
        if isinstance(s, Var):
            kept.append(d)
            vars.append(s)
        elif isinstance(s, Window):
            _window(w, d, s, mesh, aligned)
            kept.append(d)
            vars.append(s.var)
        elif s is ONE:
            _one(w, d)
        elif isinstance(s, At):
            _select(w, d, Num.of(s.where, aligned is True), mesh)
        elif isinstance(s, Expr):
            _take_whole(w, d)
        else:
            raise LayoutError(f"subscript {s!r}", unsupported=True)
    w.home = [w.home[d] for d in kept]
    w.local = [w.local[d] for d in kept]
    w.open = {k: w.open[d] for k, d in enumerate(kept) if d in w.open}
    w.uneven = {k: w.uneven[d] for k, d in enumerate(kept) if d in w.uneven}
    return w.freeze(), tuple(vars)


def _extent(w: _Work, digits: Sequence[int]) -> int:
    return prod(w.size[g] for g in digits)


def _plain(w: _Work, d: int) -> bool:
    return d not in w.open and d not in w.uneven and w.home[d] == w.local[d]


def _empty(w: _Work, d: int) -> None:
    for g in w.local[d]:
        del w.size[g]
    w.home[d], w.local[d] = [], []


def _one(w: _Work, d: int) -> None:
    if d in w.open:
        local, ref = w.open.pop(d)
        if local != 1 or ref != 1:
            raise LayoutError(
                f"dim {d} has size {local} here and {ref} in the reference, where 1 is broadcast"
            )
    elif w.home[d] or w.local[d]:
        n = _extent(w, w.local[d])
        raise LayoutError(f"dim {d} has size {n} on each rank but is broadcast from size 1 in the reference")


def _take_whole(w: _Work, d: int) -> None:
    """All positions are read, in an order data decides: of blocks the rank's own (checked by the caller)."""
    if d in w.open:
        del w.open[d]
        return
    if d in w.uneven:
        raise LayoutError(f"dim {d} is cut unevenly", unsupported=True)
    held = set(w.holders()) & set(w.home[d])
    if [g for g in w.home[d] if g not in held] != w.local[d]:
        raise LayoutError(f"dim {d} is indexed by data but its elements are not in the reference's order")
    for g in w.home[d]:
        w.size.pop(g)
    w.axis = {a: [g for g in gs if g not in held] for a, gs in w.axis.items()}
    w.axis = {a: gs for a, gs in w.axis.items() if gs}
    w.home[d], w.local[d] = [], []


def _assign(
    w: _Work, digits: list[int], steps: Mapping[str, Any], unit: int, mesh: Mapping[str, int]
) -> bool:
    """Give `digits` to the axes whose coordinates count them in blocks of `unit`."""
    block = steps_of_blocks(steps, unit, mesh)
    if block is None or block.count != _extent(w, digits) or any(a in w.axis for a in block.axes):
        return False
    queue = list(digits)
    for a in block.axes:
        n, mine = mesh[a], []
        while n > 1:
            g = queue[0]
            if w.size[g] > n:
                _, inner = w.split(g, n)
                queue.insert(1, inner)
            if n % w.size[g]:
                return False
            n //= w.size[g]
            mine.append(queue.pop(0))
        w.axis[a] = mine
    return True


def _select(w: _Work, d: int, at: Num, mesh: Mapping[str, int]) -> None:
    if d in w.open:
        del w.open[d]
    elif not w.home[d] and w.local[d]:
        digits, w.local[d] = w.local[d], []
        _pick(w, digits, at, mesh, d)
    elif _plain(w, d) and at.fixed:
        _empty(w, d)
    elif not w.home[d] and not w.local[d]:
        pass
    elif _plain(w, d):
        raise LayoutError(f"position of dim {d} depends on the rank, not so in the reference")
    else:
        raise LayoutError(f"reads one position of dim {d}, of which every rank holds another part")


def _pick(w: _Work, digits: list[int], at: Num, mesh: Mapping[str, int], d: int) -> None:
    """One value of digits whose reference dim is elsewhere: the rank's own part, or one part for all."""
    if at.ref not in (0, None):
        raise LayoutError(f"position {at.ref} of dim {d} in the reference", unsupported=True)
    if at.steps:
        if at.local != 0 or not _assign(w, digits, dict(at.steps), 1, mesh):
            raise LayoutError(f"part taken of dim {d} is not the rank's own in rank order")
        return
    rest = at.local
    for g in reversed(digits):
        rest, w.fixed[g] = divmod(rest, w.size[g])


def _window(w: _Work, d: int, s: Window, mesh: Mapping[str, int], aligned: bool | None) -> None:
    start, length = Num.of(s.start, aligned is True), Num.of(s.length, aligned is True)
    if aligned is False:  # whatever a reference would read there
        start, length = replace(start, ref=None), replace(length, ref=None)
    if length.steps:
        raise LayoutError("a length that differs between ranks", unsupported=True)
    if d in w.open:
        local, ref = w.open[d]
        guess = ref * length.local // local if local and ref * length.local % local == 0 else length.local
        w.open[d] = (length.local, length.at(guess).ref)
    elif d in w.uneven:
        if start.fixed and start.local == 0 and length.ref == w.uneven[d]:
            return
        raise LayoutError(f"slice of dim {d}, which is cut unevenly", unsupported=True)
    elif aligned is False and _is_part(w, d, start, length, mesh):
        _part(w, d, start, length, mesh)
    elif _plain(w, d) and start.fixed and length.fixed:
        _empty(w, d)
        g = w.digit(length.local)
        w.home[d], w.local[d] = [g], [g]
    elif s.step != 1:
        _strided(w, d, start, length, s.step)
    elif not _whole(w, d, start, length):
        _cut(w, d, start, length, mesh)


def _whole(w: _Work, d: int, start: Num, length: Num) -> bool:
    return (
        start.fixed
        and start.local == 0
        and length.local == _extent(w, w.local[d])
        and length.ref in (None, _extent(w, w.home[d]))
    )


def _is_part(w: _Work, d: int, start: Num, length: Num, mesh: Mapping[str, int]) -> bool:
    """A slice the reference does not have: one of as many parts as some axes have ranks."""
    if not _plain(w, d) or not length.local or start.steps or start.local % length.local:
        return False
    parts, rest = divmod(_extent(w, w.local[d]), length.local)
    return not rest and parts > 1 and axes_for_ratio(1, parts, mesh, set()) is not None


def _strided(w: _Work, d: int, start: Num, length: Num, step: int) -> None:
    """Every `step`-th position: the innermost digit loses its inner part."""
    if w.local[d] and w.home[d] and w.local[d][-1] == w.home[d][-1] and start.fixed and start.local < step:
        g = w.local[d][-1]
        n = w.size[g]
        if (
            n % step == 0
            and length.local * step == _extent(w, w.local[d])
            and length.at(-(-_extent(w, w.home[d]) // step)).ref * step == _extent(w, w.home[d])
        ):
            w.size[g] = n // step
            return
    raise LayoutError(f"slice with step {step} of dim {d} does not fit its cut")


def _cut(w: _Work, d: int, start: Num, length: Num, mesh: Mapping[str, int]) -> None:
    """A run of the leading digit(s) of a dim."""
    home, local = w.home[d], w.local[d]
    if not local:
        raise LayoutError(f"slice of dim {d}, of which every rank holds one position")
    if not length.local:
        raise LayoutError(f"an empty slice of dim {d}")
    whole_ref = start.ref in (0, None) and length.ref in (None, _extent(w, home))
    if start.steps:
        parts, exact = divmod(_extent(w, local), length.local)
        if start.local == 0 and not exact and whole_ref and dict(start.steps):
            lead = w.take_lead(d, parts)
            if _assign(w, lead, dict(start.steps), length.local, mesh):
                return
        if _plain(w, d) and start.ref in (None, start.local) and _rank_window(w, d, start, length, mesh):
            return
        raise LayoutError(f"slice of dim {d} is not the rank's part in rank order")
    if home and home[0] == local[0] and _leading_run(w, d, start, length):
        return
    parts, rest = divmod(_extent(w, local), length.local)
    if (
        whole_ref
        and not rest
        and start.local % length.local == 0
        and (_plain(w, d) or local[0] not in home[:1])
    ):
        _part(w, d, start, length, mesh)
        return
    if _plain(w, d):
        raise LayoutError(
            f"every rank reads positions {start.local}..{start.local + length.local} of dim {d} where the "
            f"reference reads {start.ref}..{start.ref + length.ref}"
        )
    raise LayoutError(f"slice inside dim {d}, which is cut over {_axes(w, d)}")


def _part(w: _Work, d: int, start: Num, length: Num, mesh: Mapping[str, int]) -> None:
    lead = w.take_lead(d, _extent(w, w.local[d]) // length.local)
    _pick(w, lead, Num(start.local // length.local, 0), mesh, d)


def _axes(w: _Work, d: int) -> str:
    holders = w.holders()
    return ", ".join(dict.fromkeys(holders[g] for g in w.home[d] if g in holders)) or "other dims"


def _rank_window(w: _Work, d: int, start: Num, length: Num, mesh: Mapping[str, int]) -> bool:
    """Rank r reads the r-th block of a run that the reference reads whole."""
    block = steps_of_blocks(dict(start.steps), length.local, mesh)
    total = length.at(block.count * length.local if block else 0).ref
    if block is None or block.count * length.local != total or any(a in w.axis for a in block.axes):
        return False
    _empty(w, d)
    w.open[d] = (length.local, total)
    w.close_as(d, length.local, [(a, mesh[a]) for a in block.axes])
    return True


def _leading_run(w: _Work, d: int, start: Num, length: Num) -> bool:
    """Some values of a leading digit that every rank holds (a strided shard's pieces)."""
    g = w.home[d][0]
    inner, inner_ref = _extent(w, w.local[d][1:]), _extent(w, w.home[d][1:])
    first, a = divmod(start.local, inner)
    count, b = divmod(length.local, inner)
    want = (first * inner_ref, count * inner_ref)
    if a or b or want != (start.at(want[0]).ref, length.at(want[1]).ref):
        return False
    if count == 1:
        del w.size[g]
        w.home[d], w.local[d] = w.home[d][1:], w.local[d][1:]
    else:
        w.size[g] = count
    return True
