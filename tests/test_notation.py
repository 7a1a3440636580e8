import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtypes.notation import (
    ATTEMPTS,
    DTYPES,
    Dim,
    NotationError,
    Type,
    bind,
    format_type,
    global_shape,
    local_shape,
    parse,
    resolve,
)

MESH = {"dp": 2, "tp": 4}


def b(*axes):
    return Dim("b", axes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b@dp s h", Type((b("dp"), Dim("s"), Dim("h")))),
        ("b@dp, s, h", Type((b("dp"), Dim("s"), Dim("h")))),
        ("b@dp s h@tp", Type((b("dp"), Dim("s"), Dim("h", ("tp",))))),
        ("8@dp@cp 16", Type((Dim(8, ("dp", "cp")), Dim(16)))),
        ("bf16[b@dp s]", Type((b("dp"), Dim("s")), "bf16")),
        ("bf16[b@dp s | tp:P]", Type((b("dp"), Dim("s")), "bf16", (("tp", "sum"),))),
        ("b s | tp:P", Type((b(), Dim("s")), None, (("tp", "sum"),))),
        ("b s | tp:P(avg), dp:I", Type((b(), Dim("s")), None, (("tp", "avg"), ("dp", "I")))),
        ("b s | tp:V dp:R", Type((b(), Dim("s")), None, (("tp", "V"),))),
        ("f32[]; avg@dp", Type((), "f32", (("dp", "avg"),))),
        ("f32[]; avg@dp; sum@cp", Type((), "f32", (("dp", "avg"), ("cp", "sum")))),
        ("f32[]; sum@dp, sum@cp", Type((), "f32", (("dp", "sum"), ("cp", "sum")))),
        ("f32[] | avg@dp@cp", Type((), "f32", (("dp", "avg"), ("cp", "avg")))),
        ("i64[4@dp, 6] < 24", Type((Dim(4, ("dp",)), Dim(6)), "i64", (), 24)),
        ("f32[8@dp, 16] < 5 ; avg@tp", Type((Dim(8, ("dp",)), Dim(16)), "f32", (("tp", "avg"),), 5)),
        ("i64[s] < v", Type((Dim("s"),), "i64", limit_dim="v")),
        ("[]", Type(())),
        ("", Type(())),
        ("| tp:P", Type(None, None, (("tp", "sum"),))),
        ("tp:P", Type(None, None, (("tp", "sum"),))),
        ("f32[...] | tp:P", Type(None, "f32", (("tp", "sum"),))),
    ],
)
def test_what_a_text_means(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("b@tp s@tp", 7, "axis tp used twice in 'b@tp s@tp'"),
        ("b@tp s | tp:P", 9, "axis tp used twice"),
        ("b@ s", 3, None),
        ("b@", 2, "expected the name of a mesh axis after 'b@', found the end"),
        ("b@@dp", 2, "expected the name of a mesh axis after 'b@', found '@'"),
        ("@dp s", 0, "expected a dim (a name or a number) before '@'"),
        ("b@dp s | tp:Q", 12, "expected R, I, V or P after 'tp:', found 'Q'"),
        ("b@dp s | tp:S", 12, "a shard is written at its dim, as in 'dim@tp'"),
        ("b | tp:P(mean)", 9, "expected a reduction (sum, avg, max, min, prod), found 'mean'"),
        ("b | tp", 4, "expected 'axis:P' or 'sum@axis' after '|', found 'tp'"),
        ("b | tp:P(avg", 12, "expected ')' after 'P(avg', found the end"),
        ("float32[b]", 0, "unknown dtype 'float32': expected one of f64, f32"),
        ("f32[b s", 7, "expected ']' after the dims, found the end"),
        ("b s]", 3, "expected a dim, '|' or the end, found ']'"),
        ("b < @", 4, "expected a number or the name of a dim after '<', found '@'"),
        ("avg@dp", 0, "'avg' is a reduction, not a dim"),
        ("b 0 s", 2, "dim of size 0"),
        ("b 2x s", 2, "expected a dim (a name or a number), found '2x'"),
        ("b ? s", 2, "unexpected '?'"),
    ],
)
def test_an_error_points_at_its_column(text, column, message):
    if message is None:  # 'b@ s' reads as b cut over s: legal, blanks do not matter
        assert parse(text) == Type((Dim("b", ("s",)),))
        return
    with pytest.raises(NotationError) as e:
        parse(text)
    assert message in e.value.message
    assert e.value.column == column
    assert str(e.value).splitlines()[-1] == "    " + " " * column + "^"


