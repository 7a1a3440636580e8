"""The accelerator is the CPU: requests for cuda are answered with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from spmdtypes.capture.patches import Patches

CPU = torch.device("cpu")


def on_cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    return device


class CudaIsCpu(TorchFunctionMode):
    """A fake tensor on cuda aborts the process on CPU builds, so none is ever made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs:
            if "device" in kwargs:
                device = kwargs["device"]
                kwargs = {**kwargs, "device": CPU if type(device) is int else on_cpu(device)}
        else:
            kwargs = {}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], *(CPU if type(a) is int else on_cpu(a) for a in args[1:]))
        elif func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)


def keep_in_backward(patches: Patches, *modes: Callable[[], TorchFunctionMode]) -> None:
    """A function mode is off while `Tensor.backward`, which it was asked about, runs: what the backward
    calls (recomputation, hooks, autograd Functions) finds these modes on again."""
    engine = torch.autograd.graph._engine_run_backward

    @functools.wraps(engine)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        present = {type(mode) for mode in _get_current_function_mode_stack()}  # type: ignore[no-untyped-call]
        with contextlib.ExitStack() as stack:
            for make in modes:
                mode = make()
                if type(mode) not in present:
                    stack.enter_context(mode)
            return engine(*args, **kwargs)

    patches.everywhere(engine, run_backward)


class Stream:
    """Stands for a stream or an event: everything on it has happened already."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0  # rates divide by it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def patch_cuda(patches: Patches, rank: int) -> None:
    cuda = torch.cuda
    quiet = "set_device synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all init"
    quiet += " _lazy_init ipc_collect set_stream reset_max_memory_allocated set_per_process_memory_fraction"
    for name in quiet.split():
        patches.set(cuda, name, returning(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        patches.set(cuda, name, returning(0))
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
        patches.set(cuda, name, returning(value))
    for name in ("Stream", "Event"):
        patches.set(cuda, name, Stream)
    for name in ("current_stream", "default_stream"):
        patches.set(cuda, name, lambda *args: Stream())
    for name in ("stream", "device"):
        patches.set(cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    patches.set(torch.Tensor, "record_stream", returning(None))  # refuses what is no stream of C++
    patches.set(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)
    to = torch.nn.Module.to

    @functools.wraps(to)
    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(CPU if type(a) is int else on_cpu(a) for a in args)
        if "device" in kwargs:
            kwargs["device"] = CPU if type(kwargs["device"]) is int else on_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    patches.set(torch.nn.Module, "to", module_to)
    autocast = torch.autocast.__init__

    @functools.wraps(autocast)
    def autocast_init(self: Any, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    patches.set(torch.autocast, "__init__", autocast_init)
