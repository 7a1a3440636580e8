"""What a script sets for the whole process is set back."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# pairs of functions that read and write one setting
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_deterministic_algorithms_warn_only_enabled, lambda v: None),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (lambda: sys.excepthook, lambda v: setattr(sys, "excepthook", v)),
    (lambda: (sys.stdout, sys.stderr, sys.stdin), lambda v: _set_streams(*v)),
)
_BACKENDS = (
    ("cuda.matmul", "allow_tf32"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("cudnn", "allow_tf32"),
    ("cudnn", "benchmark"),
    ("cudnn", "deterministic"),
    ("cudnn", "enabled"),
)
_KERNELS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def _set_streams(out: Any, err: Any, into: Any) -> None:
    sys.stdout, sys.stderr, sys.stdin = out, err, into


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Process-wide settings of Python and torch are as before when this is left."""
    # the internal test library of torch forbids all others to set flags of backends
    flags_may_be_set: Any = getattr(torch.backends, "__allow_nonbracketed_mutation")
    with contextlib.ExitStack() as stack:
        stack.enter_context(flags_may_be_set())
        for read, write in _FLAGS:
            stack.callback(write, read())
        _keep_backends(stack)
        _keep_python(stack)
        yield


def _keep_backends(stack: contextlib.ExitStack) -> None:
    for path, name in _BACKENDS:
        owner: Any = torch.backends
        for part in path.split("."):
            owner = getattr(owner, part)
        with contextlib.suppress(Exception):
            stack.callback(setattr, owner, name, getattr(owner, name))
    for name in _KERNELS:
        enabled = getattr(torch.backends.cuda, f"{name}_enabled")()
        stack.callback(getattr(torch.backends.cuda, f"enable_{name}"), enabled)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
    stack.callback(_set_default_device, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None))


def _set_default_device(before: Any) -> None:
    now = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if now is not before:
        torch.set_default_device(None if before is None else before.device)


def _keep_python(stack: contextlib.ExitStack) -> None:
    stack.callback(_set_environ, dict(os.environ))
    stack.callback(_set_list, sys.path, list(sys.path))
    stack.callback(_set_list, sys.argv, list(sys.argv))
    stack.callback(_set_list, warnings.filters, list(warnings.filters))
    root = logging.getLogger()
    stack.callback(_set_list, root.handlers, list(root.handlers))
    stack.callback(root.setLevel, root.level)
    stack.callback(logging.disable, root.manager.disable)
    stack.callback(gc.enable if gc.isenabled() else gc.disable)
    stack.callback(_set_directory, os.getcwd())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        number = getattr(signal, name, None)
        if number is not None:
            stack.callback(_set_signal, number, signal.getsignal(number))


def _set_directory(before: str) -> None:
    with contextlib.suppress(OSError):
        os.chdir(before)


def _set_signal(number: int, handler: Any) -> None:
    if signal.getsignal(number) is not handler and handler is not None:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, handler)


def _set_environ(before: dict[str, str]) -> None:
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _set_list(items: Any, before: list[Any]) -> None:
    if list(items) != before:
        items[:] = before
