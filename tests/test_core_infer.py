"""One pass over a graph: errors at their cause, evidence, provenance, oracle."""

import subprocess
import sys

from spmdtypes.core import ranks
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.infer import infer
from spmdtypes.core.spec import At, Iota, OpSpec, Out, axes, fn, total
from spmdtypes.graph import Comm, Graph, Lit, Node, Ref, TensorMeta
from spmdtypes.notation import parse

MESH = {"dp": 2, "tp": 4}
i, j, k = axes("i j k")


def den(text):
    t = parse(text)
    return Denotation.from_type(t, tuple(d.size for d in t.dims), MESH)


def build(node, operands):
    """A handful of ops."""
    x, y = [*operands, None, None][:2]
    match node.op:
        case "mm":
            return OpSpec.of(Out((i, j), total("sum", [k], x[i, k] * y[k, j])))
        case "add":
            return OpSpec.of(Out((i, j), x[i, j] + y[i, j]))
        case "sum":
            return OpSpec.of(Out((), total("sum", [i, j], x[i, j])))
        case "gelu":
            return OpSpec.of(Out((i, j), fn("gelu", x[i, j])))
        case "div":
            return OpSpec.of(Out((), x[()] / y[()]))
    return None


class Program:
    """Builds a graph line by line."""

    def __init__(self):
        self.graph = Graph(dict(MESH), {"dp": 0, "tp": 0})
        self.inputs = {}

    def add(self, op, *refs, shape, comm=None, name="", dtype="f32", **meta):
        n = len(self.graph.nodes)
        out = TensorMeta(shape, dtype, **meta)
        self.graph.nodes.append(Node(n, op, refs, outs=(out,), comm=comm, name=name, ref=n, ref_outs=(None,)))
        return Ref(n)

    def input(self, name, text, grad=False, dtype="f32"):
        self.inputs[name] = den(text)
        return self.add(
            "input", shape=self.inputs[name].local_shape, name=name, requires_grad=grad, dtype=dtype
        )

    def reduce(self, x, axis, shape):
        return self.add(
            "comm.all_reduce", x, shape=shape, comm=Comm("all_reduce", (axis,), (0, 1, 2, 3), "sum")
        )

    def infer(self, **kw):
        return infer(self.graph, self.inputs, build, **kw)


def mlp(p, reduced=True):
    x = p.input("x", "8@dp 6")
    h = p.add("gelu", p.add("mm", x, p.input("up", "6 16@tp"), shape=(4, 4)), shape=(4, 4))
    y = p.add("mm", h, p.input("down", "16@tp 6"), shape=(4, 6))
    return p.reduce(y, "tp", (4, 6)) if reduced else y


def test_a_tensor_parallel_layer():
    p = Program()
    found = p.infer() if (out := mlp(p)) else None
    assert str(found.values[out]) == "8@dp 6"
    assert not found.problems
    assert set(found.evidence.values()) == {"proved"}
    assert found.constraints["tp", 16]


def test_an_error_is_reported_once_where_it_began():
    p = Program()
    y = mlp(p, reduced=False)
    bad = p.add("gelu", y, shape=(4, 6))
    worse = p.add("gelu", bad, shape=(4, 6))
    found = p.infer()
    assert found.problems[bad].error.kind == "nonlinear"
    assert found.problems[bad].operands == (y,)
    assert found.problems[worse] is found.problems[bad]
    assert str(found.values[worse]) == "8@dp 6 | tp:V"


def test_what_is_lost_over_one_axis_leaves_the_others():
    """A second mistake over another axis is a problem of its own."""
    p = Program()
    bad = p.add("gelu", mlp(p, reduced=False), shape=(4, 6))
    total = p.add("sum", bad, shape=())
    assert str(p.infer().values[total]) == "| dp:P tp:V"


def test_provenance_names_the_nodes():
    p = Program()
    y = mlp(p, reduced=False)
    chain = p.infer().became(y, "tp")
    assert [n for n, _ in chain][-1] == y.node
    assert chain[-1][1].startswith("became Partial(sum) over tp here: the dim that is summed is cut over tp")
    assert any("up is Shard(1) over tp from the start" in s for _, s in chain)


