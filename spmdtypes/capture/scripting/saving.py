"""Checkpoints: written to the throw-away layer, or kept in memory where tensors hold no values."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.files import layer
from spmdtypes.capture.scripting.imports import Hooks
from spmdtypes.capture.scripting.overlay import Overlay

_TOKEN = b"spmdtypes:kept:"


def install(patches: Patches, context: Context) -> None:
    overlay = layer(context)
    hooks = Hooks(patches, context)
    _patch_torch(patches, context, overlay)
    hooks.when("safetensors", lambda m: _patch_safetensors(patches, context, overlay, m))
    hooks.when("safetensors.torch", lambda m: _patch_safetensors_torch(patches, context, overlay, m))
    if context.fake:
        hooks.when("torch.distributed.checkpoint", lambda m: _patch_distributed(patches, context, m))


def _is_path(x: Any) -> bool:
    return isinstance(x, (str, os.PathLike))


def _patch_torch(patches: Patches, context: Context, overlay: Overlay) -> None:
    save, load = torch.save, torch.load
    kept: dict[bytes, Any] = {}
    number = itertools.count()

    def written(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        place = overlay.prepare(f, keep=False) if _is_path(f) and overlay.covers(f) else f
        if not context.fake:
            with _disable_current_modes():
                save(obj, place, *args, **kwargs)
            return
        token = _TOKEN + str(next(number)).encode()
        kept[token] = obj
        if isinstance(place, (str, os.PathLike)):
            with open(place, "wb") as out:
                out.write(token)
        else:
            place.write(token)

    def read(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = overlay.read(f) if _is_path(f) else f
        known = kept.get(_head(place)) if context.fake else None
        if known is not None:
            return known
        with _disable_current_modes():
            return load(place, "meta" if str(map_location) == "meta" else "cpu", *args, **kwargs)

    patches.everywhere(save, functools.wraps(save)(written))
    patches.everywhere(load, functools.wraps(load)(read))


def _head(f: Any) -> bytes:
    """The first bytes of a file, which is left where it stands."""
    if _is_path(f):
        if not os.path.isfile(f):
            return b""
        with open(f, "rb") as file:
            return file.read(64)
    try:
        here = f.tell()
        head: bytes = f.read(64)
        f.seek(here)
    except (AttributeError, OSError):
        return b""
    return head


def _cpu_only(device: Any) -> Any:
    return "cpu" if device is not None and ("cuda" in str(device) or isinstance(device, int)) else device


def _patch_safetensors(patches: Patches, context: Context, overlay: Overlay, module: Any) -> None:
    real_open, real_write = module.safe_open, module.serialize_file

    class Opened:
        """A file of tensors; what is read from it has values."""

        def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> None:
            with _disable_current_modes():
                self._file = real_open(overlay.read(filename), framework, device=_cpu_only(device), **kwargs)

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *exc: Any) -> None:
            self._file.__exit__(*exc)

        def get_tensor(self, name: str) -> Any:
            with _disable_current_modes():
                return self._file.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def write(data: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        place = overlay.prepare(filename, keep=False) if overlay.covers(filename) else filename
        real_write(data, place, *args, **kwargs)

    patches.by_value(real_open, Opened)
    patches.set(module, "safe_open", Opened)
    patches.by_value(real_write, write)
    patches.set(module, "serialize_file", write)


def _patch_safetensors_torch(patches: Patches, context: Context, overlay: Overlay, module: Any) -> None:
    saving: Callable[..., Any] = module.save_file

    @functools.wraps(saving)
    def save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if context.fake:
            context.note("save_file: the tensors have no values, and nothing is written")
            return
        with _disable_current_modes():
            place = overlay.prepare(filename, keep=False) if overlay.covers(filename) else filename
            saving(tensors, place, *args, **kwargs)

    loading: Callable[..., Any] = module.load_file

    @functools.wraps(loading)
    def load_file(filename: Any, device: Any = "cpu") -> Any:
        with _disable_current_modes():
            return loading(overlay.read(filename), device=_cpu_only(device))

    patches.everywhere(saving, save_file)
    patches.everywhere(loading, load_file)


def _patch_distributed(patches: Patches, context: Context, module: Any) -> None:
    """A group that does not communicate cannot agree on who writes what."""

    def dropped(name: str, result: Callable[[], Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            context.note(f"torch.distributed.checkpoint.{name}: nothing is written or read here")
            return result()

        return functools.wraps(getattr(module, name))(call)

    def done() -> Any:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    for name in ("save", "save_state_dict", "load", "load_state_dict", "async_save"):
        if hasattr(module, name):
            new = dropped(name, done if name == "async_save" else lambda: None)
            patches.everywhere(getattr(module, name), new)
