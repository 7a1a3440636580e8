"""Collectives as moves on denotations."""

import pytest

from spmdtypes.core.collectives import collective
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.layout import Layout
from spmdtypes.core.simulate import coordinates, local_indices
from spmdtypes.graph import Comm
from spmdtypes.notation import parse

MESH = {"dp": 2, "tp": 4}


def den(text):
    t = parse(text)
    return Denotation.from_type(t, tuple(d.size for d in t.dims), MESH)


def do(kind, operand, *axes, op="", outs=1, **kw):
    comm = Comm(kind, axes, tuple(range(8)), op, **kw)
    operands = [operand] if not isinstance(operand, list) else operand
    found = collective(comm, [den(o) if isinstance(o, str) else o for o in operands], MESH, outs)
    return found[0] if outs == 1 else found


def text(result):
    return result.kind if isinstance(result, RuleError) else str(result)


@pytest.mark.parametrize(
    ("operand", "axis", "op", "result"),
    [
        ("8 6 | tp:P", "tp", "sum", "8 6"),
        ("8 6 | tp:P", "tp", "avg", "8 6 x tp"),
        ("8 6 | tp:P(avg)", "tp", "avg", "8 6"),
        ("8 6 | tp:P(avg)", "tp", "sum", "8 6 x tp^-1"),
        ("8 6", "tp", "sum", "8 6 x tp^-1"),
        ("8 6", "tp", "avg", "8 6"),
        ("8 6", "tp", "max", "8 6"),
        ("8 6 | tp:P(max)", "tp", "max", "8 6"),
        ("8@dp 6 | tp:P", "tp", "sum", "8@dp 6"),
        ("8 6 | dp:P tp:P", "tp", "sum", "8 6 | dp:P"),
        ("8 6 | tp:P", "tp", "max", "nonlinear"),
        ("8 6 | tp:P(max)", "tp", "sum", "nonlinear"),
        ("8@tp 6", "tp", "sum", "layout"),
        ("8@dp 6 | tp:P", "dp", "sum", "layout"),
        ("8 6", "tp", "prod", "nonlinear"),
        ("8 6 | tp:P", "tp", "bor", "unsupported"),
    ],
)
def test_all_reduce(operand, axis, op, result):
    assert text(do("all_reduce", operand, axis, op=op)) == result


def test_premultiplied_sum():
    assert text(do("all_reduce", "8 6 | tp:P", "tp", op="premul_sum", factor=0.25)) == "8 6 x tp"
    assert text(do("all_reduce", "8 6 | tp:P", "tp", op="premul_sum", factor=0.3)) == "scale"


@pytest.mark.parametrize(
    ("operand", "axes", "result"),
    [
        ("8@tp 6", ["tp"], "8 6"),
        ("8@dp@tp 6", ["tp"], "8@dp 6"),
        ("8@dp@tp 6", ["dp", "tp"], "8 6"),
        ("8 6", ["tp"], "layout"),
        ("8 6 | tp:P", ["tp"], "unsupported"),
    ],
)
def test_all_gather(operand, axes, result):
    assert text(do("all_gather", operand, *axes)) == result


def test_gathering_nested_shards_outside_in_has_another_order():
    wrong = do("all_gather", do("all_gather", "8@dp@tp 6", "dp"), "tp")
    assert wrong != Denotation.replicate((8, 6))
    assert wrong.local_shape == (8, 6)
    right = do("all_gather", do("all_gather", "8@dp@tp 6", "tp"), "dp")
    assert right == Denotation.replicate((8, 6))


def test_gathering_into_a_list_gives_the_ranks_values():
    pieces = do("all_gather", "8@tp 6", "tp", outs=4)
    here = [local_indices(p, {"dp": 0, "tp": 0}) for p in pieces]
    assert here == [local_indices(den("8@tp 6"), {"dp": 0, "tp": r}) for r in range(4)]


@pytest.mark.parametrize(
    ("operand", "op", "result"),
    [
        ("8 6 | tp:P", "sum", "8@tp 6"),
        ("8@dp 6 | tp:P", "sum", "8@dp@tp 6"),
        ("8 6", "sum", "8@tp 6 x tp^-1"),
        ("8@tp 6", "sum", "layout"),
        ("6 6 | tp:P", "sum", "layout"),
    ],
)
def test_reduce_scatter(operand, op, result):
    assert text(do("reduce_scatter", operand, "tp", op=op)) == result


def test_all_to_all_exchanges_who_holds_what():
    """Stacked along dim 0: rank r's part k is rank k's part r."""
    x = den("4 8@tp").layout.reshape((4, 2), (4, 8), MESH)
    moved = do("all_to_all", Denotation(x), "tp")
    for c in coordinates(MESH):
        sent = [local_indices(x, c | {"tp": r})[2 * c["tp"] : 2 * c["tp"] + 2] for r in range(4)]
        assert local_indices(moved, c) == [i for part in sent for i in part]
    uneven = do("all_to_all", "8@tp 6", "tp", splits=((1, 0, 1, 0), (0, 1, 0, 1)))
    assert uneven.kind == "unsupported"


def test_the_result_of_reduce_is_right_on_the_root_only():
    reduced = do("reduce", "6 | tp:P", "tp", op="sum", root=2)
    assert reduced.varying == {"tp"}
    assert text(do("broadcast", reduced, "tp", root=2)) == "6"
    assert text(do("broadcast", reduced, "tp", root=0)) == "rank"
    assert text(do("all_reduce", reduced, "tp", op="sum")) == "rank"


def test_broadcast_replaces_shards():
    assert text(do("broadcast", "8 6", "tp", root=0)) == "8 6"
    assert text(do("broadcast", "8@tp 6", "tp", root=0)) == "layout"


def test_a_group_that_is_no_product_of_axes_is_not_guessed():
    comm = Comm("all_reduce", (), (0, 3, 5), "sum")
    (result,) = collective(comm, [den("8 6 | tp:P")], MESH)
    assert result.kind == "unsupported"
    assert result.poisoned.varying == {"dp", "tp"}


def test_a_group_of_one_does_nothing():
    (result,) = collective(Comm("all_reduce", (), (3,), "sum"), [den("8 6 | tp:P")], MESH)
    assert text(result) == "8 6 | tp:P"


def test_errors_keep_what_is_known_of_other_axes():
    assert text(do("all_reduce", "8@tp 6 | dp:P", "tp", op="sum").poisoned) == "2 6 | dp:P tp:V"


def test_gathering_one_equal_number_per_rank_gives_copies():
    copies = do("all_gather", "1", "tp")
    assert copies.local_shape == (4,)
    assert copies.ref_shape == (1,)


def test_gathering_a_fill_takes_it_as_cut():
    fill = Denotation(Layout.opened(2, 8))
    assert text(do("all_gather", fill, "tp")) == "8"
