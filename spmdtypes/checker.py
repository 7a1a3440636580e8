"""From a program to a report: capture, align, infer, test, judge."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from spmdtypes.borders import averaged_axes, batch_axes, expected_types, without_axes
from spmdtypes.capture import align
from spmdtypes.contracts import Program
from spmdtypes.core import draws
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.infer import Inference, Oracle, infer
from spmdtypes.diagnostics.compose import compose
from spmdtypes.diagnostics.finding import Finding, Note, Span, in_order
from spmdtypes.diagnostics.hazards import with_recorded
from spmdtypes.diagnostics.trace import place
from spmdtypes.differential import Border, Divergence, Experiment
from spmdtypes.graph import Graph
from spmdtypes.mesh import shrunk
from spmdtypes.notation import Type
from spmdtypes.ops import registry
from spmdtypes.report import Report
from spmdtypes.verdict import Verdict, judge


@dataclass(frozen=True)
class Options:
    """`test`: run the ranks for real when the program is small enough (`max_ranks`, `max_elements` of all
    inputs and parameters together). `seeds` of those runs."""

    test: bool = True
    seeds: tuple[int, ...] = (0, 1, 2)
    max_ranks: int = 16
    max_elements: int = 2_000_000
    timeout: float = 60.0


@dataclass
class _Run:
    """One pass: a graph relative to a reference that keeps `kept` axes, and what was learnt."""

    inference: Inference
    verdicts: list[Verdict]
    experiment: Experiment | None = None
    kept: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def check_program(program: Program, options: Options | None = None) -> Report:
    """Does `program` compute on its mesh what it computes on the mesh of ones?"""
    options = options or Options()
    start = time.perf_counter()
    small = smaller(program, options) if options.test else None
    if small is None:
        report = _check_proved(program)
    elif small is program:
        report = _check_tested(program, options)
    else:
        report = both(_check_proved(program), _check_tested(small, options), small.mesh)
    return replace(report, seconds=time.perf_counter() - start)


def smaller(program: Program, options: Options) -> Program | None:
    """The program on the largest mesh that can be run here: its own, or one whose long axes have their
    smallest prime factor as size. None: even that is too large, or the sizes are not known."""
    sizes = [_numel(t) for t in (*program.inputs.values(), *program.params.values())]
    if None in sizes or sum(s or 0 for s in sizes) > options.max_elements:
        return None
    mesh = shrunk(program.mesh, options.max_ranks)
    if mesh is None:
        return None
    return program if mesh == program.mesh else replace(program, mesh=mesh)


def both(proved: Report, tested: Report, small: Mapping[str, int]) -> Report:
    """Rules on the whole mesh, an experiment on a smaller one. What only the rules complain of is a
    warning when the experiment shows nothing wrong."""
    shape = ", ".join(f"{a}={n}" for a, n in small.items())
    findings = list(proved.findings)
    if tested.failures:
        findings = list(proved.findings)
    elif tested.errors and not proved.errors:
        findings += tested.errors
    elif proved.errors and not tested.errors:
        findings = [replace(f, severity="warning") for f in findings]
    counts = {k: max(proved.counts.get(k, 0), tested.counts.get(k, 0)) for k in ("proved", "assumed")}
    total = sum(proved.counts.values())
    counts["tested"] = min(
        tested.counts.get("tested", 0) + tested.counts.get("proved", 0), total - counts["proved"]
    )
    counts["unknown"] = max(0, total - sum(counts.values()))
    note = f"run for real on the smaller mesh {shape}" if not tested.failures else f"could not run on {shape}"
    return replace(
        proved, findings=in_order(findings), counts=counts, assumptions=(*proved.assumptions, note)
    )


def _numel(t: Type) -> int | None:
    sizes = [d.size for d in t.dims or ()]
    return prod(int(s) for s in sizes) if all(isinstance(s, int) for s in sizes) else None


# -- by experiment and rules --------------------------------------------------------------------


def _check_tested(program: Program, options: Options) -> Report:
    from spmdtypes import differential

    found = differential.run(program, seeds=options.seeds, timeout=options.timeout)
    if found.divergence is not None:
        return conclude(program, found)
    if found.stalled:
        note = f"could not be tested by running it: {found.failures[0].message}"
        report = _check_proved(program)
        return replace(report, assumptions=(*report.assumptions, note))
    if found.failures:
        f = found.failures[0]
        at = f"{f.frames[0].file}:{f.frames[0].line}: " if f.frames else f"{program.file}:{program.line}: "
        return Report(program.name, failures=(f"{at}error: {f.error}: {f.message}",), file=str(program.file))
    run = _infer_tested(program, found)
    means = _means_of_means(run.inference)
    if means and any(v.status == "wrong" for v in run.verdicts):
        # These ranks' means are averaged by declaration: test the other axes against a reference
        # that keeps these, and rely on the rules for them.
        kept = tuple(a for a in program.mesh if a in means or a in found.kept_axes)
        mesh = {a: n if a in kept else 1 for a, n in program.mesh.items()}
        again = differential.run(program, seeds=options.seeds, reference_mesh=mesh, timeout=options.timeout)
        warnings = _warnings(run.inference)
        run = _infer_tested(program, again)
        run.verdicts = [_assumed(v) for v in run.verdicts]
        findings = _findings(program, run) or warnings
    else:
        if found.kept_axes:  # nothing was tested along these
            run.verdicts = [_assumed(v) for v in run.verdicts]
        findings = _findings(program, run)
    return _report_tested(program, found, run, findings)


def conclude(
    program: Program,
    found: Experiment,
    more: Callable[[Inference, Mapping[str, int]], list[Verdict]] | None = None,
) -> Report:
    """The report on a program that was run by somebody else; `more` judges what the program itself claims."""
    if found.divergence is not None:
        return _report(program, [_diverging(found.divergence, program)], Counter(), None, found)
    run = _infer_tested(program, found)
    if more is not None:
        run.verdicts = run.verdicts + more(run.inference, run.inference.graph.mesh)
    return _report_tested(program, found, run, _findings(program, run))


def _report_tested(program: Program, found: Experiment, run: _Run, findings: list[Finding]) -> Report:
    """The report of an experiment, with what only its recording shows."""
    if found.crossed and any(f.is_error for f in findings):
        findings = [_crossed(found.crossed[0], program, findings)]
    plain = found.rounded or found
    findings = with_recorded(findings, [r.graph for r in plain.ranks], plain.same_rounding)
    return _report(program, findings, _counts(run.verdicts), run.inference, run.experiment)


def _assumed(v: Verdict) -> Verdict:
    return replace(v, evidence="assumed") if v.status == "right" else v


def _infer_tested(program: Program, found: Experiment) -> _Run:
    mesh = {a: n for a, n in found.mesh.items() if a not in found.kept_axes}
    first = found.ranks[0].graph
    if first is None:  # nothing was recorded: only the borders are known
        blank = Inference(Graph(mesh, dict.fromkeys(mesh, 0)))
        types = {b: x.type or Type(()) for b, x in found.borders.items()}
        return _Run(blank, _judge(types, blank, mesh, found.borders), found, found.kept_axes)
    aligned = align.align(
        first, found.reference[0].graph, [r.graph for r in found.ranks[1:] if r.graph is not None]
    )
    types = _border_types(program, aligned.graph, found.kept_axes)
    graph = aligned.graph
    run = _Run(_infer(program, graph, mesh, found.kept_axes, None), [], found, found.kept_axes)
    run.verdicts = _judge(types, run.inference, mesh, found.borders)
    coarse = any(b.coarse for b in found.borders.values())  # readings of rounded values settle nothing
    if not coarse and any(v.status != "right" or v.evidence == "tested" for v in run.verdicts):
        informed = _infer(program, graph, mesh, found.kept_axes, found.oracle())
        informed.assumptions += [a for a in run.inference.assumptions if a not in informed.assumptions]
        run.inference = informed
        by_rules = {v.border: v for v in run.verdicts}
        informed_verdicts = _judge(types, informed, mesh, found.borders)
        run.verdicts = [_explained(v, by_rules.get(v.border)) for v in informed_verdicts]
    return run


def _explained(v: Verdict, by_rules: Verdict | None) -> Verdict:
    """What a run only shows to be wrong, the rules may have explained: equal or unequal random numbers."""
    if v.status != "wrong" or by_rules is None or by_rules.problem is None or v.problem is None:
        return v
    better = v.problem.error.kind == "observed" and by_rules.problem.error.kind == "random"
    return by_rules if better else v


def _border_types(program: Program, graph: Graph, kept: Sequence[str]) -> dict[str, Type]:
    types = expected_types(program, graph.outputs)
    return {k: without_axes(t, kept, program.mesh) for k, t in types.items()}


def _judge(
    types: Mapping[str, Type], inference: Inference, mesh: Mapping[str, int], tested: Mapping[str, Border]
) -> list[Verdict]:
    names = [*types, *(b for b in tested if b not in types)]
    return [judge(b, types.get(b, Type(())), inference, mesh, tested.get(b)) for b in names]


def _infer(
    program: Program,
    graph: Graph,
    mesh: Mapping[str, int],
    kept: Sequence[str],
    oracle: Oracle | None,
) -> Inference:
    shown, remarks = draws.dealt(replace_mesh(graph, mesh), batch_axes(program) - set(kept))
    inputs = input_denotations(program, graph, mesh, kept)
    averaged = averaged_axes(program) - set(kept)
    found = infer(shown, inputs, registry.build, oracle=oracle, averaged=averaged)
    draws.narrow(found)
    found.assumptions += remarks
    return found


def replace_mesh(graph: Graph, mesh: Mapping[str, int]) -> Graph:
    """The graph seen on a mesh without some axes: groups span what is left of theirs."""
    if mesh == graph.mesh:
        return graph
    nodes = []
    for n in graph.nodes:
        if n.comm is not None and any(a not in mesh for a in n.comm.axes):
            left = tuple(a for a in n.comm.axes if a in mesh)
            n = replace(n, comm=replace(n.comm, axes=left), op=n.op if left else f"{n.op}.outside")
        nodes.append(n)
    return replace(graph, mesh=dict(mesh), nodes=nodes)


def input_denotations(
    program: Program, graph: Graph, mesh: Mapping[str, int], kept: Sequence[str] = ()
) -> dict[str, Denotation]:
    """What the graph's named inputs denote, by the contract."""
    declared = {**program.params, **program.inputs}
    found = {}
    for node in graph.inputs():
        t = declared.get(node.name)
        if t is None or t.dims is None or node.name in found:
            continue
        t = without_axes(t, kept, program.mesh)
        shape = tuple(int(d.size) for d in t.dims or ())
        try:
            found[node.name] = Denotation.from_type(t, shape, mesh)
        except RuleError:
            continue  # reported when the types were bound
    return found


