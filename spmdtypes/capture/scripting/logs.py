"""What a script shows to people: printed, logged, or handed to a tracking service. Nothing is sent."""

from __future__ import annotations

import builtins
import functools
import io
import logging
import numbers
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.imports import Hooks
from spmdtypes.capture.scripting.sinks import LOGGERS, OFFLINE, make_module

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w]*\.\d)|(?<!\w)(?:nan|inf)\b"
)
_LABEL = re.compile(r"([A-Za-z_][\w./@-]*(?: [A-Za-z_][\w./@-]*){0,2})\W*$")


def install(patches: Patches, context: Context) -> None:
    _patch_print(patches, context)
    _patch_logging(patches, context)
    patches.environ(OFFLINE)
    hooks = Hooks(patches, context)
    for name in LOGGERS:
        hooks.instead(name, functools.partial(make_module, context))
    hooks.when("tqdm.std", lambda module: _patch_bars(patches, context, module))


def _patch_print(patches: Patches, context: Context) -> None:
    """To show a tensor is no part of what is checked."""
    real = builtins.print

    @functools.wraps(real)
    def print(*args: Any, **kwargs: Any) -> None:
        if context.callers.user_asks():
            note_arguments(context, "print", args)
        with _disable_current_modes():
            real(*args, **kwargs)

    patches.set(builtins, "print", print)


def _patch_logging(patches: Patches, context: Context) -> None:
    log = logging.Logger._log

    @functools.wraps(log)
    def logged(self: Any, level: int, msg: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            if context.callers.user_asks(through=("logging/__init__.py",)):
                values = args if isinstance(args, tuple) else (args,)
                note_arguments(context, "logging", _message(msg, values))
            # a frame of ours is none that a record should name
            log(self, level, msg, args, *rest, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    patches.set(logging.Logger, "_log", logged)


def _message(msg: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors apart; else the text as it is shown, whose words name the numbers."""
    if any(isinstance(v, Tensor) for v in values):
        texts = re.split(r"%[-+ #0-9.*]*[a-zA-Z]", str(msg))
        return tuple(x for pair in zip(texts, values) for x in pair)
    try:
        return (str(msg) % values if values else msg,)
    except (TypeError, ValueError):
        return (msg, *values)


def note_arguments(context: Context, sink: str, args: tuple[Any, ...]) -> None:
    """Numbers among `args` under the words before them."""
    label = ""
    for a in args:
        if isinstance(a, str):
            for name, value, resolution in numbers_in(a):
                context.log(sink, name, value, resolution)
            label = _label(a)
        else:
            for name, value in values_in(a, label):
                context.log(sink, name, value)


def numbers_in(text: str) -> Iterator[tuple[str, float, float]]:
    """(words before it, value, size of its last digit) of each number written in `text`."""
    end = 0
    for m in _NUMBER.finditer(text):
        digits = m.group().replace(",", "").replace("_", "")
        try:
            value = float(digits)
        except ValueError:
            continue
        mantissa, _, exponent = digits.lower().partition("e")
        places = len(mantissa.partition(".")[2])
        resolution = 10.0 ** ((int(exponent) if exponent else 0) - places)
        yield _label(text[end : m.start()]), value, resolution
        end = m.end()


def _label(text: str) -> str:
    found = _LABEL.search(text)
    return found.group(1).lower() if found else ""


def values_in(x: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and numbers in `x`, which may be nested, with their names."""
    if isinstance(x, Tensor) or (isinstance(x, numbers.Number) and not isinstance(x, bool)):
        yield name, x
    elif isinstance(x, Mapping):
        for k, v in x.items():
            yield from values_in(v, f"{name}/{k}" if name else str(k))
    elif isinstance(x, (list, tuple)):
        for i, v in enumerate(x):
            yield from values_in(v, f"{name}/{i}" if name else str(i))
    elif type(x).__module__ == "numpy" and getattr(x, "ndim", 1) == 0:
        yield name, x


def _patch_bars(patches: Patches, context: Context, module: Any) -> None:
    """Progress bars count, and draw nothing."""
    bar = module.tqdm
    init, postfix = bar.__init__, bar.set_postfix

    @functools.wraps(init)
    def quiet_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "file": io.StringIO()})

    @functools.wraps(postfix)
    def set_postfix(self: Any, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        for name, value in values_in({**dict(ordered_dict or {}), **kwargs}):
            context.log("tqdm", name, value)

    def text(self: Any, s: Any = "", *args: Any, **kwargs: Any) -> None:
        note_arguments(context, "tqdm", (str(s),))

    def write(cls: Any, s: Any, *args: Any, **kwargs: Any) -> None:
        note_arguments(context, "tqdm", (str(s),))

    patches.set(bar, "__init__", quiet_init)
    patches.set(bar, "set_postfix", set_postfix)
    patches.set(bar, "set_postfix_str", text)
    patches.set(bar, "set_description", text)
    patches.set(bar, "set_description_str", text)
    patches.set(bar, "write", classmethod(write))
