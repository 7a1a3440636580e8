"""Where a wrong border's value first stops being what the reference has: by numbers, without rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from spmdtypes.borders import sharding_axes, without_axes
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.differential.experiment import Experiment
from spmdtypes.differential.layout import global_shape
from spmdtypes.differential.oracle import Oracle
from spmdtypes.graph import Node, Ref

MOST = 8
Bad = Callable[[Ref], bool | None]  # None: the value is unknown


def suspects(experiment: Experiment, border: str) -> list[tuple[int, str]]:
    """Nodes of rank 0's graph with a sentence each, the first ones the likeliest; empty when nothing is
    known. After the nodes where a reading was lost come those where the pending reductions among their
    operands arose.
    """
    graph = experiment.ranks[0].graph if experiment.ranks else None
    if graph is None or border not in graph.outputs or border not in experiment.borders:
        return []
    oracle = experiment.oracle()
    start = graph.outputs[border]
    readings = oracle.readings(start)
    if readings is None:
        return []
    bad, sentence = _trouble(oracle, readings, _expected(experiment, border, oracle.mesh))
    origins = _origins(graph.nodes, start, bad)[:MOST]
    found = {ref.node: sentence(ref, oracle) for ref in origins}
    if sentence is _say_lost:
        for operand in [o for ref in origins for o in graph.nodes[ref.node].refs()]:
            pending = _first_of(oracle, operand).partial
            if pending:
                for ref in _origins(graph.nodes, operand, _pending(oracle, pending)):
                    found.setdefault(ref.node, _say_pending(_first_of(oracle, operand)))
    return list(found.items())[:MOST]


def _say_pending(den: Denotation) -> str:
    return f"becomes a pending {den.op} over {', '.join(sorted(den.partial))} here"


def _expected(experiment: Experiment, border: str, mesh: dict[str, int]) -> Denotation | None:
    """What the declared type says of the local value, before the outer wrapper's reductions."""
    type_ = experiment.borders[border].type
    if type_ is None or type_.dims is None:
        return None
    pending = type_.partial
    if border.startswith("grad:"):
        pending += tuple((a, op) for a, op in experiment.grads.items() if a not in sharding_axes(type_))
    kept = without_axes(replace(type_, partial=pending), experiment.kept_axes, experiment.mesh)
    try:
        return Denotation.from_type(kept, global_shape(kept), mesh)
    except (RuleError, ValueError):
        return None


Sentence = Callable[[Ref, Oracle], str]


def _trouble(oracle: Oracle, readings: object, expected: Denotation | None) -> tuple[Bad, Sentence]:
    """Which property of the border's value is wrong, and how to say where it begins."""
    found = list(readings) if isinstance(readings, (list, tuple)) else []
    if not found:
        return _lost(oracle), _say_lost
    den = found[0]
    extra = den.partial - (expected.partial if expected else frozenset())
    if extra:
        text = _say_pending(replace(den, partial=extra))
        return _pending(oracle, extra), lambda ref, _: text
    factor = den.scale_in(oracle.mesh) / (expected.scale_in(oracle.mesh) if expected else 1.0)
    if abs(factor - 1) > 1e-9:
        if abs(_factor_of(oracle, den, backward=True) - 1) < 1e-9:  # right by itself, not for the wrapper
            return lambda ref: False, lambda ref, _: f'is "{den}" where "{expected}" is declared'
        return _scaled(oracle), lambda ref, o: f"is off by the factor {_factor(o, ref):g} from here on"
    cut = den.layout.axes ^ (expected.layout.axes if expected else frozenset())
    if cut:
        return _cut(oracle, cut), lambda ref, o: f"is laid out as {_first_of(o, ref)} from here on"
    return _lost(oracle), _say_lost


def _first_of(oracle: Oracle, ref: Ref) -> Denotation:
    """The simplest reading; an empty one when there is none."""
    readings = oracle.readings(ref)
    return readings[0] if readings else Denotation.replicate(())


def _lost(oracle: Oracle) -> Bad:
    def bad(ref: Ref) -> bool | None:
        readings = oracle.readings(ref)
        return None if readings is None else not readings

    return bad


def _say_lost(ref: Ref, oracle: Oracle) -> str:
    graph = oracle.experiment.ranks[0].graph
    assert graph is not None
    known = []
    for operand in dict.fromkeys(graph.nodes[ref.node].refs()):
        readings = oracle.readings(operand)
        if readings:
            known.append(f'"{readings[0]}"' if str(readings[0]) else "a replicated scalar")
    given = f" (from {', '.join(known)})" if known else ""
    return f"no placement relates the ranks' values to the reference from here on{given}"


def _pending(oracle: Oracle, axes: frozenset[str]) -> Bad:
    def bad(ref: Ref) -> bool | None:
        readings = oracle.readings(ref)
        return None if readings is None else bool(readings) and axes <= readings[0].partial

    return bad


def _scaled(oracle: Oracle) -> Bad:
    def bad(ref: Ref) -> bool | None:
        readings = oracle.readings(ref)
        if readings is None:
            return None
        return bool(readings) and abs(_factor(oracle, ref) - 1) > 1e-9

    return bad


def _factor(oracle: Oracle, ref: Ref) -> float:
    """By how much the local value is too large. Under a loss that ranks average, the cotangents of what
    differs between the ranks are n times the reference's, and so they should be."""
    return _factor_of(oracle, _first_of(oracle, ref), _in_backward(oracle, ref))


def _factor_of(oracle: Oracle, den: Denotation, backward: bool) -> float:
    found = 1 / den.scale_in(oracle.mesh)
    axes = [a for a in sorted(den.layout.axes | den.partial) if oracle.mesh[a] > 1]
    averaged = oracle.experiment.averaged
    certain = math.prod(oracle.mesh[a] for a in axes if a in averaged)
    if averaged or not backward:
        return found / (certain if backward else 1)
    possible = {
        math.prod(oracle.mesh[a] for a in some)
        for k in range(len(axes) + 1)
        for some in itertools.combinations(axes, k)
    }
    return 1.0 if any(abs(found / p - 1) < 1e-9 for p in possible) else found


def _in_backward(oracle: Oracle, ref: Ref) -> bool:
    graph = oracle.experiment.ranks[0].graph
    assert graph is not None
    return graph.nodes[ref.node].phase not in ("forward", "recompute")


def _cut(oracle: Oracle, axes: frozenset[str]) -> Bad:
    def bad(ref: Ref) -> bool | None:
        readings = oracle.readings(ref)
        return None if readings is None else bool(readings) and axes <= readings[0].layout.axes

    return bad


def _origins(nodes: list[Node], start: Ref, bad: Bad) -> list[Ref]:
    """Bad values with no bad value behind them; unknown values are looked through."""
    origins: list[Ref] = []
    seen = {start}
    stack = [start]
    while stack:
        ref = stack.pop()
        behind = _bad_behind(nodes, ref, bad)
        if (ref == start or bad(ref)) and not behind:
            origins.append(ref)
        for b in behind:
            if b not in seen:
                seen.add(b)
                stack.append(b)
    return sorted(origins, key=lambda r: r.node)


def _bad_behind(nodes: list[Node], ref: Ref, bad: Bad) -> list[Ref]:
    """The nearest bad values among the operands, through unknown ones."""
    out: list[Ref] = []
    todo = list(nodes[ref.node].refs())
    seen: set[Ref] = set(todo)
    while todo:
        r = todo.pop()
        verdict = bad(r)
        if verdict:
            out.append(r)
        elif verdict is None:
            for q in nodes[r.node].refs():
                if q not in seen:
                    seen.add(q)
                    todo.append(q)
    return out
