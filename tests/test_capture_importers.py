"""Exported programs and fx graphs become the same graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from spmdtypes.capture.environment import environment
from spmdtypes.capture.importers import from_export, from_fx
from spmdtypes.capture.replay import replay
from spmdtypes.capture.run import CaptureError
from spmdtypes.graph import Graph


def nothing(node: object, tensors: object) -> list[Tensor]:
    raise AssertionError("no collective expected")


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        y = self.inner(x).split([1, 2], dim=1)
        return y[0].relu() + y[1]


def test_export() -> None:
    module, x = Counted(), torch.randn(2, 4)
    before = {n: t.clone() for n, t in [*module.named_parameters(), *module.named_buffers()]}
    graph = from_export(torch.export.export(module, (x,)))
    assert {n.name for n in graph.inputs()} == {"x", "seen", "inner.weight", "inner.bias"}
    env = replay(graph, {"x": x} | before, nothing)
    torch.testing.assert_close(env[graph.outputs["output"]], module(x))
    torch.testing.assert_close(env[graph.outputs["param:seen"]], torch.ones(()))
    linear = next(n for n in graph.nodes if n.module == "inner")
    relu = next(n for n in graph.nodes if n.op == "aten.relu.default")
    assert linear.op.startswith("aten.")
    assert Path(graph.frames(relu)[0].file).name == Path(__file__).name


def test_functional_collectives_in_fx() -> None:
    with environment(4, 0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        name = mesh.get_group("tp").group_name

        def run(x: Tensor) -> Tensor:
            y = funcol.all_reduce(x * 2, "sum", mesh.get_group("tp"))
            return funcol.all_gather_tensor(y, 0, mesh.get_group("tp")) + 1

        gm = make_fx(run)(torch.ones(3, 4))
    graph = from_fx(gm, {"dp": 2, "tp": 2}, groups={name: ("tp",)})
    comms = [n.comm for n in graph.nodes if n.comm is not None]
    assert [(c.kind, c.axes, c.reduce_op) for c in comms] == [
        ("all_reduce", ("tp",), "sum"),
        ("all_gather", ("tp",), ""),
    ]
    assert graph.outputs["output"].node == len(graph.nodes) - 1
    unnamed = from_fx(gm, {"dp": 2, "tp": 2})
    assert any("not known" in note for note in unnamed.notes)


def test_a_backward_traced_by_make_fx() -> None:
    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        w = w.detach().requires_grad_()
        loss = (x @ w).square().sum()
        return [loss, *torch.autograd.grad(loss, w)]

    x, w = torch.randn(2, 3), torch.randn(3, 4)
    graph: Graph = from_fx(make_fx(run)(x, w), names={"w_1": "weight"})
    assert {n.name for n in graph.inputs()} == {"x_1", "weight"}
    env = replay(graph, {"x_1": x, "weight": w}, nothing)
    for name, value in zip(("output.0", "output.1"), run(x, w)):
        torch.testing.assert_close(env[graph.outputs[name]], value.detach())


def test_graphs_that_cannot_be_imported_say_why() -> None:
    with pytest.raises(CaptureError, match="mutates"):
        from_fx(make_fx(lambda x: x.clone().add_(1))(torch.ones(2)))
    with pytest.raises(CaptureError, match="call_module"):
        from_fx(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))