def test_an_unknown_op_is_counted_and_not_guessed():
    p = Program()
    x, w = p.input("x", "8@dp 6"), p.input("w", "6 6")
    same, other = p.add("mystery", w, shape=(6, 6)), p.add("mystery", x, shape=(4, 6))
    found = p.infer()
    assert found.unknown_ops == {"mystery": 2}
    assert found.values[same].is_replicated
    assert found.problems[other].error.kind == "unsupported"
    assert found.values[other].varying == {"dp"}


def test_an_input_that_does_not_fit_its_type():
    p = Program()
    x = p.add("input", shape=(8, 6), name="x")
    p.inputs["x"] = den("8@dp 6")
    found = p.infer()
    assert found.problems[x].error.kind == "layout"
    assert "[4, 6]" in found.problems[x].error.message


def test_an_input_nobody_typed():
    p = Program()
    x = p.add("input", shape=(8, 6), name="x")
    assert p.infer().problems[x].error.kind == "missing"


def test_a_mean_of_means_is_an_assumption():
    p = Program()
    loss = p.add("sum", p.input("x", "8@dp 6", grad=True), shape=())
    count = p.add("sum", p.input("mask", "8@dp 6"), shape=())
    mean = p.add("div", loss, count, shape=())
    found = p.infer(averaged=frozenset({"dp"}))
    assert str(found.values[mean]) == "| dp:P(avg)"
    assert found.evidence[mean] == "assumed"
    assert found.assumptions == [(mean.node, "mean of per-rank means over dp")]
    assert p.infer().problems[mean].error.kind == "product"


class Seen:
    """An oracle that knows some values."""

    def __init__(self, known):
        self.known = known

    def readings(self, ref):
        return self.known.get(ref)

    def agrees(self, ref, den):
        return None if ref not in self.known else any(d.same(den, MESH) for d in self.known[ref])


def test_the_oracle_settles_what_rules_cannot():
    p = Program()
    x = p.add("mystery", p.input("x", "8@dp 6"), shape=(4, 6))
    y = p.add("gelu", x, shape=(4, 6))
    found = p.infer(oracle=Seen({x: [den("8@dp 6")]}))
    assert str(found.values[y]) == "8@dp 6"
    assert (found.evidence[x], found.evidence[y]) == ("tested", "proved")
    assert not found.problems


def test_the_oracle_overrules_a_rule_on_record():
    p = Program()
    y = mlp(p, reduced=False)
    found = p.infer(oracle=Seen({y: [den("8@dp 6")]}))
    assert [c[0] for c in found.conflicts] == [y]
    assert str(found.values[y]) == "8@dp 6"


def test_no_reading_at_all_confirms_the_error():
    p = Program()
    bad = p.add("gelu", mlp(p, reduced=False), shape=(4, 6))
    assert bad in p.infer(oracle=Seen({bad: []})).problems


def test_integers_are_told_apart_when_results_are_reused():
    """Two equal comparisons of different tensors share one derivation, not one identity."""
    p = Program()
    a, b = (p.input(n, "8@dp 6", dtype="i64") for n in "ab")
    found = p.infer()
    assert found.values[a] != found.values[b]
    names = {found.values[r].value.keys for r in (a, b)}
    assert len(names) == 2


def test_reshaped_identities_survive_renaming():
    value = ranks.tensor_atom("t", 1)
    nested = value.mapped(lambda a: ("u", ("reshaped", a[1], (0,), (4,), (2, 2)), (0, 1)))
    there = nested.mapped(ranks.rekeyed({("reshaped", "t", (0,), (4,), (2, 2)): "#0"}))
    grown = there.mapped(lambda a: ("u", ("reshaped", a[1], (0, 1), (2, 2), (4,)), (0,)))
    back = grown.mapped(ranks.rekeyed({"#0": ("reshaped", "t", (0,), (4,), (2, 2))}))
    assert back.keys == (("reshaped", ("reshaped", "t", (0,), (4,), (2, 2)), (0, 1), (2, 2), (4,)),)


def test_many_equal_layers_are_derived_once():
    calls = []

    def counted(node, operands):
        calls.append(node.op)
        return build(node, operands)

    p = Program()
    h = p.input("x", "8@dp 6")
    up, down = p.input("up", "6 16@tp"), p.input("down", "16@tp 6")
    for _ in range(50):
        y = p.add("gelu", p.add("mm", h, up, shape=(4, 4)), shape=(4, 4))
        h = p.add("add", h, p.reduce(p.add("mm", y, down, shape=(4, 6)), "tp", (4, 6)), shape=(4, 6))
    found = infer(p.graph, p.inputs, counted)
    assert str(found.values[h]) == "8@dp 6"
    assert len(calls) == 4


