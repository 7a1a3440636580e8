"""Memory that a collective is at work on is used by somebody else: only then a hazard is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.test_capture_comms import alone

Body = Callable[[Any, Tensor], Tensor | None]


def kinds(body: Body) -> list[tuple[str, str, bool]]:
    return [(h.op, h.comm.kind, h.writes) for h in alone(body, {"dp": 2}).hazards]


def reads_before_the_wait(mesh: Any, x: Tensor) -> Tensor:
    work = dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True)
    y = x * 2
    work.wait()
    return y


def never_waits(mesh: Any, x: Tensor) -> Tensor:
    full = x.new_empty(8, 6)
    dist.all_gather_into_tensor(full, x, group=mesh.get_group("dp"), async_op=True)
    return full.flatten() + 1


def overwrites_what_is_being_sent(mesh: Any, x: Tensor) -> Tensor:
    full = x.new_empty(8, 6)
    work = dist.all_gather_into_tensor(full, x, group=mesh.get_group("dp"), async_op=True)
    x.zero_()
    work.wait()
    return full


def reads_its_column_early(mesh: Any, x: Tensor) -> Tensor:
    block = torch.zeros(4, 6)
    work = dist.all_reduce(block[:2], group=mesh.get_group("dp"), async_op=True)
    y = block[:, 1].clone()
    work.wait()
    return y


def functional_without_wait(mesh: Any, x: Tensor) -> Tensor:
    name = mesh.get_group("dp").group_name
    return torch.ops._c10d_functional.all_reduce(x, "sum", name) + 1


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (reads_before_the_wait, ("aten.mul.Tensor", "all_reduce", False)),
        (never_waits, ("aten.add.Tensor", "all_gather", False)),
        (overwrites_what_is_being_sent, ("aten.zero_.default", "all_gather", True)),
        (reads_its_column_early, ("aten.clone.default", "all_reduce", False)),
        (functional_without_wait, ("aten.add.Tensor", "all_reduce", False)),
    ],
)
def test_use_before_the_wait_is_a_hazard(body: Body, found: tuple[str, str, bool]) -> None:
    assert kinds(body) == [found]


def waits(mesh: Any, x: Tensor) -> Tensor:
    work = dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True)
    shape, view, like = x.shape, x[1:], torch.empty_like(x)
    work.wait()
    return view + like[1:] * shape[0]


def blocks(mesh: Any, x: Tensor) -> Tensor:
    dist.all_reduce(x, group=mesh.get_group("dp"))
    return x + 1


def reads_what_is_being_sent(mesh: Any, x: Tensor) -> Tensor:
    full = x.new_empty(8, 6)
    work = dist.all_gather_into_tensor(full, x, group=mesh.get_group("dp"), async_op=True)
    y = x * 2
    work.wait()
    return y + full[:4]


def works_on_another_part(mesh: Any, x: Tensor) -> Tensor:
    flat = torch.zeros(24)
    work = dist.all_reduce(flat[:12], group=mesh.get_group("dp"), async_op=True)
    y = flat[12:] * 2
    work.wait()
    return y


def works_on_another_column(mesh: Any, x: Tensor) -> Tensor:
    work = dist.all_reduce(x.view(8, 3)[:4], group=mesh.get_group("dp"), async_op=True)
    y = x[2:, 1::2] * 2
    work.wait()
    return y


def exchanges_in_a_batch(mesh: Any, x: Tensor) -> Tensor:
    group, got = mesh.get_group("dp"), torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, 1, group), dist.P2POp(dist.irecv, got, 1, group)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    x.add_(1)
    return x + got


def coalesces(mesh: Any, x: Tensor) -> Tensor:
    a, b, group = x * 1, x * 2, mesh.get_group("dp")
    with dist._coalescing_manager(group, x.device, async_ops=True) as manager:
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    manager.wait()
    return a + b


def functional(mesh: Any, x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", mesh["dp"]) + 1


def waits_for_the_device(mesh: Any, x: Tensor) -> Tensor:
    dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True)
    torch.cuda.synchronize()
    return x + 1


def asks(mesh: Any, x: Tensor) -> Tensor:
    work = dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True)
    while not work.is_completed():
        pass
    return x + 1


def chains(mesh: Any, x: Tensor) -> Tensor:
    future = dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True).get_future()
    future.wait()
    return x + 1


@pytest.mark.parametrize(
    "body",
    [
        waits,
        blocks,
        reads_what_is_being_sent,
        works_on_another_part,
        works_on_another_column,
        exchanges_in_a_batch,
        coalesces,
        functional,
        waits_for_the_device,
        asks,
        chains,
    ],
)
def test_all_else_is_none(body: Body) -> None:
    assert kinds(body) == []
