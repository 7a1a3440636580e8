"""What a recording shows by itself, without a reference: memory used while a collective is at work on
it, and sums whose summands were rounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spmdtypes.diagnostics.finding import Finding, Note, Span
from spmdtypes.diagnostics.rounding import Harmless, rounded_reductions
from spmdtypes.graph import Graph, Hazard


def with_recorded(
    findings: Sequence[Finding], graphs: Iterable[Graph | None], harmless: Harmless | None = None
) -> list[Finding]:
    """`findings` and what the recordings of the ranks show; the first graph is that of rank 0.

    What the others say of the same lines follows from a value that was used too early.
    """
    known = [g for g in graphs if g is not None]
    own: dict[object, Finding] = {}
    for graph in known:
        for hazard in graph.hazards:
            finding = _finding(hazard)
            if finding is not None:
                own.setdefault((finding.span, finding.notes[0].span), finding)
    early = list(own.values())
    rest = []
    for f in findings:
        cause = next((i for i, e in enumerate(early) if set(e.lines()) & set(f.lines())), None)
        if cause is None:
            rest.append(f)
        else:
            also = (*early[cause].also, Note(f.span, f.message), *f.also)
            early[cause] = replace(early[cause], also=also, border=early[cause].border or f.border)
    rounded = rounded_reductions(known[0], harmless) if known else []
    return early + rest + rounded


def _finding(hazard: Hazard) -> Finding | None:
    if not hazard.frames or not hazard.issued:
        return None  # a framework's own doing
    comm = hazard.comm
    at, issued = Span.of(hazard.frames[0]), Span.of(hazard.issued[0])
    op = hazard.op.split(".")[1].strip("_")
    over = f" over {', '.join(comm.axes)}" if comm.axes else ""
    what = "writes to memory" if hazard.writes else "reads a value"
    return Finding(
        "SPMD603",
        "error",
        f"{op} at line {at.line} {what} before its {comm.kind}{over}, issued at line {issued.line}, "
        "has been waited for",
        at,
        (Note(issued, f"the {comm.kind}{over} is issued here and still at work"),),
        hint="call .wait() on the handle first",
        evidence="proved",
        axes=comm.axes,
    )
