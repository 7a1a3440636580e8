"""Layouts against brute force: which reference element every rank's element is."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.simulate import coordinates, local_indices, local_shape
from spmdtypes.notation import parse

MESH = {"dp": 2, "tp": 4, "cp": 3}


def den(text, mesh=MESH):
    t = parse(text)
    return Denotation.from_type(t, tuple(d.size for d in t.dims), mesh)


def indices(layout, mesh=MESH):
    return [local_indices(layout, c) for c in coordinates(mesh)]


@st.composite
def layouts(draw):
    """A tensor cut along some dims, each axis used at most once."""
    axes = draw(st.permutations(list(MESH)))[: draw(st.integers(0, 3))]
    ndim = draw(st.integers(1, 3))
    cuts = {}
    for a in axes:
        cuts.setdefault(draw(st.integers(0, ndim - 1)), []).append(a)
    shape = [draw(st.integers(1, 4)) * prod(MESH[a] for a in cuts.get(d, [])) for d in range(ndim)]
    return Layout.sharded(shape, cuts, MESH)


@st.composite
def factored(draw, n):
    """A shape of n elements."""
    out = []
    while n > 1:
        k = draw(st.sampled_from([k for k in range(2, n + 1) if n % k == 0]))
        out.append(k)
        n //= k
    return (*out, 1) if draw(st.booleans()) else tuple(out)


@given(layouts())
def test_every_element_has_one_place_per_replica(x):
    counts = [i for rank in indices(x) for i in rank]
    copies = prod(n for a, n in MESH.items() if a not in x.axes)
    assert sorted(counts) == sorted(list(range(prod(x.ref_shape))) * copies)


@given(layouts(), st.data())
def test_a_reshape_keeps_every_element(x, data):
    """Whatever reshape the algebra accepts, flat order is preserved on both sides."""
    local = data.draw(factored(prod(x.local_shape)))
    ref = data.draw(factored(prod(x.ref_shape)))
    local, ref = (s + (1,) * (max(len(local), len(ref)) - len(s)) for s in (local, ref))
    try:
        y = x.reshape(local, ref, MESH)
    except LayoutError:
        return
    assert y.local_shape == local
    assert y.ref_shape == ref
    assert indices(y) == indices(x)
    assert y.reshape(x.local_shape, x.ref_shape, MESH) == x


@given(layouts(), st.data())
def test_an_inferred_reference_shape_keeps_every_element(x, data):
    local = data.draw(factored(prod(x.local_shape)))
    try:
        y = x.reshape(local, None, MESH)
    except LayoutError:
        return
    assert y.local_shape == local
    assert indices(y) == indices(x)


@given(layouts(), st.data())
def test_permuting_back_is_the_identity(x, data):
    order = data.draw(st.permutations(range(x.ndim)))
    y = x.permute(order)
    assert y.ref_shape == tuple(x.ref_shape[d] for d in order)
    assert y.permute([order.index(d) for d in range(x.ndim)]) == x


@given(layouts(), st.data())
@settings(max_examples=200)
def test_scatter_undoes_gather(x, data):
    if not x.axes:
        return
    axes = data.draw(st.permutations(sorted(x.axes)))
    dim = data.draw(st.integers(0, x.ndim - 1))
    gathered = x.gather(axes, dim)
    assert not gathered.axes & set(axes)
    assert gathered.scatter(axes, MESH, dim) == x


@given(layouts())
def test_gather_stacks_the_ranks_values(x):
    """Gathering over one axis along dim 0 is the concatenation of the ranks' values."""
    for axis in x.axes:
        for c in coordinates(MESH):
            parts = [local_indices(x, c | {axis: k}) for k in range(MESH[axis])]
            assert local_indices(x.gather([axis]), c) == [i for p in parts for i in p]


@given(layouts())
def test_printed_types_read_back(x):
    d = Denotation(x)
    assert den(str(d)) == d


@pytest.mark.parametrize(
    "text", ["8@dp 6", "24@dp@tp@cp 6", "24@tp@dp 6", "6 | tp:P", "6@dp | cp:P(avg) tp:P(avg)"]
)
def test_notation_round_trip(text):
    assert str(den(text)) == text


def test_the_order_of_axes_matters():
    assert den("8@dp@tp") != den("8@tp@dp")
    assert local_indices(den("8@dp@tp"), {"dp": 1, "tp": 0, "cp": 0}) == [4]
    assert local_indices(den("8@tp@dp"), {"dp": 1, "tp": 0, "cp": 0}) == [1]


def test_average_is_a_sum_with_a_scale():
    d = den("6 | tp:P(avg)")
    assert (d.op, d.partial, d.scale) == ("sum", {"tp"}, (("tp", -1),))
    assert d.scale_in(MESH) == 0.25


def test_uneven_shards_follow_torch_chunk():
    d = den("10@tp 2")
    sizes = [local_shape(d.layout, c)[0] for c in coordinates({"tp": 4})]
    assert sizes == [3, 3, 3, 1]
    assert d.ref_shape == (10, 2)
    assert local_indices(d, {"dp": 0, "cp": 0, "tp": 3}) == [18, 19]


def test_uneven_shards_are_not_moved_about():
    with pytest.raises(LayoutError, match="uneven") as e:
        den("10@tp 2").layout.gather(["tp"])
    assert e.value.unsupported


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [("8@xp", "axis", "unknown"), ("10@dp@tp", "layout", "not divisible")],
)
def test_types_that_mean_nothing(text, kind, message):
    with pytest.raises(RuleError, match=message) as e:
        den(text)
    assert e.value.kind == kind


def test_a_fused_projection_is_a_strided_shard():
    """[3, tp, L] as one dim: views of it keep apart what a contiguous shard would mix."""
    fused = Layout.sharded((3, 8), {1: ["tp"]}, MESH).reshape((6,), (24,), MESH)
    assert fused.show() == "[3*tp*2]"
    assert fused.reshape((3, 2), (3, 8), MESH).show() == "3 8@tp"
    assert fused != Layout.sharded((24,), {0: ["tp"]}, MESH)


def test_a_view_of_a_gathered_buffer_shows_the_wrong_order():
    """[b, f@tp] gathered along dim 0 and viewed as [b, f] has its elements elsewhere."""
    gathered = Layout.sharded((8, 8), {1: ["tp"]}, MESH).gather(["tp"])
    wrong = gathered.reshape((8, 8), (8, 8), MESH)
    assert not any(wrong.is_proper(d) for d in range(2))
    right = gathered.reshape((4, 8, 2), (1, 8, 8), MESH).permute((1, 0, 2)).reshape((8, 8), (8, 8), MESH)
    assert right == Layout.replicated((8, 8))
