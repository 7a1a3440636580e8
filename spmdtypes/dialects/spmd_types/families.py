"""V without a dim: one value per rank, read as an extra leading dim that is cut over the axis.

A program of local operations never touches that dim, so what it computes is the same for every entry:
the graph is rewritten to carry it (size 1 on a rank, the axis' size in the reference), and operations are
described with it. Summing over the ranks sums over the dim, gathering makes it an ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from spmdtypes.core.spec import (
    Concat,
    Expr,
    Fn,
    Load,
    Operand,
    OpSpec,
    Out,
    Red,
    Reshape,
    Var,
    total,
)
from spmdtypes.graph import Graph, Lit, Node, Ref, TensorMeta
from spmdtypes.ops import registry

Families = tuple[str, ...]
_MARK = "families"
_SUMS = ("all_reduce", "reduce_scatter", "reduce")
_CUTS = ("reduce_scatter", "all_to_all", "scatter")


@dataclass
class Lifted:
    """`graph` with the extra dims; `families[ref]`: the axes of those of a value of `graph`, in order."""

    graph: Graph
    families: dict[Ref, Families] = field(default_factory=dict)

    def of(self, ref: Ref) -> Families:
        return self.families.get(ref, ())


def lifted(graph: Graph, given: Mapping[str, Families], mesh: Mapping[str, int]) -> Lifted:
    """`given`: of which axes each named input is a family. Axes that only ever cut such dims."""
    return _Lift(graph, given, mesh).run()


class _Lift:
    def __init__(self, graph: Graph, given: Mapping[str, Families], mesh: Mapping[str, int]) -> None:
        self.old, self.given, self.mesh = graph, given, mesh
        self.local = frozenset(a for f in given.values() for a in f)
        self.new = Graph(graph.mesh, graph.coords, [], {}, graph.stacks, graph.notes)
        self.out = Lifted(self.new)
        self.moved: dict[Ref, Ref] = {}
        self.node = Node(0, "")

    def run(self) -> Lifted:
        for node in self.old.nodes:
            self.node = node
            refs = tuple(node.refs())
            if node.op == "input":
                self._carry(node, self.given.get(node.name, ()))
            elif node.comm is not None and len(refs) == len(node.outs) == 1:
                self._collective(node, refs[0])
            else:
                self._plain(node)
        self.new.outputs = {k: self.moved[r] for k, r in self.old.outputs.items() if r in self.moved}
        return self.out

    def _ordered(self, axes: Iterable[str]) -> Families:
        found = set(axes)
        return tuple(a for a in self.mesh if a in found)

    def _widened(self, meta: TensorMeta | None, families: Families, reference: bool) -> TensorMeta | None:
        if meta is None or not families:
            return meta
        extra = tuple(self.mesh[a] if reference else 1 for a in families)
        return replace(meta, shape=extra + meta.shape)

    def _carry(self, node: Node, families: Families, args: Any = None, kwargs: Any = None) -> Node:
        """`node` in the new graph, its results families."""
        outs = tuple(self._widened(m, families, False) for m in node.outs)
        refs = node.ref_outs and tuple(self._widened(m, families, True) for m in node.ref_outs)
        new = replace(
            node,
            id=len(self.new.nodes),
            outs=outs,
            ref_outs=refs,
            args=node.args if args is None else args,
            kwargs=node.kwargs if kwargs is None else kwargs,
        )
        self.new.nodes.append(new)
        for k in range(len(outs)):
            self.moved[Ref(node.id, k)] = Ref(new.id, k)
            self.out.families[Ref(new.id, k)] = families
        return new

    def _emit(
        self, op: str, args: tuple[Any, ...], local: Sequence[int], ref: Sequence[int], families: Families
    ) -> Ref:
        meta = next(m for m in self.node.outs if m is not None)
        node = Node(len(self.new.nodes), op, args, {}, (TensorMeta(tuple(local), meta.dtype),))
        node.ref, node.ref_outs = node.id, (TensorMeta(tuple(ref), meta.dtype),)
        node.stack, node.phase = self.node.stack, self.node.phase
        self.new.nodes.append(node)
        self.out.families[Ref(node.id)] = families
        return Ref(node.id)

    # -- operations -----------------------------------------------------------------------------

    def _plain(self, node: Node) -> None:
        refs = [self.moved[r] for r in node.refs()]
        families = self._ordered(a for r in refs for a in self.out.of(r))
        if not families:
            args, kwargs = self._mapped(node.args, ()), self._mapped(node.kwargs, ())
            self._carry(node, (), args, kwargs)
            return
        args, kwargs = self._mapped(node.args, families), self._mapped(node.kwargs, families)
        probe = Node(0, "", args, kwargs)
        marks = tuple(self.out.of(r) for r in probe.refs())
        sizes = tuple(self.mesh[a] for a in families)
        self._carry(node, families, args, {**kwargs, _MARK: (families, sizes, marks)})

    def _mapped(self, x: Any, families: Families, listed: bool = False) -> Any:
        """Arguments in the new graph; tensors in a list all become families alike, as they are joined."""
        if isinstance(x, Ref):
            ref = self.moved[x]
            return self._spread(ref, families) if listed else ref
        if isinstance(x, dict):
            return {k: self._mapped(v, families) for k, v in x.items()}
        if isinstance(x, tuple):
            return tuple(self._mapped(y, families, listed=True) for y in x)
        return x

    def _spread(self, ref: Ref, families: Families) -> Ref:
        have = self.out.of(ref)
        if have == families:
            return ref
        meta, k = self.new.meta(ref), len(have)
        assert meta is not None
        refs = self.new.nodes[ref.node].ref_outs
        whole = (refs[ref.out] or meta).shape if refs else meta.shape
        local = (1,) * len(families) + meta.shape[k:]
        reference = (*(self.mesh[a] for a in families), *whole[k:])
        sizes = tuple(Lit(1, self.mesh[a]) for a in families)
        return self._emit("family.spread", (ref, have, families, sizes), local, reference, families)

    # -- collectives ----------------------------------------------------------------------------

    def _collective(self, node: Node, operand: Ref) -> None:
        assert node.comm is not None
        ref = self.moved[operand]
        families, axes = self.out.of(ref), node.comm.axes
        own = tuple(a for a in axes if a in families)
        others = tuple(a for a in families if a not in axes)
        meta, out = self.new.meta(ref), node.outs[0]
        cuts = node.comm.kind in _CUTS and bool(axes) and set(axes) <= self.local
        if meta is None or out is None or not (families or cuts):
            self._carry(node, (), (ref,) if node.args else node.args)
            return
        if own and node.comm.kind in _SUMS:
            rest = tuple(n for a, n in zip(families, meta.shape) if a not in own)
            shape = (*rest, *meta.shape[len(families) :])
            ref = self._emit("family.sum", (ref, families, own), shape, self._whole(others, shape), others)
            families, own = others, ()
        ref = self._packed(ref, families, own, others)
        tail = (1,) * len(others)
        wide = replace(node, outs=(replace(out, shape=out.shape + tail),), ref_outs=None, ref=node.id)
        done = self._carry(wide, (), (ref,))
        self.out.families[Ref(done.id)] = ()
        self.moved[Ref(node.id)] = self._unpacked(Ref(done.id), out.shape, axes if cuts else (), others)

    def _whole(self, families: Families, shape: Sequence[int]) -> tuple[int, ...]:
        k = len(families)
        return (*(self.mesh[a] for a in families), *shape[k:])

    def _packed(self, ref: Ref, families: Families, own: Families, others: Families) -> Ref:
        """[own dims and dim 0 as one, rest, other dims]: what a collective along dim 0 takes."""
        meta = self.new.meta(ref)
        assert meta is not None
        if not families:
            return ref
        k, n = len(families), len(meta.shape)
        order = (
            *(families.index(a) for a in own),
            *range(k, n),
            *(families.index(a) for a in others),
        )
        whole = self._whole(families, meta.shape)
        local, reference = [meta.shape[d] for d in order], [whole[d] for d in order]
        ref = self._emit("family.permute", (ref, order), local, reference, ())
        j = len(own) + 1
        if own and n > k:
            local, reference = [prod(local[:j]), *local[j:]], [prod(reference[:j]), *reference[j:]]
            ref = self._emit("family.reshape", (ref, tuple(local), tuple(reference)), local, reference, ())
        return ref

    def _unpacked(self, ref: Ref, shape: Sequence[int], cut: Families, others: Families) -> Ref:
        """Back to [extra dims, shape]; a result that is cut along dim 0 becomes a family."""
        local = [*(1 for _ in cut), *shape, *(1 for _ in others)]
        reference = [*(self.mesh[a] for a in cut), *shape, *(self.mesh[a] for a in others)]
        if cut:
            ref = self._emit("family.reshape", (ref, tuple(local), tuple(reference)), local, reference, ())
        families = self._ordered((*cut, *others))
        first = [*cut, *(None for _ in shape), *others]
        order = (*(first.index(a) for a in families), *range(len(cut), len(cut) + len(shape)))
        if families:
            local, reference = [local[d] for d in order], [reference[d] for d in order]
            ref = self._emit("family.permute", (ref, order), local, reference, families)
        return ref


# -- descriptions -------------------------------------------------------------------------------


def build(node: Node, operands: Sequence[Operand]) -> OpSpec | None:
    """The description of a node of a lifted graph."""
    if node.op.startswith("family."):
        return _own(node, operands[0])
    mark = node.kwargs.get(_MARK)
    if mark is None:
        return registry.build(node, operands)
    families, sizes, each = mark
    plain = replace(node, kwargs={k: v for k, v in node.kwargs.items() if k != _MARK})
    bare = [
        replace(o, shape=o.shape[len(f) :], ref_shape=o.ref_shape[len(f) :]) for o, f in zip(operands, each)
    ]
    spec = registry.build(plain, bare)
    return None if spec is None else _with_families(spec, families, sizes, each, bare)


def _own(node: Node, x: Operand) -> OpSpec:
    vars = tuple(Var(f"i{d}") for d in range(x.ndim))
    match node.op:
        case "family.permute":
            return OpSpec.of(Out(tuple(vars[d] for d in node.args[1]), x[vars]))
        case "family.reshape":
            return OpSpec.of(Reshape(x.position, node.args[1], node.args[2]))
        case "family.sum":
            families, own = node.args[1:]
            gone = [vars[k] for k, a in enumerate(families) if a in own]
            return OpSpec.of(Out(tuple(v for v in vars if v not in gone), total("sum", gone, x[vars])))
    _, have, families, sizes = node.args
    named = {a: _extra(a) for a in families}
    rest = vars[len(have) :]
    free = {named[a]: n for a, n in zip(families, sizes) if a not in have}
    read = x[(*(named[a] for a in have), *rest)]
    return OpSpec.of(Out((*named.values(), *rest), read), sizes=free)


def _extra(axis: str) -> Var:
    return Var(f"family of {axis}")


def _with_families(
    spec: OpSpec,
    families: Families,
    sizes: Sequence[int],
    each: Sequence[Families],
    operands: Sequence[Operand],
) -> OpSpec:
    """The same for every entry of the extra dims."""
    lead = tuple(map(_extra, families))
    heads = [tuple(map(_extra, f)) for f in each]

    def expr(e: Expr) -> Expr:
        if isinstance(e, Load):
            index = (expr(s) if isinstance(s, Expr) else s for s in e.index)
            return Load(e.operand, (*heads[e.operand], *index))
        if isinstance(e, Fn):
            return Fn(e.name, tuple(map(expr, e.args)))
        return Red(e.op, e.vars, expr(e.body)) if isinstance(e, Red) else e

    def out(o: Out | Reshape | Concat | None) -> Out | Reshape | Concat | None:
        match o:
            case Out():
                return Out((*lead, *o.vars), expr(o.value))
            case Reshape():
                return Reshape(o.operand, (*(1 for _ in lead), *o.shape), (*sizes, *o.ref_shape))
            case Concat():
                return Concat(o.operands, o.dim + len(lead))
        return None

    uses = [(k, (*heads[k], *index)) for k, index in spec.uses]
    # the extent of an extra dim, should the value not read an operand that has it
    uses += [
        (k, (*head, *(Var(f"any {k} {d}") for d in range(operands[k].ndim))))
        for k, head in enumerate(heads)
        if head
    ]
    return replace(spec, outs=tuple(map(out, spec.outs)), uses=tuple(uses))
