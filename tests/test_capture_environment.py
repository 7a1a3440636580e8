"""The environment makes one process a rank of any job, and leaves torch as it was."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdtypes.capture.environment import environment
from spmdtypes.capture.recorder import Recorder

NAMESPACES: list[Any] = [
    torch,
    torch.cuda,
    torch.nn.Module,
    torch.autograd.Function,
    torch.autocast,
    torch.optim.Optimizer,
    torch.Tensor,
    dist,
    dist.distributed_c10d,
    sys.modules["torch.distributed.device_mesh"],
    DeviceMesh,
    ProcessGroup,
    Work,
    *Work.__subclasses__(),
]


def state() -> dict[tuple[int, str], Any]:
    """Every attribute of everything that is patched, the environment variables and open modes."""
    found: dict[tuple[int, str], Any] = {("environ", ""): dict(os.environ)}  # type: ignore[dict-item]
    for i, space in enumerate(NAMESPACES):
        for name, value in vars(space).items():
            if not isinstance(value, ModuleType) and name != "__warningregistry__":
                found[i, name] = value
    found["modes", ""] = (  # type: ignore[index]
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.autograd.is_multithreading_enabled(),
    )
    return found


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    gone = object()
    return [str(k) for k in before.keys() | after.keys() if not same(before.get(k, gone), after.get(k, gone))]


def same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (dict, tuple, int)) and a == b)


@pytest.fixture(autouse=True)
def settled() -> None:
    with environment(2, 0):  # imports of a first run are not patches
        pass


def test_torch_is_as_it_was() -> None:
    before = state()
    with environment(4, 1), Recorder({"tp": 4}, {"tp": 1}).recording():
        assert changed(before, state())
        dist.all_reduce(torch.ones(2))
    assert changed(before, state()) == []


def fail() -> None:
    with environment(4, 1), Recorder({"tp": 4}, {"tp": 1}).recording():
        dist.all_reduce(torch.ones(2))
        raise ZeroDivisionError


def test_torch_is_as_it_was_after_an_error() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert changed(before, state()) == []
    assert not dist.is_initialized()


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (8, 3), (8192, 8191)])
def test_rank_and_world(world: int, rank: int) -> None:
    with environment(world, rank):
        assert (dist.get_world_size(), dist.get_rank()) == (world, rank)
        assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == (str(world), str(rank))
    assert not dist.is_initialized()


def test_a_script_may_make_its_own_group() -> None:
    with environment(4, 2):
        dist.init_process_group("nccl")
        group = dist.new_group([0, 2], backend="nccl")
        assert dist.get_process_group_ranks(group) == [0, 2]
        dist.destroy_process_group()
        assert dist.get_world_size() == 4


def test_meshes_of_cuda_devices_are_made_on_the_cpu() -> None:
    with environment(8, 5):
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        assert mesh.device_type == "cpu"
        assert mesh["tp"].get_local_rank() == 1
        flat = mesh["dp", "tp"]._flatten("all")
        assert flat.size() == 8


def test_cuda_calls_do_not_abort() -> None:
    with environment(2, 0):
        torch.cuda.set_device(1)
        x = torch.ones(3, device="cuda").cuda() + torch.zeros(3).to("cuda:1") + torch.ones(3).to(0)
        m = torch.nn.Linear(3, 2).cuda().to("cuda")
        with torch.cuda.stream(torch.cuda.Stream()), torch.autocast("cuda", dtype=torch.bfloat16):
            y = m(x)
        torch.cuda.synchronize()
        assert y.device.type == "cpu" and y.dtype == torch.bfloat16
        assert torch.cuda.current_device() == 0


def test_compiled_code_runs_eagerly() -> None:
    with environment(2, 0), Recorder({"tp": 2}, {"tp": 0}).recording() as rec:
        torch.compile(lambda x: x.sin())(torch.ones(2))
    assert "aten.sin.default" in [raw.op for raw in rec.trace]


def test_one_environment_at_a_time() -> None:
    with environment(2, 0), pytest.raises(RuntimeError, match="already initialised"), environment(2, 0):
        pass
    assert not dist.is_initialized()
