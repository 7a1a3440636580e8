"""Raw trace -> pure graph: no mutation, no aliasing, no dead nodes; collectives are never dead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spmdtypes.capture import expand
from spmdtypes.capture.collector import no_collection
from spmdtypes.capture.raw import Raw, Res, View
from spmdtypes.capture.storage import Memory
from spmdtypes.capture.variants import variant
from spmdtypes.capture.views import step
from spmdtypes.graph import Graph, Hazard, Node, Ref, TensorMeta

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import Recorder

_SAME = {
    "aten.detach.default",
    "aten.detach_.default",
    "aten.alias.default",
    "aten.lift_fresh.default",
    "aten.lift.default",
}
_KEPT = ("comm.", "aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten._unique", "aten.unique")


@dataclass
class Functional:
    """A pure graph and where each recorded value went: `values` as recorded, by `Ref`; `origins[ref]` is
    the (raw node, output) that first gave it."""

    graph: Graph
    values: dict[Ref, Tensor] = field(default_factory=dict)
    origins: dict[Ref, tuple[int, int]] = field(default_factory=dict)


def functionalise(rec: Recorder, outputs: Mapping[str, View | Res]) -> Functional:
    """The pure graph of a recorder's trace; `outputs` name the values wanted at its end."""
    f = _Functionaliser(rec)
    with no_collection():
        for index, raw in enumerate(rec.trace):
            f.visit(index, raw)
        named = {name: f.resolve(x) for name, x in outputs.items()}
        return f.close(named)


