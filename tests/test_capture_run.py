"""Programs of all styles run under the recorder, on fake and on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from spmdtypes.capture.fake import capture
from spmdtypes.capture.run import CaptureError
from spmdtypes.contracts import Program
from spmdtypes.graph import Graph, Node
from spmdtypes.notation import Dim, Type

MESH = {"dp": 2, "tp": 2}


def of(*shape: int, dtype: str = "f32") -> Type:
    return Type(tuple(Dim(n) for n in shape), dtype)


def program(build: Callable[[DeviceMesh], nn.Module], step: Any = None, **inputs: Type) -> Program:
    return Program("test", MESH, build, inputs=inputs or {"x": of(4, 8)}, step=step)


def captured(build: Callable[[DeviceMesh], nn.Module], step: Any = None, **inputs: Type) -> Graph:
    return capture(program(build, step, **inputs), MESH, 0)


def find(graph: Graph, op: str, **fields: Any) -> list[Node]:
    return [
        n
        for n in graph.nodes
        if n.op.removeprefix("aten.").startswith(op) and all(getattr(n, k) == v for k, v in fields.items())
    ]


def source(graph: Graph, node: Node, forward: bool = False) -> str:
    """The text that the innermost frame of a node underlines."""
    frame = graph.stacks[node.forward_stack if forward else node.stack][0]
    with open(frame.file) as f:
        line = f.readlines()[frame.line - 1]
    return line[frame.col : frame.end_col] if frame.line == frame.end_line else line[frame.col :].strip()


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Net(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group("tp")
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = Reduce.apply(self.first(x), self.group)
        return self.second(torch.tanh(h)).sum()


# ---- provenance


def test_source_spans_to_the_column_forward_and_backward() -> None:
    graph = captured(Net)
    (tanh,) = find(graph, "tanh.default")
    (back,) = find(graph, "tanh_backward")
    (reduced,) = find(graph, "comm.all_reduce")
    assert source(graph, tanh) == "torch.tanh(h)"
    assert graph.nodes[back.forward or 0] is tanh
    assert source(graph, back, forward=True) == "torch.tanh(h)"
    assert source(graph, reduced) == "dist.all_reduce(g, group=ctx.group)"
    assert source(graph, reduced, forward=True) == "Reduce.apply(self.first(x), self.group)"
    assert reduced.phase == "backward" and tanh.phase == "forward"


def test_modules_and_parameters_are_known_by_name() -> None:
    graph = captured(Net)
    assert [n.name for n in graph.inputs()] == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
        "x",
    ]
    assert {n.module for n in find(graph, "addmm")} == {"first", "second"}
    assert {n.module for n in find(graph, "mm", phase="backward")} == {"first", "second"}


def test_outputs_are_named() -> None:
    names = set(captured(Net).outputs)
    params = {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert names == {"output"} | {f"{k}:{p}" for k in ("grad", "param") for p in params}


def test_a_parameter_without_gradient_has_gradient_zero() -> None:
    class Idle(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).sum()

    graph = captured(Idle)
    assert graph.nodes[graph.outputs["grad:second.weight"].node].op == "aten.zeros.default"


def test_constants_keep_their_values_and_construction_is_recorded() -> None:
    class Tables(nn.Module):
        def __init__(self, mesh: DeviceMesh) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(3))
            self.where = torch.arange(3) + 3 * mesh.get_local_rank("tp")

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * torch.tensor([1.0, 2.0, 3.0]) * self.where).sum()

    graph = capture(program(Tables), MESH, 1)
    (const,) = find(graph, "const")
    assert const.args == ((1.0, 2.0, 3.0),)
    (offset,) = find(graph, "add")
    assert offset.args[1] == 3 and offset.phase == "other"


# ---- phases


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_in_its_own_phase(reentrant: bool) -> None:
    graph = captured(lambda mesh: _Checkpointed(mesh, reentrant))
    assert [n.phase for n in find(graph, "tanh.default")] == ["forward", "recompute"]
    (back,) = find(graph, "tanh_backward")
    assert graph.nodes[back.forward or 0].op == "aten.tanh.default"


class _Checkpointed(Net):
    def __init__(self, mesh: DeviceMesh, reentrant: bool) -> None:
        super().__init__(mesh)
        self.reentrant = reentrant

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * 2

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x * self.second.weight[0], use_reentrant=self.reentrant).sum()


def test_hooks() -> None:
    class Hooked(Net):
        def __init__(self, mesh: DeviceMesh) -> None:
            super().__init__(mesh)
            self.first.weight.register_hook(lambda g: g * 3)
            self.second.weight.register_post_accumulate_grad_hook(self.done)

        def done(self, p: Tensor) -> None:
            dist.all_reduce(p.grad, group=self.group)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.register_hook(lambda g: g + 4)
            return Reduce.apply(self.second(h), self.group).sum()

    graph = captured(Hooked)
    hooks = [(n.op, n.phase) for n in graph.nodes if n.phase == "hook"]
    assert sorted(hooks) == [
        ("aten.add.Tensor", "hook"),
        ("aten.mul.Tensor", "hook"),
        ("comm.all_reduce", "hook"),
    ]


def test_clipping_and_optimizer() -> None:
    def step(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        loss = module(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            shown = norm * 2
        return {"norm": norm, "shown": shown, "steps": 1}

    graph = captured(Net, step)
    assert {n.phase for n in find(graph, "linalg_vector_norm")} == {"clip"}
    assert {n.phase for n in find(graph, "sqrt")} == {"optimizer"}
    assert graph.nodes[graph.outputs["result:shown"].node].phase == "other"
    assert graph.nodes[graph.outputs["param:first.weight"].node].phase == "optimizer"
    assert any("result:steps" in note for note in graph.notes)


# ---- frameworks


def test_dtensor_tensor_parallel() -> None:
    def build(mesh: DeviceMesh) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return _Scalar(net)

    graph = captured(build, input=of(4, 8))
    forward = [n for n in graph.nodes if n.comm is not None and n.phase == "forward"]
    assert [(n.comm.kind, n.comm.axes) for n in forward if n.comm] == [("all_reduce", ("tp",))]
    weight = next(n for n in graph.inputs() if n.name == "net.0.weight")
    assert weight.outs[0] is not None and weight.outs[0].shape == (8, 8)
    assert graph.dtensors["grad:net.0.weight"] == {"tp": "S(0)"}


class _Scalar(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input: Tensor) -> Tensor:
        return F.mse_loss(self.net(input), torch.zeros_like(input))


def test_functional_collectives_lead_on() -> None:
    class Functional(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = funcol.all_reduce(self.first(x), "sum", self.group)
            return (y * 2).sum()

    graph = captured(Functional)
    (doubled,) = find(graph, "mul", phase="forward")
    (ref,) = doubled.refs()
    assert graph.nodes[ref.node].op == "comm.all_reduce"
    assert not find(graph, "const")


def test_fsdp2() -> None:
    def build(mesh: DeviceMesh) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in net:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(_Scalar(net), mesh=mesh["dp"])

    graph = captured(build, input=of(4, 8))
    kinds = [n.comm.kind for n in graph.nodes if n.comm is not None]
    assert kinds.count("all_gather") >= 2 and kinds.count("reduce_scatter") == 2
    assert all(n.comm.axes == ("dp",) for n in graph.nodes if n.comm is not None)
    assert not any(n.op.startswith("fsdp") or "_out" in n.op for n in graph.nodes)
    reduced = find(graph, "comm.reduce_scatter")[0]
    assert reduced.comm is not None and reduced.comm.reduce_op in ("sum", "avg")


def test_ddp() -> None:
    def build(mesh: DeviceMesh) -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            _Scalar(nn.Linear(8, 8)), process_group=mesh.get_group("dp")
        )

    graph = captured(build, input=of(4, 8))
    (reduced,) = [n for n in graph.nodes if n.comm is not None]
    assert reduced.comm is not None
    assert (reduced.comm.kind, reduced.comm.axes, reduced.comm.reduce_op) == ("all_reduce", ("dp",), "sum")
    assert "grad:module.net.weight" in graph.outputs


def test_mixed_precision_and_attention() -> None:
    class Attention(nn.Module):
        def __init__(self, mesh: DeviceMesh) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                q, k, v = self.qkv(x).view(2, 2, 6, 4).chunk(3, dim=2)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.float().sum()

    graph = captured(Attention, x=of(4, 8))
    (attention,) = [n for n in graph.nodes if "attention" in n.op and n.phase == "forward"]
    assert attention.outs[0] is not None and attention.outs[0].dtype == "bf16"


# ---- values read back


def test_reading_a_number_is_assumed_and_said() -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).sum()
            return y * 2 if y.item() > 0 else y

    graph = captured(Reads)
    (read,) = find(graph, "_local_scalar_dense")
    assert read.assumed == "1.0"
    assert any("assumed 1.0" in note and "line" in note for note in graph.notes)


def test_small_integers_have_their_real_values() -> None:
    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            n = torch.bincount(torch.tensor([0, 2, 2, 1])).tolist()
            return self.first(x[: n[2]]).sum()

    graph = captured(Counts)
    assert all(n.assumed is None for n in graph.nodes)
    assert find(graph, "slice.Tensor")[-1].args[3] == 2


def test_data_dependent_routing_is_consistent() -> None:
    class Routed(Net):
        def forward(self, x: Tensor) -> Tensor:
            best = self.first(x).argmax(-1)
            out = torch.zeros_like(x)
            for i in range(2):
                rows = (best == i).nonzero().squeeze(-1)
                out[rows] = self.second(x[rows])
            return out[best >= 0].sum()

    assert any("assumed" in note for note in captured(Routed).notes)


# ---- random numbers


def test_streams_are_told_apart() -> None:
    class Drops(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            a = F.dropout(self.first(x))
            b = F.dropout(self.first(x))
            torch.manual_seed(3)
            c = torch.rand_like(x)
            return (a + b + c).sum()

    streams = [n.rng for n in captured(Drops).nodes if n.rng is not None]
    assert len(streams) == 3 and streams[0] != streams[1]


def test_recomputation_with_the_same_stream_draws_the_same() -> None:
    class Drops(_Checkpointed):
        def part(self, x: Tensor) -> Tensor:
            return F.dropout(torch.tanh(self.first(x)))

    graph = captured(lambda mesh: Drops(mesh, False))
    streams = [n.rng for n in graph.nodes if n.rng is not None]
    assert len(streams) == 2 and streams[0] == streams[1]


# ---- bad programs


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"third": of(8)}, "no parameter or buffer 'third'"),
        ({"first.bias": of(9)}, "first.bias has local shape"),
    ],
)
def test_declarations_that_do_not_fit(params: dict[str, Type], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Program("test", MESH, Net, inputs={"x": of(4, 8)}, params=params), MESH)


def test_dims_that_do_not_divide() -> None:
    odd = Type((Dim(5, ("dp",)), Dim(8)), "f32")
    with pytest.raises(CaptureError, match="5 does not divide by dp = 2"):
        capture(Program("test", MESH, Net, inputs={"x": odd}), MESH)


def test_a_build_that_returns_no_module() -> None:
    with pytest.raises(CaptureError, match="not a module"):
        captured(lambda mesh: 3)  # type: ignore[arg-type, return-value]
