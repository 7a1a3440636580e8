"""What the engine derives from index notation, case by case."""

from dataclasses import replace

import pytest

from spmdtypes.core import ranks
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.engine import derivation, derive
from spmdtypes.core.layout import Layout
from spmdtypes.core.spec import (
    ONE,
    At,
    Concat,
    Const,
    Iota,
    Operand,
    OpSpec,
    Out,
    Rand,
    Reshape,
    Size,
    Window,
    axes,
    fn,
    mean,
    total,
)
from spmdtypes.graph import Lit
from spmdtypes.notation import parse

MESH = {"dp": 2, "tp": 4}
i, j, k = axes("i j k")
x, y, z = (Operand(n, (), (), "f32") for n in range(3))


def den(text):
    t = parse(text)
    return Denotation.from_type(t, tuple(d.size for d in t.dims), MESH)


def one(value, *operands, out=(i, j), mesh=MESH, **kw):
    """The result of `out = value` on operands given as types."""
    how = {n: kw.pop(n) for n in ("averaged", "grad_free", "streams", "aligned") if n in kw}
    dens = [den(o) if isinstance(o, str) else o for o in operands]
    (result,) = derive(OpSpec.of(Out(out, value), **kw), dens, mesh, **how)
    return result


def text(result):
    return f"{result.kind}: {result.message}" if isinstance(result, RuleError) else str(result)


MM = total("sum", [k], x[i, k] * y[k, j])


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ("8@dp 6", "6 12@tp", "8@dp 12@tp"),
        ("8@dp 12@tp", "12@tp 6", "8@dp 6 | tp:P"),
        ("8 6 | tp:P", "6 12", "8 12 | tp:P"),
        ("8 6 | tp:P(avg)", "6 12@dp", "8 12@dp | tp:P(avg)"),
        ("8@dp@tp 6", "6 12", "8@dp@tp 12"),
    ],
)
def test_matrix_product(a, b, result):
    assert text(one(MM, a, b)) == result


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("8 12@tp", "12 6", "layout"),
        ("8@dp@tp 6", "6 12@dp", "axis"),
        ("8 6 | tp:P", "6 12 | tp:P", "product"),
        ("8@tp 6", "6 12 | tp:P", "mix"),
        ("8 16@dp@tp", "16@tp@dp 6", "layout"),
    ],
)
def test_matrix_product_without_a_reading(a, b, kind):
    assert one(MM, a, b).kind == kind


@pytest.mark.parametrize(
    ("value", "operands", "result"),
    [
        (x[i, j] + y[i, j], ("8 6 | tp:P", "8 6 | tp:P"), "8 6 | tp:P"),
        (x[i, j] + y[i, j], ("8 6 | tp:P(avg)", "8 6"), "8 6 | tp:P(avg)"),
        (x[i, j] + y[i, j], ("8 6 | tp:P(max)", "8 6"), "8 6 | tp:P(max)"),
        (x[i, j] + 1, ("8 6 | tp:P(avg)",), "8 6 | tp:P(avg)"),
        (x[i, j] * 3, ("8 6 | tp:P",), "8 6 | tp:P"),
        (x[i, j] * -3, ("8 6 | tp:P(max)",), "8 6 | tp:P(min)"),
        (fn("exp", x[i, j]), ("8 6 | tp:P(max)",), "8 6 | tp:P(max)"),
        (fn("where", fn("ge", Iota(i), Iota(j)), x[i, j], 0), ("8 6 | tp:P",), "8 6 | tp:P"),
        (x[i, j] / Const(Lit(4, 1)), ("8 6",), "8 6 x tp"),
        (fn("sq", x[i, j] / Const(Lit(4, 1))), ("8 6",), "8 6 x tp^2"),
        (fn("relu", x[i, j] / Const(Lit(2, 1))), ("8 6",), "8 6 x dp"),
    ],
)
def test_elementwise(value, operands, result):
    assert text(one(value, *operands)) == result


