"""Every patch of torch, and nothing else patches anything.

`environment` makes one process look like a rank of a job of any size; `observed` lets a recorder
see what the dispatcher does not show. Both restore torch on exit, also after an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import Recorder

_MISSING = object()


class Patches:
    """Attributes and dict entries replaced for a while; `undo` puts back exactly what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # pybind methods must come back from __dict__: getattr would unwrap them
        before = vars(owner).get(name, _MISSING)

        def undo() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(undo)

    def everywhere(self, old: Any, new: Any) -> None:
        """Replace a function in every module that imported it by value."""
        for module in list(sys.modules.values()):
            space = getattr(module, "__dict__", None)
            if space is None:
                continue
            for name in (old.__name__, "_" + old.__name__):
                if space.get(name) is old:
                    self.set(module, name, new)

    def environ(self, values: dict[str, str]) -> None:
        for key, value in values.items():
            before = os.environ.get(key)

            def undo(key: str = key, before: str | None = before) -> None:
                if before is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = before

            os.environ[key] = value
            self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


@contextlib.contextmanager
def _patches() -> Iterator[Patches]:
    patches = Patches()
    try:
        yield patches
    finally:
        patches.undo()


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
            _fake_group(world_size, rank)
            stack.callback(_destroy)
            stack.callback(torch.set_rng_state, torch.get_rng_state())
        patches = stack.enter_context(_patches())
        patches.environ({k: str(v) for k, v in values.items()} | address)
        if fake:
            _patch_groups(patches)
        _patch_mesh(patches)
        _patch_compile(patches, stack)
        _patch_ddp(patches, fake)
        _patch_cuda(patches, rank)
        stack.enter_context(_CudaIsCpu())
        yield


