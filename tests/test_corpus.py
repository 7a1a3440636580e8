"""The corpus of silent bugs: most are found, at their line, and no mended twin gets an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpus import Isolated, Outcome, judge, main, summarise

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, file: Path) -> tuple[str, dict[str, Any]]:
    """What the benchmark prints and writes. A process of its own, since it forks."""
    command = [sys.executable, "-m", "benchmarks.corpus", str(folder), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.mark.slow
def test_corpus(tmp_path: Path) -> None:
    rows, result = run(ROOT / "tests" / "corpus", tmp_path / "result.json")
    summary = result["summary"]
    assert summary["cases"] == 60
    assert summary["false_alarms"] == 0, rows
    assert summary["unknown"] == 0, rows
    assert summary["detected"] >= 58, rows
    assert summary["detected_at_line"] >= 52, rows


def _case(tmp_path: Path, lines: list[int]) -> Path:
    folder = tmp_path / "001_example"
    folder.mkdir()
    (folder / "case.toml").write_text(f'category = "wrong-axis"\nlines = {lines}\n')
    return folder


def _error(*lines: int) -> Outcome:
    return Outcome(errors=({"code": "SPMD101", "message": "wrong", "lines": list(lines)},))


SILENT, CRASHED = Outcome(), Outcome(failure="RuntimeError: boom")


@pytest.mark.parametrize(
    ("buggy", "fixed", "kind", "at_line"),
    [
        (_error(12), SILENT, "detected", True),
        (_error(30, 8), SILENT, "detected", True),
        (_error(13), SILENT, "detected", False),
        (_error(), SILENT, "detected", False),
        (SILENT, SILENT, "missed", False),
        (_error(10), _error(10), "false_alarm", False),
        (CRASHED, _error(10), "false_alarm", False),
        (CRASHED, SILENT, "unknown", False),
        (_error(10), CRASHED, "unknown", False),
    ],
)
def test_judgement(tmp_path: Path, buggy: Outcome, fixed: Outcome, kind: str, at_line: bool) -> None:
    case = judge(_case(tmp_path, [10]), buggy, fixed)
    assert (case.kind, case.at_line) == (kind, at_line)


def test_summary_counts_every_case_once(tmp_path: Path) -> None:
    folder = _case(tmp_path, [10])
    pairs = [(_error(9), SILENT), (SILENT, SILENT), (_error(9), _error(9)), (CRASHED, SILENT)]
    summary = summarise([judge(folder, *pair) for pair in pairs], seconds=2.0)
    assert summary == {
        "cases": 4,
        "detected": 1,
        "detected_at_line": 1,
        "missed": 1,
        "false_alarms": 1,
        "unknown": 1,
        "seconds": 2.0,
    }


def test_a_folder_without_cases_is_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2


def test_a_crash_in_one_case_does_not_end_the_run(tmp_path: Path) -> None:
    folder = _case(tmp_path, [10])
    for twin in ("buggy", "fixed"):
        (folder / f"{twin}.py").write_text("import os\nos._exit(3)\n")
    _, result = run(tmp_path, tmp_path / "result.json")
    assert result["summary"]["unknown"] == 1
    assert "process died" in result["cases"][0]["buggy"]["failure"]


def test_a_twin_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    twin = tmp_path / "slow.py"
    twin.write_text("import time\ntime.sleep(60)\n")
    outcome = Isolated(twin, limit=0).finish()
    assert outcome.failure == "no verdict after 0 s"
