"""`torch.cuda` and `torch.accelerator` as a script for GPUs expects them."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from spmdtypes.capture.accelerator import Stream, returning
from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.tensors import CPU, Devices

_MEMORY = 80 << 30
_QUIET = (
    "synchronize empty_cache reset_peak_memory_stats reset_accumulated_memory_stats init _lazy_init "
    "ipc_collect set_stream reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats "
    "reset_accumulated_host_memory_stats set_per_process_memory_fraction set_sync_debug_mode "
    "caching_allocator_enable caching_allocator_delete change_current_allocator"
)
_NOTHING = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached"
_NOTHING += " max_memory_cached utilization temperature power_draw clock_rate memory_usage device_memory_used"
_NOTHING += " caching_allocator_alloc get_sync_debug_mode"


def count(context: Context) -> int:
    """Accelerators of this machine: one a rank."""
    return min(context.node, context.world - context.node_rank * context.node)


def install(patches: Patches, context: Context, devices: Devices) -> None:
    here = count(context)
    _patch_presence(patches, context, here)
    _patch_places(patches, devices)
    _patch_accelerator(patches, context, devices, here)
    _patch_memory(patches)
    _patch_profiling(patches)
    _patch_graphs(patches, context)
    _patch_types(patches)
    patches.set(torch, "device", _devices(devices))
    patches.set(torch, "Generator", _generators())


def _for_users(context: Context, real: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """An answer for the user's code; libraries get the real one and choose no kernels of GPUs."""

    @functools.wraps(real)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return answer if context.callers.sees_accelerator() else real(*args, **kwargs)

    return asked


def _patch_presence(patches: Patches, context: Context, count: int) -> None:
    cuda, backends = torch.cuda, torch.backends
    patches.set(cuda, "is_available", _for_users(context, cuda.is_available, True))
    patches.set(cuda, "device_count", _for_users(context, cuda.device_count, count))
    patches.set(cuda, "is_initialized", _for_users(context, returning(False), True))
    patches.set(backends.cuda, "is_built", _for_users(context, backends.cuda.is_built, True))
    patches.set(backends.cudnn, "version", _for_users(context, backends.cudnn.version, 91000))
    patches.set(backends.cudnn, "is_available", _for_users(context, backends.cudnn.is_available, True))
    patches.set(cuda.nccl, "version", returning((2, 27, 0)))