def _fake_group(world_size: int, rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _disable_current_modes():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


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


def _average(group: Any, bucket: Any) -> Any:
    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future


# ---- the accelerator is the CPU

_CPU = torch.device("cpu")


def _cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    return device


class _CudaIsCpu(TorchFunctionMode):
    """A fake tensor on cuda aborts the process on CPU builds, so none is ever made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:
            if "device" in kwargs:
                device = kwargs["device"]
                kwargs = {**kwargs, "device": _CPU if type(device) is int else _cpu(device)}
        else:
            kwargs = {}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], *(_CPU if type(a) is int else _cpu(a) for a in args[1:]))
        elif func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        elif func is torch.Tensor.record_stream:
            return None
        return func(*args, **kwargs)


class _Stream:
    """Stands for a stream or an event: everything on it has happened already."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _patch_cuda(patches: Patches, rank: int) -> None:
    cuda = torch.cuda
    quiet = "set_device synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all init"
    quiet += " _lazy_init ipc_collect set_stream reset_max_memory_allocated set_per_process_memory_fraction"
    for name in quiet.split():
        patches.set(cuda, name, _returning(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        patches.set(cuda, name, _returning(0))
    properties = SimpleNamespace(
        name="cpu", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132
    )
    answers = {
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (80 << 30, 80 << 30),
        "is_bf16_supported": True,
    }
    for name, value in answers.items():
        patches.set(cuda, name, _returning(value))
    for name in ("Stream", "Event"):
        patches.set(cuda, name, _Stream)
    for name in ("current_stream", "default_stream"):
        patches.set(cuda, name, lambda *args: _Stream())
    for name in ("stream", "device"):
        patches.set(cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    patches.set(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)
    to = torch.nn.Module.to

    @functools.wraps(to)
    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_CPU if type(a) is int else _cpu(a) for a in args)
        if "device" in kwargs:
            kwargs["device"] = _CPU if type(kwargs["device"]) is int else _cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    patches.set(torch.nn.Module, "to", module_to)
    autocast = torch.autocast.__init__

    @functools.wraps(autocast)
    def autocast_init(self: Any, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    patches.set(torch.autocast, "__init__", autocast_init)


# ---- what a recorder must see

_OBJECT_COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


@contextlib.contextmanager
def observed(rec: Recorder) -> Iterator[None]:
    """Module calls, autograd Functions, reduce operators and waits are reported to `rec`."""
    with _patches() as patches:
        _observe_modules(patches, rec)
        _observe_functions(patches, rec)
        _observe_groups(patches, rec)
        _observe_works(patches, rec)
        yield


def _observe_modules(patches: Patches, rec: Recorder) -> None:
    call = torch.nn.Module.__call__

    @functools.wraps(call)
    def observed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        rec.entering(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            rec.module_stack.pop()

    patches.set(torch.nn.Module, "__call__", observed_call)
    for name in ("register_parameter", "register_buffer"):
        patches.set(torch.nn.Module, name, _observed_register(getattr(torch.nn.Module, name), rec))


def _observed_register(register: Any, rec: Recorder) -> Any:
    @functools.wraps(register)
    def observed_register(self: Any, name: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        rec.declared(value)
        register(self, name, value, *args, **kwargs)

    return observed_register


def _observe_functions(patches: Patches, rec: Recorder) -> None:
    apply = torch.autograd.Function.__dict__["apply"].__func__

    @functools.wraps(apply)
    def observed_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return apply(cls, *args, **kwargs)
        sequence = rec.applying()
        try:
            return apply(cls, *args, **kwargs)
        finally:
            rec.applied(sequence)

    patches.set(torch.autograd.Function, "apply", classmethod(observed_apply))


def _observe_groups(patches: Patches, rec: Recorder) -> None:
    collectives = [n for n in vars(ProcessGroup) if _issues(n)]
    for name in collectives:
        patches.set(ProcessGroup, name, _observed_collective(getattr(ProcessGroup, name), rec))
    if "_end_coalescing" in vars(ProcessGroup):
        end = ProcessGroup._end_coalescing

        def end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = end(self, *args, **kwargs)
            loose, rec.pending.loose = rec.pending.loose, []
            rec.pending.attach(work, loose)
            return work

        patches.set(ProcessGroup, "_end_coalescing", end_coalescing)
    make = vars(dist)["_make_nccl_premul_sum"]

    @functools.wraps(make)
    def premul_sum(factor: Any) -> Any:
        rec.pending.premul = float(factor) if not isinstance(factor, torch.Tensor) else None
        return make(factor)

    patches.everywhere(make, premul_sum)


def _issues(name: str) -> bool:
    stems = ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "send", "recv", "barrier")
    return any(s in name for s in stems) and callable(getattr(ProcessGroup, name))


def _observed_collective(method: Any, rec: Recorder) -> Any:
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rec.pending.call(_reduction(rec, (*args, *kwargs.values()))) as issued:
            work = method(self, *args, **kwargs)
        rec.pending.attach(work, issued)
        return work

    return collective


def _reduction(rec: Recorder, args: tuple[Any, ...]) -> tuple[str, float | None]:
    from spmdtypes.capture.groups import reduce_name

    for a in args:
        op = getattr(a, "reduceOp", a)
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            name = reduce_name(op)
            return name, rec.pending.premul if name == "premul_sum" else None
    return "unknown", None


def _observe_works(patches: Patches, rec: Recorder) -> None:
    kinds = [Work, *(k for k in Work.__subclasses__() if k.__module__.startswith("torch._C"))]
    for kind in kinds:
        for name in ("wait", "synchronize", "get_future", "result", "block_current_stream"):
            if name in vars(kind):
                patches.set(kind, name, _observed_wait(getattr(kind, name), rec))
        if "is_completed" in vars(kind):
            patches.set(kind, "is_completed", _observed_question(vars(kind)["is_completed"], rec))
    for owner in (torch.cuda, torch.accelerator):
        patches.set(owner, "synchronize", _observed_synchronize(rec))


def _observed_question(method: Any, rec: Recorder) -> Any:
    def is_completed(self: Any) -> bool:
        done = dist.get_backend() == "fake" or bool(method(self))  # that one is never done by itself
        if done:
            rec.pending.wait(id(self))
        return done

    return is_completed


def _observed_synchronize(rec: Recorder) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        """The device has nothing left to do: every collective issued is done."""
        for key, (work, _) in list(rec.pending.works.items()):
            if key >= 0:
                work.wait()

    return synchronize


def _observed_wait(method: Any, rec: Recorder) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rec.pause():  # some backends finish a collective with ops of their own
            out = method(self, *args, **kwargs)
        rec.pending.wait(id(self))
        return out

    return wait