class _Functionaliser:
    def __init__(self, rec: Recorder) -> None:
        self.rec = rec
        self.nodes: list[Node] = []
        self.memory = Memory(self.emit_plain, rec.note)
        self.raw_refs: dict[tuple[int, int], Ref] = {}
        self.values: dict[Ref, Tensor] = {}
        self.raw = Raw("")
        self.index = 0
        self.metas: dict[tuple[tuple[int, ...], str], TensorMeta] = {}
        self.renamed: dict[Ref, Ref] = {}  # what an input was computed as, before it became one
        self.visitors: dict[str, Callable[[Raw], None]] = {
            "source": self._source,
            "bind": self._bind,
            "write": self._write,
            "aten.copy_.default": self._copy,
            "aten.fill_.Scalar": self._fill,
            "aten.zero_.default": self._fill,
            "aten.set_.source_Tensor": self._nothing,
            "aten.resize_.default": self._nothing,
            "aten.as_strided.default": self._as_strided,
            "aten.as_strided_.default": self._as_strided,
        }

    # ---- emitting

    def meta(self, shape: tuple[int, ...], dtype: str) -> TensorMeta:
        meta = self.metas.get((shape, dtype))
        if meta is None:
            meta = self.metas[shape, dtype] = TensorMeta(shape, dtype)
        return meta

    def emit(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorMeta | None, ...]
    ) -> Node:
        raw = self.raw
        node = Node(len(self.nodes), op, args, kwargs, outs, raw.stack, raw.phase, raw.module, raw.forward)
        node.forward_stack = raw.forward_stack
        self.nodes.append(node)
        return node

    def emit_plain(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], dtype: str
    ) -> Ref:
        return Ref(self.emit(op, args, kwargs, (self.meta(tuple(shape), dtype),)).id)

    def resolve(self, x: Any) -> Any:
        """A raw argument in terms of refs."""
        kind = type(x)
        if kind is View:
            return self.memory.read(x) if self.memory.knows(x) else self._unknown(x)
        if kind is Res:
            return self.raw_refs[x.node, x.out]
        if kind is tuple:
            return tuple([self.resolve(y) for y in x])
        return x

    def _unknown(self, view: View) -> Ref:
        node = self.emit("const", (), {}, (self.meta(view.shape, view.dtype),))
        self.rec.note("a tensor of unknown origin is taken as a constant")
        self.memory.define(view, Ref(node.id))
        return Ref(node.id)

    def produced(self, out: int, ref: Ref) -> None:
        """Output `out` of the current raw node is `ref`."""
        self.raw_refs[self.index, out] = ref
        value = self.rec.values.get((self.index, out))
        if value is not None:
            self.values.setdefault(ref, value)

    # ---- visiting

    def visit(self, index: int, raw: Raw) -> None:
        self.index, self.raw = index, raw
        special = self.visitors.get(raw.op)
        if special is not None:
            special(raw)
        elif raw.op in _SAME:
            self._same(raw)
        elif raw.mutated and raw.comm is None:
            self._mutate(raw)
        elif raw.op == "aten.native_batch_norm.default" and raw.args[3] is not None and raw.args[5]:
            self._batch_norm(raw)
        elif raw.op.startswith("aten._foreach_"):
            expand.foreach(self, raw)
        else:
            self._pure(raw)

    def _nothing(self, raw: Raw) -> None:
        pass

    def _source(self, raw: Raw) -> None:
        (view,) = raw.outs
        node = self.emit("const", raw.args, {}, (self.meta(view.shape, view.dtype),))
        node.name = raw.name
        self.memory.define(view, Ref(node.id))
        self.produced(0, Ref(node.id))

    def _bind(self, raw: Raw) -> None:
        (view,) = raw.outs
        before = self.memory.read(view) if raw.kwargs and self.memory.knows(view) else None
        node = self.emit("input", (), {}, (raw.meta,))
        node.name = raw.name
        if before is not None:
            self.renamed[before] = Ref(node.id)
        self._store(view, Ref(node.id))
        self.produced(0, Ref(node.id))

    def _store(self, view: View, ref: Ref) -> None:
        if self.memory.knows(view):
            self.memory.write(view, ref)
        else:
            self.memory.define(view, ref)

    def _write(self, raw: Raw) -> None:
        (view,) = raw.outs
        self._store(view, self._cast(self.resolve(raw.args[0]), view))

    def _cast(self, ref: Ref, view: View) -> Ref:
        """`ref` with the dtype and shape of `view`, as a copy into it would have."""
        meta = self.nodes[ref.node].outs[ref.out]
        assert meta is not None
        if meta.dtype != view.dtype:
            ref = self.emit_plain(
                "aten._to_copy.default", (ref,), {"dtype": view.dtype}, meta.shape, view.dtype
            )
        if meta.shape != view.shape:
            ref = self.emit_plain("aten.expand.default", (ref, view.shape), {}, view.shape, view.dtype)
        return ref

    def _copy(self, raw: Raw) -> None:
        (view,) = raw.mutated
        source = self.resolve(raw.args[1])
        if not isinstance(source, Ref):
            source = self.emit_plain(
                "aten.full.default", (view.shape, source), {"dtype": view.dtype}, view.shape, view.dtype
            )
        ref = self._cast(source, view)
        self._store(view, ref)
        self.produced(0, ref)

    def _fill(self, raw: Raw) -> None:
        (view,) = raw.mutated
        old = self.resolve(raw.args[0])
        meta = (self.meta(view.shape, view.dtype),)
        if raw.op == "aten.zero_.default":
            node = self.emit("aten.zeros_like.default", (old,), {}, meta)
        else:
            node = self.emit("aten.full_like.default", (old, self.resolve(raw.args[1])), {}, meta)
        self._store(view, Ref(node.id))
        self.produced(0, Ref(node.id))

    def _same(self, raw: Raw) -> None:
        ref = self.resolve(raw.args[0])
        self.produced(0, ref)
        if raw.outs and raw.outs[0] is not None and not self.memory.knows(raw.outs[0]):
            self.memory.define(raw.outs[0], ref)

    def _as_strided(self, raw: Raw) -> None:
        ref = self.resolve(raw.outs[0])
        self.produced(0, ref)

    def _pure(self, raw: Raw) -> None:
        parent = raw.args[0] if raw.args and type(raw.args[0]) is View else None
        outs = raw.outs
        if (
            parent is not None
            and outs
            and type(outs[0]) is View
            and outs[0].storage == parent.storage
            and not raw.comm
        ):
            self._view(raw, parent)
            return
        args = tuple([self.resolve(a) for a in raw.args])
        kwargs = {k: self.resolve(v) for k, v in raw.kwargs.items()} if raw.kwargs else {}
        node = self.emit(raw.op, args, kwargs, tuple([self._meta_of(o) for o in outs]))
        node.comm, node.rng, node.assumed = raw.comm, raw.rng, raw.assumed
        for i, o in enumerate(outs):
            ref = Ref(node.id, i)
            if type(o) is View:
                self._define_output(raw, o, ref)
            self.produced(i, ref)

    def _define_output(self, raw: Raw, view: View, ref: Ref) -> None:
        if raw.comm is not None and raw.mutated:
            self._store(view, ref)
        elif not any(type(a) is View and a.storage == view.storage for a in raw.args):
            self.memory.define(view, ref)
        else:
            self._store(view, ref)

    def _meta_of(self, o: Any) -> TensorMeta | None:
        return self.meta(o.shape, o.dtype) if type(o) is View else o

    def _view(self, raw: Raw, parent: View) -> None:
        """An op whose results share the memory of its operand. A view of memory that was written
        in pieces is not taken before somebody reads it: the pieces may be all that is wanted."""
        if not self.memory.knows(parent):
            self.resolve(parent)
        operand = self.memory.current(parent)
        rest = tuple([self.resolve(a) for a in raw.args[1:]])
        for i, o in enumerate(raw.outs):
            if type(o) is not View:
                continue
            s = step(raw.op, rest, raw.kwargs, i, parent, o)
            if s is None or self.memory.above(parent, o):
                self.produced(i, self.memory.read(o))
            elif operand is None:
                if o != parent:
                    self.memory.alias(parent, o, s, None)
                if self.rec.is_data(self.index):
                    self.produced(i, self.memory.read(o))
            else:
                # a view of everything is kept: on another mesh it may be a view of a part
                ref = self.emit_plain(s.op, (operand, *s.args), dict(s.kwargs), o.shape, o.dtype)
                if o == parent:
                    self.memory.renew(o, ref)
                else:
                    self.memory.alias(parent, o, s, ref)
                self.produced(i, ref)

    # ---- mutation

    def _mutate(self, raw: Raw) -> None:
        if raw.op.startswith("aten._foreach_"):
            expand.foreach(self, raw)
            return
        if raw.op in expand.MUTATIONS:
            expand.MUTATIONS[raw.op](self, raw)
            return
        target = raw.mutated
        if len(target) == 1 and type(raw.args[0]) is View and self._moves(raw, target[0]):
            return
        form = variant(raw.func)
        if form is None:
            self._opaque(raw)
            return
        args = tuple([self.resolve(a) for a in raw.args])
        kwargs = {k: self.resolve(v) for k, v in raw.kwargs.items() if k not in form.dropped}
        metas = self._result_metas(raw, form.func, args, kwargs, form.written)
        node = self.emit(form.name, args, kwargs, metas)
        node.rng, node.assumed = raw.rng, raw.assumed
        for out, view in zip(form.written, target):
            ref = self._cast(Ref(node.id, out), view)
            self._store(view, ref)
            self.produced(0 if len(target) == 1 else out, ref)
        for i, view in enumerate(target):
            value = self.rec.values.get((self.index, -1 - i))
            if value is not None:
                self.values.setdefault(self.memory.read(view), value)

    def _moves(self, raw: Raw, after: View) -> bool:
        """In-place view ops (`t_`, `unsqueeze_`) change the reading, not the memory."""
        before = raw.args[0]
        if after == before or after.storage != before.storage or raw.op.split(".")[1] not in _MOVING:
            return False
        self._view(raw, before)
        return True

    def _result_metas(
        self, raw: Raw, func: Any, args: Any, kwargs: Any, written: tuple[int, ...]
    ) -> tuple[TensorMeta | None, ...]:
        """Metas of the functional form; run on meta tensors where promotion may change the dtype."""
        target = raw.mutated
        dtypes = {
            m.dtype
            for r in _refs((args, tuple(kwargs.values())))
            if (m := self.nodes[r.node].outs[r.out]) and m.shape
        }
        n = len(func._schema.returns)
        if (n == 1 and len(target) == 1 and dtypes <= {target[0].dtype}) or raw.rng is not None:
            return (self.meta(target[0].shape, target[0].dtype),)
        from spmdtypes.capture.replay import meta_outputs

        found = meta_outputs(func, args, kwargs, lambda r: self.nodes[r.node].outs[r.out])
        if found is not None:
            return found
        metas: list[TensorMeta | None] = [None] * n
        for out, view in zip(written, target):
            metas[out] = self.meta(view.shape, view.dtype)
        return tuple(metas)

    def _opaque(self, raw: Raw) -> None:
        """A mutating op without functional form keeps its name; outputs: returns, then written."""
        args = tuple([self.resolve(a) for a in raw.args])
        kwargs = {k: self.resolve(v) for k, v in raw.kwargs.items()}
        fresh = [o for o in raw.outs if type(o) is not View or o not in raw.mutated]
        metas = tuple([self._meta_of(o) for o in fresh] + [self._meta_of(v) for v in raw.mutated])
        node = self.emit(raw.op, args, kwargs, metas)
        for i, o in enumerate(fresh):
            if type(o) is View:
                self._define_output(raw, o, Ref(node.id, i))
        for i, view in enumerate(raw.mutated):
            ref = Ref(node.id, len(fresh) + i)
            self._store(view, ref)
            value = self.rec.values.get((self.index, -1 - i))
            if value is not None:
                self.values.setdefault(ref, value)

    def _batch_norm(self, raw: Raw) -> None:
        """`native_batch_norm` updates the running statistics without saying so in its schema."""
        mean, var = raw.args[3], raw.args[4]
        args = tuple([self.resolve(a) for a in raw.args])
        stat = self.meta(mean.shape, mean.dtype)
        metas = tuple([self._meta_of(o) for o in raw.outs]) + (stat, stat)
        node = self.emit("aten._native_batch_norm_legit_functional.default", args, {}, metas)
        for i, o in enumerate(raw.outs):
            self._define_output(raw, o, Ref(node.id, i))
            self.produced(i, Ref(node.id, i))
        self._store(mean, Ref(node.id, 3))
        self._store(var, Ref(node.id, 4))

    # ---- closing

    def close(self, outputs: dict[str, Ref]) -> Functional:
        """Drop dead nodes, renumber, and point backward nodes at surviving forward ones."""
        if self.renamed:
            self._rename(outputs)
        alive = [n.op.startswith(_KEPT) or n.op == "input" for n in self.nodes]
        for ref in outputs.values():
            alive[ref.node] = True
        for n in reversed(self.nodes):
            if alive[n.id]:
                for r in n.refs():
                    alive[r.node] = True
        number: dict[int, int] = {}
        kept: list[Node] = []
        for n in self.nodes:
            if alive[n.id]:
                number[n.id] = len(kept)
                kept.append(n)
        refs: dict[Ref, Ref] = {}
        for n in kept:
            n.args = _renumber(n.args, number, refs)
            if n.kwargs:
                n.kwargs = {k: _renumber(v, number, refs) for k, v in n.kwargs.items()}
            n.forward = self._forward(n.forward, number)
        for n in kept:
            n.id = number[n.id]
        rec = self.rec
        graph = Graph(dict(rec.mesh), dict(rec.coords), kept)
        graph.outputs = {name: _renumber(r, number, refs) for name, r in outputs.items()}
        graph.stacks = _used_stacks(rec, kept)
        graph.notes = list(rec.notes)
        graph.hazards = _hazards(rec)
        values = {_renumber(r, number, refs): v for r, v in self.values.items() if r.node in number}
        origins: dict[Ref, tuple[int, int]] = {}
        for key, ref in self.raw_refs.items():
            if ref.node in number:
                new = _renumber(ref, number, refs)
                if rec.trace[origins.get(new, key)[0]].op == "source" or new not in origins:
                    origins[new] = key
        return Functional(graph, values, origins)

    def _rename(self, outputs: dict[str, Ref]) -> None:
        """Whoever read a value that later became an input reads the input, which comes first."""
        for n in self.nodes:
            n.args = _replaced(n.args, self.renamed)
            n.kwargs = {k: _replaced(v, self.renamed) for k, v in n.kwargs.items()}
        for name, ref in outputs.items():
            outputs[name] = self.renamed.get(ref, ref)
        first = {r.node for r in self.renamed.values()}
        order = [n for n in self.nodes if n.id in first] + [n for n in self.nodes if n.id not in first]
        number = {n.id: i for i, n in enumerate(order)}
        refs: dict[Ref, Ref] = {}
        for n in order:
            n.args = _renumber(n.args, number, refs)
            n.kwargs = {k: _renumber(v, number, refs) for k, v in n.kwargs.items()}
        for i, n in enumerate(order):
            n.id = i
        self.nodes = order
        for name, ref in outputs.items():
            outputs[name] = _renumber(ref, number, refs)
        self.raw_refs = {k: _renumber(r, number, refs) for k, r in self.raw_refs.items()}
        self.values = {_renumber(r, number, refs): v for r, v in self.values.items()}

    def _forward(self, raw_index: int | None, number: dict[int, int]) -> int | None:
        if raw_index is None:
            return None
        ref = self.raw_refs.get((raw_index, 0))
        return number.get(ref.node) if ref is not None else None


