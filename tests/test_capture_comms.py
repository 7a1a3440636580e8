"""Every spelling of a collective becomes one canonical node with the axes it spans."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from spmdtypes.capture import comms
from spmdtypes.capture.environment import environment
from spmdtypes.capture.functionalise import Functional, functionalise
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.replay import replay
from spmdtypes.graph import Comm, Graph, Ref

Body = Callable[[DeviceMesh, Tensor], Tensor | None]


def recorded(mesh: dict[str, int], rank: int, device_mesh: DeviceMesh, body: Body, x: Tensor) -> Functional:
    """Record `body` on real tensors."""
    groups = comms.Groups(mesh, {})
    rec = Recorder(
        mesh, dict(zip(mesh, groups.coords(rank))), comms.group_axes(device_mesh), keep_values=True
    )
    with rec.recording():
        rec.bind(x, "x")
        out = body(device_mesh, x)
        with rec.pause():
            comms.drain(rec)
    return functionalise(rec, {"out": rec.view(out)} if out is not None else {})


def alone(body: Body, mesh: dict[str, int] | None = None, rank: int = 0) -> Graph:
    """The graph of `body` under a process group that does not communicate."""
    mesh = mesh or {"dp": 2, "tp": 2}
    world = 1
    for n in mesh.values():
        world *= n
    with environment(world, rank):
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        return recorded(mesh, rank, device_mesh, body, torch.arange(24.0).reshape(4, 6)).graph


def nodes(graph: Graph) -> list[Comm]:
    return [n.comm for n in graph.nodes if n.comm is not None]


def only(body: Body, mesh: dict[str, int] | None = None, rank: int = 0) -> Comm:
    (comm,) = nodes(alone(body, mesh, rank))
    return comm


# ---- which axes


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        ([0, 1], ("c",)),
        ([0, 2], ("b",)),
        ([0, 6], ("a",)),
        ([0, 1, 2, 3, 4, 5], ("b", "c")),
        ([0, 1, 6, 7], ("a", "c")),
        (list(range(12)), ("a", "b", "c")),
        ([0, 3], ()),
        ([0, 1, 2], ()),
    ],
)
def test_axes_of_a_group(ranks: list[int], axes: tuple[str, ...]) -> None:
    groups = comms.Groups({"a": 2, "b": 3, "c": 2}, {})
    if ranks == [0, 2]:
        assert groups.axes((0, 2, 4)) == axes
    else:
        assert groups.axes(tuple(ranks)) == axes


def test_groups_of_all_kinds() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> None:
        dist.all_reduce(x)
        dist.all_reduce(x, group=mesh["tp"].get_group())
        dist.all_reduce(x, group=mesh["dp", "tp"]._flatten("both").get_group())
        dist.all_reduce(x, group=dist.new_group([0, 2]))
        dist.all_reduce(x, group=dist.new_group([0, 3]))

    spans = [(c.axes, c.ranks) for c in nodes(alone(body))]
    both = ("dp", "tp")
    assert spans == [
        (both, (0, 1, 2, 3)),
        (("tp",), (0, 1)),
        (both, (0, 1, 2, 3)),
        (("dp",), (0, 2)),
        ((), (0, 3)),
    ]


def test_axes_of_size_one_are_told_by_their_group() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> None:
        dist.all_reduce(x, group=mesh.get_group("dp"))
        dist.all_reduce(x, group=mesh.get_group("tp"))
        dist.all_reduce(x)

    assert [c.axes for c in nodes(alone(body, {"dp": 1, "tp": 2}))] == [("dp",), ("tp",), ("tp",)]


# ---- which operator


@pytest.mark.parametrize(
    ("name", "canonical"), [("SUM", "sum"), ("AVG", "avg"), ("MAX", "max"), ("PRODUCT", "prod")]
)
def test_reduce_operators(name: str, canonical: str) -> None:
    op = getattr(dist.ReduceOp, name)

    def body(mesh: DeviceMesh, x: Tensor) -> None:
        dist.all_reduce(x, op)
        dist.reduce(x, 0, op)
        dist.reduce_scatter_tensor(torch.empty(1, 6), x, op)
        dist.all_reduce_coalesced([x], op)
        funcol.all_reduce(x, canonical.replace("prod", "product"), mesh.get_group("tp"))

    assert {c.reduce_op for c in nodes(alone(body))} == {canonical}


def test_premultiplied_sum_keeps_its_factor() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> None:
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.25))

    comm = only(body)
    assert (comm.reduce_op, comm.factor) == ("premul_sum", 0.25)


# ---- which kind


def test_list_forms() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        parts = [torch.empty(4, 6) for _ in range(2)]
        dist.all_gather(parts, x, group=mesh.get_group("tp"))
        return parts[1] * 2

    graph = alone(body)
    assert [n.op for n in graph.nodes] == ["input", "comm.all_gather", "aten.slice.Tensor", "aten.mul.Tensor"]
    assert graph.nodes[1].outs[0] and graph.nodes[1].outs[0].shape == (8, 6)
    assert graph.nodes[2].args == (Ref(1), 0, 4, 8)


def test_gathering_scalars_and_stacking() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        parts = [torch.empty(()) for _ in range(2)]
        dist.all_gather(parts, x.sum(), group=mesh.get_group("tp"))
        stacked = torch.empty(2, 4, 6)
        dist.all_gather_into_tensor(stacked, x, group=mesh.get_group("tp"))
        return stacked + parts[0] + parts[1]

    shapes = [n.outs[0].shape for n in alone(body).nodes if n.comm is not None and n.outs[0]]
    assert shapes == [(2,), (8, 6)]


def test_rooted_forms() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> None:
        group = mesh.get_group("tp")
        dist.broadcast(x, 1, group=group)
        dist.reduce(x, 0, group=group)
        dist.gather(x, [torch.empty(4, 6), torch.empty(4, 6)], 0, group=group)
        dist.scatter(x, [x + 1, x + 2], 0, group=group)

    assert [(c.kind, c.root) for c in nodes(alone(body))] == [
        ("broadcast", 1),
        ("reduce", 0),
        ("gather", 0),
        ("scatter", 0),
    ]


def test_point_to_point_and_barrier() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        group = mesh.get_group("dp")
        y = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, 2, group), dist.P2POp(dist.irecv, y, 2, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.barrier()
        return y + 1

    graph = alone(body)
    assert [(c.kind, c.root) for c in nodes(graph)] == [("send", 1), ("recv", 1), ("barrier", None)]
    recv = next(n for n in graph.nodes if n.op == "comm.recv")
    assert graph.nodes[graph.outputs["out"].node].args[0] == Ref(recv.id)


def test_all_to_all_keeps_splits() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> None:
        group = mesh.get_group("tp")
        dist.all_to_all_single(torch.empty(4, 6), x, [3, 1], [1, 3], group=group)
        funcol.all_to_all_single(x, [2, 2], [2, 2], group)
        dist.all_to_all([torch.empty(3, 6), torch.empty(1, 6)], [x[:3], x[3:]], group=group)

    assert [c.splits for c in nodes(alone(body))] == [((3, 1), (1, 3)), ((2, 2), (2, 2)), ((3, 1), (3, 1))]


def test_dtensor_comes_back_as_local_ops() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        d = DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
        whole = (d * 2).redistribute(placements=[Replicate()]).to_local()
        moved = d.redistribute(placements=[Shard(1)]).to_local()
        return whole.sum() + moved.sum()

    graph = alone(body)
    assert {c.axes for c in nodes(graph)} == {("tp",)}
    assert all(not n.op.startswith("_dtensor") for n in graph.nodes)


# ---- when the result arrives


def test_an_async_collective_takes_effect_when_waited_for() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        y = x * 1
        work = dist.all_reduce(y, async_op=True)
        early = y + 1
        work.wait()
        return early + y

    graph = alone(body)
    names = {n.op: n.id for n in graph.nodes}
    late, early = graph.nodes[-1], graph.nodes[-2]
    assert early.args[0] == Ref(names["aten.mul.Tensor"])
    assert late.args == (Ref(early.id), Ref(names["comm.all_reduce"]))


def test_an_async_collective_nobody_waits_for_changes_nothing() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        y = x * 1
        dist.all_reduce(y, async_op=True)
        return y + 1

    graph = alone(body)
    assert graph.nodes[-1].args[0] == Ref(next(n.id for n in graph.nodes if n.op == "aten.mul.Tensor"))
    assert len(nodes(graph)) == 1


# ---- real ranks


def _rank(rank: int, world: int, path: str, body: Body, pipe: Any) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world)
        with environment(world, rank, fake=False):
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
            x = torch.arange(24.0).reshape(4, 6) * (rank + 1) + rank
            expected = body(mesh, x.clone())
            done = recorded({"tp": world}, rank, mesh, body, x.clone())
        graph = done.graph
        drawn = lambda n, _: [done.values.get(Ref(n.id, k)) for k in range(len(n.outs))]  # noqa: E731
        constants = {n.id: done.values[Ref(n.id)] for n in graph.nodes if n.op == "const"}
        got = replay(graph, {"x": x}, drawn, constants)[graph.outputs["out"]]
        torch.testing.assert_close(got, expected)
        pipe.send((None, graph, {r: v.tolist() for r, v in done.values.items() if graph.nodes[r.node].comm}))
    except BaseException:
        pipe.send((traceback.format_exc(), None, None))


def on_ranks(world: int, body: Body) -> list[tuple[Graph, dict[Ref, list[Any]]]]:
    """Run `body` on real ranks, recorded and not; both give the same and replay gives it again."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as path:
        pipes = [context.Pipe() for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(r, world, path, body, pipes[r][1])) for r in range(world)
        ]
        for r in ranks:
            r.start()
        results = []
        for ours, _ in pipes:
            assert ours.poll(60), "a rank does not answer"
            results.append(ours.recv())
        for r in ranks:
            r.join(5)
    for error, _, _ in results:
        assert error is None, error
    return [(graph, values) for _, graph, values in results]


