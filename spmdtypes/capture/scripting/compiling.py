"""Compilers: what they are given runs as it is."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from spmdtypes.capture.accelerator import returning
from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context


def install(patches: Patches, context: Context) -> None:
    @functools.wraps(torch.compile)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _plain if model is None else _plain(model)

    patches.set(torch, "compile", compile)
    patches.set(torch.nn.Module, "compile", lambda self, *args, **kwargs: None)
    jit: Any = torch.jit
    patches.everywhere(jit.script, script)  # it reads the source of what it calls, ours included
    compiler: Any = torch.compiler
    for name in ("cudagraph_mark_step_begin", "reset", "set_enable_guard_collectives"):
        if hasattr(compiler, name):
            patches.set(compiler, name, returning(None))
    patches.set(compiler, "disable", _decorator)
    patches.set(compiler, "set_stance", _Stance)
    patches.set(compiler, "is_compiling", returning(False))
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        for name in ("optimize", "optimize_assert", "run", "disable", "allow_in_graph"):
            patches.set(dynamo, name, _optimize if "optimize" in name else _decorator)
        patches.set(dynamo, "reset", returning(None))


def _plain(model: Any) -> Any:
    """The thing itself. Scripts look for the original of a compiled module, which is it too."""
    if isinstance(model, torch.nn.Module):
        model.__dict__["_orig_mod"] = model
    return model


def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
    """TorchScript of a thing is the thing itself."""
    return obj


def _decorator(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    return fn if fn is not None else lambda f: f


def _optimize(*args: Any, **kwargs: Any) -> Any:
    return lambda f: f


class _Stance:
    """A stance of the compiler, as a statement, a decorator or a context."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, fn: Any) -> Any:
        return fn

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: Any) -> None: ...