# -- by rules alone -----------------------------------------------------------------------------


def _check_proved(program: Program) -> Report:
    """For programs too large to run: representative ranks are recorded under fake tensors."""
    from spmdtypes.capture.fake import capture

    mesh = dict(program.mesh)
    ones = dict.fromkeys(mesh, 1)
    first = capture(program, mesh, 0)
    others = [capture(program, mesh, r) for r in representative_ranks(mesh)[1:]]
    return conclude_recorded(program, first, capture(program, ones, 0), others)


def conclude_recorded(
    program: Program, first: Graph, reference: Graph, others: Sequence[Graph], strict: bool = True
) -> Report:
    """The report on a program of which one rank, some others, and the mesh of ones were recorded. Without
    `strict`, a join of parts that no placement describes is not known to be wrong: it may be a buffer."""
    mesh = dict(program.mesh)
    aligned = align.align(first, reference, others)
    inference = _infer(program, aligned.graph, mesh, (), None)
    types = _border_types(program, aligned.graph, ())
    run = _Run(inference, [_as_read(v) for v in _judge(types, inference, mesh, {})])
    if not strict:
        run.verdicts = [_undecided_join(v, inference) for v in run.verdicts]
    findings = _findings(program, run)
    findings = with_recorded(findings, [aligned.graph, first, *others])
    findings += [_diverging_nodes(d, aligned.graph, program) for d in aligned.divergences]
    return _report(program, findings, _counts(run.verdicts), inference, None)


