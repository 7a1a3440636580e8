"""Derive what an op's outputs denote from its index-notation spec and what its operands denote.

All mesh axes at once: variables take the layouts of the dims they walk (`core.bind`), then every
expression is evaluated to what is pending, scaled, or rank-dependent about it (`core.combine`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any

from spmdtypes.core import ranks
from spmdtypes.core.bind import Env, bind
from spmdtypes.core.combine import Rules, left_out
from spmdtypes.core.denotation import NONE, Denotation, RuleError
from spmdtypes.core.evaluate import Context, Restart, Run
from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.moves import concat, reshape
from spmdtypes.core.simplify import collapsed
from spmdtypes.core.spec import (
    ONE,
    Concat,
    OpSpec,
    Out,
    Reshape,
    Var,
)

Result = Denotation | RuleError | None


@dataclass(frozen=True)
class Derivation:
    """`notes`: assumptions made, in user terms. `known`: the op has a rule."""

    outs: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    known: bool = True


def derive(
    spec: OpSpec,
    operands: Sequence[Denotation],
    mesh: Mapping[str, int],
    *,
    averaged: frozenset[str] = frozenset(),
    grad_free: Sequence[bool] = (),
    streams: frozenset[str] = frozenset(),
    aligned: bool | None = True,
) -> tuple[Result, ...]:
    """One result per output of `spec` (None where the spec has None).

    `averaged`: pure data axes whose loss and gradients the contract averages. `grad_free[k]`: operand k
    does not depend on a parameter. `streams`: axes over which the random streams differ. `aligned`: the
    reference has the same op, with the same plain numbers; False: it has none; None: no reference.
    """
    return derivation(
        spec, operands, mesh, averaged=averaged, grad_free=grad_free, streams=streams, aligned=aligned
    ).outs


def derivation(
    spec: OpSpec,
    operands: Sequence[Denotation],
    mesh: Mapping[str, int],
    *,
    averaged: frozenset[str] = frozenset(),
    grad_free: Sequence[bool] = (),
    streams: frozenset[str] = frozenset(),
    aligned: bool | None = True,
) -> Derivation:
    """`derive` with the assumptions it made."""
    lost = NONE.union(*(d.varying for d in operands if d.value is None and d.guard is None))
    notes: list[str] = list(spec.assumes)

    def output(out: Out | Reshape | Concat, lost: frozenset[str]) -> Result:
        known = [replace(d.poisoned(lost, ""), varying=d.varying - lost) if lost else d for d in operands]
        return _Case(spec, known, mesh, averaged, tuple(grad_free), streams - lost, aligned, notes).output(
            out
        )

    outs: list[Result] = []
    for out in spec.outs:
        if out is None:
            outs.append(None)
            continue
        result = output(out, lost)
        if isinstance(result, RuleError) and result.poisoned is None and result.axes - lost:
            rest = output(out, lost | result.axes)
            if isinstance(rest, Denotation):
                result = replace_error(result, rest.poisoned(result.axes, result.message))
        outs.append(_without(result, lost, operands))
    return Derivation(tuple(outs), tuple(dict.fromkeys(notes)))


def _without(result: Result, lost: frozenset[str], operands: Sequence[Denotation]) -> Result:
    """The result with the axes that were already lost."""
    if not lost or result is None:
        return result
    reason = next((d.reason for d in operands if d.varying & lost and d.reason), "")
    if isinstance(result, RuleError):
        if result.poisoned is None:
            return result
        return replace_error(result, result.poisoned.poisoned(lost, reason))
    return result.poisoned(lost, reason)


def replace_error(e: RuleError, poisoned: Denotation | None) -> RuleError:
    return RuleError(e.kind, e.message, e.axes, e.operands, poisoned)


@dataclass
class _Case(Context):
    """One output of one op."""

    def output(self, out: Out | Reshape | Concat) -> Result:
        try:
            if isinstance(out, Reshape):
                ref_shape = out.ref_shape if self.aligned is True else None
                return reshape(self.operands[out.operand], out.shape, ref_shape, self.mesh)
            if isinstance(out, Concat):
                rules = Rules(self.mesh, self.averaged, {}, lambda v: v.local == v.ref, self.notes)
                return concat([self.operands[k] for k in out.operands], out.dim, rules)
            if any(isinstance(v, tuple) for v in out.vars):
                return self._merged(out)
            simpler = collapsed(out.value, self.operands)
            if simpler is not out.value:
                found = self._attempt(Out(out.vars, simpler))
                if found is not None:
                    return found
            return self._settled(out)
        except LayoutError as e:
            return self._fail(RuleError("unsupported" if e.unsupported else "layout", str(e)), out)
        except RuleError as e:
            return self._fail(e, out)

    def _merged(self, out: Out) -> Result:
        """Output dims of several variables: derived apart, then merged."""
        widths = [len(v) if isinstance(v, tuple) else 1 for v in out.vars]
        apart = tuple(w for v in out.vars for w in (v if isinstance(v, tuple) else (v,)))
        found = self.output(Out(apart, out.value))

        def merge(d: Denotation) -> Denotation:
            shapes = []
            for sizes in (d.local_shape, d.ref_shape):
                rest = iter(sizes)
                shapes.append(tuple(prod(islice(rest, n)) for n in widths))
            return reshape(d, shapes[0], shapes[1], self.mesh)

        if isinstance(found, RuleError):
            return replace_error(found, merge(found.poisoned) if found.poisoned else None)
        return None if found is None else merge(found)

    def _attempt(self, out: Out) -> Denotation | None:
        try:
            found = self._settled(out)
        except (RuleError, LayoutError):
            found = None
        self.chosen.clear()
        return found if isinstance(found, Denotation) and not found.varying else None

    def _settled(self, out: Out) -> Result:
        """The output once every open dim that needs a layout has one."""
        for _ in range(1 + len(self.mesh) * 4):
            try:
                return self._output(out)
            except Restart:
                continue
        raise RuleError("unsupported", "no layout found for the new dims")

    def _fail(self, e: RuleError, out: Out | Reshape | Concat) -> RuleError:
        if not e.axes:
            axes = NONE.union(*(d.axes for d in self.operands))
            e = RuleError(e.kind, e.message, axes, e.operands, e.poisoned)
        return e

    def _output(self, out: Out) -> Result:
        env = Env(self.mesh, chosen=self.chosen, aligned=self.aligned)
        bind(self.spec, self.operands, env, [out])
        run = Run(self, env)
        a = run.value(out.value)
        layout = self._assemble(out, run)
        if a.fault is None and a.partial & layout.axes:
            both = a.partial & layout.axes
            a = replace(a, fault=left_out(a.op, both))
        names = {v: d for d, v in enumerate(out.vars) if isinstance(v, Var)} | {ONE: ONE}
        value = a.value.mapped(ranks.renamer(names)) if a.value else None
        guard = a.guard.mapped(ranks.renamer(names)) if a.guard else None
        if a.fault is None and a.loose:
            a = replace(a, fault=RuleError("rank", "holds only on some ranks", frozenset(self.mesh)))
        if a.fault is None:
            if a.guard is not None and guard is None:
                a = replace(a, guard=None, zero=False)
            return Denotation(layout, a.partial, a.op, a.scale, value=value, guard=guard, zero=a.zero)
        axes = a.fault.axes or NONE.union(*(d.axes for d in self.operands)) or frozenset(self.mesh)
        tracked = Denotation(
            layout,
            a.partial - axes,
            a.op if a.partial - axes else "",
            a.scale,
            axes,
            a.fault.message,
            value,
            guard,
        )
        if value is not None or (guard is not None and not a.zero):
            return tracked
        e = a.fault
        return RuleError(e.kind, e.message, axes, e.operands, tracked.bare().poisoned(axes, e.message))

    def _assemble(self, out: Out, run: Run) -> Layout:
        parts: list[tuple[Layout, list[int]]] = []
        seen: set[int] = set()
        place = {v: d for d, v in enumerate(out.vars) if isinstance(v, Var)}
        if len(place) < sum(isinstance(v, Var) for v in out.vars):
            raise RuleError("unsupported", "one variable walks two output dims")
        for v in place:
            block = run.env.of.get(v)
            if block is None:
                raise RuleError("unsupported", f"size of output dim {place[v]} unknown")
            if id(block) in seen:
                continue
            seen.add(id(block))
            if any(w not in place for w in block.vars):
                raise RuleError(
                    "layout", f"dims in another order than the reference's: {block.layout.show()}"
                )
            layout = block.layout
            if layout.open and v in run.pinned and len(block.vars) == 1:
                local, ref = run.env.sizes(v)
                layout = Layout.replicated([local]) if local == ref else layout
            parts.append((layout, [place[w] for w in block.vars]))
        return Layout.join(parts, len(out.vars))


def _names(axes: Any) -> str:
    return ", ".join(sorted(axes))
