"""From verdicts to findings: one cause, one finding, told in the user's terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spmdtypes.borders import Mismatch, batch_axes, factor_number
from spmdtypes.contracts import Program
from spmdtypes.core.infer import Inference, Problem
from spmdtypes.core.scalar import SCALARS
from spmdtypes.diagnostics.finding import Evidence, Finding, Note, Span
from spmdtypes.diagnostics.hints import hint_for
from spmdtypes.diagnostics.trace import (
    Step,
    ancestors,
    backward_call,
    collectives_on_path,
    meeting,
    own_backwards,
    place,
    placements_by_index,
    reaches,
    unused_collectives,
    where_pending,
    where_standing,
)
from spmdtypes.graph import Frame, Graph, Node
from spmdtypes.ops.norm import by_batch
from spmdtypes.verdict import Verdict

_MAX_NOTES = 12
# The weighed sum that drives a program whose result is no loss: ours, not the user's.
_DRIVEN = "output.loss"
_SEEN = ("metric:",)
_LEFT = ("param:", "state:", "norm:")  # borders a step leaves behind
_LATE = ("grad:", *_LEFT, *_SEEN)
_ROUNDING = ("round", "trunc", "floor", "ceil")
_OF_PROBLEM = {
    "nonlinear": "SPMD102",
    "mix": "SPMD103",
    "product": "SPMD104",
    "layout": "SPMD401",
    "axis": "SPMD402",
    "scale": "SPMD301",
    "rank": "SPMD105",
    "random": "SPMD501",
}

_CODE_OF_BORDER = {"param": "SPMD701", "state": "SPMD701", "norm": "SPMD703", "metric": "SPMD702"}
# Scalar functions and the ops that are nothing else.
_PLAIN = {
    "recip": ("reciprocal", "div"),
    "sq": ("square", "pow"),
    "max": ("clamp", "clamp_min", "maximum"),
    "min": ("clamp", "clamp_max", "minimum"),
    "trunc": ("to_copy", "copy"),
    "pow": ("pow",),
}


@dataclass
class Cause:
    """What several borders have in common: why they are wrong, and where that began."""

    code: str
    axes: tuple[str, ...]
    nodes: list[tuple[int, str]] = field(default_factory=list)  # where it began, with a sentence each
    verdicts: list[Verdict] = field(default_factory=list)


def compose(
    verdicts: Sequence[Verdict],
    program: Program,
    inference: Inference,
    suspects: Mapping[str, Sequence[tuple[int, str]]],
) -> list[Finding]:
    """Findings for the wrong borders. `suspects[border]`: where the experiment saw it go wrong."""
    causes: dict[object, Cause] = {}
    for v in verdicts:
        if v.status != "wrong":
            continue
        cause = _cause(v, program, inference, suspects.get(v.border, ()))
        known = causes.setdefault(_key(cause, v, inference.graph), cause)
        known.verdicts.append(v)
        if known is not cause:
            known.nodes += [n for n in cause.nodes if n not in known.nodes]
    merged = _merged(list(causes.values()), inference.graph)
    for c in merged:
        began = [inference.graph.nodes[n].op for n, _ in c.nodes[:1]]
        if any(map(by_batch, began)) and set(c.axes) <= batch_axes(program):
            c.code = "SPMD304"
    return [_finding(c, program, inference) for c in _leading(merged, inference.graph)]


def _merged(causes: list[Cause], graph: Graph) -> list[Cause]:
    """Causes that lead back to the same node (other than an input) are one."""
    kept: list[Cause] = []
    for c in causes:
        mine = {n for n, _ in c.nodes if graph.nodes[n].op != "input"}
        same = next((k for k in kept if k.axes == c.axes and mine & {n for n, _ in k.nodes}), None)
        if same is None:
            kept.append(c)
        else:
            same.verdicts += c.verdicts
            same.nodes += [n for n in c.nodes if n not in same.nodes]
    return kept


def _key(cause: Cause, v: Verdict, graph: Graph) -> object:
    """Borders with equal keys share their cause: one place, or one omission for several gradients."""
    if v.border.startswith("grad:") and cause.code in ("SPMD202", "SPMD301", "SPMD302"):
        return ("scale", cause.axes)
    if v.problem is not None and cause.code != "SPMD201":
        return (v.problem.node,)
    if v.border.startswith("grad:") or not cause.nodes:
        return (cause.code, cause.axes)
    return tuple(place(graph, graph.nodes[n])[:1] for n, _ in cause.nodes[:1])


def _leading(causes: list[Cause], graph: Graph) -> list[Cause]:
    """Causes that are told: what a script reads and logs is wrong by itself only when all else is right,
    and what a step leaves only when the gradients it was made from are."""
    metrics = [c for c in causes if _only(c, _SEEN)]
    rest = [c for c in causes if c not in metrics]
    left = [c for c in rest if _only(c, _LEFT)]
    before = [c for c in rest if c not in left]
    told = _primary(before, graph) if before else left
    if not told:
        return metrics
    for c in (*metrics, *(left if before else ())):
        told[0].verdicts += c.verdicts
    return told


def _only(cause: Cause, kinds: tuple[str, ...]) -> bool:
    return all(v.border.startswith(kinds) for v in cause.verdicts)


def _primary(causes: list[Cause], graph: Graph) -> list[Cause]:
    """A wrong forward value makes gradients wrong too: those are consequences, told with it."""
    forward = [c for c in causes if any(not v.border.startswith(_LATE) for v in c.verdicts)]
    if not forward:
        return causes
    lead = min(forward, key=lambda c: c.nodes[0][0] if c.nodes else len(graph.nodes))
    kept = []
    for c in causes:
        began = c.nodes[0][0] if c.nodes else len(graph.nodes)
        follows = c is not lead and reaches(graph, {n for n, _ in lead.nodes}, began)
        if c is lead or not (follows or c not in forward):
            kept.append(c)
        else:
            lead.verdicts += c.verdicts
    return kept


def _cause(v: Verdict, program: Program, inference: Inference, suspects: Sequence[tuple[int, str]]) -> Cause:
    p = v.problem
    if p is not None and (p.error.kind in _OF_PROBLEM or p.error.kind == "observed"):
        return _problem_cause(v, p, inference)
    if v.mismatch is not None and v.ref is not None and v.mismatch.kind != "varying":
        nodes: list[Step] = []
        for axis in v.mismatch.axes:
            nodes += [x for x in where_standing(inference, v.ref, axis) if x not in nodes]
        return Cause(_mismatch_code(v, program), v.mismatch.axes, nodes or list(suspects[:3]))
    nodes = list(suspects[:3])
    if v.ref is not None and nodes:
        nodes += meeting(inference, nodes[0][0], v.ref) + placements_by_index(inference, nodes[0][0], v.ref)
    return Cause(_tested_code(v), _tested_axes(v), nodes)


def _problem_cause(v: Verdict, p: Problem, inference: Inference) -> Cause:
    """A value without a reading: the op that has none, then where its operands became what they are."""
    axes = tuple(sorted(p.error.axes))
    pending = [
        (r, a) for r in p.operands for a in axes if r in inference.values and a in inference.values[r].partial
    ]
    began: list[Step] = []
    for r, a in pending:
        began += [x for x in where_pending(inference, r, a)[:3] if x not in began]
    if p.error.kind in ("mix", "layout") and began and inference.graph.nodes[p.node].phase == "backward":
        # one way the gradient came lacks the reduction that the others have
        return Cause(
            "SPMD201", axes, [*began, (p.node, f"joins a gradient that is complete: {p.error.message}")]
        )
    nodes: list[Step] = [(p.node, in_user_words(p.error.message, inference.graph.nodes[p.node])), *began]
    for r in p.operands:
        for a in axes:
            if (r, a) not in pending:
                nodes += [x for x in where_standing(inference, r, a, 2) if x not in nodes]
    if v.ref is not None and p.error.kind in ("rank", "layout"):
        nodes += meeting(inference, p.node, v.ref) + placements_by_index(inference, p.node, v.ref)
    return Cause(_problem_code(v, p, inference.graph), axes, nodes)


def _problem_code(v: Verdict, p: Problem, graph: Graph) -> str:
    """The rule's kind, refined by where it was broken."""
    kind, node, gradient = p.error.kind, graph.nodes[p.node], v.border.startswith("grad:")
    if kind == "scale" and gradient:
        return "SPMD302"
    if kind == "observed" and node.comm is not None:
        return "SPMD602"
    if kind == "axis" and gradient and node.phase == "backward":
        return "SPMD203"
    if kind in ("layout", "axis"):
        return "SPMD402" if node.comm is not None else "SPMD401"
    if kind == "rank" and "positions" in p.error.message:
        return "SPMD404"
    if kind == "random" and "draws the same numbers" in p.error.message:
        return "SPMD502"
    if kind == "nonlinear":
        if p.error.message.partition(" ")[0] in _ROUNDING:
            return "SPMD801"
        if v.border.startswith(("result:", *_LEFT)) and "sqrt" in node.op and _after_backward(graph, node):
            return "SPMD703"
    return _OF_PROBLEM.get(kind) or _tested_code(v)