def test_the_core_needs_no_torch():
    code = (
        "import sys, spmdtypes.core.infer, spmdtypes.core.simulate\n"
        "assert not {'torch', 'sympy', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def const(*values, shape=()):
    p = Program()
    x = p.add("const", shape=shape)
    p.graph.nodes[0].args = values
    return p.infer().values[x]


def test_constants_say_what_they_are():
    assert const((0.0, 0.0), shape=(2,)).is_zero
    assert str(const((1.0, 2.0), shape=(2,))) == "2"
    assert str(const((Lit(4, 1),))) == "x tp^-1"
    assert const((Lit(0, 0, (("tp", 3),)),)).varying == {"tp"}
    assert const((Lit(1.0, 5.0), Lit(2.0, 7.0)), shape=(2,)).varying == {"dp", "tp"}


def build_more(node, operands):
    """The ops of `build`, elementwise ones in any shape, and reads by position."""
    x, y = [*operands, None, None][:2]
    dims = axes("i j k")[: x.ndim] if x is not None else []
    match node.op:
        case "mul" | "div":
            return OpSpec.of(Out(tuple(dims), fn(node.op, x[tuple(dims)], y[tuple(dims)])))
        case "bound":
            return OpSpec.of(Out((), fn("max", x[()], 1)))
        case "select":
            return OpSpec.of(Out((j,), x[At(node.args[1]), j]))
        case "order":
            inner = fn("opaque", Iota(k), x[k, j])
            return OpSpec.of(
                Out((i, j), fn("opaque", Iota(i), total("sum", [k], inner))), sizes={i: node.args[1]}
            )
    return build(node, operands)


def kinds(p, ref):
    return infer(p.graph, p.inputs, build_more).problems[ref].error.kind


def test_a_mean_per_rank_is_a_mistake_unless_it_is_weighted_afterwards():
    p = Program()
    total_, count, weight = (
        p.add("sum", p.input(n, "8@dp 6"), shape=()) for n in ("total", "count", "weight")
    )
    mean = p.add("div", total_, p.add("bound", count, shape=()), shape=())
    assert kinds(p, mean) == "nonlinear"
    weighted = p.add("mul", mean, weight, shape=())
    assert kinds(p, weighted) == "unsupported"
    assert kinds(p, mean) == "unsupported"


def test_a_product_of_pending_sums_is_a_mistake_however_it_goes_on():
    p = Program()
    a, b, c = (p.add("sum", p.input(n, "8@dp 6"), shape=()) for n in "abc")
    product = p.add("mul", p.add("mul", a, b, shape=()), c, shape=())
    assert kinds(p, product) == "product"


def test_one_position_of_a_cut_dim_is_a_mistake_and_every_position_in_turn_is_not_known_to_be():
    p = Program()
    x = p.input("x", "4@dp 6")
    first = p.add("select", x, 0, shape=(6,))
    assert kinds(p, first) == "layout"
    p.add("select", x, 1, shape=(6,))
    assert kinds(p, first) == "unsupported"


def test_ordering_a_cut_dim_cannot_be_followed():
    p = Program()
    ordered = p.add("order", p.input("x", "8@dp 6"), 4, shape=(4, 6))
    assert kinds(p, ordered) == "unsupported"
    q = Program()
    ordered = q.add("order", q.reduce(q.input("x", "8 6 | dp:P"), "tp", (8, 6)), 8, shape=(8, 6))
    assert kinds(q, ordered) == "nonlinear"


def test_a_step_only_some_ranks_take_leaves_its_result_open():
    p = Program()
    x = p.add("sum", p.input("x", "8@dp 6"), shape=())
    extra = p.add("mul", x, p.add("sum", p.input("y", "8 6"), shape=()), shape=())
    p.graph.nodes[extra.node].apart = ("tp",)
    after = p.add("mul", extra, p.add("sum", p.input("z", "8 6"), shape=()), shape=())
    assert kinds(p, after) == "unsupported"
    q = Program()
    bad = q.add("gelu", q.input("x", "8 6 | tp:P"), shape=(8, 6))
    assert kinds(q, bad) == "nonlinear"
    q.graph.nodes[bad.node].apart = ("tp",)
    assert kinds(q, bad) == "unsupported"