def _undecided_join(v: Verdict, inference: Inference) -> Verdict:
    p = v.problem
    if v.status != "wrong" or p is None or p.error.kind != "layout":
        return v
    joins = inference.graph.nodes[p.node].op.startswith(("aten.cat.", "aten.stack."))
    return replace(v, status="unknown", evidence="unknown") if joins else v


def _as_read(v: Verdict) -> Verdict:
    """A number off by a product of axis sizes may be divided by it before anybody sees it."""
    off = v.border.startswith("metric:") and v.mismatch is not None and v.mismatch.kind in ("scale", "double")
    return replace(v, status="unknown", evidence="unknown") if off else v


def representative_ranks(mesh: Mapping[str, int]) -> list[int]:
    """Row-major numbers of rank 0 and, along each axis, coordinate 1 and the last."""
    names = list(mesh)
    strides = {a: prod(mesh[b] for b in names[i + 1 :]) for i, a in enumerate(names)}
    found = [0]
    for axis, n in mesh.items():
        for c in (1, n - 1):
            if 0 < c < n and c * strides[axis] not in found:
                found.append(c * strides[axis])
    return found


# -- findings -----------------------------------------------------------------------------------


def _findings(program: Program, run: _Run) -> list[Finding]:
    suspects: dict[str, Sequence[tuple[int, str]]] = {}
    if run.experiment is not None:
        for v in run.verdicts:
            if v.status == "wrong":
                suspects[v.border] = run.experiment.suspects(v.border)
    findings = compose(run.verdicts, program, run.inference, suspects)
    if not findings:
        findings = _warnings(run.inference)
    return findings