@pytest.mark.parametrize(
    ("value", "operands", "kind"),
    [
        (x[i, j] + y[i, j], ("8 6 | tp:P", "8 6"), "mix"),
        (x[i, j] + 1, ("8 6 | tp:P",), "mix"),
        (fn("where", fn("ge", Iota(i), Iota(j)), x[i, j], 1), ("8 6 | tp:P",), "mix"),
        (fn("gelu", x[i, j]), ("8 6 | tp:P",), "nonlinear"),
        (fn("trunc", x[i, j]), ("8 6 | tp:P",), "nonlinear"),
        (x[i, j] * y[i, j], ("8 6 | tp:P(max)", "8 6"), "nonlinear"),  # the sign of y is unknown
        (fn("gelu", x[i, j] / Const(Lit(4, 1))), ("8 6",), "scale"),
        (x[i, j] / Const(Lit(4, 1)) + y[i, j], ("8 6", "8 6"), "scale"),
        (x[i, j] / Const(Lit(3, 1)), ("8 6",), "scale"),
        (x[i, j] * Const(Lit(0, 0, (("tp", 1),))), ("8 6",), "rank"),
        (x[i, j] + y[i, j], ("8 6 | tp:P", "8 6 | tp:P(max)"), "layout"),
        (fn("frobnicate", x[i, j]), ("8 6 | tp:P",), "nonlinear"),
    ],
)
def test_elementwise_without_a_reading(value, operands, kind):
    result = one(value, *operands)
    assert isinstance(result, RuleError)
    assert result.kind in (kind, "mix")


def test_mean_over_a_cut_dim_is_an_average():
    assert text(one(mean([j], x[i, j]), "8 12@tp", out=(i,))) == "8 | tp:P(avg)"


def test_a_bias_needs_its_divisor():
    """x @ w + b / tp is a pending sum; b alone would be added tp times."""
    value = x[i, j] + y[j] / Const(Lit(4, 1))
    assert text(one(value, "8 6 | tp:P", "6")) == "8 6 | tp:P"


def test_reductions_that_do_not_commute():
    assert one(total("max", [j], x[i, j]), "8 6 | tp:P", out=(i,)).kind == "nonlinear"
    assert text(one(total("max", [j], x[i, j]), "8 12@tp", out=(i,))) == "8 | tp:P(max)"


def test_an_open_dim_takes_the_layout_it_meets():
    ones = one(Const(1.0), out=(i, j), sizes={i: Lit(4, 8), j: 6})
    assert ones.constant == {0, 1}
    assert text(one(x[i, j] * y[i, j], ones, "8@dp 6")) == "8@dp 6"


def test_the_gradient_of_a_mean_is_scaled():
    """expand(1 / numel): the reference divides by the whole size."""
    grad = one(Const(1.0) / Const(Lit(4, 8)), out=(i,), sizes={i: Lit(4, 8)})
    assert text(one(x[i] * y[i], grad, "8@dp", out=(i,))) == "8@dp x dp^-1"


# -- windows and positions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "window", "result"),
    [
        ("8 6", Window(i, Lit(0, 0, (("dp", 4),)), Lit(4, 8)), "8@dp 6"),
        ("8 6", Window(i, Lit(0, 0, (("dp", 4), ("tp", 1))), Lit(1, 8)), "8@dp@tp 6"),
        ("8 6", Window(i, 2, 4), "4 6"),
        ("16@tp 6", Window(i, 0, Lit(4, 16)), "16@tp 6"),
        ("16@tp 6", Window(i, 1, Lit(2, 8), 2), "8@tp 6"),
    ],
)
def test_slices(operand, window, result):
    assert text(one(x[window, j], operand)) == result


@pytest.mark.parametrize(
    ("operand", "window"),
    [
        ("8 6", Window(i, Lit(0, 0, (("dp", 3),)), Lit(4, 8))),  # overlapping
        ("8 6", Window(i, Lit(4, 0, (("dp", -4),)), Lit(4, 8))),  # in reverse
        ("16@tp 6", Window(i, 0, Lit(3, 15))),  # inside every shard
        ("16@tp 6", Window(i, Lit(1, 1), Lit(3, 15))),
    ],
)
def test_slices_of_other_elements(operand, window):
    assert one(x[window, j], operand).kind in ("layout", "unsupported")


def test_pieces_of_a_fused_projection():
    fused = Denotation(Layout.sharded((3, 16), {1: ["tp"]}, MESH).reshape((12,), (48,), MESH))
    q = one(x[Window(i, 4, 4, 1)], fused, out=(i,), aligned=None)
    assert text(q) == "16@tp"
    again = derive(OpSpec.of(Concat((0, 1, 2), 0)), [q, q, q], MESH)[0]
    assert again.layout == fused.layout


def test_one_chunk_of_a_gathered_buffer():
    """all_gather along dim 0, then chunk and cat along dim 1."""
    gathered = Denotation(den("6 8@tp").layout.gather(["tp"]))
    parts = [one(x[Window(i, 6 * n, Lit(6, 6)), j], gathered, aligned=n == 0) for n in range(4)]
    whole = derive(OpSpec.of(Concat((0, 1, 2, 3), 1)), parts, MESH)[0]
    assert whole == Denotation.replicate((6, 8))
    swapped = derive(OpSpec.of(Concat((1, 0, 2, 3), 1)), parts, MESH)[0]
    assert isinstance(swapped, RuleError)