def _after_backward(graph: Graph, node: Node) -> bool:
    """Computed from gradients?"""
    return any(n.phase == "backward" for n in ancestors(graph, node))


def _mismatch_code(v: Verdict, program: Program) -> str:
    m = v.mismatch
    assert m is not None
    kind, _, key = v.border.partition(":")
    gradient = kind == "grad"
    if m.kind == "partial":
        if gradient:
            return "SPMD201"
        if kind in _CODE_OF_BORDER:
            return _CODE_OF_BORDER[kind]
        if kind == "result":
            return "SPMD701" if key in program.params else "SPMD702"
        return "SPMD101"
    if m.kind == "double":
        return "SPMD202" if gradient else "SPMD301"
    if m.kind == "scale":
        grown = bool(m.factor) and all(k > 0 for _, k in m.factor)
        if gradient:
            return "SPMD202" if grown else "SPMD302"
        return "SPMD301"
    return "SPMD203" if gradient else "SPMD403"


def _tested_code(v: Verdict) -> str:
    kind, _, _ = v.border.partition(":")
    t = v.tested
    if kind == "grad":
        return "SPMD302" if t is not None and t.ratio is not None else "SPMD204"
    if kind in _CODE_OF_BORDER:
        return _CODE_OF_BORDER[kind]
    if t is not None and t.kind == "replicas differ":
        return "SPMD701" if kind in ("result", "param") else "SPMD105"
    return "SPMD301" if t is not None and t.ratio is not None else "SPMD106"