def _means_of_means(inference: Inference) -> set[str]:
    """Axes over which the rules took a ratio of partial sums for a mean of per-rank means."""
    return {
        a
        for _, text in inference.assumptions
        if "mean of per-rank means" in text
        for a in _axes_in(text, inference)
    }


def _axes_in(text: str, inference: Inference) -> list[str]:
    words = text.replace(",", " ").split()
    return [a for a in inference.graph.mesh if a in words]


_WARNED = (
    (
        "mean of per-rank means",
        "SPMD303",
        ": every rank divides by its own count, so samples weigh differently",
    ),
    (draws.DEALT, "SPMD502", ": fold the rank into the seed to have other ones"),
)


def _warnings(inference: Inference) -> list[Finding]:
    found = []
    for node, text in inference.assumptions:
        for sign, code, more in _WARNED:
            if sign in text:
                frames = place(inference.graph, inference.graph.nodes[node])
                found.append(
                    Finding(
                        code,
                        "warning",
                        text + more,
                        Span.of(frames[0]) if frames else None,
                        evidence="assumed",
                        axes=tuple(_axes_in(text, inference)),
                    )
                )
    return _one_a_line(found)


def _one_a_line(findings: Sequence[Finding]) -> list[Finding]:
    kept: dict[object, Finding] = {}
    for f in findings:
        kept.setdefault((f.code, f.span.line if f.span else None, f.axes), f)
    return list(kept.values())


