"""One pass over a graph: what every value denotes, and why."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, Protocol

from spmdtypes.core import compose, provenance, ranks
from spmdtypes.core.collectives import collective
from spmdtypes.core.denotation import NONE, Denotation, RuleError
from spmdtypes.core.engine import Derivation, Result, derivation
from spmdtypes.core.layout import Layout
from spmdtypes.core.same import (
    Column,
    Fact,
    Memo,
    Patterns,
    Row,
    Step,
    all_plain,
    atom_names,
    pattern,
    renamed,
    result_renamed,
)
from spmdtypes.core.simulate import local_shape
from spmdtypes.core.spec import Const, Fn, Operand, OpSpec, Out, Var
from spmdtypes.graph import Graph, Lit, Node, Ref, TensorMeta

BuildSpec = Callable[[Node, Sequence[Operand]], OpSpec | None]


class Oracle(Protocol):
    """What really running the ranks and the reference shows."""

    def readings(self, ref: Ref) -> Sequence[Denotation] | None:
        """Placements under which the ranks' values give the reference value; None: nothing known."""

    def agrees(self, ref: Ref, den: Denotation) -> bool | None:
        """Does this reading hold? None: nothing known."""


@dataclass(frozen=True)
class Problem:
    """A value without a reading, at the node where it began."""

    node: int
    error: RuleError
    operands: tuple[Ref, ...]


@dataclass
class Inference:
    """What is known of every value of `graph`: a row of facts per node.

    `problems`: values without a reading over some axis; one computed from such a value points at the
    same problem. `evidence`: how each value's own step is known: "proved", "assumed", "tested",
    "unknown". `conflicts`: (value, what the rule said, what the oracle saw). `constraints`: (axis,
    size of a dim it cuts) -> number of distinct placements that need it to divide.
    """

    graph: Graph
    rows: list[Row] = field(default_factory=list, repr=False)
    problems: dict[Ref, Problem] = field(default_factory=dict)
    unknown_ops: Counter[str] = field(default_factory=Counter)
    assumptions: list[tuple[int, str]] = field(default_factory=list)
    conflicts: list[tuple[Ref, Denotation, Sequence[Denotation]]] = field(default_factory=list)
    constraints: Counter[tuple[str, int]] = field(default_factory=Counter)

    @cached_property
    def values(self) -> Mapping[Ref, Denotation]:
        return Column(self.rows, attrgetter("den"))

    @cached_property
    def evidence(self) -> Mapping[Ref, str]:
        return Column(self.rows, attrgetter("evidence"))

    def became(self, ref: Ref, axis: str) -> list[tuple[int, str]]:
        """The nodes where this value's standing over `axis` arose, with a sentence each."""
        return provenance.became(self.graph, self.values, ref, axis)


def infer(
    graph: Graph,
    inputs: Mapping[str, Denotation],
    build_spec: BuildSpec,
    *,
    oracle: Oracle | None = None,
    averaged: frozenset[str] = frozenset(),
    memo: dict[Any, Any] | None = None,
) -> Inference:
    """What every value of `graph` denotes, given what its inputs denote (by name).

    `averaged`: data axes whose loss and gradients the contract averages. `memo` may be shared between
    calls on graphs over one mesh, with the same rules.
    """
    shared = Memo() if memo is None else memo.setdefault(averaged, Memo())
    run = _Pass(graph, inputs, build_spec, oracle, averaged, shared)
    collecting = gc.isenabled()
    gc.disable()  # what is made stays, and a collection walks the whole graph
    try:
        for node in graph.nodes:
            run.visit(node)
    finally:
        if collecting:
            gc.enable()
    run.settle()
    return run.result


