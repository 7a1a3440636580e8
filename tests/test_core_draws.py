"""Equal random numbers on different shards: over which of several axes of one size."""

from __future__ import annotations

from spmdtypes.core.denotation import Denotation
from spmdtypes.core.draws import narrow
from spmdtypes.core.infer import infer
from spmdtypes.graph import Graph, Lit, Node, Ref, TensorMeta
from spmdtypes.notation import parse
from spmdtypes.ops import registry

MESH = {"dp": 2, "feat": 2}


def axes_of_the_fault(weight: str | None) -> set[str]:
    """A draw of 10 numbers a rank, 20 in the reference, beside a weight of that type."""
    draw = Node(0, "aten.rand.default", ((Lit(10, 20),),), outs=(TensorMeta((10,), "f64"),))
    draw.ref, draw.ref_outs = 0, (TensorMeta((20,), "f64"),)
    nodes, inputs = [draw], {}
    if weight is not None:
        nodes.append(Node(1, "input", name="w", outs=(TensorMeta((10,), "f64"),)))
        inputs["w"] = Denotation.from_type(parse(weight), (20,), MESH)
    found = infer(Graph(MESH, {"dp": 0, "feat": 0}, nodes), inputs, registry.build)
    narrow(found)
    return set(found.problems[Ref(0)].error.axes)


def test_the_axis_that_cuts_a_dim_of_that_size_elsewhere() -> None:
    assert axes_of_the_fault("f32[20@feat]") == {"feat"}
    assert axes_of_the_fault("f32[20@dp]") == {"dp"}


def test_either_when_nothing_else_tells() -> None:
    assert axes_of_the_fault(None) == {"dp", "feat"}
