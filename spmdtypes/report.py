"""The verdict on one program."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmdtypes.diagnostics.finding import Finding

EVIDENCE = ("proved", "tested", "assumed", "unknown")


@dataclass(frozen=True)
class Report:
    """What was found in `name`, and how much is known.

    `counts` says for how many borders (outputs, gradients, parameters, results) the verdict is
    proved, tested, assumed or unknown. `unknown_ops` counts uses of operations without a rule.
    `failures` are reasons why the program could not be checked. `nodes`: size of one rank's graph.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    unknown_ops: Mapping[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    file: str | None = None
    nodes: int = 0

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 clean, 1 an error was found, 2 could not check."""
        return 1 if self.errors else 2 if self.failures else 0

    def summary(self) -> str:
        """One line: "MLP: 1 error; 12 proved, 3 tested, 1 assumed, 0 unknown (0.8 s)"."""
        return f"{self.name}: {verdict(self)}; {evidence_line(self.counts)} ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        from spmdtypes.diagnostics.render import render_text

        return render_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plural(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")


def verdict(report: Report) -> str:
    if report.failures:
        return "could not be checked"
    parts = [plural(len(report.errors), "error")] if report.errors else []
    parts += [plural(len(report.warnings), "warning")] if report.warnings else []
    return ", ".join(parts) or "no errors"


def evidence_line(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts.get(e, 0)} {e}" for e in EVIDENCE)


def total_counts(reports: Sequence[Report]) -> dict[str, int]:
    return {e: sum(r.counts.get(e, 0) for r in reports) for e in EVIDENCE}
