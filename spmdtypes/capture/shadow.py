"""Values a program reads back (`.item()`, `nonzero`, `bool(tensor)`) when tensors are fake.

Small integer tensors keep a real twin for as long as everything they come from has one. Where
none is left, a value is assumed and said so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from spmdtypes.capture.raw import Raw, View

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import OpInfo, Recorder

_SMALL = 4096
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


class Shadows:
    """Real twins of fake tensors, by storage; a write without a twin forgets the storage."""

    def __init__(self) -> None:
        self.known: dict[int, dict[View, Tensor]] = {}

    def learn(self, view: View, value: Tensor) -> None:
        self.known.setdefault(view.storage, {})[view] = value

    def forget(self, view: View) -> None:
        self.known.pop(view.storage, None)

    def get(self, view: View) -> Tensor | None:
        return self.known.get(view.storage, {}).get(view)

    def before(self, rec: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        return None

    def after(self, rec: Recorder, func: Any, real: Any, out: Any, args: Any, kwargs: Any) -> None:
        return None


def needs_values(func: Any) -> bool:
    return False


def run(rec: Recorder, raw: Raw, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def special(func: Any) -> Callable[..., Any] | None:
    if func is torch.ops.aten._local_scalar_dense.default:
        return _item
    return None


def _item(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor becomes a Python number."""
    (t,) = args
    raw = rec.begin(info.name, func, args, kwargs)
    if isinstance(t, FakeTensor):
        known = rec.shadows.get(raw.args[0])
        if known is None and t.constant is not None:
            known = t.constant
        if known is None:
            value: Any = False if t.dtype is torch.bool else 1 if not t.dtype.is_floating_point else 1.0
            raw.assumed = repr(value)
            rec.note(f"assumed {value!r} for a value read from a tensor")
        else:
            with rec.quiet():
                value = known.item()
    else:
        value = func(*args, **kwargs)
    rec.finish(raw, info, args, kwargs, value)
    return value
