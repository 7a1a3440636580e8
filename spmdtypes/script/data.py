"""Where data comes into being that later meets the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spmdtypes.capture.functionalise import Functional
from spmdtypes.graph import Graph, Node, Ref
from spmdtypes.script.facts import Arrival, Key

if TYPE_CHECKING:
    from spmdtypes.script.recorder import ScriptRecorder

# a result of these has other rows than its operand: one value, or one a class, for all samples
_SUMMARIES = (
    "aten.sum.",
    "aten.mean.",
    "aten.amax.",
    "aten.amin.",
    "aten.max.",
    "aten.min.",
    "aten.any.",
    "aten.all.",
    "aten.bincount.",
    "aten.histc.",
    "aten.count_nonzero.",
    "aten.var.",
    "aten.std.",
    "aten.var_mean.",
    "aten.norm.",
    "aten.linalg_vector_norm.",
)
# the same elements, however their rows are counted
_RESHAPED = (
    "aten.view.",
    "aten._unsafe_view.",
    "aten.reshape.",
    "aten.transpose.",
    "aten.permute.",
    "aten.t.",
    "aten.unsqueeze.",
    "aten.squeeze.",
    "aten.clone.",
    "aten._to_copy.",
)
# their first operand is looked up in: its rows are not those of the result
_TABLES = ("aten.index.", "aten.index_select.", "aten.gather.", "aten.embedding.", "aten.take.")
# memory that is filled later
_NOTHING = ("aten.empty", "aten.new_empty", "aten.zeros", "aten.new_zeros")


def arrivals(rec: ScriptRecorder, done: Functional) -> list[Arrival]:
    """The data of a rank's program, traced back to where it was made as far as its rows are the same.

    Arrivals that meet row by row before they meet parameters are of one `group`.
    """
    graph = done.graph
    moved = depends_on_inputs(graph)
    seen: set[Ref] = set()
    origins: dict[Ref, int] = {}
    for node in graph.nodes:
        if node.id in moved and node.op != "input":
            for ref in node.refs():
                if ref.node not in moved:
                    for origin in _origins(graph, ref, moved, seen):
                        origins.setdefault(origin, len(origins))
    _join(graph, origins, moved, seen)
    found = []
    for ref, group in origins.items():
        arrival = _arrival(rec, done, ref, group)
        if arrival is not None:
            found.append(arrival)
    return found


def as_inputs(graph: Graph, arrived: Sequence[Arrival], names: Mapping[Key, str]) -> Graph:
    """The graph with the arrivals that have a name as inputs of it, as far as a node gives nothing else."""
    nodes = list(graph.nodes)
    for a in arrived:
        node = nodes[a.ref.node]
        if a.key in names and a.ref.out == 0 and len(node.outs) == 1:
            nodes[a.ref.node] = replace(node, op="input", args=(), kwargs={}, name=names[a.key])
    return replace(graph, nodes=nodes)


def _join(graph: Graph, origins: dict[Ref, int], moved: set[int], seen: set[Ref]) -> None:
    """Add the origins of what meets the rows of known ones, and put both into one group."""
    carried = dict(origins)  # refs whose rows are those of an origin -> its group
    for node in graph.nodes:
        if node.id in moved or node.comm is not None:
            continue
        operands = list(node.refs())[node.op.startswith(_TABLES) :]
        held = [r for r in operands if r in carried]
        if not held:
            continue
        first, group = held[0], carried[held[0]]
        shape = _shape(graph, first)
        for r in operands:
            other = _shape(graph, r)
            if r not in carried and len(other) == len(shape) and other[0] == shape[0] > 1:
                fresh = _origins(graph, r, moved, seen)
                origins.update(dict.fromkeys(fresh, group))
                carried[r] = group
            elif r in carried and carried[r] != group:
                gone = carried[r]
                for table in (origins, carried):
                    table.update({k: group for k, g in table.items() if g == gone})
        for out in range(len(node.outs)):
            if Ref(node.id, out) not in carried and _shape(graph, Ref(node.id, out))[:1] == shape[:1]:
                carried[Ref(node.id, out)] = group


def _shape(graph: Graph, ref: Ref) -> tuple[int, ...]:
    meta = graph.meta(ref)
    return meta.shape if meta is not None else ()


def depends_on_inputs(graph: Graph) -> set[int]:
    moved: set[int] = set()
    for node in graph.nodes:
        if node.op == "input" or any(r.node in moved for r in node.refs()):
            moved.add(node.id)
    return moved


def _origins(graph: Graph, ref: Ref, moved: set[int], seen: set[Ref]) -> list[Ref]:
    """Where the rows of `ref` were made: data is followed to the operand that has as many."""
    out: list[Ref] = []
    todo = [ref]
    while todo:
        r = todo.pop()
        if r in seen:
            continue
        seen.add(r)
        node = graph.nodes[r.node]
        behind = [p for p in node.refs() if p.node not in moved]
        meta = graph.meta(r)
        if meta is None or node.comm is not None:
            continue
        if not meta.shape or node.op.startswith(_SUMMARIES):
            todo += behind
            continue
        if node.op.startswith(_RESHAPED):
            todo += behind[:1]
            continue
        if node.op == "aten.cat.default" and all((_rows(graph, p) or 0) > 1 for p in behind):
            todo += behind  # batches of two kinds, one after the other
            continue
        same = [p for p in behind if _rows(graph, p) == meta.shape[0]]
        if same:
            todo += same
        else:
            out.append(r)
    return out


def _rows(graph: Graph, ref: Ref) -> int | None:
    meta = graph.meta(ref)
    return meta.shape[0] if meta is not None and meta.shape else None


def _arrival(rec: ScriptRecorder, done: Functional, ref: Ref, group: int) -> Arrival | None:
    """None for what a module makes for itself (noise, masks), and for constants."""
    at = done.origins.get(ref)
    if at is None:
        return None
    index, out = at
    node = done.graph.nodes[ref.node]
    if index in rec.batch_keys:
        return Arrival(rec.key(index), ref, done.values.get(ref), 0, group)
    if rec.depths[index]:
        return None
    if node.op.startswith(_NOTHING):
        return None
    key = rec.key(index, out)
    return Arrival(key, ref, done.values.get(ref), _line(rec, index, node), group)


def _line(rec: ScriptRecorder, index: int, node: Node) -> int:
    frames = rec.stacks.resolve(rec.trace[index].stack)
    own = next((f for f in frames if rec.own(f.file)), frames[0] if frames else None)
    return own.line if own else 0
