"""One program seen on several meshes and ranks: what is the same number, and what grows with what.

Literals that differ between the rank programs, or from the program on the mesh of ones, become
`Lit`s; nodes learn the metas of their counterparts; places where ranks part company are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtypes.capture.collector import no_collection
from spmdtypes.capture.match import matched
from spmdtypes.core.simulate import rank_of
from spmdtypes.graph import Graph, Lit, Node, Ref, TensorMeta


@dataclass(frozen=True)
class Divergence:
    """The first point where the rank at `coords` does something else than the local one.

    `local` or `other` is None when that program has ended or lacks the step. `collective`: both
    ranks belong to the group, so they wait for each other there.
    """

    local: Node | None
    other: Node | None
    other_graph: Graph = field(repr=False)
    coords: dict[str, int]
    collective: bool


@dataclass
class Aligned:
    """`graph` is the local program with `Lit`s, `ref`s and `ref_outs`. `divergences`: where a rank
    issues another collective than this one (a hang); `differences`: where it takes other steps,
    as a rank with a role of its own may. At most one entry per compared rank."""

    graph: Graph
    divergences: list[Divergence] = field(default_factory=list)
    differences: list[Divergence] = field(default_factory=list)


def align(local: Graph, reference: Graph | None, others: Sequence[Graph] = ()) -> Aligned:
    """Align `local` with the program on the mesh of ones and with other ranks of its own mesh."""
    with no_collection():
        return _align(local, reference, others)


def _align(local: Graph, reference: Graph | None, others: Sequence[Graph]) -> Aligned:
    refs = matched(local, reference) if reference is not None else [None] * len(local.nodes)
    tables = [matched(local, g) for g in others]
    literals = _Literals(local, others)
    nodes = []
    for i, node in enumerate(local.nodes):
        r = refs[i]
        ref = reference.nodes[r] if reference is not None and r is not None else None
        peers = [g.nodes[t[i]] if t[i] is not None else None for g, t in zip(others, tables)]  # type: ignore[index]
        nodes.append(_merge(node, ref, peers, literals))
        nodes[-1].apart = _apart(local, [g for g, p in zip(others, peers) if p is None])
    graph = Graph(
        local.mesh,
        local.coords,
        nodes,
        dict(local.outputs),
        local.stacks,
        list(local.notes),
        dict(local.dtensors),
    )
    if reference is not None:
        _infer_missing(graph, refs)
    found = [d for g, t in zip(others, tables) if (d := _divergence(local, g, t)) is not None]
    return Aligned(graph, [d for d in found if d.collective], [d for d in found if not d.collective])


def _apart(local: Graph, lacking: Sequence[Graph]) -> tuple[str, ...]:
    """Axes along which ranks that lack a step differ from this one."""
    if not lacking:
        return ()
    return tuple(a for a, c in local.coords.items() if any(g.coords.get(a) != c for g in lacking))


def _merge(node: Node, ref: Node | None, peers: list[Node | None], literals: _Literals) -> Node:
    args, kwargs = node.args, node.kwargs
    if any(p is not None and p.args != args for p in peers) or (ref is not None and ref.args != args):
        args = literals.merge(args, ref and ref.args, [p and p.args for p in peers])
    if kwargs and (
        any(p is not None and p.kwargs != kwargs for p in peers) or (ref is not None and ref.kwargs != kwargs)
    ):
        kwargs = {
            k: literals.merge(v, ref and ref.kwargs.get(k), [p and p.kwargs.get(k) for p in peers])
            for k, v in kwargs.items()
        }
    new = Node(node.id, node.op, args, kwargs, node.outs, node.stack, node.phase, node.module, node.forward)
    new.name, new.comm, new.rng, new.assumed = node.name, node.comm, node.rng, node.assumed
    new.forward_stack = node.forward_stack
    if ref is not None:
        new.ref, new.ref_outs = ref.id, ref.outs
    if node.rng is not None:
        new.rng_axes = literals.differing([None if p is None else p.rng for p in peers], node.rng)
    return new


class _Literals:
    """Numbers of several rank programs as affine functions of their mesh coordinates."""

    def __init__(self, local: Graph, others: Sequence[Graph]) -> None:
        self.coords = local.coords
        self.steps = [
            {a: g.coords[a] - c for a, c in local.coords.items() if g.coords.get(a, c) != c} for g in others
        ]

    def merge(self, x: Any, ref: Any, peers: list[Any]) -> Any:
        """`x` with every number that is not the same everywhere as a `Lit`. Missing programs are None."""
        if isinstance(x, tuple):
            n = len(x)
            ref = ref if isinstance(ref, tuple) and len(ref) == n else (None,) * n
            rows = [p if isinstance(p, tuple) and len(p) == n else (None,) * n for p in peers]
            return tuple([self.merge(y, ref[i], [r[i] for r in rows]) for i, y in enumerate(x)])
        if isinstance(x, Ref) or x is None or isinstance(x, str):
            return x
        differs = any(p is not None and not _equal(p, x) for p in peers)
        if not differs and (ref is None or isinstance(ref, (Ref, tuple)) or _equal(ref, x)):
            return x
        ref = x if ref is None or isinstance(ref, (Ref, tuple)) else ref
        return self.fit(x, ref, peers) if differs else Lit(x, ref)

    def fit(self, x: Any, ref: Any, peers: list[Any]) -> Lit:
        """The `Lit` of a number that ranks do not agree on."""
        numbers = [x, *(p for p in peers if p is not None)]
        if any(isinstance(v, (bool, complex)) or not isinstance(v, (int, float)) for v in numbers):
            return Lit(x, ref, (), affine=False)
        growth: dict[str, Any] = {}
        for step, p in zip(self.steps, peers):
            if p is not None and len(step) == 1:
                ((axis, by),) = step.items()
                growth.setdefault(axis, _quotient(p - x, by))
        predicted = [x + sum(growth.get(a, 0) * by for a, by in s.items()) for s in self.steps]
        if any(p is not None and not _equal(p, q) for p, q in zip(peers, predicted)):
            return Lit(x, ref, (), affine=False)
        origin = x - sum(g * self.coords[a] for a, g in growth.items())
        return Lit(origin, ref, tuple((a, growth[a]) for a in self.coords if growth.get(a)))

    def differing(self, streams: list[str | None], own: str) -> tuple[str, ...] | None:
        """The axes along which another rank's random stream is not this one's."""
        if all(s is None for s in streams):
            return None
        found = {
            next(iter(s)) for s, r in zip(self.steps, streams) if r is not None and len(s) == 1 and r != own
        }
        return tuple(a for a in self.coords if a in found)


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    return bool(a == b) or (a != a and b != b) or (type(a) is float and abs(a - b) <= 1e-12 * abs(a))


def _quotient(delta: Any, by: int) -> Any:
    if isinstance(delta, int):
        return delta // by if delta % by == 0 else delta / by
    return delta / by


def _infer_missing(graph: Graph, refs: Sequence[int | None]) -> None:
    """Reference metas of steps the reference lacks (a copy that is not needed at size 1), where the
    operand decides them: one tensor in, the same shape out, and no two dims to be confused."""
    for i, node in enumerate(graph.nodes):
        if refs[i] is not None or len(node.outs) != 1 or node.comm is not None:
            continue
        operands = list(node.refs())
        (out,) = node.outs
        if len(operands) != 1 or out is None:
            continue
        source = graph.nodes[operands[0].node]
        metas = source.ref_outs
        have, want = source.outs[operands[0].out], metas[operands[0].out] if metas else None
        if have is None or want is None or have.shape != out.shape or len(want.shape) != len(have.shape):
            continue
        if len(set(zip(have.shape, want.shape))) == len(set(have.shape)):
            node.ref_outs = (TensorMeta(want.shape, out.dtype),)


# ---- where ranks part

_POINT_TO_POINT = ("send", "recv")


def _divergence(local: Graph, other: Graph, table: Sequence[int | None]) -> Divergence | None:
    """The first collective the two ranks do not share, or else the first other step."""
    hang = _first_collective(local, other)
    if hang is not None:
        return Divergence(*hang, other, other.coords, collective=True)
    if all(j is not None for j in table) and len(table) == len(other.nodes):
        return None
    taken = {j for j in table if j is not None}
    mine = next((n for n, j in zip(local.nodes, table) if j is None and not _one_sided(n)), None)
    theirs = next((n for n in other.nodes if n.id not in taken and not _one_sided(n)), None)
    return Divergence(mine, theirs, other, other.coords, collective=False) if mine or theirs else None


def _one_sided(n: Node) -> bool:
    """Steps that belong to a rank's role in an exchange, not to its control flow."""
    return n.comm is not None and n.comm.kind in _POINT_TO_POINT


def _first_collective(local: Graph, other: Graph) -> tuple[Node | None, Node | None] | None:
    shared = {rank_of(local.coords, local.mesh), rank_of(other.coords, other.mesh)}
    mine, theirs = _calls(local, shared), _calls(other, shared)
    for a, b in zip(mine, theirs):
        if _signature(a) != _signature(b):
            return a, b
    if len(mine) == len(theirs):
        return None
    n = min(len(mine), len(theirs))
    return (mine[n], None) if len(mine) > n else (None, theirs[n])


def _calls(g: Graph, members: set[int]) -> list[Node]:
    return [
        n
        for n in g.nodes
        if n.comm is not None
        and n.comm.kind not in _POINT_TO_POINT
        and all(m in n.comm.ranks for m in members)  # a group may have thousands: no set of each
    ]


def _signature(n: Node) -> Any:
    assert n.comm is not None
    shapes = [(m.shape, m.dtype) for m in n.outs if m is not None]
    same = n.comm.kind in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
    return (n.comm.kind, n.comm.ranks, n.comm.reduce_op, n.comm.root, tuple(shapes) if same else None)
