"""Reads and joins of layouts against brute force on indices; bounds on closed forms against evaluation."""

from itertools import product
from math import prod

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from spmdtypes.core import ranks
from spmdtypes.core.denotation import RuleError
from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.moves import join_layouts
from spmdtypes.core.ranks import Lin, Truth
from spmdtypes.core.simulate import coordinates, local_indices
from spmdtypes.core.spec import At, Var, Window
from spmdtypes.core.subscript import read
from spmdtypes.graph import Lit

MESH = {"dp": 2, "tp": 2}
ROW, COL = Var("i"), Var("j")


@st.composite
def layouts(draw):
    """Two dims, cut, gathered or scattered about at random."""
    cuts = {}
    for a in draw(st.permutations(list(MESH))):
        cuts.setdefault(draw(st.integers(0, 2)), []).append(a)
    cuts.pop(2, None)
    shape = [draw(st.sampled_from([4, 8])) * prod(MESH[a] for a in cuts.get(d, [])) for d in range(2)]
    x = Layout.sharded(shape, cuts, MESH)
    for _ in range(draw(st.integers(0, 2))):
        try:
            match draw(st.integers(0, 3)):
                case 0 if x.axes:
                    x = x.gather([draw(st.sampled_from(sorted(x.axes)))], draw(st.integers(0, 1)))
                case 1 if set(MESH) - x.axes:
                    x = x.scatter(
                        [draw(st.sampled_from(sorted(set(MESH) - x.axes)))], MESH, draw(st.integers(0, 1))
                    )
                case 2 if x.axes:
                    x = x.all_to_all([draw(st.sampled_from(sorted(x.axes)))], MESH, draw(st.integers(0, 1)))
                case 3:
                    local, ref = x.local_shape, x.ref_shape
                    x = x.reshape((prod(local) // 2, 2), (prod(ref) // 2, 2), MESH)
        except LayoutError:
            pass
    return x


def local_value(x, coords):
    """The rank's value of a tensor that holds its own flat reference indices, as nested rows."""
    rows, cols = x.local_shape
    flat = local_indices(x, coords)
    return [flat[r * cols : (r + 1) * cols] for r in range(rows)]


def divisors(n):
    return [k for k in range(1, n + 1) if n % k == 0]


@st.composite
def windows(draw, x):
    """(local start, its step per coordinate, local length, reference start, reference length, step)"""
    n, m = x.local_shape[0], x.ref_shape[0]
    length = draw(st.sampled_from(divisors(n)))
    start = length * draw(st.integers(0, n // length - 1))
    step = draw(st.sampled_from([1, 1, 1, 2]))
    steps = draw(
        st.sampled_from([{}, {}, {"dp": length}, {"tp": length}, {"dp": length * 2, "tp": length}, {"dp": 1}])
    )
    ref_length = draw(st.sampled_from([length, length * 2, length * 4, m]))
    ref_start = draw(st.sampled_from([0, start, start * 2, start * 4]))
    last = start + sum(s * (MESH[a] - 1) for a, s in steps.items()) + (length - 1) * step
    assume(last < n and ref_start + (ref_length - 1) * step < m)
    return start, steps, length, ref_start, ref_length, step


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(layouts(), st.data())
def test_an_accepted_slice_reads_the_reference_slice(x, data):
    start, steps, length, ref_start, ref_length, step = data.draw(windows(x))
    window = Window(ROW, Lit(start, ref_start, tuple(steps.items())), Lit(length, ref_length), step)
    try:
        y, vars = read(x, (window, COL), MESH)
    except LayoutError:
        return
    assert vars == (ROW, COL)
    assert y.local_shape == (length, x.local_shape[1])
    cols = x.ref_shape[1]
    for c in coordinates(MESH):
        at = start + sum(s * c[a] for a, s in steps.items())
        read_rows = local_value(x, c)[at : at + length * step : step]
        said = local_indices(y, c)
        want = [(ref_start + step * (i // cols)) * cols + i % cols for i in said]
        assert [v for row in read_rows for v in row] == want


@settings(max_examples=300, deadline=None)
@given(
    layouts(),
    st.integers(0, 7),
    st.integers(0, 7),
    st.sampled_from([{}, {"dp": 1}, {"tp": 1}, {"dp": 2, "tp": 1}]),
)
def test_an_accepted_position_reads_the_reference_position(x, at, ref_at, steps):
    assume(at + sum(s * (MESH[a] - 1) for a, s in steps.items()) < x.local_shape[0])
    assume(ref_at < x.ref_shape[0])
    try:
        y, _ = read(x, (At(Lit(at, ref_at, tuple(steps.items()))), COL), MESH)
    except LayoutError:
        return
    cols = x.ref_shape[1]
    for c in coordinates(MESH):
        row = local_value(x, c)[at + sum(s * c[a] for a, s in steps.items())]
        assert row == [ref_at * cols + i for i in local_indices(y, c)]


@settings(max_examples=300, deadline=None)
@given(layouts(), layouts(), st.integers(0, 1), st.booleans())
def test_an_accepted_cat_is_the_reference_cat(x, other, dim, same):
    y = x if same else other
    assume(x.local_shape[1 - dim] == y.local_shape[1 - dim] and x.ref_shape[1 - dim] == y.ref_shape[1 - dim])
    try:
        z = join_layouts([x, y], dim, MESH)
    except (LayoutError, RuleError):
        return
    m = x.ref_shape[dim]
    for c in coordinates(MESH):
        parts = [local_value(p, c) for p in (x, y)]
        for n, p in enumerate((x, y)):
            parts[n] = [[(n, *divmod(v, p.ref_shape[1])) for v in row] for row in parts[n]]
        rows = parts[0] + parts[1] if dim == 0 else [a + b for a, b in zip(*parts)]
        got = [v for row in rows for v in row]
        want = []
        for i in local_indices(z, c):
            at = list(divmod(i, z.ref_shape[1]))
            n = int(at[dim] >= m)
            at[dim] -= m * n
            want.append((n, *at))
        assert got == want


# -- closed forms -------------------------------------------------------------------------------

ATOMS = [("r", "dp"), ("r", "tp"), ("i", 0), ("u", "t", (0,))]
EXTENT = 3


@st.composite
def forms(draw):
    return Lin.of(draw(st.integers(-6, 6)), {a: draw(st.integers(-3, 3)) for a in ATOMS})


truths = st.frozensets(forms(), min_size=1, max_size=2).flatmap(
    lambda c: st.booleans().map(lambda neg: Truth(c, neg))
)


def points():
    for dp, tp, i, u in product(range(2), range(2), range(EXTENT), range(-8, 9)):
        yield dict(zip(ATOMS, (dp, tp, i, u)))


def number(x, at):
    return x.const + sum(c * at[a] for a, c in x.terms)


def holds(b, at):
    return all(number(x, at) >= 0 for x in b.conj) != b.neg


@settings(max_examples=200, deadline=None)
@given(truths, truths)
def test_implication_is_sound(a, b):
    if ranks.implies(a, b, {0: EXTENT}):
        assert all(holds(b, at) for at in points() if holds(a, at))


@settings(max_examples=100, deadline=None)
@given(truths, truths)
def test_logic_of_truths(a, b):
    for name, f in (("and", lambda p, q: p and q), ("or", lambda p, q: p or q)):
        c = ranks.apply(name, [a, b])
        if c is not None:
            assert all(holds(c, at) == f(holds(a, at), holds(b, at)) for at in points())
    assert all(holds(ranks.negate(a), at) != holds(a, at) for at in points())


@settings(max_examples=100, deadline=None)
@given(forms(), forms(), st.sampled_from(["ge", "gt", "le", "lt", "eq", "ne"]))
def test_comparisons(x, y, name):
    signs = {"ge": (0, 1), "gt": (1,), "le": (-1, 0), "lt": (-1,), "eq": (0,), "ne": (-1, 1)}
    c = ranks.apply(name, [x, y])
    for at in points():
        p, q = number(x, at), number(y, at)
        assert holds(c, at) == ((p > q) - (p < q) in signs[name])


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(-2, 2),
    st.sampled_from([{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"tp": 1}, {"dp": 3}]),
    st.integers(-2, 12),
)
def test_a_partition_has_one_owner_each(size, offset, order, top):
    """Where `partition` answers, exactly one rank of its axes owns what the reference has."""
    u = Lin.of(offset, {("u", "t", (0,)): 1})
    shifted = u.plus(Lin.of(0, {("r", a): s * size for a, s in order.items()}), -1)
    local = Truth(frozenset([shifted, shifted.times(-1).shift(size - 1)]))
    ref = Truth(frozenset([u, u.times(-1).shift(top)]))
    block = ranks.partition(local, ref, MESH)
    if block is None:
        return
    for value in range(-20, 21):
        at = {("i", 0): 0, ("u", "t", (0,)): value}
        owners = sum(
            holds(local, at | {("r", a): c.get(a, 0) for a in MESH})
            for c in (dict(zip(block.axes, p)) for p in product(*(range(MESH[a]) for a in block.axes)))
        )
        assert owners == holds(ref, at | {("r", a): 0 for a in MESH})
