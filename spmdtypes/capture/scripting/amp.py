"""Mixed precision of an accelerator, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.policy import Policy

# functions that take a device type, with its position
_BY_TYPE = {
    "is_autocast_enabled": 0,
    "get_autocast_dtype": 0,
    "set_autocast_enabled": 0,
    "set_autocast_dtype": 0,
}


def install(patches: Patches) -> None:
    _patch_autocast(patches)
    _patch_scaler(patches)
    _patch_custom(patches)


def _patch_autocast(patches: Patches) -> None:
    """The accelerator's low precision is float16 unless told; the CPU's would be bfloat16."""
    init, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__
    chosen = [torch.float16]
    policy = Policy()
    patches.on_undo(policy.stop)

    @functools.wraps(init)
    def autocast_init(self: Any, device_type: str = "cuda", dtype: Any = None, **kwargs: Any) -> None:
        if device_type.startswith("cuda") and dtype is None:
            dtype = chosen[0]
        self._for_accelerator = device_type.startswith("cuda")
        init(self, device_type, dtype, **kwargs)

    @functools.wraps(enter)
    def autocast_enter(self: Any) -> Any:
        if self._for_accelerator and self._enabled:
            policy.start()
            policy.on += 1
        return enter(self)  # type: ignore[no-untyped-call]

    @functools.wraps(leave)
    def autocast_exit(self: Any, *exc: Any) -> Any:
        if self._for_accelerator and self._enabled:
            policy.on -= 1
        return leave(self, *exc)

    def choose(dtype: Any) -> None:
        chosen[0] = dtype

    patches.set(torch.autocast, "__init__", autocast_init)
    patches.set(torch.autocast, "__enter__", autocast_enter)
    patches.set(torch.autocast, "__exit__", autocast_exit)
    for name in _BY_TYPE:
        patches.set(torch, name, _on_cpu(getattr(torch, name)))
    patches.set(torch, "set_autocast_gpu_dtype", choose)
    patches.set(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if args and isinstance(args[0], str) and args[0].startswith("cuda"):
            args = ("cpu", *args[1:])
        if function is _is_enabled and not args:
            args = ("cpu",)
        return function(*args)

    return call


_is_enabled = torch.is_autocast_enabled


def _patch_scaler(patches: Patches) -> None:
    """A scaler works on the CPU as on an accelerator."""
    init = torch.amp.GradScaler.__init__

    @functools.wraps(init)
    def scaler_init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if str(device).startswith("cuda") else device, *args, **kwargs)

    patches.set(torch.amp.GradScaler, "__init__", scaler_init)


def _patch_custom(patches: Patches) -> None:
    from torch.amp import autocast_mode

    for name in ("custom_fwd", "custom_bwd"):
        patches.everywhere(getattr(autocast_mode, name), _custom(getattr(autocast_mode, name)))
    cast = autocast_mode._cast

    def cast_here(value: Any, device_type: str, dtype: Any) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    patches.set(autocast_mode, "_cast", cast_here)


def _custom(decorator: Any) -> Any:
    @functools.wraps(decorator)
    def on_cpu(*args: Any, device_type: str = "cuda", **kwargs: Any) -> Any:
        return decorator(*args, device_type="cpu" if device_type == "cuda" else device_type, **kwargs)

    return on_cpu
