"""The terminal form of findings and reports.

    model.py:14:16: error[SPMD101]: forward returns a partial sum over tp where 'b@dp s d' is declared
       |
    13 |     y = F.linear(F.gelu(F.linear(x, self.up)), self.down)
       |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ became a partial sum over tp here
       = hint: dist.all_reduce(y) after line 13
       = evidence: proved

Built as `rich.text.Text`; printed plain where the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import IO

from rich.console import Console
from rich.text import Text

from spmdtypes.diagnostics.finding import Finding, Span, in_order
from spmdtypes.diagnostics.source import line_at
from spmdtypes.errors import CannotCheck, shown_path
from spmdtypes.report import Report, evidence_line, plural, total_counts

_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GUTTER = "blue"
_LINE = 100  # columns of source and remark that fit beside each other


def console_for(stream: IO[str], color: bool | None = None) -> Console:
    """A console that never wraps or guesses; `color` None: where the stream is a terminal that wants it."""
    return Console(
        file=stream,
        highlight=False,
        soft_wrap=True,
        no_color=None if color is None else not color,
        force_terminal=color or None,
        emoji=False,
        markup=False,
    )


def show(console: Console, text: Text) -> None:
    """Print a text that ends its own last line."""
    text.rstrip()
    console.print(text)


def render_finding(finding: Finding) -> Text:
    """Message, excerpts in line order (notes and the place itself), hint, evidence."""
    style = _STYLE[finding.severity]
    out = Text()
    if finding.span is not None:
        out.append(f"{place(finding.span)}: ", "bold")
    out.append(f"{finding.severity}[{finding.code}]", style)
    out.append(f": {finding.message}\n", "bold")
    width = _width(finding)
    for excerpt in _excerpts(finding, width):
        out.append_text(excerpt)
    for note in finding.also:
        where = "" if note.span is None else f" ({_also_place(note.span, finding.span)})"
        _remark(out, width, "also", note.text + where)
    if finding.hint:
        _remark(out, width, "hint", finding.hint)
    _remark(out, width, "evidence", finding.evidence)
    return out


def place(span: Span) -> str:
    return f"{shown_path(span.file)}:{span.line}:{span.col + 1}"


def _also_place(span: Span, main: Span | None) -> str:
    return f"line {span.line}" if main is not None and span.file == main.file else place(span)


def _remark(out: Text, width: int, label: str, text: str) -> None:
    first, *rest = text.splitlines() or [""]
    out.append(f"{' ' * width} = ", _GUTTER)
    out.append(f"{label}: ", "bold")
    out.append(first + "\n")
    for line in rest:
        out.append(f"{' ' * (width + 3)}{' ' * (len(label) + 2)}{line}\n")


def _width(finding: Finding) -> int:
    spans = [finding.span, *(n.span for n in finding.notes)]
    return max([len(str(s.line)) for s in spans if s is not None], default=1) + 1


def _excerpts(finding: Finding, width: int) -> Iterator[Text]:
    """Source lines with carets; consecutive ones of one file share a block. A note without a place
    follows as a remark."""
    style = _STYLE[finding.severity]
    marks = [(n.span, n.text, "cyan") for n in finding.notes if n.span is not None]
    if finding.span is not None and not any(
        (s.file, s.line) == (finding.span.file, finding.span.line) for s, _, _ in marks
    ):
        marks.append((finding.span, "", style))
    marks = [(s, t, style if s == finding.span else c) for s, t, c in marks]
    shown: tuple[str, int] | None = None
    for span, text, color in marks:
        source = line_at(span.file, span.line)
        block = Text()
        if finding.span is not None and span.file != finding.span.file and (shown or ("",))[0] != span.file:
            block.append(f"{' ' * width}--> {place(span)}\n", _GUTTER)
        if source is None:
            if text:
                _remark(block, width, "note", f"{text} ({place(span)})")
        else:
            if shown != (span.file, span.line):
                block.append(f"{span.line:>{width - 1}} | ", _GUTTER)
                block.append(source.rstrip() + "\n")
            carets = caret(span, source)
            gap = " " if len(carets) + len(text) < _LINE else f"\n{' ' * width}| {' ' * _indent(carets)}"
            block.append(f"{' ' * width}| ", _GUTTER)
            block.append(f"{carets}{gap if text else ''}{text}\n", color)
            shown = (span.file, span.line)
        yield block
    for note in finding.notes:
        if note.span is None:
            block = Text()
            _remark(block, width, "note", note.text)
            yield block


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def caret(span: Span, source: str) -> str:
    """Blanks and carets under a span; the whole statement when it has no columns."""
    text = source.rstrip()
    indent = _indent(text)
    start = max(span.col, indent) if span.col or span.end_col else indent
    end = span.end_col if span.end_line in (0, span.line) and span.end_col > start else len(text)
    return " " * start + "^" * max(end - start, 1)


def render_report(report: Report, quiet: bool = False) -> Text:
    """Findings, then what was assumed, what is unknown, and the summary line."""
    out = Text()
    for finding in in_order(report.findings):
        out.append_text(render_finding(finding))
        out.append("\n")
    for failure in report.failures:
        out.append_text(render_failure(failure))
    if not quiet:
        for assumption in report.assumptions:
            out.append("assumed: ", "bold")
            out.append(assumption + "\n")
        if report.unknown_ops:
            uses = ", ".join(f"{op} ({n})" for op, n in sorted(report.unknown_ops.items()))
            out.append("without a rule: ", "bold")
            out.append(uses + "\n")
    out.append(report.summary(), "bold red" if report.exit_code else "bold green")
    out.append("\n")
    return out


def render_failure(failure: str | CannotCheck) -> Text:
    """A line "file:line: error: message", and a caret where there is one."""
    first, *rest = str(failure).splitlines() or [""]
    head, mark, message = first.partition("error: ")
    out = Text()
    if mark:
        if at := re.fullmatch(r"(.+):(\d+): ", head):
            head = f"{shown_path(at[1])}:{at[2]}: "
        out.append(head, "bold")
        out.append("error", _STYLE["error"])
        out.append(f": {message}\n", "bold")
    else:
        out.append(first + "\n", "bold")
    for line in rest:
        out.append(line + "\n")
    return out


def render_total(reports: Sequence[Report], failures: int) -> Text:
    """The last line of a run over several programs."""
    errors = sum(len(r.errors) for r in reports)
    warnings = sum(len(r.warnings) for r in reports)
    parts = [plural(len(reports), "program"), plural(errors, "error")]
    parts += [plural(warnings, "warning")] if warnings else []
    parts += [f"{failures} could not be checked"] if failures else []
    text = f"{', '.join(parts)}; {evidence_line(total_counts(reports))}\n"
    return Text(text, "bold red" if errors or failures else "bold green")


def plain(texts: Iterable[Text]) -> str:
    stream = StringIO()
    console = console_for(stream, color=False)
    for text in texts:
        show(console, text)
    return stream.getvalue()


def render_text(report: Report) -> str:
    """The plain text of a report."""
    return plain([render_report(report)])