def _tested_axes(v: Verdict) -> tuple[str, ...]:
    if v.problem is not None:
        return tuple(sorted(v.problem.error.axes))
    return v.mismatch.axes if v.mismatch is not None else ()


# -- findings -----------------------------------------------------------------------------------


def _finding(cause: Cause, program: Program, inference: Inference) -> Finding:
    graph = inference.graph
    lead = next((v for v in cause.verdicts if v.border != _DRIVEN), cause.verdicts[0])
    notes: list[Note] = []
    span: Span | None = None
    for node, sentence in cause.nodes:
        frames = place(graph, graph.nodes[node])
        if not frames:
            continue
        span = span or Span.of(_users(frames))
        notes += _with_callers(frames, sentence)
    notes += _context(cause, graph, lead)
    if span is None and program.file is not None:
        span = Span(str(program.file), program.line)
    finding = Finding(
        code=cause.code,
        severity="warning" if cause.code == "SPMD304" or _only(cause, _SEEN) else "error",
        message=_message(cause, lead, program, graph),
        span=span,
        notes=tuple(_distinct(notes))[:_MAX_NOTES],
        evidence=_evidence(cause.verdicts),
        axes=cause.axes,
        border=lead.border,
        also=tuple(dict.fromkeys(Note(None, _also(v, program)) for v in _others(cause, lead))),
    )
    return replace(finding, hint=hint_for(finding, _cure(lead)))


