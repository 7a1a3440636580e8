"""Collectives as moves on denotations: digits go between axes and local dims, reductions complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from spmdtypes.core.denotation import (
    NONE,
    Denotation,
    RuleError,
    scale_mul,
    scale_of_ratio,
)
from spmdtypes.core.layout import Layout, LayoutError, _Work
from spmdtypes.core.ranks import Lin, Truth
from spmdtypes.graph import Comm

Result = Denotation | RuleError | None


def collective(
    comm: Comm,
    operands: Sequence[Denotation],
    mesh: Mapping[str, int],
    outs: int = 1,
    grad_free: Sequence[bool] = (),
) -> tuple[Result, ...]:
    """What a collective's outputs denote; along dim 0, rank-major, as torch.distributed does it.

    Operand k gives output k (coalesced forms). An all-gather of one operand with several outputs gives
    the ranks' values one by one; a reduce-scatter, all-to-all or scatter of several operands takes them
    as the parts for the ranks in turn.
    """
    move = _MOVES.get(comm.kind)
    axes = tuple(a for a in comm.axes if mesh.get(a, 1) > 1)
    if comm.kind == "barrier":
        return (None,) * outs
    if not axes and len(comm.ranks) <= 1:
        return tuple(operands[k] if k < len(operands) else None for k in range(outs))
    if move is None or not axes:
        why = f"{comm.kind} is not known" if move is None else "the group is no product of mesh axes"
        return tuple(
            RuleError("unsupported", why, frozenset(mesh), poisoned=d.poisoned(frozenset(mesh), why))
            for d in _each(operands, outs)
        )
    n = prod(mesh[a] for a in axes)
    if comm.kind == "all_gather" and len(operands) == 1 and outs == n > 1:
        return tuple(_attempt(_piece(k), comm, axes, operands[0], mesh) for k in range(n))
    if comm.kind in ("reduce_scatter", "all_to_all", "scatter") and len(operands) == n > 1 == outs:
        return (_attempt(move, comm, axes, _stacked(operands, mesh), mesh),)
    return tuple(_attempt(move, comm, axes, d, mesh) for d in _each(operands, outs))


def _each(operands: Sequence[Denotation], outs: int) -> list[Denotation]:
    if not operands:
        return []
    return [operands[min(k, len(operands) - 1)] for k in range(max(outs, 1))]


def _stacked(operands: Sequence[Denotation], mesh: Mapping[str, int]) -> Denotation:
    from spmdtypes.core.combine import Rules
    from spmdtypes.core.moves import concat

    return concat(list(operands), 0, Rules(mesh, NONE, {}, lambda v: v.local == v.ref, []))


Move = Callable[[Comm, tuple[str, ...], Denotation, Mapping[str, int]], Denotation]


def _attempt(move: Move, comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Result:
    over = frozenset(axes)
    if d.varying & over:
        if comm.kind == "broadcast" and d.guard is not None and d.guard == _is_root(comm, axes, mesh):
            return replace(d.bare(), varying=d.varying - over, reason="")
        return _of_varying(comm, over, d)
    try:
        return move(comm, axes, d, mesh)
    except LayoutError as e:
        error = RuleError("unsupported" if e.unsupported else "layout", f"{comm.kind}: {e}", over, (0,))
    except RuleError as e:
        error = RuleError(e.kind, e.message, e.axes or over, e.operands or (0,))
    return RuleError(
        error.kind, error.message, error.axes, error.operands, d.bare().poisoned(error.axes, error.message)
    )


def _of_varying(comm: Comm, over: frozenset[str], d: Denotation) -> Result:
    """Of a value that is already lost: lost as before. Of a rank-dependent one: lost here."""
    if d.value is None and d.guard is None:
        return d
    text = f"{comm.kind} of a value that {_complaint(d)}"
    return RuleError("rank", text, d.varying & over, (0,), d.bare().poisoned(d.varying & over, text))


def _complaint(d: Denotation) -> str:
    if d.guard is not None:
        return d.reason or "is arbitrary outside the part a rank owns"
    return d.reason or "differs between ranks"


def _names(axes: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(axes)


# -- reductions ---------------------------------------------------------------------------------


def _reduced(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    """The all-reduced value."""
    d = d.bare()
    over = frozenset(axes)
    op = "sum" if comm.reduce_op in ("avg", "premul_sum") else comm.reduce_op
    if op not in ("sum", "max", "min", "prod"):
        raise RuleError("unsupported", f"all-reduce with {comm.reduce_op or 'an unknown operation'}")
    cut = sorted(over & d.layout.axes)
    if cut:
        raise RuleError(
            "layout",
            f"{comm.kind}({comm.reduce_op}) over {_names(cut)} combines different shards",
            frozenset(cut),
        )
    pending = d.partial & over
    if pending and d.op != op:
        text = f"{comm.kind}({comm.reduce_op}) over {_names(sorted(pending))} of a pending {d.op}"
        raise RuleError("nonlinear", text, pending)
    scale = d.scale
    again = tuple((a, 1) for a in axes if a not in pending)
    if op == "sum":
        scale = scale_mul(scale, again, -1)
    elif op == "prod" and again:
        raise RuleError(
            "nonlinear", f"product over {_names(axes)} of equal values", frozenset(a for a, _ in again)
        )
    if comm.reduce_op == "avg":
        scale = scale_mul(scale, tuple((a, 1) for a in axes))
    if comm.reduce_op == "premul_sum":
        scale = scale_mul(scale, _factor(comm, mesh, over), -1)
    rest = d.partial - over
    return replace(d, partial=rest, op=d.op if rest else "", scale=scale)


def _factor(
    comm: Comm, mesh: Mapping[str, int], prefer: frozenset[str]
) -> tuple[tuple[str, int | Fraction], ...]:
    if not comm.factor or comm.factor <= 0:
        raise RuleError("unsupported", f"premul_sum with factor {comm.factor}")
    found = scale_of_ratio(Fraction(comm.factor).limit_denominator(10**6), mesh, prefer)
    if found is None:
        raise RuleError("scale", f"premul_sum with factor {comm.factor}: no product of axis sizes")
    return found


def _all_reduce(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    return _reduced(comm, axes, d, mesh)


def _reduce(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    return _only_on_root(_reduced(comm, axes, d, mesh), comm, axes, mesh)


def _only_on_root(d: Denotation, comm: Comm, axes: tuple[str, ...], mesh: Mapping[str, int]) -> Denotation:
    """Right on the root, anything elsewhere."""
    guard = _is_root(comm, axes, mesh)
    reason = f"the result of {comm.kind} is valid on rank {comm.root} of {_names(axes)} only"
    if guard is None:
        return d.poisoned(frozenset(axes), reason)
    return replace(d, varying=d.varying | frozenset(axes), reason=reason, guard=guard)


def _is_root(comm: Comm, axes: tuple[str, ...], mesh: Mapping[str, int]) -> Truth | None:
    if comm.root is None:
        return None
    rest, forms = comm.root, []
    for a in reversed(axes):
        rest, at = divmod(rest, mesh[a])
        form = Lin.of(-at, {("r", a): 1})
        forms += [form, form.times(-1)]
    return Truth(frozenset(forms))


def _reduce_scatter(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    done = _reduced(comm, axes, d, mesh)
    return replace(done, layout=done.layout.scatter(axes, mesh))


# -- moves --------------------------------------------------------------------------------------


def _needs_complete(kind: str, axes: tuple[str, ...], d: Denotation) -> Denotation:
    pending = d.partial & frozenset(axes)
    if pending:
        # the ranks' terms may still be summed afterwards, out of our sight
        error = "mix" if kind == "broadcast" else "unsupported"
        raise RuleError(error, f"{kind} over {_names(sorted(pending))} of a pending {d.op}", pending)
    return d.bare()


def _all_gather(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    d = _needs_complete(comm.kind, axes, d)
    return replace(d, layout=_gathered(d.layout, axes, mesh))


def _settled(x: Layout, axes: tuple[str, ...], mesh: Mapping[str, int]) -> Layout:
    """An open dim of the right sizes is taken as cut over axes that cut nothing else."""
    missing = tuple(a for a in axes if a not in x.axes)
    n = prod(mesh[a] for a in missing)
    for d, (local, ref) in x.open_dims.items():
        if missing and local * n == ref:
            return x.shard_open(d, missing, mesh)
    return x


def _gathered(x: Layout, axes: tuple[str, ...], mesh: Mapping[str, int]) -> Layout:
    x = _settled(x, axes, mesh)
    missing = [a for a in axes if a not in x.axes]
    if len(missing) == len(axes) and x.ndim and x.local_shape[0] == x.ref_shape[0] == 1:
        copies = Layout.opened(prod(mesh[a] for a in axes), 1)
        rest = list(range(1, x.ndim))
        return Layout.join([(copies, [0]), (x.restrict(rest), rest)], x.ndim)
    if missing:
        raise RuleError(
            "layout",
            f"all_gather over {_names(missing)} of a value that is the same on its ranks: it is repeated",
            frozenset(missing),
        )
    return x.gather(axes)


def _piece(index: int) -> Move:
    """All-gather into a list: the value of one rank of the group."""

    def move(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
        d = _needs_complete(comm.kind, axes, d)
        missing = [a for a in axes if a not in d.layout.axes]
        if len(missing) == len(axes):
            return d
        if missing:
            raise RuleError("unsupported", f"all_gather of a value that is the same over {_names(missing)}")
        w, rest = _Work.of(d.layout), index
        for a in reversed(axes):
            digits = w.axis.pop(a)
            w.need_even(digits)
            for g in reversed(digits):
                rest, w.fixed[g] = divmod(rest, w.size[g])
        return replace(d, layout=w.freeze())

    return move


def _all_to_all(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    d = _needs_complete(comm.kind, axes, d)
    if comm.splits is not None and any(len(set(s)) > 1 for s in comm.splits):
        raise RuleError("unsupported", "all_to_all with unequal parts")
    d = replace(d, layout=_settled(d.layout, axes, mesh))
    missing = [a for a in axes if a not in d.layout.axes]
    if missing:
        raise RuleError(
            "unsupported",
            f"all_to_all over {_names(missing)} of a value that is the same on its ranks",
            frozenset(missing),
        )
    return replace(d, layout=d.layout.all_to_all(axes, mesh))


def _broadcast(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    over = frozenset(axes)
    d = _needs_complete(comm.kind, axes, d)
    cut = sorted(over & d.layout.axes)
    if cut:
        raise RuleError(
            "layout",
            f"broadcast over {_names(cut)} replaces the ranks' own shards by one rank's",
            frozenset(cut),
        )
    return d


def _scatter(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    d = _needs_complete(comm.kind, axes, d)
    return replace(d, layout=d.layout.scatter(axes, mesh))


def _gather(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    return _only_on_root(_all_gather(comm, axes, d, mesh), comm, axes, mesh)


def _point_to_point(comm: Comm, axes: tuple[str, ...], d: Denotation, mesh: Mapping[str, int]) -> Denotation:
    over = frozenset(axes)
    if not d.axes & over:
        return d
    raise RuleError("unsupported", f"{comm.kind} of a value that is not the same over {_names(axes)}", over)


_MOVES: dict[str, Move] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "send": _point_to_point,
    "recv": _point_to_point,
}
