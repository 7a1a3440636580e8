"""The rules alone: silent on clean transformers, loud on every broken collective of theirs.

A sample of `benchmarks/mutants.py`; a mutant counts when a simulation of all ranks shows that it
changes a result.
"""

import pytest

from benchmarks.mutants import KINDS
from benchmarks.mutation_run import run_program
from tests.programs.transformers import PROGRAMS


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_clean_programs_are_silent_and_mutants_are_flagged(name):
    silent, rows, missed = run_program(PROGRAMS[name](), per_kind=4, seed=1)
    assert silent
    assert not missed
    assert set(rows) == set(KINDS)
    assert sum(made for made, _ in rows.values()) >= 12