def _users(frames: Sequence[Frame]) -> Frame:
    """The innermost frame outside of installed packages, if there is one."""
    return next((f for f in frames if "site-packages" not in f.file), frames[0])


def _others(cause: Cause, lead: Verdict) -> list[Verdict]:
    return [v for v in cause.verdicts if v is not lead and v.border != _DRIVEN][:6]


def _cure(v: Verdict) -> str | None:
    """What the wrong value must be multiplied by, as a product of axis sizes."""
    if v.mismatch is None or not v.mismatch.factor:
        return None
    up = [a for a, k in v.mismatch.factor if k < 0]
    down = [a for a, k in v.mismatch.factor if k > 0]
    return "*".join(up or ["1"]) + "".join(f"/{a}" for a in down)


def _evidence(verdicts: Iterable[Verdict]) -> Evidence:
    """The best we have for any of them."""
    order: tuple[Evidence, ...] = ("proved", "tested", "assumed", "unknown")
    return next((e for e in order if any(v.evidence == e for v in verdicts)), "unknown")


def _distinct(notes: Iterable[Note]) -> list[Note]:
    seen: set[object] = set()
    kept = []
    for n in notes:
        key = (n.span.file, n.span.line) if n.span is not None else n.text
        if key not in seen:
            seen.add(key)
            kept.append(n)
    return kept


def _context(cause: Cause, graph: Graph, lead: Verdict) -> list[Note]:
    """Collectives that bear on the cause: those whose result nobody uses, and those on the way."""
    notes: list[Note] = []
    for node in unused_collectives(graph):
        if node.comm is not None and (not cause.axes or set(node.comm.axes) & set(cause.axes)):
            over = ", ".join(node.comm.axes)
            told = f"the result of this {node.comm.kind} over {over} is not used"
            notes += _with_callers(place(graph, node), told)
    if lead.ref is None:
        return notes
    border = graph.nodes[lead.ref.node]
    for node in collectives_on_path(graph, lead.ref, limit=3):
        if node.comm is not None:
            over = ", ".join(node.comm.axes) or "its group"
            notes += _with_callers(place(graph, node), f"{node.comm.kind} over {over} on the way")
    loss = graph.outputs.get("output")
    if loss is not None and cause.code in ("SPMD202", "SPMD302") and lead.border.startswith("grad:"):
        notes += _with_callers(place(graph, graph.nodes[loss.node])[:1], "the loss is computed here")
    if cause.code[:5] in ("SPMD2", "SPMD3"):
        for f in own_backwards(graph, lead.ref):
            notes.append(Note(Span.of(f), f"the gradient passes {f.function} here"))
    notes += _declarations(cause, graph)
    call = backward_call(graph, border)
    if call is not None:
        notes.append(Note(Span.of(call), "backward starts here"))
    return notes


def _declarations(cause: Cause, graph: Graph, most: int = 2) -> list[Note]:
    """Where the parameters whose gradients are wrong were made."""
    wrong = {v.border.partition(":")[2] for v in cause.verdicts}
    notes: list[Note] = []
    for node in graph.inputs():
        frames = graph.frames(node)
        if node.name in wrong and frames and len(notes) < most:
            notes.append(Note(Span.of(frames[0]), f"{node.name} is made here"))
    return notes


def _with_callers(frames: Sequence[Frame], text: str, most: int = 2) -> list[Note]:
    """A place and, for what happens in a helper, who called it."""
    if not frames:
        return []
    callers = [Note(Span.of(f), f"called from {f.function.rpartition('.')[2]}") for f in frames[1 : most + 1]]
    return [Note(Span.of(frames[0]), text), *callers]