def _diverging(d: Divergence, program: Program) -> Finding:
    """Ranks that wait for different collectives."""
    notes: list[Note] = []
    span = None
    for rank, place_ in zip(d.ranks, d.parted, strict=True):
        if place_ is not None:
            notes.append(Note(Span(*place_), f"rank {rank} goes this way"))
    if d.last is not None:
        notes.append(Note(Span(*d.last), "up to here the ranks went the same way"))
    for rank, call in zip(d.ranks, d.calls, strict=True):
        if call is None or not call.frames:
            continue
        at = Span.of(call.frames[0])
        span = span or at
        notes.append(Note(at, f"rank {rank} issues {call} here"))
        notes += [Note(Span.of(f), f"called from {f.function.rpartition('.')[2]}") for f in call.frames[1:5]]
    return Finding(
        "SPMD601",
        "error",
        f"the ranks issue different collectives: {d}",
        span or (Span(str(program.file), program.line) if program.file else None),
        tuple(notes),
        evidence="tested",
        axes=next((c.axes for c in d.calls if c is not None), ()),
        border=None,
    )


def _crossed(d: Divergence, program: Program, findings: Sequence[Finding]) -> Finding:
    """Ranks meet in a collective that each of them issues for something else."""
    first = in_order(findings)[0]
    met = _diverging(d, program)
    return replace(
        met,
        code="SPMD602",
        message=f"{first.message}; ranks {d.ranks[0]} and {d.ranks[1]} meet there from different lines",
        notes=(*met.notes, *first.notes)[:10],
        border=first.border,
        also=first.also,
    )


def _diverging_nodes(d: align.Divergence, graph: Graph, program: Program) -> Finding:
    """Recorded rank programs that part at a collective."""
    at = ", ".join(f"{a} {c}" for a, c in d.coords.items())
    notes = []
    for node, where, who in ((d.local, graph, "rank 0"), (d.other, d.other_graph, f"the rank at {at}")):
        frames = place(where, node) if node is not None else ()
        if frames and node is not None:
            notes.append(Note(Span.of(frames[0]), f"{who} goes on with {node.op} here"))
    return Finding(
        "SPMD601",
        "error",
        f"rank 0 and the rank at {at} issue different collectives",
        notes[0].span if notes else Span(str(program.file), program.line) if program.file else None,
        tuple(notes),
        evidence="proved",
        axes=tuple(a for a, c in d.coords.items() if c),
    )


def _counts(verdicts: Sequence[Verdict]) -> Counter[str]:
    return Counter(v.evidence if v.status != "unknown" else "unknown" for v in verdicts)


def report_of(
    program: Program, findings: Sequence[Finding], verdicts: Sequence[Verdict], inference: Inference
) -> Report:
    """The report of what the rules found."""
    return _report(program, findings, _counts(verdicts), inference, None)


def _report(
    program: Program,
    findings: Sequence[Finding],
    counts: Mapping[str, int],
    inference: Inference | None,
    experiment: Experiment | None,
) -> Report:
    texts = list(program.assumptions)
    unknown: dict[str, int] = {}
    if inference is not None:
        texts += [t for _, t in inference.assumptions]
        unknown = _unknown_ops(inference)
    if experiment is not None:
        texts += experiment.notes
    return Report(
        program.name,
        in_order(findings),
        dict(counts),
        unknown,
        tuple(dict.fromkeys(texts)),
        file=str(program.file) if program.file else None,
        nodes=len(inference.graph.nodes) if inference is not None else 0,
    )


def _unknown_ops(inference: Inference) -> dict[str, int]:
    """Operations without a rule that a border depends on, with how often they occur."""
    graph = inference.graph
    wanted = {ref.node for ref in graph.outputs.values()}
    found: Counter[str] = Counter()
    for node in reversed(graph.nodes):
        if node.id in wanted:
            wanted |= {r.node for r in node.refs()}
            if node.op in inference.unknown_ops:
                found[node.op] += 1
    return dict(found)