def test_the_ranks_own_chunk_of_a_gathered_buffer():
    stacked = Denotation(den("6 8@tp").layout.gather(["tp"]).reshape((4, 6, 2), (1, 6, 8), MESH))
    assert text(one(x[At(Lit(0, 0, (("tp", 1),))), i, j], stacked)) == "6 8@tp"


def test_positions_without_the_ranks_offset_have_no_reading():
    local = one(Iota(i), out=(i,), sizes={i: Lit(4, 8)})
    assert local.varying == {"dp"}
    assert one(fn("cos", x[i]), local, out=(i,)).kind == "rank"
    moved = one(x[i] + Const(Lit(0, 0, (("dp", 4),))), local, out=(i,))
    assert text(moved) == "8@dp"
    assert text(one(fn("cos", x[i]), moved, out=(i,))) == "8@dp"
    assert one(x[i] + Const(Lit(0, 0, (("dp", 2),))), local, out=(i,)).varying == {"dp"}


# -- ownership ----------------------------------------------------------------------------------


def ids():
    return replace(den("8@dp 6"), value=ranks.tensor_atom("ids", 2))


def in_block(width=3, parts=4):
    """first <= ids < first + width on each rank."""
    first = Const(Lit(0, 0, (("tp", width),)))
    last = Const(Lit(width, width * parts, (("tp", width),)))
    return one(fn("and", fn("ge", x[i, j], first), fn("lt", x[i, j], last)), ids())


def embedded(mask):
    shifted = one(x[i, j] - Const(Lit(0, 0, (("tp", 3),))), ids())
    index = one(fn("where", y[i, j], x[i, j], 0), shifted, mask)
    return one(y[x[i, j], k], index, "12@tp 5", out=(i, j, k))


def test_vocabulary_parallel_embedding_is_a_pending_sum():
    mask = in_block()
    rows = embedded(mask)
    assert rows.varying == {"tp"}
    masked = one(fn("where", y[i, j], x[i, j, k], 0), rows, mask, out=(i, j, k))
    assert text(masked) == "8@dp 6 5 | tp:P"
    product = one(x[i, j, k] * y[i, j], rows, mask, out=(i, j, k))
    assert text(product) == "8@dp 6 5 | tp:P"


def test_rows_of_other_ranks_must_be_zeroed():
    rows = embedded(in_block())
    assert one(total("sum", [j], x[i, j, k]), rows, out=(i, k)).kind == "rank"
    assert one(fn("where", y[i, j], x[i, j, k], 1), rows, in_block(), out=(i, j, k)).varying == {"tp"}


@pytest.mark.parametrize(("width", "parts"), [(2, 4), (3, 3)])
def test_blocks_that_do_not_share_out_the_vocabulary(width, parts):
    """Gaps between the blocks, or a vocabulary longer than all of them."""
    mask = in_block(width, parts)
    result = one(fn("where", y[i, j], x[i, j], 0), "8@dp 6", mask)
    assert isinstance(result, RuleError) or result.varying or width * 4 == width * parts


def test_an_indicator_of_owned_positions_is_a_shard():
    """The gradient of a vocabulary-parallel embedding's rows."""
    mask = in_block()
    shifted = one(x[i, j] - Const(Lit(0, 0, (("tp", 3),))), ids())
    index = one(fn("where", y[i, j], x[i, j], 0), shifted, mask)
    grad = one(fn("where", y[i, j], x[i, j, k], 0), "8@dp 6 5", mask, out=(i, j, k))
    row = axes("row")[0]
    value = total("sum", [i, j], fn("eq", x[i, j], Iota(row)) * y[i, j, k])
    assert text(one(value, index, grad, out=(row, k), sizes={row: Lit(3, 12)})) == "12@tp 5 | dp:P"
    assert isinstance(one(value, index, "8@dp 6 5", out=(row, k), sizes={row: Lit(3, 12)}), RuleError)


def test_picking_one_row_each_keeps_the_cut():
    """x[arange(n), index] on rows cut over dp."""
    rows = one(Iota(i), out=(i,), sizes={i: Lit(4, 8)})
    assert text(one(x[y[i], z[i]], "8@dp 6", rows, "8@dp", out=(i,))) == "8@dp"
    scattered = total("sum", [k], fn("mul", fn("eq", x[k], Iota(i)), y[k]))
    assert text(one(scattered + z[i], rows, "8@dp", "8@dp", out=(i,))) == "8@dp"