def test_collectives_of_real_ranks() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        group = mesh.get_group("tp")
        n, me = mesh.size(), dist.get_rank()
        y = x.clone()
        dist.all_reduce(y)
        parts = [torch.empty_like(x) for _ in range(n)]
        work = dist.all_gather(parts, y * me, async_op=True)
        z = torch.empty(4 // n, 6)
        dist.reduce_scatter_tensor(z, x)
        assert work is not None
        work.wait()
        w = funcol.all_gather_tensor(z, 0, group) + parts[1]
        dist.broadcast(w, 1)
        back = torch.empty(4, 6)
        dist.all_to_all_single(back, w)
        from_left = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, back, (me + 1) % n), dist.P2POp(dist.irecv, from_left, (me - 1) % n)]
        for p in dist.batch_isend_irecv(ops):
            p.wait()
        d = DTensor.from_local(from_left, mesh, [Shard(0)], run_check=False)
        return d.redistribute(placements=[Shard(1)]).to_local() + d.full_tensor().sum()

    (graph, values), *_ = on_ranks(2, body)
    assert graph.nodes[1].op == "aten.clone.default"
    reduced = next(n for n in graph.nodes if n.op == "comm.all_reduce")
    x = torch.arange(24.0).reshape(4, 6)
    torch.testing.assert_close(torch.tensor(values[Ref(reduced.id)]), x + x * 2 + 1)
    assert Path(graph.frames(reduced)[0].file).name == Path(__file__).name


def test_ddp_of_real_ranks() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        net = torch.nn.Linear(6, 3)
        wrapped = torch.nn.parallel.DistributedDataParallel(net, process_group=mesh.get_group("tp"))
        wrapped(x / 24).square().sum().backward()
        assert net.weight.grad is not None
        return net.weight.grad * 1

    for graph, _ in on_ranks(2, body):
        gradients = [n.comm for n in graph.nodes if n.comm is not None and n.comm.kind == "all_reduce"]
        assert [c.reduce_op for c in gradients] == ["sum"]


def test_fsdp_of_real_ranks() -> None:
    def body(mesh: DeviceMesh, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        net(x / 24).square().sum().backward()
        grad = net[0].weight.grad
        assert isinstance(grad, DTensor)
        return grad.full_tensor() * 1

    (graph, _), *_ = on_ranks(2, body)
    assert {n.comm.axes for n in graph.nodes if n.comm is not None} == {("tp",)}
