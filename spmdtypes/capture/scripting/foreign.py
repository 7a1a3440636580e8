"""Functions that open files by themselves, in C, and are told where those are."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.imports import Hooks
from spmdtypes.capture.scripting.overlay import Overlay

# module, name in it, and the mode it opens with unless told
_OPENERS = (
    ("pyarrow", "memory_map", "r"),
    ("pyarrow", "OSFile", "r"),
    ("h5py", "File", "r"),
)


def install(patches: Patches, context: Context, overlay: Overlay) -> None:
    hooks = Hooks(patches, context)
    for module, name, mode in _OPENERS:
        hooks.when(module, functools.partial(_patch_opener, patches, overlay, name, mode))
    hooks.when("sqlite3", functools.partial(_patch_databases, patches, overlay))
    _patch_storages(patches, overlay)


def _is_path(x: Any) -> bool:
    return isinstance(x, (str, os.PathLike))


def _patch_opener(patches: Patches, overlay: Overlay, name: str, default: str, module: Any) -> None:
    """`name(path, mode)`."""
    real = getattr(module, name)

    def opened(path: Any, mode: str = default, *args: Any, **kwargs: Any) -> Any:
        if _is_path(path) and overlay.covers(path):
            keep = not mode.startswith(("w", "x"))
            path = (
                overlay.read(path)
                if mode.startswith("r") and "+" not in mode
                else overlay.prepare(path, keep)
            )
        return real(path, mode, *args, **kwargs)

    if isinstance(real, type):
        made = type(real.__name__, (real,), {"__new__": lambda cls, *args, **kwargs: opened(*args, **kwargs)})
        patches.set(module, name, made)
    else:
        patches.by_value(real, opened)


def _patch_databases(patches: Patches, overlay: Overlay, module: Any) -> None:
    """A database is opened to be changed."""
    connect = module.connect

    @functools.wraps(connect)
    def connect_here(database: Any, *args: Any, **kwargs: Any) -> Any:
        plain = _is_path(database) and str(database) not in ("", ":memory:") and not kwargs.get("uri")
        if plain and overlay.covers(database):
            database = overlay.prepare(database, keep=True)
        return connect(database, *args, **kwargs)

    patches.everywhere(connect, connect_here)


def _patch_storages(patches: Patches, overlay: Overlay) -> None:
    """A tensor that lives in a file, shared or not."""
    real = torch.from_file

    @functools.wraps(real)
    def from_file(filename: str, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if overlay.covers(filename):
            filename = overlay.prepare(filename, keep=True) if shared else overlay.read(filename)
        return real(filename, shared, *args, **kwargs)

    patches.set(torch, "from_file", from_file)
