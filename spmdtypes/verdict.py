"""One judgement per border, from what the rules prove and what the experiment shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from spmdtypes.borders import Mismatch, mismatch
from spmdtypes.core.denotation import Denotation, RuleError, scale_mul
from spmdtypes.core.infer import Inference, Problem
from spmdtypes.graph import Ref
from spmdtypes.notation import Type

if TYPE_CHECKING:
    from spmdtypes.differential import Border

Status = Literal["right", "wrong", "unknown"]
UNDECIDED = ("unsupported", "missing")


@dataclass(frozen=True)
class Verdict:
    """`ref` is the border's value in the graph. `problem` or `mismatch` say what the rules found,
    `tested` what running the ranks showed; either may be absent."""

    border: str
    status: Status
    evidence: str
    ref: Ref | None
    type: Type
    expected: Denotation | None = None
    actual: Denotation | None = None
    problem: Problem | None = None
    mismatch: Mismatch | None = None
    tested: Border | None = None


def judge(
    border: str,
    declared: Type,
    inference: Inference,
    mesh: Mapping[str, int],
    tested: Border | None,
) -> Verdict:
    """The experiment decides where there is one; the rules say why. One that a low precision blurs does
    not overrule them."""
    ref = inference.graph.outputs.get(border)
    by_rule = _by_rule(border, declared, inference, ref, mesh)
    if tested is None or tested.kind == "untested":
        return by_rule
    if tested.ok:
        if tested.coarse and by_rule.status == "wrong":
            return _with(by_rule, "unknown", "unknown", tested)
        evidence = by_rule.evidence if by_rule.status == "right" else "tested"
        return _with(by_rule, "right", evidence, tested)
    return _with(by_rule, "wrong", by_rule.evidence if by_rule.status == "wrong" else "tested", tested)


def _with(v: Verdict, status: Status, evidence: str, tested: Border) -> Verdict:
    return Verdict(
        v.border, status, evidence, v.ref, v.type, v.expected, v.actual, v.problem, v.mismatch, tested
    )


def _by_rule(
    border: str, declared: Type, inference: Inference, ref: Ref | None, mesh: Mapping[str, int]
) -> Verdict:
    if ref is None:
        return Verdict(border, "unknown", "unknown", None, declared)
    actual = _completed(inference.values.get(ref), inference.graph.dtensors.get(border, {}))
    problem = inference.problems.get(ref)
    try:
        shape = _global_shape(declared, actual)
        expected = Denotation.from_type(declared, shape, mesh)
    except RuleError:
        return Verdict(border, "unknown", "unknown", ref, declared, None, actual, problem)
    evidence = inference.evidence.get(ref, "unknown")
    if problem is not None:
        decided = problem.error.kind not in UNDECIDED
        return Verdict(
            border,
            "wrong" if decided else "unknown",
            "tested" if problem.error.kind == "observed" else "proved" if decided else "unknown",
            ref,
            declared,
            expected,
            actual,
            problem,
        )
    if actual is None or evidence == "unknown":
        return Verdict(border, "unknown", "unknown", ref, declared, expected, actual)
    wrong = mismatch(actual, expected, mesh)
    return Verdict(
        border, "wrong" if wrong else "right", evidence, ref, declared, expected, actual, None, wrong
    )


def _completed(actual: Denotation | None, placements: Mapping[str, str]) -> Denotation | None:
    """A DTensor says itself which sums are pending; whoever reads it completes them."""
    pending = {a for a, p in placements.items() if p.startswith("P") and "avg" not in p}
    if actual is None or not pending or actual.op not in ("", "sum"):
        return actual
    left = actual.partial - pending
    # equal on n ranks and summed: n times the local value
    alike = pending - actual.partial - actual.layout.axes - actual.varying
    scale = scale_mul(actual.scale, tuple((a, -1) for a in sorted(alike)))
    return replace(actual.bare(), partial=left, op=actual.op if left else "", scale=scale)


def _global_shape(declared: Type, actual: Denotation | None) -> tuple[int, ...]:
    """Sizes the type names, else those of the value."""
    if declared.dims is None:
        return actual.ref_shape if actual is not None else ()
    if all(isinstance(d.size, int) for d in declared.dims) and (
        declared.dims or actual is None or not actual.ref_shape
    ):
        return tuple(int(d.size) for d in declared.dims)
    return actual.ref_shape if actual is not None else ()
