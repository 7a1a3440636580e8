"""A value's placement is found from numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spmdtypes.core import simulate
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.layout import Layout
from spmdtypes.core.simulate import coordinates
from spmdtypes.differential.readings import Observation, holds, positions, search

MESH = {"dp": 2, "tp": 3}
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SHARES = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
Rank = dict[str, int]


def seen(local: Callable[[Rank], torch.Tensor], whole: torch.Tensor = X) -> Observation:
    return Observation(MESH, tuple(local(c) for c in coordinates(MESH)), whole)


@pytest.mark.parametrize(
    ("local", "text"),
    [
        (lambda c: X, "12 6"),
        (lambda c: X.chunk(2)[c["dp"]], "12@dp 6"),
        (lambda c: X.chunk(6)[3 * c["dp"] + c["tp"]], "12@dp@tp 6"),
        (lambda c: X.chunk(6)[2 * c["tp"] + c["dp"]], "12@tp@dp 6"),
        (lambda c: X.chunk(2)[c["dp"]].chunk(3, 1)[c["tp"]], "12@dp 6@tp"),
        (lambda c: X.view(2, 3, 2, 6)[:, c["tp"]].reshape(4, 6), "[2*tp*2] 6"),
        (lambda c: X * SHARES[c["tp"]], "12 6 | tp:P"),
        (lambda c: X * SHARES[c["tp"]] * 3, "12 6 | tp:P(avg)"),
        (lambda c: (X * SHARES[c["tp"]]).chunk(2)[c["dp"]], "12@dp 6 | tp:P"),
        (lambda c: X - 9.0 * (torch.arange(72).view(12, 6) % 3 != c["tp"]), "12 6 | tp:P(max)"),
        (lambda c: X * 3, "12 6 x tp^-1"),
        (lambda c: X.chunk(2)[c["dp"]] / 2, "12@dp 6 x dp"),
    ],
)
def test_the_simplest_reading_comes_first(local: Callable[[Rank], torch.Tensor], text: str) -> None:
    assert str(search([seen(local)])[0]) == text


def test_unrelated_values_have_no_reading() -> None:
    assert search([seen(lambda c: X + c["tp"] + 1)]) == []
    assert search([seen(lambda c: torch.full((4, 6), 7.0))]) == []


def test_zero_is_ambiguous_and_another_observation_settles_it() -> None:
    zero = torch.zeros_like(X)
    nothing = seen(lambda c: zero, zero)
    assert {str(d) for d in search([nothing])} >= {"12 6", "12 6 | tp:P"}
    assert [str(d) for d in search([nothing, seen(lambda c: X * SHARES[c["tp"]])])] == ["12 6 | tp:P"]


def test_uneven_shards() -> None:
    whole = X[:11]
    assert str(search([seen(lambda c: whole.chunk(3)[c["tp"]], whole)])[0]) == "11@tp 6"


def test_nan_equals_nan() -> None:
    whole = X.clone()
    whole[3] = float("nan")
    assert str(search([seen(lambda c: whole.chunk(2)[c["dp"]], whole)])[0]) == "12@dp 6"


def test_a_proposed_reading_is_checked_on_every_rank() -> None:
    shard = Denotation(Layout.sharded((12, 6), {0: ("dp",)}, MESH))
    assert holds(shard, seen(lambda c: X.chunk(2)[c["dp"]])) is True
    assert holds(shard, seen(lambda c: X.chunk(2)[1 - c["dp"]])) is False
    assert holds(shard, seen(lambda c: X)) is False
    assert holds(replace(shard, varying=frozenset(["tp"])), seen(lambda c: X)) is None


def test_an_open_dim_stands_for_a_constant_one() -> None:
    rows = X[:, :1]
    den = Denotation(Layout.join([(Layout.replicated((12,)), (0,)), (Layout.opened(2, 6), (1,))], 2))
    assert holds(den, seen(lambda c: rows.expand(12, 2), rows.expand(12, 6))) is True
    assert holds(den, seen(lambda c: X[:, :2], X)) is False


def test_positions_agree_with_the_digit_by_digit_ones() -> None:
    strided = Layout.sharded((2, 3, 2, 6), {1: ("tp",), 3: ("dp",)}, MESH).reshape((4, 3), (12, 6), MESH)
    for layout in (strided, Layout.sharded((11, 6), {0: ("tp",)}, MESH)):
        for c in coordinates(MESH):
            assert positions(layout, tuple(c.items())).flatten().tolist() == simulate.local_indices(layout, c)


def test_an_open_dim_is_judged_by_its_own_numbers() -> None:
    """What was worked out for the whole value is not used for one slice of it."""
    rows = X[:, :1]
    den = Denotation(Layout.join([(Layout.replicated((12,)), (0,)), (Layout.opened(2, 6), (1,))], 2))
    pending = replace(den, partial=frozenset(["tp"]), op="sum")
    seen_once = seen(lambda c: (rows * SHARES[c["tp"]]).expand(12, 2), rows.expand(12, 6))
    assert search([seen_once]) == []
    assert holds(pending, seen_once) is True
    assert holds(den, seen_once) is False


def test_empty_values_have_a_reading() -> None:
    nothing = X[:0]
    assert [str(d) for d in search([seen(lambda c: nothing, nothing)])][:1] == ["0 6"]
