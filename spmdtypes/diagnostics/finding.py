"""One thing that is wrong, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spmdtypes.graph import Frame

Severity = Literal["error", "warning", "note"]
Evidence = Literal["proved", "tested", "assumed", "unknown"]


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A place in a source file. Lines are 1-based, columns 0-based, `end_col` exclusive.
    `end_line` and `end_col` of 0 mean: to the end of `line`."""

    file: str
    line: int
    col: int = 0
    end_line: int = 0
    end_col: int = 0

    @classmethod
    def of(cls, frame: Frame) -> Span:
        return cls(frame.file, frame.line, frame.col, frame.end_line, frame.end_col)


@dataclass(frozen=True, slots=True)
class Note:
    """A step of the reasoning, with its own place: "became a partial sum over tp here: ..."."""

    span: Span | None
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """`message` is one sentence in the user's terms (tensor and parameter names).

    `notes` lead from where the trouble began to where it shows. `axes` are the mesh axes concerned.
    `border` names the output, gradient, parameter or result that is wrong ("output", "grad:up").
    `also` are consequences of the same cause that are not reported again.
    """

    code: str
    severity: Severity
    message: str
    span: Span | None = None
    notes: tuple[Note, ...] = ()
    hint: str | None = None
    evidence: Evidence = "proved"
    axes: tuple[str, ...] = ()
    border: str | None = None
    also: tuple[Note, ...] = ()

    @property
    def is_error(self) -> bool:
        return self.severity == "error"

    def lines(self) -> tuple[int, ...]:
        """Every line the finding points at."""
        spans = [self.span, *(n.span for n in self.notes), *(n.span for n in self.also)]
        return tuple(s.line for s in spans if s is not None)


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Errors first, then by place."""
    rank = {"error": 0, "warning": 1, "note": 2}
    nowhere = Span("~", 0)
    return tuple(sorted(findings, key=lambda f: (rank[f.severity], f.span or nowhere, f.code)))