_MOVING = {"t_", "transpose_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_"}


def _refs(x: Any) -> list[Ref]:
    if isinstance(x, Ref):
        return [x]
    return [r for y in x for r in _refs(y)] if isinstance(x, tuple) else []


def _replaced(x: Any, new: dict[Ref, Ref]) -> Any:
    if type(x) is Ref:
        return new.get(x, x)
    return tuple([_replaced(y, new) for y in x]) if type(x) is tuple else x


def _renumber(x: Any, number: dict[int, int], refs: dict[Ref, Ref]) -> Any:
    if type(x) is Ref:
        new = refs.get(x)
        if new is None:
            new = refs[x] = Ref(number[x.node], x.out)
        return new
    return tuple([_renumber(y, number, refs) for y in x]) if type(x) is tuple else x


def _hazards(rec: Recorder) -> list[Hazard]:
    """Uses of memory that a collective was at work on, one per pair of places."""
    found: dict[object, Hazard] = {}
    for raw, index, writes in rec.pending.hazards:
        issuer = rec.trace[index]
        assert issuer.comm is not None
        frames, issued = [
            rec.stacks.resolve(r.stack) or rec.stacks.resolve(r.forward_stack) for r in (raw, issuer)
        ]
        found.setdefault((frames, issued), Hazard(raw.op, writes, frames, issuer.comm, issued))
    return list(found.values())


def _used_stacks(rec: Recorder, nodes: list[Node]) -> list[Any]:
    """Resolved frames of the stacks in use; nodes are renumbered to them."""
    order: dict[int, int] = {0: 0}
    stacks: list[Any] = [()]
    for n in nodes:
        for field_name in ("stack", "forward_stack"):
            old = getattr(n, field_name)
            if old not in order:
                order[old] = len(stacks)
                stacks.append(rec.stacks.resolve(old))
            setattr(n, field_name, order[old])
    return stacks
