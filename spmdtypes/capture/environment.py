"""One process as a rank of a job of any size, and a recorder's view of it.

All patches of torch live in this package, and every one is undone on exit, also after an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.accelerator import CudaIsCpu, keep_in_backward, patch_cuda
from spmdtypes.capture.observers import observed
from spmdtypes.capture.patches import Patches, patched

__all__ = ["environment", "observed"]


@contextlib.contextmanager
def environment(world_size: int, rank: int, fake: bool = True) -> Iterator[None]:
    """This process as rank `rank` of `world_size`, on a machine whose accelerator is the CPU.

    With `fake`, a process group that does not communicate is made and destroyed here, and the
    program's own attempts to make one are answered with it. Without, the caller has made a real
    one. Raises RuntimeError when `fake` and a process group exists already.
    """
    if fake and dist.is_initialized():
        raise RuntimeError("a process group is already initialised in this process")
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with contextlib.ExitStack() as stack:
        if fake:
            stack.callback(setattr, sys, "excepthook", sys.excepthook)  # making a group wraps it
            _fake_group(world_size, rank)
            stack.callback(_destroy)
            stack.callback(_forget_meshes)
            stack.callback(_meta_collectives()._destroy)
            stack.callback(torch.set_rng_state, torch.get_rng_state())
        patches = stack.enter_context(patched())
        patches.environ({k: str(v) for k, v in values.items()} | address)
        if fake:
            _patch_groups(patches)
        _patch_mesh(patches)
        _patch_compile(patches, stack)
        _patch_ddp(patches, fake)
        _patch_coalesced(patches)
        patch_cuda(patches, rank)
        keep_in_backward(patches, CudaIsCpu)
        stack.enter_context(CudaIsCpu())
        yield


def _fake_group(world_size: int, rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _disable_current_modes():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _meta_collectives() -> torch.library.Library:
    """Kernels for fake tensors of the coalesced collectives, for which torch has none."""
    from torch._C._distributed_c10d import FakeWork

    def nothing(*args: Any) -> Any:
        return FakeWork().boxed()

    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in _COALESCED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, nothing, "Meta")  # type: ignore[no-untyped-call]
    return library


_COALESCED = (
    *("allreduce_coalesced_", "allgather_coalesced_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"),
)


def _forget_meshes() -> None:
    """DTensor caches layouts of results, with meshes that know their rank and groups, under keys that do
    not: what it learnt as this rank would be wrong for the next."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    with contextlib.suppress(AttributeError):
        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _patch_groups(patches: Patches) -> None:
    c10d = dist.distributed_c10d
    make, new_group = c10d.init_process_group, c10d.new_group

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        return None

    @functools.wraps(new_group)
    def new_fake_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kept = {k: v for k, v in kwargs.items() if k in ("group_desc", "use_local_synchronization")}
        with _disable_current_modes():
            return new_group(ranks, backend="fake", **kept)

    @functools.wraps(c10d.destroy_process_group)
    def destroy_process_group(group: Any = None) -> None:
        return None

    patches.everywhere(make, init_process_group)
    patches.everywhere(new_group, new_fake_group)
    patches.everywhere(c10d.destroy_process_group, destroy_process_group)


def _patch_mesh(patches: Patches) -> None:
    """Meshes are bookkeeping: on the CPU, and outside of any recording or fake tensors."""
    init = DeviceMesh.__init__

    @functools.wraps(init)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            init(self, "cpu", *args, **kwargs)

    patches.set(DeviceMesh, "__init__", on_cpu)
    for name in (
        "_flatten",
        "_unflatten",
        "__getitem__",
        "get_local_rank",
        "get_coordinate",
        "_get_all_submeshes",
    ):
        if name in vars(DeviceMesh):
            patches.set(DeviceMesh, name, _plainly(getattr(DeviceMesh, name)))
    import torch.distributed.device_mesh as module

    patches.everywhere(module.init_device_mesh, _mesh_on_cpu(module.init_device_mesh))


def _plainly(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call


def _mesh_on_cpu(init: Any) -> Any:
    @functools.wraps(init)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return init("cpu", *args, **kwargs)

    return init_device_mesh


def _patch_compile(patches: Patches, stack: contextlib.ExitStack) -> None:
    """Compiled code computes what eager code computes, and only the latter can be watched."""

    @functools.wraps(torch.compile)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda f: f

    patches.set(torch, "compile", compile)
    patches.set(torch.nn.Module, "compile", lambda self, *args, **kwargs: None)
    if "torch._dynamo" in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def _patch_ddp(patches: Patches, fake: bool) -> None:
    """DDP reduces gradients in C++, where neither the operator nor the wait can be seen and where a
    group that does not communicate is refused; a comm hook does the same from Python."""
    ddp = torch.nn.parallel.DistributedDataParallel
    init, register = ddp.__init__, ddp.register_comm_hook

    @functools.wraps(init)
    def init_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        if fake:
            kwargs["init_sync"] = False
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        init(self, args[0] if args else kwargs.pop("module"), None, None, *args[3:], **kwargs)
        chosen: list[Any] = [None, _average]

        def hook(state: Any, bucket: Any) -> Any:
            state, reduce = chosen
            return reduce(self.process_group if reduce is _average else state, bucket)

        hook.__annotations__.clear()  # DDP compares them as objects, not as text
        register(self, None, hook)
        self.__dict__["register_comm_hook"] = lambda state, hook: chosen.__setitem__(
            slice(None), [state, hook]
        )

    patches.set(ddp, "__init__", init_with_hook)
    if fake:  # new buckets for later steps are agreed on by real values
        patches.set(vars(dist)["Reducer"], "_rebuild_buckets", lambda self: False)


def _patch_coalesced(patches: Patches) -> None:
    """DDP sends buffers and initial values from C++; from Python the broadcasts can be seen."""

    def broadcast_coalesced(
        process_group: Any, tensors: Any, buffer_size: int = 0, authoritative_rank: int = 0
    ) -> None:
        for t in tensors:
            dist.broadcast(t, group=process_group, group_src=authoritative_rank)

    patches.set(dist, "_broadcast_coalesced", broadcast_coalesced)


def _average(group: Any, bucket: Any) -> Any:
    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future