axis_names = st.sampled_from(["dp", "tp", "cp", "pp", "ep"])


@st.composite
def types(draw):
    axes = draw(st.lists(axis_names, unique=True))
    dims = []
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.one_of(st.integers(1, 99), st.sampled_from(["b", "s", "h", "d_ff"])))
        cut = [axes.pop() for _ in range(draw(st.integers(0, len(axes))))]
        dims.append(Dim(size, tuple(cut)))
    ops = st.sampled_from(["sum", "avg", "max", "min", "prod", "I", "V"])
    partial = tuple((a, draw(ops)) for a in axes)
    unknown = draw(st.booleans()) and not dims
    limit = draw(st.none() | st.integers(0, 99))
    return Type(None if unknown else tuple(dims), draw(st.none() | st.sampled_from(DTYPES)), partial, limit)


@given(types())
def test_printing_and_parsing_are_inverse(t):
    assert parse(format_type(t)) == t


@given(st.text(alphabet="bs12@:|;,<()[]. PIVR", max_size=12))
def test_any_text_is_read_or_refused_with_a_column(text):
    error = None
    try:
        t = parse(text)
    except NotationError as e:
        error = e
    if error is None:
        assert parse(format_type(t)) == t
    else:
        assert 0 <= error.column <= len(text)


def test_free_dims_get_sizes_of_their_own():
    ts = {"x": parse("b@dp s d"), "up": parse("f@tp d"), "down": parse("d f@dp")}
    for attempt in range(ATTEMPTS):
        sizes = resolve(ts, mesh=MESH, attempt=attempt)
        assert len({*sizes.values()}) == 4
        assert sizes["b"] % 2 == 0
        assert sizes["f"] % 4 == 0
        assert all(n not in (1, 2, 4) for n in sizes.values())


def test_given_dims_are_kept_and_constructor_names_get_sizes():
    sizes = resolve({"x": parse("b@dp s")}, {"b": 8}, MESH, names=("heads",))
    assert sizes["b"] == 8
    assert sizes["heads"] > 1


@pytest.mark.parametrize(
    ("text", "dims", "message"),
    [
        ("b@dpp s", {}, "unknown axis 'dpp' in 'b@dpp s': the mesh has dp, tp (did you mean dp?)"),
        (
            "b@tp s",
            {"b": 6},
            "dim b = 6 is not divisible by axis tp = 4 in 'b@tp s': valid sizes of tp are 1, 2, 3, 6",
        ),
        ("6@tp s", {}, "dim 6 is not divisible by axis tp = 4"),
        ("12@dp@tp s", {}, "dim 12 is not divisible by axis tp = 4 (after 2 blocks over the axes before it)"),
        ("b@dp s", {"b": 0}, "dim b has size 0: expected a positive number"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh(text, dims, message):
    with pytest.raises(NotationError) as e:
        resolve({"x": parse(text)}, dims, MESH)
    assert message in e.value.message


def test_shapes_of_a_bound_type():
    t = bind(parse("b@dp s f@tp"), {"b": 6, "s": 5, "f": 8})
    assert global_shape(t) == (6, 5, 8)
    assert local_shape(t, MESH) == (3, 5, 2)
    with pytest.raises(NotationError, match="dim b of 'b s' has no size yet"):
        global_shape(parse("b s"))
