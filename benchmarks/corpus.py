"""How many of a folder of known bugs are found, and where.

    python benchmarks/corpus.py DIR [--json FILE] [--only PREFIX] [--jobs N]

Each case is a folder with `buggy.py`, its mended twin `fixed.py`, and `case.toml`, whose `lines`
say where in the buggy twin a good message may point. A case is

    false alarm   when the mended twin gets an error,
    unknown       else, when a twin could not be checked (the checker failed or ran out of time),
    detected      else, when the buggy twin gets an error,
    missed        else.

A detected case is "at the line" when a span or a note of one of its errors lies within two lines
of `lines`. Every twin is checked in a process of its own, forked after the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdtypes.diagnostics.finding import Finding

ROOT = Path(__file__).resolve().parent.parent
NEAR = 2  # lines
LIMIT = 120.0  # seconds a twin may take
KINDS = ("detected", "missed", "false_alarm", "unknown")


@dataclass(frozen=True)
class Outcome:
    """What the checker said of one twin. `failure` says why it said nothing."""

    errors: tuple[dict[str, Any], ...] = ()
    warnings: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    failure: str | None = None


@dataclass(frozen=True)
class Case:
    """The verdict on one case."""

    id: str
    category: str
    kind: str  # one of KINDS
    at_line: bool
    lines: tuple[int, ...]
    seconds: float
    buggy: Outcome = field(default_factory=Outcome)
    fixed: Outcome = field(default_factory=Outcome)


def judge(folder: Path, buggy: Outcome, fixed: Outcome) -> Case:
    """The verdict on the case in `folder` from what was said of its twins."""
    meta = tomllib.loads((folder / "case.toml").read_text())
    lines = tuple(meta.get("lines", ()))
    if fixed.errors:
        kind = "false_alarm"
    elif buggy.failure or fixed.failure:
        kind = "unknown"
    else:
        kind = "detected" if buggy.errors else "missed"
    named = {line for error in buggy.errors for line in error["lines"]}
    at_line = kind == "detected" and any(abs(line - want) <= NEAR for line in named for want in lines)
    seconds = buggy.seconds + fixed.seconds
    return Case(folder.name, meta.get("category", ""), kind, at_line, lines, seconds, buggy, fixed)


def summarise(cases: Iterable[Case], seconds: float) -> dict[str, Any]:
    cases = list(cases)
    count = {kind: sum(case.kind == kind for case in cases) for kind in KINDS}
    return {
        "cases": len(cases),
        "detected": count["detected"],
        "detected_at_line": sum(case.at_line for case in cases),
        "missed": count["missed"],
        "false_alarms": count["false_alarm"],
        "unknown": count["unknown"],
        "seconds": round(seconds, 2),
    }


def check_twin(path: Path) -> Outcome:
    """Check one twin in this process."""
    from benchmarks.corpus_format import load_twin
    from spmdtypes.checker import check_program

    start = time.perf_counter()
    report = check_program(load_twin(path))
    seconds = round(time.perf_counter() - start, 3)
    errors = tuple(_plain(f, path) for f in report.findings if f.severity == "error")
    others = tuple(_plain(f, path) for f in report.findings if f.severity != "error")
    failure = "; ".join(report.failures) or None
    return Outcome(errors, others, seconds, None if errors else failure)


def _plain(finding: Finding, path: Path) -> dict[str, Any]:
    """A finding as JSON data; `lines` are those of `path` that its span and notes name."""
    spans = [finding.span, *(note.span for note in (*finding.notes, *finding.also))]
    lines = sorted({s.line for s in spans if s is not None and Path(s.file).resolve() == path.resolve()})
    return {"code": finding.code, "message": finding.message, "evidence": finding.evidence, "lines": lines}


class Isolated:
    """`check_twin(path)` under way in a forked process group."""

    def __init__(self, path: Path, limit: float = LIMIT) -> None:
        context = multiprocessing.get_context("fork")
        self.start, self.limit = time.perf_counter(), limit
        self.result, send = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(path, send))
        self.process.start()
        send.close()

    @property
    def left(self) -> float:
        """Seconds until its time is up."""
        return max(0.0, self.start + self.limit - time.perf_counter())

    def finish(self) -> Outcome:
        """Its outcome, or why there is none; nothing of it runs on."""
        outcome: Outcome | None = None
        in_time = self.result.poll()
        with contextlib.suppress(EOFError):
            outcome = self.result.recv() if in_time else None
        self.result.close()
        _end_group(self.process)
        seconds = round(time.perf_counter() - self.start, 3)
        died = f"process died ({self.process.exitcode})"
        reason = died if in_time else f"no verdict after {self.limit:.0f} s"
        return outcome or Outcome(seconds=seconds, failure=reason)


def _child(path: Path, send: Any) -> None:
    os.setsid()
    _silence()
    start = time.perf_counter()
    try:
        outcome = check_twin(path)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc(limit=-4)
        seconds = round(time.perf_counter() - start, 3)
        outcome = Outcome(seconds=seconds, failure=f"{text}\n{trace}")
    send.send(outcome)
    send.close()
    os._exit(0)


def _silence() -> None:
    """Drop what the checked program prints: the rows are this program's output."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _end_group(process: Any) -> None:
    """End the process and whatever it started."""
    process.join(0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def run(folders: list[Path], jobs: int) -> Iterator[Case]:
    """The verdicts, in the order of `folders`, as they become known.

    One thread does it all: forking a process that has threads is not safe.
    """
    waiting = [folder / f"{twin}.py" for folder in folders for twin in ("buggy", "fixed")]
    running: dict[Path, Isolated] = {}
    done: dict[Path, Outcome] = {}
    for folder in folders:
        buggy, fixed = folder / "buggy.py", folder / "fixed.py"
        while not {buggy, fixed} <= done.keys():
            while waiting and len(running) < jobs:
                path = waiting.pop(0)
                running[path] = Isolated(path)
            soonest = min(twin.left for twin in running.values())
            ready = connection.wait([twin.result for twin in running.values()], soonest)
            for path, twin in list(running.items()):
                if twin.result in ready or not twin.left:
                    done[path] = running.pop(path).finish()
        yield judge(folder, done[buggy], done[fixed])


def _row(case: Case) -> str:
    where = "at the line" if case.at_line else ""
    said = case.fixed if case.kind == "false_alarm" else case.buggy
    if case.kind == "unknown":
        detail = (case.buggy.failure or case.fixed.failure or "").splitlines()[0]
    elif said.errors:
        first = said.errors[0]
        detail = f"{first['code']} {first['lines']} {first['message'].splitlines()[0]}"
    else:
        detail = ""
    return f"{case.kind:11} {where:11} {case.seconds:6.1f}s  {case.id:44} {detail[:90]}".rstrip()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", type=Path, help="folder of cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts here")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only cases whose name starts so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    folders = sorted(
        toml.parent for toml in options.dir.glob("*/case.toml") if toml.parent.name.startswith(options.only)
    )
    if not folders:
        print(f"{options.dir}: no case found", file=sys.stderr)
        return 2
    _import_once()
    start, cases = time.perf_counter(), []
    try:
        for case in run(folders, max(1, options.jobs)):
            cases.append(case)
            print(_row(case), flush=True)
    finally:
        summary = summarise(cases, time.perf_counter() - start)
        if options.json:
            result = {"summary": summary, "cases": [asdict(case) for case in cases]}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("  ".join(f"{name.replace('_', ' ')} {value}" for name, value in summary.items()))
    return 0


def _import_once() -> None:
    """Import what every twin needs, so that the forked processes need not."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.distributed.tensor
    import torch.nn.parallel

    torch.set_num_threads(1)
    # a failure here would be the same in every twin, and is told there
    with contextlib.suppress(Exception):
        for name in ("benchmarks.corpus_format", "spmdtypes.checker"):
            importlib.import_module(name)


if __name__ == "__main__":
    # run as a script from anywhere, with the package installed or not
    sys.path.insert(0, str(ROOT))
    from benchmarks.corpus import main as main_of_module

    sys.exit(main_of_module())