def _patch_places(patches: Patches, devices: Devices) -> None:
    cuda = torch.cuda
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=_MEMORY,
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        L2_cache_size=50 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )

    def set_device(device: Any) -> None:
        found = devices.asked(device)
        if found is not None and found.index is not None:
            devices.current = found.index

    answers: dict[str, Any] = {
        "set_device": set_device,
        "current_device": lambda: devices.current,
        "get_device_name": returning(properties.name),
        "get_device_properties": returning(properties),
        "get_device_capability": returning((9, 0)),
        "can_device_access_peer": returning(True),
        "get_arch_list": returning(["sm_90"]),
        "get_gencode_flags": returning(""),
        "is_bf16_supported": returning(True),
        "is_tf32_supported": returning(True),
        "is_current_stream_capturing": returning(False),
        "get_allocator_backend": returning("native"),
        "cudart": returning(Stream()),
        "current_blas_handle": returning(0),
    }
    for name, answer in answers.items():
        patches.set(cuda, name, answer)
    for name in _QUIET.split():
        patches.set(cuda, name, returning(None))
    for name in ("Stream", "Event", "ExternalStream"):
        patches.set(cuda, name, Stream)
    for name in ("current_stream", "default_stream", "get_stream_from_external"):
        patches.set(cuda, name, lambda *args, **kwargs: Stream())
    for name in ("stream", "StreamContext", "use_mem_pool", "caching_allocator_disabled"):
        patches.set(cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    patches.set(cuda, "MemPool", Stream)
    patches.set(cuda, "device", functools.partial(_OnDevice, devices))
    patches.set(cuda, "device_of", functools.partial(_OnDevice, devices))
    for name in ("Stream", "Event"):
        patches.set(torch, name, _here_or_real(getattr(torch, name), devices))


class _OnDevice(contextlib.ContextDecorator):
    """`with torch.cuda.device(1)`."""

    def __init__(self, devices: Devices, device: Any = None) -> None:
        self.devices, self.device = devices, device
        self.idx = devices.current

    def __enter__(self) -> _OnDevice:
        self.before = self.devices.current
        found = self.devices.asked(self.device)
        if found is not None and found.index is not None:
            self.devices.current = found.index
        return self

    def __exit__(self, *exc: Any) -> None:
        self.devices.current = self.before


def _here_or_real(real: Any, devices: Devices) -> Any:
    """A class for streams or events: one of an accelerator stands for itself only."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device", args[0] if args else "cuda")
            return real(*args, **kwargs) if str(device) == "cpu" else Stream()

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (real, Stream))

    return Meta(real.__name__, (), {"__module__": "torch"})


def _patch_accelerator(patches: Patches, context: Context, devices: Devices, count: int) -> None:
    acc = torch.accelerator
    patches.set(acc, "is_available", _for_users(context, acc.is_available, True))
    patches.set(acc, "device_count", _for_users(context, acc.device_count, count))
    answer = _for_users(context, acc.current_accelerator, torch.device("cuda"))
    patches.set(acc, "current_accelerator", answer)
    for name in ("current_device_index", "current_device_idx"):
        patches.set(acc, name, lambda: devices.current)
    for name in ("set_device_index", "set_device_idx"):
        patches.set(acc, name, torch.cuda.set_device)
    for name in ("synchronize", "empty_cache", "empty_host_cache", "set_stream"):
        patches.set(acc, name, returning(None))
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        patches.set(acc, name, returning(None))
    patches.set(acc, "current_stream", lambda *args: Stream())
    patches.set(acc, "device_index", functools.partial(_OnDevice, devices))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        patches.set(acc, name, returning(0))
    patches.set(acc, "memory_stats", lambda *args: defaultdict(int))
    patches.set(acc, "get_memory_info", returning((_MEMORY, _MEMORY)))
    patches.set(acc, "get_device_capability", lambda *args: {})


def _patch_memory(patches: Patches) -> None:
    cuda = torch.cuda
    counters: Any = lambda *args, **kwargs: defaultdict(int)  # noqa: E731
    texts = returning("")
    empty: Any = lambda *args, **kwargs: []  # noqa: E731
    for space in (cuda, cuda.memory):
        for name in _NOTHING.split():
            patches.set(space, name, returning(0))
        for name in ("memory_stats", "memory_stats_as_nested_dict", "host_memory_stats"):
            patches.set(space, name, counters)
        for name in ("memory_summary", "list_gpu_processes"):
            patches.set(space, name, texts)
        patches.set(space, "memory_snapshot", empty)
        patches.set(space, "mem_get_info", returning((_MEMORY, _MEMORY)))
        patches.set(space, "get_per_process_memory_fraction", returning(1.0))
    for name in ("_record_memory_history", "_dump_snapshot", "_set_allocator_settings", "_save_memory_usage"):
        patches.set(cuda.memory, name, returning(None))
    patches.set(cuda.memory, "_snapshot", returning({"segments": [], "device_traces": []}))


def _patch_profiling(patches: Patches) -> None:
    """Nothing is measured: a check has no use for it, and traces would be written to files."""
    nvtx, profiler = torch.cuda.nvtx, torch.cuda.profiler
    for name in ("range_push", "range_pop", "range_start"):
        patches.set(nvtx, name, returning(0))
    for name in ("range_end", "mark"):
        patches.set(nvtx, name, returning(None))
    patches.set(nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext())
    for name in ("start", "stop"):
        patches.set(profiler, name, returning(None))
    patches.set(profiler, "profile", lambda: contextlib.nullcontext())
    patches.set(torch.autograd.profiler, "emit_nvtx", lambda *args, **kwargs: contextlib.nullcontext())
    patches.set(torch.profiler, "profile", Profile)
    patches.set(torch.autograd.profiler, "profile", Profile)
    patches.set(torch.profiler, "tensorboard_trace_handler", lambda *args, **kwargs: returning(None))


class Profile(contextlib.ContextDecorator):
    """A profiler that measures nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.step_num = 0

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def step(self) -> None:
        self.step_num += 1

    def key_averages(self, *args: Any, **kwargs: Any) -> Averages:
        return Averages()

    def events(self) -> Averages:
        return Averages()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return returning(None)


class Averages(list[Any]):
    def table(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def total_average(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_time_total=0, cpu_time_total=0, count=0)


def _patch_graphs(patches: Patches, context: Context) -> None:
    """What is captured runs once, eagerly; it cannot run again by itself."""

    class CUDAGraph:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def replay(self) -> None:
            raise context.refuse("a captured CUDA graph is replayed: run the script without graphs here")

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return returning(None)

    @contextlib.contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        context.note("a CUDA graph is captured: the code in it runs once, eagerly")
        yield

    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        return callables

    made = {"CUDAGraph": CUDAGraph, "graph": graph, "make_graphed_callables": make_graphed_callables}
    for name, new in made.items():
        patches.set(torch.cuda, name, new)
        patches.set(torch.cuda.graphs, name, new)
    patches.set(torch.cuda, "graph_pool_handle", returning((0, 0)))


def _patch_types(patches: Patches) -> None:
    """`torch.cuda.FloatTensor` and its kin, in old scripts."""
    for name in vars(torch.cuda).copy():
        if name.endswith("Tensor") and hasattr(torch, name):
            patches.set(torch.cuda, name, getattr(torch, name))
    set_type = torch.set_default_tensor_type

    @functools.wraps(set_type)
    def set_default_tensor_type(t: Any) -> None:
        if isinstance(t, str) and t.startswith("torch.cuda."):
            torch.set_default_device("cuda")
            t = "torch." + t.removeprefix("torch.cuda.")
        set_type(t)

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


# ---- classes of torch that refuse what the CPU build has no device for


def _stands_for(real: Any, make: Callable[..., Any]) -> Any:
    """A class that is `real` to whoever tests, compares or looks it up, and is made by `make`."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, other: Any) -> bool:
            return other is cls or issubclass(other, real)

        def __eq__(cls, other: Any) -> bool:
            return other is cls or other is real

        def __hash__(cls) -> int:
            return hash(real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    return Meta(real.__name__, (), {"__module__": "torch", "__doc__": real.__doc__})


def _devices(devices: Devices) -> Any:
    real = torch.device

    def make(*args: Any, **kwargs: Any) -> Any:
        """`torch.device(1)` means the accelerator."""
        index = args[0] if args else kwargs.get("index")
        if type(index) is int and len(args) + len(kwargs) == 1:
            return real("cuda", index)
        return real(*args, **kwargs)

    return _stands_for(real, make)


def _generators() -> Any:
    real = torch.Generator

    def make(device: Any = "cpu") -> torch.Generator:
        return real(CPU if str(device).startswith("cuda") or type(device) is int else device)

    return _stands_for(real, make)