class _Pass:
    """The state of one pass. A step that occurs again, on operands no rule can tell apart, is looked up."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Denotation],
        build_spec: BuildSpec,
        oracle: Oracle | None,
        averaged: frozenset[str],
        memo: Memo,
    ) -> None:
        self.graph, self.inputs, self.build_spec = graph, inputs, build_spec
        self.oracle, self.averaged, self.memo = oracle, averaged, memo
        self.mesh = {a: n for a, n in graph.mesh.items() if n > 1}
        self.result = Inference(graph)
        self.rows, self.values = self.result.rows, self.result.values
        self.patterns = Patterns(memo)
        self.settled: dict[Any, Step] = {}
        self.counted: set[int] = set()
        self.doubted: set[int] = set()
        self.parted = any(n.apart for n in graph.nodes)
        self.reads: dict[tuple[str, tuple[Ref, ...]], list[Node]] = defaultdict(list)
        self.compared = any(n.ref is not None or n.ref_outs is not None for n in graph.nodes)
        self.fits: dict[tuple[Layout, tuple[int, ...]], bool] = {}

    # -- one node -------------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        key = self._key(node, self.rows)
        strays = self._strays(node) if self.parted else NONE
        step = self.settled.get(key)
        if step is not None and not strays:
            self.rows.append(step.row)
            if not step.known:
                self.result.unknown_ops[node.op] += 1
            return
        if node.op == "input":
            found = Derivation((self._input(node),))
            free = not any(m is not None and m.requires_grad for m in node.outs)
        elif node.op == "const":
            found, free = Derivation(self._const(node)), True
        else:
            refs = tuple(node.refs())
            facts = [self.rows[r.node][r.out] for r in refs]
            free = all(f is not None and f.grad_free for f in facts)
            found = self._derive(node, refs, facts, key)
        if strays:
            found = self._of_strays(found, strays)
        row = self._record(node, found, free)
        self.rows.append(row)
        if self.oracle is None and not strays and not found.notes and all_plain(row):
            self.settled[key] = Step(row, found.known)

    def _key(self, node: Node, rows: Any) -> Any:
        """Everything a step's result depends on. `rows[node][out]`: what is known of an operand."""
        op, kwargs, comm = node.op, node.kwargs, node.comm
        source: Denotation | tuple[int, ...] | None = None
        if op == "input":
            source = self.inputs.get(node.name)
        elif op == "const" and node.ref_outs is not None:
            source = self.patterns.outs(node.ref_outs)
        return (
            op,
            pattern(node.args, rows),
            pattern((kwargs,), rows) if kwargs else None,
            self.patterns.outs(node.outs),
            None if comm is None else self.patterns.comm(comm),
            node.rng_axes,
            self._aligned(node),
            source,
        )

    def _strays(self, node: Node) -> frozenset[str]:
        """Axes along which some rank lacks the step that made an operand, though it takes this one."""
        made = [self.graph.nodes[r.node].apart for r in node.refs()]
        from_root = node.comm is not None and node.comm.root is not None
        return NONE if from_root or not any(made) else frozenset(a for m in made for a in m) - set(node.apart)

    def _of_strays(self, found: Derivation, axes: frozenset[str]) -> Derivation:
        text = f"not every rank of {', '.join(sorted(axes))} takes the step that made this"
        lost = [o if isinstance(o, Denotation) else o.poisoned if o is not None else None for o in found.outs]
        outs = [d and RuleError("unsupported", text, axes, poisoned=d.poisoned(axes, text)) for d in lost]
        return replace(found, outs=tuple(outs))

    def _record(self, node: Node, found: Derivation, free: bool) -> Row:
        for note in found.notes:
            self.result.assumptions.append((node.id, note))
        row: list[Fact | None] = []
        for k, meta in enumerate(node.outs):
            result = found.outs[k] if k < len(found.outs) else None
            known = None if meta is None else self._fact(node, k, meta, result, bool(found.notes), free)
            row.append(known)
        return tuple(row)

    def _fact(self, node: Node, k: int, meta: TensorMeta, result: Result, assumed: bool, free: bool) -> Fact:
        ref = Ref(node.id, k)
        if result is None:
            result = RuleError("missing", "nothing is known of this output", frozenset(self.mesh))
        if isinstance(result, Denotation) and not self._fits(result, meta):
            result = self._misfit(node, result, meta)
        evidence = "assumed" if assumed else "proved"
        den = self._consult(ref, result) if self.oracle is not None else None
        if isinstance(den, RuleError):
            den = self._after_error(node, ref, meta, den)
            evidence = "unknown"
        elif den is not None:
            if den is not result:
                evidence = "tested"
        elif isinstance(result, Denotation):
            den = result
            inherited = self._inherited(node) if den.varying and not (den.value or den.guard) else None
            if inherited is not None:
                self.result.problems[ref] = inherited
                evidence = "unknown"
        else:
            den = self._after_error(node, ref, meta, result)
            evidence = "unknown"
        den = self._intern(self._with_atom(den, ref, meta))
        named = bool((den.value is not None and den.value.keys) or den.guard is not None)
        lost = bool(den.varying) or ref in self.result.problems
        token = self.memo.token(den, meta, free if self.averaged else None)
        return Fact(den, evidence, token, free, not named and not lost)

    def _after_error(self, node: Node, ref: Ref, meta: TensorMeta, error: RuleError) -> Denotation:
        """Report the error unless it follows from a lost operand; go on with what is still known."""
        inherited = self._inherited(node)
        error = self._softened(node, error)
        lost = NONE.union(*(self.values[r].varying for r in node.refs() if r in self.result.problems))
        if inherited is None or (
            error.kind not in ("unsupported", "layout", "missing") and not error.axes & lost
        ):
            inherited = Problem(node.id, error, tuple(node.refs()))
        self.result.problems[ref] = inherited
        if error.poisoned is not None and self._fits(error.poisoned, meta):
            return replace(error.poisoned, varying=error.poisoned.varying | lost)
        axes = error.axes | NONE.union(*(self.values[r].axes for r in node.refs()))
        return Denotation(
            Layout.replicated(meta.shape), varying=axes or frozenset(self.mesh), reason=error.message
        )

    def _inherited(self, node: Node) -> Problem | None:
        found = next((self.result.problems[r] for r in node.refs() if r in self.result.problems), None)
        undecided = found is not None and found.node not in self.doubted and node.phase == "forward"
        if found is not None and undecided and self._weighs(node, found):
            self.doubted.add(found.node)
        return found

    def _weighs(self, node: Node, problem: Problem) -> bool:
        """`node` multiplies a per-rank mean (a quotient, or its denominator, is the `problem`) by the
        rank's own amount: that may be a right term of a sum again."""
        refs, over = tuple(node.refs()), problem.error.axes
        dens = [self.values[r] for r in refs]
        lost = [k for k, r in enumerate(refs) if self.result.problems.get(r) == problem]
        own = [
            k
            for k, d in enumerate(dens)
            if d.op == "sum" and d.partial >= over and not d.varying and not d.scale
        ]
        if len(lost) != 1 or len(own) != 1 or node.comm is not None:
            return False
        spec = self._spec(node, refs)
        if spec is None or not self._is_mean(problem):
            return False
        return self._linear(node, spec, dens, own, over) and self._linear(node, spec, dens, lost, over)

    def _is_mean(self, problem: Problem) -> bool:
        """A quotient of pending sums, or a bound that keeps such a denominator off zero."""
        wanted = {"product": ("div",), "nonlinear": ("max", "clamp", "clamp_min")}.get(problem.error.kind)
        spec = self._spec(self.graph.nodes[problem.node], problem.operands) if wanted else None
        outs = [o.value for o in spec.outs if isinstance(o, Out)] if spec is not None else []
        return wanted is not None and any(isinstance(e, Fn) and e.name in wanted for e in outs)

    def _linear(
        self, node: Node, spec: OpSpec, dens: Sequence[Denotation], of: list[int], over: frozenset[str]
    ) -> bool:
        """Is it a pending sum when only the operands `of` are?"""
        plain = [replace(d.bare(), partial=d.partial - over, varying=d.varying - over) for d in dens]
        trial = [
            replace(d, partial=d.partial | over if k in of else d.partial, scale=())
            for k, d in enumerate(plain)
        ]
        trial = [replace(d, op="sum" if d.partial else "") for d in trial]
        outs = derivation(spec, trial, self.mesh, aligned=self._aligned(node)).outs
        return all(o is None or (isinstance(o, Denotation) and o.partial >= over) for o in outs)

    def settle(self) -> None:
        """Problems that later steps may make good are no proof of a mistake."""
        for ref, found in self.result.problems.items():
            if found.node in self.doubted:
                e = found.error
                text = f"{e.message}; what comes of it is then weighted by each rank's own amount"
                self.result.problems[ref] = replace(
                    found, error=RuleError("unsupported", text, e.axes, e.operands)
                )

    def _softened(self, node: Node, error: RuleError) -> RuleError:
        """A part of a cut dim read by position is a mistake, unless all parts are read, one after another."""
        if node.apart or (
            error.kind == "rank" and self._aligned(node) is False
        ):  # the reference takes no such step
            return RuleError("unsupported", error.message, error.axes, error.operands, error.poisoned)
        if error.kind != "layout" or node.comm is not None or not error.axes:
            return error
        if not self.reads:
            for n in self.graph.nodes:
                self.reads[n.op, tuple(n.refs())].append(n)
        whole = [m for r in node.refs() if (m := self.graph.meta(r)) is not None]
        parts = self.reads[node.op, tuple(node.refs())]
        shapes = {m.shape for n in parts for m in n.outs if m is not None}
        if len(parts) < 2 or len(whole) != 1 or len(shapes) != 1:
            return error
        if len(parts) * prod(shapes.pop()) != prod(whole[0].shape):
            return error
        text = f"{error.message}; its parts are taken one by one"
        return RuleError("unsupported", text, error.axes, error.operands, error.poisoned)

    def _fits(self, den: Denotation, meta: TensorMeta) -> bool:
        key = (den.layout, meta.shape)
        found = self.fits.get(key)
        if found is None:
            found = self.fits[key] = local_shape(den.layout, self.graph.coords) == meta.shape
        return found

    def _misfit(self, node: Node, den: Denotation, meta: TensorMeta) -> RuleError:
        mine = local_shape(den.layout, self.graph.coords)
        if node.op == "input":
            text = f"{node.name} is {den}: {_shape(mine)} on this rank, but it is {_shape(meta.shape)}"
            return RuleError("layout", text, den.layout.axes or frozenset(self.mesh))
        text = f"rule gives local shape {_shape(mine)}, the tensor has {_shape(meta.shape)}"
        return RuleError("unsupported", text, den.axes or frozenset(self.mesh))

    def _intern(self, den: Denotation) -> Denotation:
        den = self.memo.interned.setdefault(den, den)
        if id(den) in self.counted:
            return den
        self.counted.add(id(den))
        for d in range(den.ndim):
            for a in den.axes_of(d):
                self.result.constraints[a, den.ref_shape[d]] += 1
        return den

    def _with_atom(self, den: Denotation, ref: Ref, meta: TensorMeta) -> Denotation:
        """Integers that all ranks agree on get a name, so that bounds on them can be followed."""
        integer = meta.dtype[0] in "iu"
        if not integer or den.value or den.guard or den.varying or den.partial or den.scale:
            return den
        dims = tuple(d for d in range(den.ndim) if d not in den.layout.open_dims)
        form = ranks.Lin(0, ((("u", (ref.node, ref.out), dims), 1),))
        return replace(den, value=ranks.Value(form, form))

    # -- sources --------------------------------------------------------------------------------

    def _input(self, node: Node) -> Result:
        den = self.inputs.get(node.name)
        return den if den is not None else RuleError("missing", f"nothing says how {node.name} is placed")

    def _const(self, node: Node) -> tuple[Result, ...]:
        """The same tensor on every rank and in the reference, unless its literals say otherwise."""
        out: list[Result] = []
        for k, meta in enumerate(node.outs):
            ref = node.ref_outs[k] if node.ref_outs and k < len(node.ref_outs) else None
            if meta is None:
                out.append(None)
            elif ref is not None and ref.shape != meta.shape:
                text = f"a constant of shape {_shape(meta.shape)} here, {_shape(ref.shape)} in the reference"
                out.append(RuleError("unsupported", text, frozenset(self.mesh)))
            else:
                out.append(self._filled(meta.shape, node.args))
        return tuple(out)

    def _filled(self, shape: tuple[int, ...], args: tuple[Any, ...]) -> Result:
        """A constant whose numbers may be known: one number throughout, or one a position."""
        numbers = args[0] if args and isinstance(args[0], tuple) else args
        if not numbers or not all(isinstance(x, (bool, int, float, Lit)) for x in numbers):
            return Denotation.replicate(shape)
        first = numbers[0]
        if all(x == first and type(x) is type(first) for x in numbers):
            vars = tuple(Var(f"c{d}") for d in range(len(shape)))
            spec = OpSpec.of(Out(vars, Const(first)), sizes=dict(zip(vars, shape)))
            return derivation(spec, (), self.mesh).outs[0]
        if not any(isinstance(x, Lit) for x in numbers):
            return Denotation.replicate(shape)
        text = "a constant whose numbers differ from the reference's"
        lost = Denotation.replicate(shape).poisoned(frozenset(self.mesh), text)
        return RuleError("rank", text, frozenset(self.mesh), poisoned=lost)

    # -- rules ----------------------------------------------------------------------------------

    def _derive(
        self, node: Node, refs: tuple[Ref, ...], facts: Sequence[Fact | None], key: Any
    ) -> Derivation:
        dens = [self.values[r] for r in refs]
        free = tuple(f is not None and f.grad_free for f in facts)
        streams = frozenset(a for a in node.rng_axes or () if a in self.mesh)
        names = atom_names(dens)
        if names:
            dens = [self._intern(renamed(d, names)) for d in dens]
            key = self._key(node, self._renamed_rows(refs, facts, dens))
        found = self.memo.derived.get(key)
        if found is None:
            found = self._fresh(node, refs, dens, free, streams)
            outs = tuple(self._intern(o) if isinstance(o, Denotation) else o for o in found.outs)
            found = self.memo.derived[key] = replace(found, outs=outs)
        if not found.known:
            self.result.unknown_ops[node.op] += 1
        if names:
            back = {v: k for k, v in names.items()}
            found = Derivation(tuple(result_renamed(o, back) for o in found.outs), found.notes)
        return self._read_through(node, refs, found) if names and node.comm is None else found

    def _renamed_rows(
        self, refs: Sequence[Ref], facts: Sequence[Fact | None], dens: Sequence[Denotation]
    ) -> dict[int, dict[int, Fact]]:
        rows: dict[int, dict[int, Fact]] = defaultdict(dict)
        for r, f, d in zip(refs, facts, dens):
            meta = self.graph.meta(r)
            assert f is not None and meta is not None
            token = self.memo.token(d, meta, f.grad_free if self.averaged else None)
            rows[r.node][r.out] = replace(f, den=d, token=token)
        return rows

    def _read_through(self, node: Node, refs: tuple[Ref, ...], found: Derivation) -> Derivation:
        """What has no reading by its operands may have one by what these were made of."""
        outs = list(found.outs)
        loose = {r for r in refs if (d := self.values[r]).varying and d.guard and not d.value}
        for k, was in enumerate(outs) if loose else ():
            if was is None or (isinstance(was, Denotation) and not was.varying):
                continue
            made = self._described(Ref(node.id, k))
            deeper = compose.composed(*made, lambda r: self._described(r, loose=True)) if made else None
            if deeper is None:
                continue
            out, operands = deeper
            dens = [self.values[r] for r in operands]
            spec = OpSpec.of(out)
            (better,) = derivation(spec, dens, self.mesh, aligned=self._aligned(node)).outs
            if isinstance(better, Denotation) and not better.varying:
                outs[k] = better
        return replace(found, outs=tuple(outs))

    def _spec(self, node: Node, refs: Sequence[Ref]) -> OpSpec | None:
        try:
            return self.build_spec(node, [self._operand(k, r, self.values[r]) for k, r in enumerate(refs)])
        except ValueError:
            return None

    def _described(self, ref: Ref, loose: bool = False) -> tuple[Out, tuple[Ref, ...]] | None:
        """How a value is computed, in index notation over the operands of its node."""
        node, refs = self.graph.nodes[ref.node], tuple(self.graph.nodes[ref.node].refs())
        den = self.values.get(ref)
        if loose and (den is None or not den.varying or den.value is not None):
            return None
        if node.op in ("input", "const") or node.comm is not None or not refs:
            return None
        spec = self._spec(node, refs)
        # sizes that no operand determines would be lost
        out = compose.plain(spec, ref.out) if spec is not None and not spec.sizes else None
        return None if out is None else (out, refs)

    def _fresh(
        self,
        node: Node,
        refs: Sequence[Ref],
        dens: Sequence[Denotation],
        free: tuple[bool, ...],
        streams: frozenset[str],
    ) -> Derivation:
        if node.comm is not None:
            return Derivation(collective(node.comm, dens, self.mesh, len(node.outs)))
        operands = [self._operand(k, r, d) for k, (r, d) in enumerate(zip(refs, dens))]
        try:
            spec = self.build_spec(node, operands)
        except ValueError as e:
            return Derivation(self._unknown(node, dens, str(e)), known=False)
        if spec is None:
            return Derivation(self._unknown(node, dens, f"no rule for {node.op}"), known=False)
        return derivation(
            spec,
            dens,
            self.mesh,
            averaged=self.averaged,
            grad_free=free,
            streams=streams,
            aligned=self._aligned(node),
        )

    def _aligned(self, node: Node) -> bool | None:
        if not self.compared:
            return None
        return node.ref is not None or node.ref_outs is not None

    def _operand(self, k: int, ref: Ref, den: Denotation) -> Operand:
        meta = self.graph.meta(ref)
        shape = meta.shape if meta is not None else den.local_shape
        return Operand(k, shape, den.ref_shape, meta.dtype if meta is not None else "f32")

    def _unknown(self, node: Node, dens: Sequence[Denotation], why: str) -> tuple[Result, ...]:
        """An op without a rule: of equal operands it is equal, of others nothing is known."""
        axes = NONE.union(*(d.axes for d in dens)) | frozenset(node.rng_axes or ())
        literal = any(_has_lit(x) for x in (*node.args, *node.kwargs.values()))
        same = all(d.is_replicated for d in dens) and not literal and not axes
        out: list[Result] = []
        for meta in node.outs:
            if meta is None:
                out.append(None)
            elif same:
                out.append(Denotation.replicate(meta.shape))
            else:
                over = axes or frozenset(self.mesh)
                lost = Denotation(Layout.replicated(meta.shape), varying=over, reason=why)
                out.append(RuleError("unsupported", why, over, tuple(range(len(dens))), lost))
        return tuple(out)

    # -- oracle ---------------------------------------------------------------------------------

    def _consult(self, ref: Ref, result: Result) -> Denotation | RuleError | None:
        """The reading to go on with when the oracle knows the value; None: the rule's result stands."""
        assert self.oracle is not None
        tracked = isinstance(result, Denotation) and (result.guard is not None or result.value is not None)
        if isinstance(result, Denotation) and not result.varying:
            agrees = self.oracle.agrees(ref, result)
            if agrees is not False:
                return result if agrees else None
            seen = self.oracle.readings(ref) or ()
            self.result.conflicts.append((ref, result, seen))
            if seen:
                return simplest(seen)
            text = f'the ranks do not hold "{result}" of the reference value, nor any other placement'
            axes = result.axes or frozenset(self.mesh)
            return RuleError("observed", text, axes, poisoned=result.poisoned(axes, text))
        if tracked:
            return None
        seen = self.oracle.readings(ref) or ()
        return simplest(seen) if seen else None


def simplest(readings: Sequence[Denotation]) -> Denotation:
    """The reading with the fewest pending axes, factors and cuts."""
    return min(
        readings, key=lambda d: (len(d.varying), len(d.scale), len(d.partial), len(d.layout.sizes), str(d))
    )


def _shape(s: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, s)) + "]"


def _has_lit(x: Any) -> bool:
    return isinstance(x, Lit) or (isinstance(x, (tuple, list)) and any(map(_has_lit, x)))
