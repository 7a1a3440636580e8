"""The real programs themselves, on real ranks: right as they are, wrong without a collective."""

from __future__ import annotations

import pytest

from tests.real.programs import REAL, REMOVED, Real
from tests.real.truth import largest_error

pytestmark = pytest.mark.real

# parts of Megatron-core compute in float32 whatever the parameters are
ROUNDING = 1e-5


@pytest.mark.parametrize("real", REAL, ids=str)
def test_ranks_agree_with_the_mesh_of_ones(real: Real) -> None:
    assert largest_error(real.program()) < ROUNDING


@pytest.mark.parametrize(("real", "removed"), REMOVED, ids=str)
def test_removing_a_collective_changes_a_result(real: Real, removed: str) -> None:
    assert largest_error(real.program(), real.removal(removed)) > 100 * ROUNDING
