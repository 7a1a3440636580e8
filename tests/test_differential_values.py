"""Global values: drawn once from the types, cut into the ranks' blocks, put together again."""

from __future__ import annotations

import pytest
import torch

from spmdtypes.core.simulate import coordinates
from spmdtypes.differential import values
from spmdtypes.differential.layout import ShapeError, assemble, block
from spmdtypes.differential.streams import plan
from spmdtypes.differential.values import Regime
from spmdtypes.differential.watch import Noted
from spmdtypes.notation import parse

MESH = {"dp": 2, "tp": 3}
X = torch.arange(66, dtype=torch.float64).reshape(11, 6)


@pytest.mark.parametrize("text", ["[11, 6]", "[11@tp, 6]", "[11@dp@tp, 6]", "[11, 6@tp@dp]", "[11@dp, 6@tp]"])
def test_blocks_put_together_are_the_whole(text: str) -> None:
    type_ = parse(text)
    parts = [X[block(type_, c, MESH)] for c in coordinates(MESH)]
    whole = assemble(parts, type_, MESH)
    assert torch.equal(whole.value, X)
    assert whole.spread == 0


def test_the_first_axis_is_the_outermost() -> None:
    at = {"dp": 1, "tp": 0}
    assert block(parse("[12@dp@tp]"), at, MESH) == (slice(6, 8),)
    assert block(parse("[12@tp@dp]"), at, MESH) == (slice(2, 4),)


def test_pending_reductions_are_done_and_replicas_compared() -> None:
    shares = [X * (c["tp"] + 1) for c in coordinates(MESH)]
    assert torch.equal(assemble(shares, parse("[11, 6] | tp:P"), MESH).value, 6 * X)
    assert torch.equal(assemble(shares, parse("[11, 6] | tp:P(max)"), MESH).value, 3 * X)
    assert assemble(shares, parse("[11, 6]"), MESH).spread > 0
    with pytest.raises(ShapeError, match="rank 0"):
        assemble(shares, parse("[12, 6]"), MESH)


def test_values_depend_on_name_and_seed_and_keep_to_their_type() -> None:
    types = {"ids": parse("i64[8, 9] < 5"), "keep": parse("bool[8]"), "x": parse("bf16[8, 4]")}
    one, same, other = (values.inputs(types, MESH, s, Regime("plain")) for s in (1, 1, 2))
    assert torch.equal(one["x"], same["x"])
    assert not torch.equal(one["x"], other["x"])
    assert set(one["ids"].unique().tolist()) <= set(range(5))
    assert one["keep"].dtype is torch.bool


def test_norm_weights_are_around_one() -> None:
    drawn = values.parameters(
        {"norm.weight": parse("[500]"), "up": parse("[500, 2]")}, MESH, 0, Regime("plain")
    )
    assert abs(float(drawn["norm.weight"].mean()) - 1) < 0.1
    assert abs(float(drawn["up"].mean())) < 0.1


def test_uneven_regimes_tell_shards_apart() -> None:
    skewed = values.inputs({"x": parse("[400@dp, 2]")}, MESH, 0, Regime("skewed", skew=8.0))["x"]
    first, second = skewed.chunk(2)
    assert 4 < float(second.std() / first.std()) < 16


def noted(stream: str, x: torch.Tensor) -> Noted:
    return Noted("aten.rand.default", stream, tuple(x.shape), x, ())


def test_numbers_for_a_cut_dim_are_the_same_wherever_its_parts_are() -> None:
    whole = torch.rand(4, 6)
    ranks = [[noted(str(c["tp"]), torch.rand(4, 2))] for c in coordinates(MESH)]
    found = plan(ranks, [[noted("0", whole)]], MESH, {"dp": 1, "tp": 1})
    assert found.draws[0].treatment == "block"
    assert torch.equal(found.reference[0][0], whole[:, :1].expand(4, 6))
    assert all(torch.equal(r[0], whole[:, :1].expand(4, 2)) for r in found.ranks)


def test_one_stream_for_all_shards_is_left_alone() -> None:
    ranks = [[noted("same", torch.rand(4, 2))] for _ in coordinates(MESH)]
    found = plan(ranks, [[noted("same", torch.rand(4, 6))]], MESH, {"dp": 1, "tp": 1})
    assert found.draws[0].treatment == "own"
    assert not any(found.ranks)
