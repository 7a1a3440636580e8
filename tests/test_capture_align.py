"""Programs of several ranks and of the mesh of ones, seen as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdtypes.capture.align import Aligned, align
from spmdtypes.capture.fake import capture
from spmdtypes.capture.match import pairs
from spmdtypes.contracts import Program
from spmdtypes.graph import Graph, Lit, Node
from spmdtypes.notation import Dim, Type

MESH = {"dp": 2, "tp": 4}


def module(body: Callable[[Tensor, DeviceMesh], Tensor]) -> Callable[[DeviceMesh], nn.Module]:
    class Model(nn.Module):
        def __init__(self, mesh: DeviceMesh) -> None:
            super().__init__()
            self.mesh = mesh
            self.w = nn.Parameter(torch.empty(6))

        def forward(self, x: Tensor) -> Tensor:
            return body(x * self.w, self.mesh).sum()

    return Model


def aligned(body: Callable[[Tensor, DeviceMesh], Tensor], ranks: list[int] | None = None) -> Aligned:
    program = Program("test", MESH, module(body), inputs={"x": Type((Dim(8, ("dp",)), Dim(6)), "f32")})
    others = [capture(program, MESH, r) for r in ranks or [1, 3, 4]]
    return align(capture(program, MESH, 0), capture(program, dict.fromkeys(MESH, 1), 0), others)


def find(graph: Graph, op: str) -> Node:
    return next(n for n in graph.nodes if n.op == f"aten.{op}" and n.phase == "forward")


def test_equal_numbers_stay_numbers() -> None:
    graph = aligned(lambda x, mesh: x * 3 + 1).graph
    assert find(graph, "mul.Tensor").ref_outs and find(graph, "add.Tensor").args[1] == 1
    assert all(n.ref == n.id for n in graph.nodes)


def test_sizes_have_a_local_and_a_reference_value() -> None:
    graph = aligned(lambda x, mesh: x.view(-1)).graph
    view = find(graph, "view.default")
    assert view.outs[0] and view.outs[0].shape == (24,)
    assert view.ref_outs and view.ref_outs[0] and view.ref_outs[0].shape == (48,)


def test_numbers_linear_in_the_rank() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return x + (10 * mesh.get_local_rank("tp") + 100 * mesh.get_local_rank("dp") + 5)

    add = find(aligned(body).graph, "add.Tensor")
    assert add.args[1] == Lit(5, 5, (("dp", 100), ("tp", 10)))


def test_numbers_that_are_not_linear_in_the_rank() -> None:
    add = find(aligned(lambda x, mesh: x + mesh.get_local_rank("tp") ** 2).graph, "add.Tensor")
    assert add.args[1] == Lit(0, 0, (), affine=False)


def test_numbers_that_depend_on_sizes() -> None:
    mul = find(aligned(lambda x, mesh: x / mesh.size()).graph, "div.Tensor")
    assert mul.args[1] == Lit(8, 1)


def test_small_constants_are_compared() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0 + mesh.get_local_rank("tp")])

    const = next(n for n in aligned(body).graph.nodes if n.op == "const")
    assert const.args[0][:5] == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert const.args[0][5] == Lit(6.0, 6.0, (("tp", 1.0),))


def test_loops_over_the_world_match_where_they_can() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        total = x.sin()
        for _ in range(mesh["tp"].size() - 1):
            total = total + x.cos()
        return total.tanh()

    graph = aligned(body).graph
    assert find(graph, "tanh.default").ref is not None and find(graph, "sin.default").ref is not None
    unmatched = {n.op for n in graph.nodes if n.ref is None and n.phase == "forward"}
    assert unmatched == {"aten.cos.default", "aten.add.Tensor"}


def test_other_callers_do_not_hide_the_same_step() -> None:
    def wrapped(x: Tensor) -> Tensor:
        return plain(x) * 2

    def plain(x: Tensor) -> Tensor:
        return x.sin().cos()

    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return wrapped(x) if mesh.size() > 1 else plain(x)

    graph = aligned(body).graph
    assert [n.op for n in graph.nodes if n.ref is None and n.phase == "forward"] == ["aten.mul.Tensor"]


def test_a_copy_the_reference_does_not_need_takes_its_operands_shape() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return (x.clone() if mesh["tp"].size() > 1 else x).exp()

    graph = aligned(body).graph
    clone = find(graph, "clone.default")
    assert clone.ref is None and clone.ref_outs and clone.ref_outs[0] and clone.ref_outs[0].shape == (8, 6)


def test_streams_that_differ_along_an_axis() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        torch.manual_seed(7 + mesh.get_local_rank("tp"))
        return nn.functional.dropout(x)

    (axes,) = {n.rng_axes for n in aligned(body).graph.nodes if n.rng is not None}
    assert axes == ("tp",)


# ---- ranks that part


def test_a_collective_that_some_ranks_skip() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        if mesh.get_local_rank("tp") < 3:
            dist.all_reduce(x, group=mesh.get_group("tp"))
        return x

    (found,) = aligned(body).divergences
    assert found.collective and found.coords == {"dp": 0, "tp": 3}
    assert found.local is not None and found.local.op == "comm.all_reduce"


def test_collectives_in_another_order() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
        for op in ops if mesh.get_local_rank("tp") == 0 else reversed(ops):
            dist.all_reduce(x, op, group=mesh.get_group("tp"))
        return x

    found = aligned(body).divergences
    assert [(d.local and d.local.comm and d.local.comm.reduce_op) for d in found] == ["sum", "sum"]
    assert [(d.other and d.other.comm and d.other.comm.reduce_op) for d in found] == ["max", "max"]


def test_ranks_with_a_role_are_no_hang() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return x * 2 if mesh.get_local_rank("tp") == 0 else x.sin().cos()

    found = aligned(body)
    assert found.divergences == []
    assert [d.collective for d in found.differences] == [False, False]


def test_pipeline_neighbours_are_no_hang() -> None:
    def body(x: Tensor, mesh: DeviceMesh) -> Tensor:
        rank, group = mesh.get_local_rank("tp"), mesh.get_group("tp")
        if rank > 0:
            dist.recv(x, group=group, group_src=rank - 1)
        if rank < 3:
            dist.send(x, group=group, group_dst=rank + 1)
        return x

    assert aligned(body).divergences == []


# ---- matching


TOKENS = st.lists(st.sampled_from("abcde"), max_size=25)


@given(TOKENS, TOKENS)
def test_matches_are_equal_tokens_in_order(a: list[str], b: list[str]) -> None:
    found = pairs(a, b)
    assert all(a[i] == b[j] for i, j in found)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(found))


@given(TOKENS, st.sets(st.integers(0, 24)))
def test_a_subsequence_is_matched_whole(a: list[str], kept: set[int]) -> None:
    b: list[Any] = [t for i, t in enumerate(a) if i in kept]
    assert len(pairs(a, b)) == len(b)
