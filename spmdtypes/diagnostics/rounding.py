"""Sums over ranks whose summands were rounded first, although the sum is wanted in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spmdtypes.diagnostics.finding import Finding, Note, Span
from spmdtypes.diagnostics.trace import _inside_backward as inside_backward
from spmdtypes.graph import Graph, Node, Ref
from spmdtypes.ops.passing import passes_on

_BITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
_SUMS = ("sum", "avg", "premul_sum")

Harmless = Callable[[Ref, Ref, Node], bool]  # wide summand, rounded one, collective


def rounded_reductions(graph: Graph, harmless: Harmless | None = None) -> list[Finding]:
    """A finding for each reduction between a cast down and a cast back up. `harmless` tells, from
    values, that the rounding of the sum comes out all the same (one summand only, whole numbers)."""
    users = _users(graph)
    found: dict[object, Finding] = {}
    for node in graph.nodes:
        comm = node.comm
        if comm is None or comm.reduce_op not in _SUMS or len(comm.ranks) < 2 or not node.args:
            continue
        if _bits(graph, Ref(node.id)) > 11:
            continue
        for cast in _narrowed(graph, node):
            wide = next(cast.refs())
            if not _widened(graph, node, users, _bits(graph, wide)):
                continue
            if harmless is None or not harmless(wide, Ref(cast.id), node):
                finding = _finding(graph, cast, node)
                found.setdefault(finding.span, finding)
    return list(found.values())


def _bits(graph: Graph, ref: Ref) -> int:
    """Of the mantissa; 99 for what is no float."""
    outs = graph.nodes[ref.node].outs
    meta = outs[ref.out] if ref.out < len(outs) else None
    return _BITS.get(meta.dtype, 99) if meta is not None else 99


def _is_cast(graph: Graph, node: Node) -> bool:
    refs = list(node.refs())
    own = _bits(graph, Ref(node.id)) if node.outs else 99
    return len(refs) == 1 and own < 99 and _bits(graph, refs[0]) not in (own, 99) and node.comm is None


def _narrowed(graph: Graph, node: Node) -> Iterator[Node]:
    """The program's own casts to a lower precision that feed `node` with nothing computed after."""
    stack, seen = [r.node for r in node.refs()], set[int]()
    while stack:
        n = graph.nodes[stack.pop()]
        if n.id in seen:
            continue
        seen.add(n.id)
        if _is_cast(graph, n):
            if _bits(graph, Ref(n.id)) < _bits(graph, next(n.refs())) and _written(graph, n):
                yield n
        elif passes_on(n.op):
            stack += [r.node for r in n.refs()]


def _written(graph: Graph, node: Node) -> bool:
    """Does the user's code say this cast? Those of autograd and of frameworks follow what was chosen."""
    frames = graph.frames(node)
    return bool(frames) and (node.phase not in ("backward", "hook") or inside_backward(frames) > 0)


def _widened(graph: Graph, node: Node, users: dict[int, list[int]], bits: int) -> bool:
    """Is the sum used in its old precision only?"""
    stack, seen, found = list(users.get(node.id, ())), set[int](), False
    if any(r.node == node.id for r in graph.outputs.values()):
        return False
    while stack:
        n = graph.nodes[stack.pop()]
        if n.id in seen:
            continue
        seen.add(n.id)
        if _is_cast(graph, n) and _bits(graph, Ref(n.id)) >= bits:
            found = True
        elif passes_on(n.op) and not any(r.node == n.id for r in graph.outputs.values()):
            stack += users.get(n.id, ())
        else:
            return False
    return found


def _users(graph: Graph) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for n in graph.nodes:
        for r in n.refs():
            users.setdefault(r.node, []).append(n.id)
    return users


def _finding(graph: Graph, cast: Node, node: Node) -> Finding:
    assert node.comm is not None
    low, axes = graph.meta(Ref(cast.id)), node.comm.axes
    assert low is not None
    over = f" over {', '.join(axes)}" if axes else ""
    at = graph.frames(node) or graph.frames(cast)
    notes = [Note(Span.of(graph.frames(cast)[0]), f"rounded to {low.dtype} here")]
    notes += [Note(Span.of(f), f"called from {f.function.rpartition('.')[2]}") for f in at[1:3]]
    return Finding(
        "SPMD801",
        "error",
        f"the summands of this {node.comm.kind}{over} are rounded to {low.dtype} before they are added up: "
        "the result is not the rounding of the sum",
        Span.of(at[0]),
        tuple(notes),
        hint="reduce in the precision before the cast, and round the sum",
        evidence="proved",
        axes=axes,
    )
