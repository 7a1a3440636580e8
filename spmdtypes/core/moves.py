"""Reshape and concatenation of denotations: layouts move, what is pending stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from spmdtypes.core.combine import Rules, left_out, of_denotation
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.layout import Layout, LayoutError, _Work
from spmdtypes.core.ranks import Atom
from spmdtypes.core.reshape import _groups
from spmdtypes.core.spec import ONE


def reshape(
    d: Denotation, shape: Sequence[int], ref_shape: Sequence[int] | None, mesh: Mapping[str, int]
) -> Denotation:
    """Raises RuleError("layout") where the elements would come apart."""
    try:
        layout = d.layout.reshape(shape, ref_shape, mesh)
    except LayoutError as e:
        kind = "unsupported" if e.unsupported else "layout"
        raise RuleError(kind, f"reshape of {d.layout.show()}: {e}", d.layout.axes, (0,)) from None
    if d.value is None and d.guard is None:
        return replace(d, layout=layout)
    rename = _renamed_by_reshape(d.layout, layout)
    value = d.value.mapped(rename) if d.value else None
    guard = d.guard.mapped(rename) if d.guard else None
    return _checked(replace(d, layout=layout, value=value, guard=guard, zero=d.zero and guard is not None), d)


def _checked(new: Denotation, old: Denotation) -> Denotation:
    """A rank-dependent value whose closed form is lost has no reading left."""
    if new.varying and new.value is None and new.guard is None:
        raise RuleError("rank", old.reason, old.varying, (0,), new)
    return new


def _renamed_by_reshape(old: Layout, new: Layout) -> Any:
    groups = _groups(old.local_shape, old.ref_shape, new.local_shape, new.ref_shape)
    place: dict[Any, tuple[Any, ...]] = {ONE: (ONE,)}
    for ins, outs in groups:
        big = [d for d in ins if (old.local_shape[d], old.ref_shape[d]) != (1, 1)]
        to = [o for o in outs if (new.local_shape[o], new.ref_shape[o]) != (1, 1)]
        for d in ins:
            place[d] = (to[0],) if len(big) == len(to) == 1 and d in big else tuple(outs) if d in big else ()

    def rename(a: Atom) -> Atom | None:
        if a[0] == "i":
            at = place[a[1]]
            single = len(at) == 1 and old.local_shape[a[1]] == new.local_shape[at[0]]
            return ("i", at[0]) if single else None
        if a[0] != "u":
            return a
        if all(place[d] == () or (len(place[d]) == 1 and _same(old, new, d, place[d][0])) for d in a[2]):
            dims = tuple(place[d][0] for d in a[2] if place[d])
            whole = len(dims) == len(a[2])
            return ("u", a[1] if whole else ("squeezed", a[1], tuple(bool(place[d]) for d in a[2])), dims)
        outs = tuple(dict.fromkeys(o for d in a[2] for o in place[d]))
        return ("u", ("reshaped", a[1], a[2], old.ref_shape, new.ref_shape), outs)

    return rename


def _same(old: Layout, new: Layout, d: Any, o: Any) -> bool:
    return d is o is ONE or (d is not ONE and o is not ONE and old.ref_shape[d] == new.ref_shape[o])


def concat(parts: Sequence[Denotation], dim: int, rules: Rules) -> Denotation:
    """`parts` joined along `dim`. Raises RuleError."""
    if len(parts) == 1:
        return parts[0]
    lost = [d for d in parts if d.varying]
    if lost:
        raise RuleError("rank", lost[0].reason, frozenset().union(*(d.varying for d in lost)))
    args = [of_denotation(d, d.value if d.is_zero else None, None, False) for d in parts]
    joined = rules.apply("choice", args, frozenset())
    if joined.fault is not None:
        raise RuleError(
            joined.fault.kind,
            joined.fault.message.replace("choice", "cat"),
            joined.fault.axes,
            joined.fault.operands,
        )
    layout = join_layouts([d.layout for d in parts], dim, rules.mesh)
    clash = layout.axes & joined.partial
    if clash:
        raise left_out(joined.op, clash)
    value = parts[0].value if all(d.is_zero for d in parts) else None
    return Denotation(layout, joined.partial, joined.op, joined.scale, value=value)


def join_layouts(parts: Sequence[Layout], dim: int, mesh: Mapping[str, int]) -> Layout:
    """Layouts joined along a dim: pieces in order, whole dims of any size, or equal cut dims."""
    parts = [_close_others(p, dim, parts) for p in parts]
    pieces = _join_pieces(parts, dim)
    if pieces is not None:
        return pieces
    kept = [d for d in range(parts[0].ndim) if d != dim]
    model = next((p for p in parts if dim not in p.open_dims), parts[0])
    if all(dim in p.open_dims for p in parts):
        local = sum(p.local_shape[dim] for p in parts)
        return _with_open(parts[0], dim, local, sum(p.ref_shape[dim] for p in parts))
    if all(
        p.is_plain(dim) or (dim in p.open_dims and p.open_dims[dim][0] == p.open_dims[dim][1]) for p in parts
    ):
        others = [p.restrict(kept) for p in parts]
        if any(o != others[0] for o in others):
            raise _unequal(parts, dim)
        rest = (others[0], list(kept))
        whole = (Layout.replicated([sum(p.local_shape[dim] for p in parts)]), [dim])
        return Layout.join([rest, whole], model.ndim)
    return _stack_cut(parts, dim)


def _unequal(parts: Sequence[Layout], dim: int) -> RuleError:
    axes = frozenset().union(*(p.axes for p in parts))
    shown = " and ".join(dict.fromkeys(p.show() for p in parts))
    return RuleError("layout", f"cat of {shown} along dim {dim}", axes)


def _close_others(p: Layout, dim: int, parts: Sequence[Layout]) -> Layout:
    """Open dims beside `dim` take the digits they have in another part."""
    for d in list(p.open_dims):
        if d == dim:
            continue
        twin = next((q for q in parts if d not in q.open_dims), None)
        if (
            twin is not None
            and any(b == (d,) for b in twin.blocks)
            and twin.local_shape[d] == p.local_shape[d]
        ):
            rest = [k for k in range(p.ndim) if k != d]
            p = Layout.join([(p.restrict(rest), rest), (twin.restrict([d]), [d])], p.ndim)
    return p


def _with_open(p: Layout, dim: int, local: int, ref: int) -> Layout:
    w = _Work.of(p)
    w.open[dim] = (local, ref)
    return w.freeze()


def _join_pieces(parts: Sequence[Layout], dim: int) -> Layout | None:
    """The parts are all values, in order, of fixed digits: these become local again, in front of `dim`."""
    first = parts[0]
    digits = [g for g, _ in first.fixed]
    if not digits or any((p.home, p.local, p.axis) != (first.home, first.local, first.axis) for p in parts):
        return None
    for k in range(len(digits)):
        mine = digits[k:]
        if prod(first.sizes[g] for g in mine) != len(parts):
            continue
        for n, p in enumerate(parts):
            values = dict(p.fixed)
            index = 0
            for g in mine:
                index = index * p.sizes[g] + values[g]
            if index != n or any(values[g] != dict(first.fixed)[g] for g in digits[:k]):
                return None
        w = _Work.of(first)
        for g in mine:
            del w.fixed[g]
        w.local[dim] = [*mine, *w.local[dim]]
        return w.freeze()
    return None


def _stack_cut(parts: Sequence[Layout], dim: int) -> Layout:
    """Equal cut dims side by side: a new outer digit, `[k, tp, L]`."""
    if any(p != parts[0] for p in parts):
        if all(p.ref_shape == parts[0].ref_shape for p in parts):
            raise _unequal(parts, dim)
        if any(p.axes_of(dim) != parts[0].axes_of(dim) for p in parts):
            raise _unequal(parts, dim)
        raise RuleError("unsupported", f"cat of cut dims of different sizes along dim {dim}", parts[0].axes)
    if parts[0].uneven or dim in parts[0].open_dims or not parts[0].is_proper(dim):
        raise RuleError("unsupported", f"cat along dim {dim} of {parts[0].show()}", parts[0].axes)
    w = _Work.of(parts[0])
    g = w.digit(len(parts))
    w.home[dim] = [g, *w.home[dim]]
    w.local[dim] = [g, *w.local[dim]]
    return w.freeze()
