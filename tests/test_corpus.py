"""The corpus of silent bugs: most are found, at their line, and no mended twin gets an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.corpus import Outcome, judge, main, summarise

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.slow
def test_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main([str(CORPUS), "--json", str(file)]) == 0
    rows = capsys.readouterr().out
    summary = json.loads(file.read_text())["summary"]
    assert summary["cases"] == 60
    assert summary["false_alarms"] == 0, rows
    assert summary["detected"] >= 45, rows
    assert summary["detected_at_line"] >= 40, rows


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
    file = tmp_path / "result.json"
    assert main([str(tmp_path), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["summary"]["unknown"] == 1
    assert result["cases"][0]["kind"] == "unknown"
