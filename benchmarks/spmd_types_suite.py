"""The test suite of the package spmd_types as input: what its checker says of each call, and what we say.

    python -m benchmarks.spmd_types_suite DIR [--only WORD] [--verbose]

DIR holds the checked-out tests. They run as they are, under the installed spmd_types; nothing of them is
copied. Every call that its checker judges (an operation on annotated tensors, a collective, an annotation,
`backward`) is also judged by us, from the annotations of the operands alone. Counted are

    stated errors    calls in passing tests for which its checker raises SpmdTypeError
    must pass        passing tests with judged calls of which its checker accepts all

A disagreement is listed with its reason. Cases that ask another question than ours (how an annotation is
spelled, which axes belong to one mesh, what its registry of Functions knows) are counted apart.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spmd_types_judge import Event, Judge

OUTSIDE = "outside"


@dataclass
class Case:
    """One test: what was judged in it, and how it ended."""

    name: str
    events: list[Event] = field(default_factory=list)
    passed: bool = False
    skipped: bool = False

    @property
    def errors(self) -> list[Event]:
        """The type errors it states, each call once."""
        found = [e for e in self.events if e.theirs == "error"]
        return list({(e.place, e.what, e.message): e for e in found}.values())

    @property
    def accepted(self) -> list[Event]:
        return [e for e in self.events if e.theirs == "right"]


class Collector:
    """Runs the tests with the judge in place."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.cases: dict[str, Case] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.judge.events = self.case(item.nodeid).events
        yield

    def pytest_runtest_logreport(self, report: Any) -> None:
        case = self.case(report.nodeid)
        if report.when == "call" and type(report).__name__ == "TestReport":
            case.passed = report.passed
        if report.skipped:
            case.skipped = True
        if report.failed:
            case.passed = False

    def case(self, nodeid: str) -> Case:
        name = nodeid.rpartition("/")[2]
        return self.cases.setdefault(name, Case(name))


def run(tests: Path, only: str = "", judged: bool = True) -> dict[str, Case]:
    """Every test of the suite, and what was judged in it. Prints nothing."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.dont_write_bytecode = True
    judge = Judge(str(tests))
    collector = Collector(judge)
    flags = ["-q", "--no-header", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
    flags += ["--rootdir", str(tests), "--capture=fd", "-W", "ignore", "--tb=no", "--show-capture=no"]
    with judge.installed() if judged else nullcontext(), open(os.devnull, "w") as quiet:
        out, sys.stdout = sys.stdout, quiet
        try:
            pytest.main([*flags, *(["-k", only] if only else []), str(tests)], plugins=[collector])
        finally:
            sys.stdout = out
    return collector.cases


# -- the table ----------------------------------------------------------------------------------


@dataclass
class Table:
    stated: Counter[str] = field(default_factory=Counter)  # our verdicts on stated errors
    passing: Counter[str] = field(default_factory=Counter)  # right, unknown, wrong
    calls: Counter[str] = field(default_factory=Counter)  # our verdicts on accepted calls
    types: Counter[str] = field(default_factory=Counter)  # result types: same, other
    outside: Counter[str] = field(default_factory=Counter)  # reason -> stated errors
    untouched: Counter[str] = field(default_factory=Counter)  # reason -> tests without a judged call
    missed: dict[str, list[tuple[str, Event]]] = field(default_factory=lambda: defaultdict(list))
    alarms: list[tuple[str, Event]] = field(default_factory=list)
    others: list[tuple[str, Event]] = field(default_factory=list)


def table(cases: Iterable[Case], alone: Mapping[str, Case]) -> Table:
    """`alone`: the same tests without us beside its checker."""
    t = Table()
    for case in cases:
        if case.skipped or not case.passed:
            own = not alone[case.name].passed
            why = "fails under the installed version" if own else "sees that we stand beside its checker"
            t.untouched["skipped" if case.skipped else why] += 1
            continue
        for e in case.errors:
            if e.outside:
                t.outside[e.outside] += 1
                continue
            t.stated[e.ours] += 1
            t.stated["unsaid"] += e.ours == "wrong" and e.own.startswith("nothing says")
            if e.ours != "wrong":
                t.missed[e.reason].append((case.name, e))
        judged = [e for e in case.accepted if not e.outside]
        if judged and not case.errors:
            worst = next((v for v in ("wrong", "unknown") if any(e.ours == v for e in judged)), "right")
            t.passing[worst] += 1
        if not judged and not case.errors:
            t.untouched["no call is checked in it"] += 1
        for e in judged:
            t.calls[e.ours] += 1
            if e.ours == "wrong":
                t.alarms.append((case.name, e))
            elif e.same_type is not None:
                t.types["same" if e.same_type else "other"] += 1
                if not e.same_type:
                    t.others.append((case.name, e))
    return t


def show(t: Table, verbose: bool, line: Callable[[str], None]) -> None:
    stated = sum(t.stated[v] for v in ("right", "wrong", "unknown"))
    passing = sum(t.passing.values())
    line(f"{'':44}{'of':>6}{'':>4}")
    line(f"{'type errors it states, reported by us':44}{stated:>6}{t.stated['wrong']:>8}")
    line(f"{'    of these for want of an annotation':44}{t.stated['wrong']:>6}{t.stated['unsaid']:>8}")
    line(f"{'tests that must pass, passed by us':44}{passing:>6}{passing - t.passing['wrong']:>8}")
    line(f"{'    of these with a call we cannot decide':44}{passing:>6}{t.passing['unknown']:>8}")
    calls = sum(t.calls.values())
    line(f"{'calls it accepts, accepted by us':44}{calls:>6}{t.calls['right'] + t.calls['unknown']:>8}")
    types = sum(t.types.values())
    line(f"{'    result of the same type, where known':44}{types:>6}{t.types['same']:>8}")
    line("\nnot counted: stated errors that ask another question")
    for reason, n in t.outside.most_common():
        line(f"  {n:4}  {reason}")
    line("not counted: tests")
    for reason, n in t.untouched.most_common():
        line(f"  {n:4}  {reason}")
    line("\nstated errors we do not report")
    for reason, found in sorted(t.missed.items(), key=lambda x: -len(x[1])):
        line(f"  {len(found):4}  {reason}")
        for name, e in found:
            line(f"          {_where(name, e)}: {e.what}")
    line("\naccepted calls we report")
    for name, e in t.alarms:
        line(f"        {_where(name, e)}: {e.what}: {e.own}")
    if verbose:
        line("\nresults of another type")
        for name, e in t.others:
            line(f"        {_where(name, e)}: {e.what}: {e.types}")


def _where(name: str, e: Event) -> str:
    file, _, test = name.partition("::")
    return f"{file}:{e.place} {test.rpartition('::')[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tests", type=Path, metavar="DIR", help="the checked-out tests of spmd_types")
    parser.add_argument("--only", default="", help="a pytest -k expression")
    parser.add_argument("--verbose", action="store_true", help="also list results of another type")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    tests = args.tests.resolve()
    alone = run(tests, args.only, judged=False)  # first: the tests hold on to the functions they import
    show(table(run(tests, args.only).values(), alone), args.verbose, print)


if __name__ == "__main__":
    main()