# -- random numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "streams", "result"),
    [
        ("8@dp 6", {"dp"}, "8@dp 6"),
        ("8 6", set(), "8 6"),
        ("8@dp 6", set(), "random"),
        ("8 6", {"tp"}, "random"),
        ("8@dp 6", {"dp", "tp"}, "random"),
    ],
)
def test_random_masks(operand, streams, result):
    drawn = one(x[i, j] * fn("opaque", Rand((i, j))), operand, streams=frozenset(streams))
    assert (drawn.kind if isinstance(drawn, RuleError) else str(drawn)) == result


def test_what_random_numbers_spoil_is_over_their_axes_only():
    drawn = one(x[i, j] * fn("opaque", Rand((i, j))), "8@dp 6", streams=frozenset({"dp", "tp"}))
    assert text(drawn.poisoned) == "8@dp 6 | tp:V"
    assert text(one(mean([i], x[i, j]), drawn.poisoned, out=(j,))) == "6 | dp:P(avg) tp:V"


# -- means of means -----------------------------------------------------------------------------


def test_a_pending_count_as_denominator_is_a_mean_of_means():
    spec = OpSpec.of(Out((), x[()] / fn("max", y[()], 1)))
    loss, count = den("[] | dp:P"), den("[] | dp:P")
    found = derivation(spec, [loss, count], MESH, averaged=frozenset({"dp"}), grad_free=(False, True))
    assert text(found.outs[0]) == "| dp:P(avg)"
    assert any("mean of per-rank means over dp" in n for n in found.notes)


@pytest.mark.parametrize(
    ("averaged", "grad_free"), [(frozenset(), (False, True)), (frozenset({"dp"}), (False, False))]
)
def test_else_it_is_a_mistake(averaged, grad_free):
    value = x[()] / y[()]
    assert (
        one(value, "[] | dp:P", "[] | dp:P", out=(), averaged=averaged, grad_free=grad_free).kind == "product"
    )


# -- moves --------------------------------------------------------------------------------------


def test_reshape_regroups_by_both_shapes():
    spec = OpSpec.of(Reshape(0, (8, 2, 2), (8, 8, 2)))
    assert text(derive(spec, [den("8 16@tp")], MESH)[0]) == "8 8@tp 2"
    bad = derive(OpSpec.of(Reshape(0, (4, 8), (16, 8))), [den("8 16@tp")], MESH)[0]
    assert text(bad) != "16@tp 8"


def test_cat_takes_pending_parts_together():
    def cat(*parts, dim=0):
        return text(derive(OpSpec.of(Concat(tuple(range(len(parts))), dim)), list(map(den, parts)), MESH)[0])

    assert cat("8@dp 6", "8@dp 4", dim=1) == "8@dp 10"
    assert cat("8 6 | tp:P", "4 6 | tp:P") == "12 6 | tp:P"
    assert cat("8 6 | tp:P", "4 6").startswith("mix")
    assert cat("8@tp 6", "8@tp 6") == "[2*tp*2] 6"
    assert cat("8@dp 6", "8 6", dim=1).startswith("layout")


def test_outputs_fail_one_by_one():
    spec = OpSpec.of(Out((i, j), x[i, j] * 2), Out((i, j), fn("gelu", x[i, j])), None)
    good, bad, nothing = derive(spec, [den("8 6 | tp:P")], MESH)
    assert text(good) == "8 6 | tp:P"
    assert bad.kind == "nonlinear"
    assert nothing is None


def test_size_of_an_uneven_dim_is_not_guessed():
    uneven = den("10@tp")
    assert text(one(total("sum", [i], x[i]), uneven, out=())) == "| tp:P"
    assert one(mean([i], x[i]), uneven, out=()).kind == "unsupported"


def test_broadcasting_needs_size_one_in_both_programs():
    assert one(x[ONE, j], "4@tp 6", out=(j,)).kind == "layout"


def test_size_alone():
    assert text(one(x[i] / Size(i), "8@dp", out=(i,))) == "8@dp x dp^-1"


def test_a_clash_over_one_axis_leaves_the_others_known():
    clash = one(MM, "8@dp 16@tp", "16 6")
    assert clash.kind == "layout"
    assert clash.axes == {"tp"}
    assert clash.poisoned is None or text(clash.poisoned) == "8@dp 6 | tp:V"
    bias = one(x[i, j] + y[i, j], "8@dp 6 | tp:P", "8@dp 6")
    assert text(bias.poisoned) == "8@dp 6 | tp:V"
