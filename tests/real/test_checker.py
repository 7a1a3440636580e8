"""Code that nobody here wrote: no error while it is right, an error without a collective."""

from __future__ import annotations

import pytest

from spmdtypes.checker import check_program
from tests.real.programs import REAL, REMOVED, Real

pytestmark = pytest.mark.real


@pytest.mark.parametrize("real", REAL, ids=str)
def test_silent_when_right(real: Real) -> None:
    report = check_program(real.program())
    assert not report.failures
    assert not report.errors, str(report)
    assert report.counts.get("unknown", 0) == 0, str(report)


@pytest.mark.parametrize(("real", "removed"), REMOVED, ids=str)
def test_loud_without_a_collective(real: Real, removed: str) -> None:
    program = real.program()
    with real.removal(removed)():
        report = check_program(program)
    assert report.errors, str(report)
    assert any(error.span for error in report.errors), str(report)
