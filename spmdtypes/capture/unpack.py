"""Buffers that hold several tensors only to communicate them together, taken apart again.

A buffer may hold parts that are cut in different ways; no placement describes it, though every part has
one. Where all that is ever read of a buffer are the parts that were put into it, what is done to the
buffer is done to each part instead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from spmdtypes.graph import Graph, Node, Ref, TensorMeta

# done to a buffer, these are done to each of its parts; other operands are single numbers
_ELEMENTWISE = (
    "aten.mul.Tensor",
    "aten.div.Tensor",
    "aten.mul.Scalar",
    "aten.div.Scalar",
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.neg.default",
)
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


@dataclass(frozen=True)
class _Pack:
    """How a value holds parts: one after another along dim 0 ("flat"), along the last of two dims ("rows"),
    or as "rows" written into one dim ("folded"). `rows` is the number of rows."""

    form: str
    sizes: tuple[int, ...]
    rows: int = 1

    def part(self, i: int) -> tuple[int, ...]:
        """The shape of a part."""
        return (self.sizes[i],) if self.form == "flat" else (self.rows, self.sizes[i])


def unpacked(graph: Graph) -> Graph:
    """The same program without buffers of which only the parts are read."""
    packs = _packs(graph)
    kept = _read_by_parts(graph, packs) if packs else {}
    return _Rewriter(graph, kept).run() if kept else graph


def _packs(graph: Graph) -> dict[int, _Pack]:
    """Every node that holds parts."""
    found: dict[int, _Pack] = {}
    for node in graph.nodes:
        pack = _packed(graph, node, found)
        if pack is not None:
            found[node.id] = pack
    return found


def _packed(graph: Graph, node: Node, packs: dict[int, _Pack]) -> _Pack | None:
    if len(node.outs) != 1 or node.outs[0] is None:
        return None
    if node.op == "aten.cat.default":
        return _joined(graph, node)
    first = node.args[0] if node.args else None
    pack = packs.get(first.node) if isinstance(first, Ref) else None
    if pack is None or not isinstance(first, Ref) or first.out:
        return None
    shape = node.outs[0].shape
    if node.op in _VIEWS:
        return _viewed(pack, shape)
    if node.op in _ELEMENTWISE:
        return pack if all(_single(graph, r) for r in list(node.refs())[1:]) else None
    if node.comm is not None and len(node.args) == 1:
        return _communicated(pack, node.comm.kind, len(node.comm.ranks))
    return None


def _joined(graph: Graph, node: Node) -> _Pack | None:
    refs = list(node.refs())
    metas = [graph.meta(r) for r in refs]
    dim = node.args[1] if len(node.args) > 1 else 0
    shapes = [m.shape for m in metas if m is not None]
    if len(refs) < 2 or len(shapes) < len(refs) or len({m.dtype for m in metas if m is not None}) > 1:
        return None
    if all(len(s) == 1 for s in shapes) and dim in (0, -1):
        return _Pack("flat", tuple(s[0] for s in shapes))
    if all(len(s) == 2 for s in shapes) and dim in (1, -1):
        return _Pack("rows", tuple(s[1] for s in shapes), shapes[0][0])
    return None


def _viewed(pack: _Pack, shape: tuple[int, ...]) -> _Pack | None:
    total = sum(pack.sizes)
    if pack.form == "flat":
        return pack if shape == (total,) else None
    if shape == (pack.rows, total):
        return replace(pack, form="rows")
    return replace(pack, form="folded") if shape == (pack.rows * total,) else None


def _communicated(pack: _Pack, kind: str, ranks: int) -> _Pack | None:
    if kind == "all_reduce":
        return pack
    if kind == "all_gather" and pack.form == "flat":
        return _Pack("folded", pack.sizes, ranks)
    if kind == "reduce_scatter" and pack.form == "folded" and pack.rows == ranks:
        return _Pack("flat", pack.sizes)
    return None


def _single(graph: Graph, ref: Ref) -> bool:
    meta = graph.meta(ref)
    return meta is not None and prod(meta.shape) == 1 and len(meta.shape) == 0


def _taken(node: Node, pack: _Pack) -> int | None:
    """Which part a slice of a buffer is."""
    if node.op != "aten.slice.Tensor" or pack.form == "folded" or len(node.args) < 4:
        return None
    dim, start, end = node.args[1:4]
    if dim != (0 if pack.form == "flat" else 1) or node.args[4:] not in ((), (1,)):
        return None
    at = 0
    for i, n in enumerate(pack.sizes):
        if (start, end) == (at, at + n):
            return i
        at += n
    return None


def _read_by_parts(graph: Graph, packs: dict[int, _Pack]) -> dict[int, _Pack]:
    """The packs of which nothing but parts is read, in the end."""
    users: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for ref in node.refs():
            users[ref.node].append(node)
    shown = {r.node for r in graph.outputs.values()}
    good: dict[int, _Pack] = {}
    for i in sorted(packs, reverse=True):
        uses = users[i]
        fine = [u.id in good or _taken(u, packs[i]) is not None for u in uses]
        if uses and all(fine) and i not in shown:
            good[i] = packs[i]
    return _rooted(graph, good)


def _rooted(graph: Graph, good: dict[int, _Pack]) -> dict[int, _Pack]:
    """Those whose way from the joining of the parts is all of this kind; a join that is not communicated
    is an ordinary one and stays."""
    kept: dict[int, _Pack] = {}
    met: set[int] = set()
    root: dict[int, int] = {}
    for i in sorted(good):
        node = graph.nodes[i]
        if node.op == "aten.cat.default":
            root[i] = i
        elif node.args[0].node in root:
            root[i] = root[node.args[0].node]
        else:
            continue
        if node.comm is not None:
            met.add(root[i])
        kept[i] = good[i]
    return {i: p for i, p in kept.items() if root[i] in met}


class _Rewriter:
    """Copies a graph, with packs taken apart."""

    def __init__(self, graph: Graph, packs: dict[int, _Pack]) -> None:
        self.graph, self.packs = graph, packs
        self.nodes: list[Node] = []
        self.refs: dict[Ref, Ref] = {}
        self.parts: dict[int, list[Ref]] = {}
        self.first: dict[int, int] = {}  # old node -> a new one in its place

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.id in self.packs:
                self.parts[node.id] = self._apart(node, self.packs[node.id])
                self.first[node.id] = self.parts[node.id][0].node
                continue
            source = node.args[0] if node.args else None
            pack = self.packs.get(source.node) if isinstance(source, Ref) else None
            taken = _taken(node, pack) if pack is not None else None
            if taken is not None and isinstance(source, Ref):
                self.refs[Ref(node.id)] = self.parts[source.node][taken]
                self.first[node.id] = self.refs[Ref(node.id)].node
            else:
                self._copy(node)
        for node in self.nodes:
            if node.forward is not None:
                node.forward = self.first.get(node.forward)
        outputs = {b: self.new(r) for b, r in self.graph.outputs.items()}
        return replace(self.graph, nodes=self.nodes, outputs=outputs)

    def new(self, x: Any) -> Any:
        if isinstance(x, Ref):
            return self.refs[x]
        return tuple([self.new(y) for y in x]) if isinstance(x, tuple) else x

    def _copy(self, node: Node) -> None:
        made = self.emit(node, node.op, self.new(node.args), node.outs)
        made.name = node.name
        self.first[node.id] = made.id
        for k in range(len(node.outs)):
            self.refs[Ref(node.id, k)] = Ref(made.id, k)

    def emit(self, like: Node, op: str, args: Any, outs: tuple[TensorMeta | None, ...]) -> Node:
        made = replace(like, id=len(self.nodes), op=op, args=args, outs=outs, name="")
        made.kwargs = {k: self.new(v) for k, v in like.kwargs.items()} if op == like.op else {}
        made.comm = like.comm if op.startswith("comm.") else None
        self.nodes.append(made)
        return made

    def _apart(self, node: Node, pack: _Pack) -> list[Ref]:
        if node.op == "aten.cat.default":
            return [self.refs[r] for r in node.refs()]
        before, held = self.parts[node.args[0].node], self.packs[node.args[0].node]
        if node.op in _VIEWS:
            return before
        dtype = (node.outs[0] or TensorMeta((), "f32")).dtype
        rest = self.new(node.args[1:])
        return [self._part(node, r, held.part(i), pack.part(i), rest, dtype) for i, r in enumerate(before)]

    def _part(
        self, node: Node, ref: Ref, old: tuple[int, ...], new: tuple[int, ...], rest: Any, dtype: str
    ) -> Ref:
        """What the node does, done to one part."""
        kind = node.comm.kind if node.comm is not None else ""
        if kind == "reduce_scatter":
            ref = self._view(node, ref, (prod(old),), dtype)
        shape = (prod(new),) if kind == "all_gather" else new
        made = Ref(self.emit(node, node.op, (ref, *rest), (TensorMeta(shape, dtype),)).id)
        return self._view(node, made, new, dtype) if kind == "all_gather" else made

    def _view(self, node: Node, ref: Ref, shape: tuple[int, ...], dtype: str) -> Ref:
        return Ref(self.emit(node, "aten.view.default", (ref, shape), (TensorMeta(shape, dtype),)).id)