# -- sentences ----------------------------------------------------------------------------------


def subject(border: str, program: Program) -> str:
    kind, _, key = border.partition(":")
    if kind == "grad":
        shown = key if key not in program.input_grads else f"input {key}"
        return f"the gradient of {shown}"
    if kind == "param":
        return f"{key} after the step"
    if kind == "result":
        return f"{key} after the step" if key in program.params else f'the result "{key}"'
    if kind == "state":
        owner, _, name = key.rpartition(".")
        return f"the optimizer's {name} of {owner} after the step"
    if kind == "norm":
        return f"the norm that {key.rpartition(' ')[0] or key} returns"
    if kind == "metric":
        return f"the number read at {key}"
    if kind == "assert":
        return f"what is asserted to be {key}"
    rest = border.removeprefix("output").lstrip(".")
    return f'the output "{rest}"' if rest not in ("", "output") else "the output"


def _over(axes: Sequence[str]) -> str:
    return " and ".join(axes)


def in_user_words(message: str, node: Node) -> str:
    """Rules speak of scalar functions ("recip is not linear"); the user wrote an op."""
    first, _, rest = message.partition(" ")
    op = node.op.split(".")[1].strip("_") if node.op.count(".") > 1 else node.op
    if first not in SCALARS and first != "opaque":
        return message
    return (
        f"{op} {rest}"
        if first == op or first == "opaque" or op in _PLAIN.get(first, ())
        else f"{op} ({first}) {rest}"
    )


def _message(cause: Cause, lead: Verdict, program: Program, graph: Graph) -> str:
    what = subject(lead.border, program)
    if cause.code == "SPMD304":
        return (
            f"{what} depends on how samples are dealt to ranks of {_over(cause.axes)}: local batch statistics"
        )
    if cause.code == "SPMD201":
        return f"{what} is a partial sum over {_over(cause.axes)}: every rank holds only its own share"
    if lead.problem is not None and lead.problem.error.kind in _OF_PROBLEM:
        told = in_user_words(lead.problem.error.message, graph.nodes[lead.problem.node])
        return f"{what} is wrong: {told}"
    if lead.mismatch is not None and lead.mismatch.kind != "varying":
        return _mismatch_message(what, lead.mismatch, lead, program.mesh)
    if cause.code == "SPMD602":
        over = _over(cause.axes)
        return f"{what} {_tested_sentence(lead)}: ranks of {over} meet in a collective for other values"
    return f"{what} {_tested_sentence(lead)}"


def _mismatch_message(what: str, m: Mismatch, v: Verdict, mesh: Mapping[str, int]) -> str:
    over = _over(m.axes)
    if m.kind == "partial":
        return f"{what} is a partial sum over {over}: every rank holds only its own share"
    if m.kind == "double":
        much = f"{factor_number(m.factor, mesh)} times too large"
        return f"{what} is complete on every rank of {over} and reduced over it again: {much}"
    if m.kind == "scale":
        times = factor_number(m.factor, mesh)
        size = f"{times} times too large" if times > 1 else f"{1 / times} times too small"
        return f"{what} is {size} (a factor of the size of {over})"
    return f'{what} is laid out as "{v.actual}" where "{v.expected}" is declared'


def _tested_sentence(v: Verdict) -> str:
    t = v.tested
    if t is None:
        return "is not what one device computes"
    if t.ratio is not None:
        return f"is {t.ratio:.6g} times what one device computes"
    if t.kind == "replicas differ":
        return f"differs between ranks that should agree (relative difference {max(t.spread, t.error):.2g})"
    if t.kind in ("shape", "missing"):
        return f"has no proper value on every rank ({t.detail or t.kind})"
    return f"is not what one device computes (relative error {t.error:.2g})"


def _also(v: Verdict, program: Program) -> str:
    return f"{subject(v.border, program)} {_tested_sentence(v) if v.tested is not None else 'is wrong'}"
