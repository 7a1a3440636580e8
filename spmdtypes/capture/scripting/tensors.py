"""Tensors remember the accelerator they were asked onto, although all of them are on the CPU.

The mark decides what a script is told about a tensor's device, which random stream an op draws from,
and where moving a tensor makes a copy, as it does between a host and a device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors

from spmdtypes.capture.accelerator import CudaIsCpu, keep_in_backward
from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting import fakes
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.streams import Streams

_MARK = "_accelerator"
_GETTERS = {vars(torch._C.TensorBase)[n]: n for n in ("device", "is_cuda", "is_cpu")}
CPU = torch.device("cpu")
_Device = torch.device  # the class itself: its name in `torch` is replaced while a script runs


class Devices:
    """Which device is current, and what the script has asked for."""

    def __init__(self, context: Context) -> None:
        self.current = 0
        self.mesh_type = "cpu"  # of the last mesh made
        self.contexts: list[torch.device | None] = []  # of `with torch.device(...)`, innermost last
        self.context = context

    def asked(self, device: Any) -> torch.device | None:
        """The accelerator that a device argument names, None for the CPU and others."""
        if isinstance(device, int):
            return _Device("cuda", device)
        found: Any = device
        if isinstance(device, str) and device.startswith("cuda"):
            found = _Device(device)
        if not isinstance(found, _Device) or found.type != "cuda":
            return None
        index: int | None = found.index
        return found if index is not None else _Device("cuda", self.current)

    def of(self, t: Tensor) -> torch.device | None:
        """Where the script believes `t` to be, None for the CPU."""
        try:
            found = t.__dict__.get(_MARK)
        except AttributeError:
            return None
        if found is None and self.mesh_type == "cuda" and hasattr(t, "device_mesh"):
            return _Device("cuda", self.current)
        return found

    def mark(self, out: Any, device: torch.device) -> Any:
        if isinstance(out, Tensor):
            out.__dict__[_MARK] = device
        elif isinstance(out, (tuple, list)):
            for o in out:
                if isinstance(o, Tensor):
                    o.__dict__[_MARK] = device
        return out

    def mark_module(self, module: torch.nn.Module, device: torch.device | None) -> None:
        for t in (*module.parameters(), *module.buffers()):
            if device is None:
                t.__dict__.pop(_MARK, None)
            else:
                self.mark(t, device)


class Marking(TorchFunctionMode):
    """Passes marks on from arguments to results."""

    def __init__(self, devices: Devices, streams: Streams) -> None:
        super().__init__()
        self.devices, self.streams = devices, streams
        self.user_asks = devices.context.callers.sees_accelerator
        self.factories = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        getter = _GETTERS.get(getattr(func, "__self__", None)) if not kwargs and len(args) < 3 else None
        if getter is not None:
            return self._answer(getter, func, args)
        if func is Tensor.to or func is Tensor.cuda or func is Tensor.cpu:
            return self._move(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _answer(self, getter: str, func: Any, args: Any) -> Any:
        """A question about a tensor's device: libraries are told the truth."""
        truth = func(*args)
        where = self.devices.of(args[0])
        if where is None or not self.user_asks() or "meta" in str(truth):
            return truth
        return {"device": where, "is_cuda": True, "is_cpu": False}[getter]

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if fakes.all_stay_real(args, kwargs):
            return fakes.really(func, args, kwargs)
        where = self._place(func, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        if where is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.streams.draws(name) and kwargs.get("generator") is None:
            with self.streams.drawing():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        return self.devices.mark(out, where)

    def _place(self, func: Any, args: Any, kwargs: Any) -> torch.device | None:
        """Where the result of a call is."""
        devices = self.devices
        if kwargs.get("device") is not None:
            return devices.asked(kwargs["device"])
        for a in (*args, *kwargs.values()):
            if isinstance(a, Tensor):
                where = devices.of(a)
                if where is not None:
                    return where
            elif isinstance(a, (list, tuple)):
                for b in a:
                    if isinstance(b, Tensor) and (where := devices.of(b)) is not None:
                        return where
        if devices.contexts and func in self.factories:
            return devices.contexts[-1]
        return None

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        if fakes.all_stay_real(args, {}):
            return fakes.really(func, args, kwargs)
        tensor, *rest = args
        here = self.devices.of(tensor)
        if func is Tensor.cpu:
            target: Any = CPU
        elif func is Tensor.cuda:
            target = self.devices.asked(kwargs.get("device", rest[0] if rest else "cuda"))
            target = target or self.devices.asked("cuda")
        else:
            target = self._target(rest, kwargs)
        there = here if target is None else self.devices.asked(target)
        if target is None or _is_meta(target) or (there is None) == (here is None):
            out = func(*args, **kwargs)
        elif func is Tensor.to:
            out = func(*args, **{**kwargs, "copy": True})
        else:
            out = Tensor.to(tensor, CPU, copy=True)
        return out if there is None else self.devices.mark(out, there)

    def _target(self, rest: Iterable[Any], kwargs: Any) -> Any:
        """The device argument of a `to`, that of another tensor, or None."""
        for a in (kwargs.get("device"), kwargs.get("other"), *rest):
            if isinstance(a, (str, _Device)) or type(a) is int:
                return a
            if isinstance(a, Tensor):
                return self.devices.of(a) or CPU
        return None


def _is_meta(target: Any) -> bool:
    return "meta" in str(target)


def install(patches: Patches, devices: Devices, streams: Streams) -> None:
    _patch_contexts(patches, devices)
    _patch_threads(patches, devices, streams)
    keep_in_backward(patches, CudaIsCpu, functools.partial(Marking, devices, streams))
    _patch_modules(patches, devices)
    _patch_functions(patches, devices)


def _patch_contexts(patches: Patches, devices: Devices) -> None:
    init, enter, leave = DeviceContext.__init__, DeviceContext.__enter__, DeviceContext.__exit__
    answer = DeviceContext.__torch_function__

    def make(self: Any, device: Any) -> None:
        asked = devices.asked(device)
        init(self, device if asked is None else CPU)
        self._asked = asked

    def __torch_function__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = getattr(self, "_asked", None)
        if asked is not None and not getattr(self, "_below", False) and func in _device_constructors():
            if kwargs.get("device") is None:
                kwargs = {**kwargs, "device": asked}
            return func(*args, **kwargs)
        return answer(self, func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __enter__(self: Any) -> Any:
        self._below = True  # the other modes, which have seen the call when it gets here
        devices.contexts.append(getattr(self, "_asked", None))
        return enter(self)  # type: ignore[no-untyped-call]

    def __exit__(self: Any, *exc: Any) -> Any:
        if devices.contexts:
            devices.contexts.pop()
        return leave(self, *exc)  # type: ignore[no-untyped-call]

    patches.set(DeviceContext, "__init__", make)
    patches.set(DeviceContext, "__torch_function__", __torch_function__)
    patches.set(DeviceContext, "__enter__", __enter__)
    patches.set(DeviceContext, "__exit__", __exit__)


def _patch_threads(patches: Patches, devices: Devices, streams: Streams) -> None:
    """Modes belong to a thread: those the script starts get the same."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_with_modes(self: Any) -> None:
        work = self.run

        def run() -> None:
            with CudaIsCpu(), Marking(devices, streams):
                work()

        self.run = run
        start(self)

    patches.set(threading.Thread, "start", start_with_modes)


def _patch_modules(patches: Patches, devices: Devices) -> None:
    module = torch.nn.Module
    to, to_empty, cpu = module.to, module.to_empty, module.cpu

    @functools.wraps(to)
    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, kwargs.get("device"))
        target = next((a for a in given if isinstance(a, (str, _Device)) or type(a) is int), None)
        out = to(self, *args, **kwargs)
        if target is not None and not _is_meta(target):
            devices.mark_module(self, devices.asked(target))
        return out

    @functools.wraps(to_empty)
    def module_to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        out = to_empty(self, device=device, recurse=recurse)
        devices.mark_module(self, devices.asked(device))
        return out

    @functools.wraps(module.cuda)
    def module_cuda(self: Any, device: Any = None) -> Any:
        devices.mark_module(self, devices.asked("cuda" if device is None else device))
        return self

    @functools.wraps(cpu)
    def module_cpu(self: Any) -> Any:
        devices.mark_module(self, None)
        return cpu(self)

    replaced = {"to": module_to, "to_empty": module_to_empty, "cuda": module_cuda, "cpu": module_cpu}
    for name, new in replaced.items():
        patches.set(module, name, new)


def _patch_functions(patches: Patches, devices: Devices) -> None:
    """Parameters and results of autograd Functions are made where no function mode looks."""
    apply = torch.autograd.Function.__dict__["apply"].__func__
    kind = torch.nn.Parameter
    make = kind.__dict__["__new__"]
    make = getattr(make, "__func__", make)

    @functools.wraps(apply)
    def marked_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        out = apply(cls, *args, **kwargs)
        for a in args:
            if isinstance(a, Tensor) and (where := devices.of(a)) is not None:
                return devices.mark(out, where)
        return out

    def marked_new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        out = make(cls, data, *args, **kwargs)
        where = devices.of(data) if isinstance(data, Tensor) else None
        return out if where is None else devices.mark(out, where)

    patches.set(torch.autograd.Function, "apply", classmethod(marked_apply))
    patches.set(kind, "__new__", staticmethod(marked_new))
