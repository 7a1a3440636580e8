"""`--format json`: the stable schema of a run.

    {"version": 1,
     "exit_code": 0 | 1 | 2,
     "programs": [{"name", "file", "exit_code", "seconds", "nodes",
                   "evidence": {"proved", "tested", "assumed", "unknown"},
                   "unknown_ops": {op: uses}, "assumptions": [text], "failures": [text],
                   "findings": [FINDING]}],
     "failures": [{"message", "file", "line"}]}

FINDING: {"code", "severity": "error" | "warning" | "note", "message", "hint", "evidence",
"axes": [name], "border", "span": SPAN | null, "notes": [{"text", "span"}], "also": [{"text", "span"}]}.
SPAN: {"file", "line", "col", "end_line", "end_col"}; lines from 1, columns from 0, ends exclusive.
Fields may be added within a version; none changes its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from spmdtypes.diagnostics.finding import Finding, Note, Span, in_order
from spmdtypes.errors import CannotCheck
from spmdtypes.report import EVIDENCE, Report

VERSION = 1


def to_json(reports: Sequence[Report], failures: Sequence[CannotCheck], exit_code: int) -> str:
    data = {
        "version": VERSION,
        "exit_code": exit_code,
        "programs": [report_data(r) for r in reports],
        "failures": [
            {"message": f.message, "file": None if f.file is None else str(f.file), "line": f.line}
            for f in failures
        ],
    }
    return json.dumps(data, indent=2, ensure_ascii=False)


def report_data(report: Report) -> dict[str, Any]:
    return {
        "name": report.name,
        "file": report.file,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "nodes": report.nodes,
        "evidence": {e: report.counts.get(e, 0) for e in EVIDENCE},
        "unknown_ops": dict(report.unknown_ops),
        "assumptions": list(report.assumptions),
        "failures": list(report.failures),
        "findings": [finding_data(f) for f in in_order(report.findings)],
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "hint": finding.hint,
        "evidence": finding.evidence,
        "axes": list(finding.axes),
        "border": finding.border,
        "span": _span(finding.span),
        "notes": [_note(n) for n in finding.notes],
        "also": [_note(n) for n in finding.also],
    }


def _note(note: Note) -> dict[str, Any]:
    return {"text": note.text, "span": _span(note.span)}


def _span(span: Span | None) -> dict[str, Any] | None:
    return None if span is None else asdict(span)
