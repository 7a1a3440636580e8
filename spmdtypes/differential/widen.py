"""A program run without its roundings: what it computes in bf16, f16 or f32 is computed in f64.

Rounding hides what is wrong and small. A second run in which casts and creations keep f64 leaves
nothing for a difference to hide in. Integers, bool and float8 stay: their rounding is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from spmdtypes.capture.recorder import Recorder

WIDE = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_LIFTS = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


def widened(func: Any, args: Any, kwargs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """`call(func, args, kwargs)` with every low float dtype among the arguments replaced.

    Tensors that were low before they met the program (constants of a module) are lifted where the op
    does not take them as they are. A kernel that insists on a low dtype gets it, and its result is lifted.
    """
    new_args, new_kwargs = tree_map(_wide_dtype, (args, dict(kwargs)))
    if func.namespace in _COLLECTIVES:
        return call(func, new_args, new_kwargs)
    if func._schema.name in _LIFTS:
        new_args = tree_map(_wide_tensor, new_args)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    try:
        return call(func, new_args, new_kwargs)
    except (RuntimeError, NotImplementedError) as e:
        if writes and "float tensor" in str(e):
            return _with_low_scalars(func, new_args, new_kwargs, call)
        if writes:
            raise
    try:
        return call(func, *tree_map(_wide_tensor, (new_args, new_kwargs)))
    except (RuntimeError, NotImplementedError):
        return tree_map(_wide_tensor, call(func, args, kwargs))


def _with_low_scalars(func: Any, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
    """Call an in-place kernel that wants its scalars (a loss scale, a flag) in f32, whatever the rest is."""
    low: list[tuple[Tensor, Tensor]] = []

    def lower(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float64 and x.numel() == 1 and not isinstance(x, list):
            low.append((x, x.float()))
            return low[-1][1]
        return x

    out = call(func, tuple(lower(a) for a in args), {k: lower(v) for k, v in kwargs.items()})
    for high, lowered in low:
        high.copy_(lowered)
    return out


def _wide_dtype(x: Any) -> Any:
    return WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def _wide_tensor(x: Any) -> Any:
    return x.to(WIDE[x.dtype]) if isinstance(x, Tensor) and x.dtype in WIDE else x


class WideRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records the program as it is without its low precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused or not isinstance(func, torch._ops.OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        record = super().__torch_dispatch__
        return widened(func, args, kwargs or {}, lambda f, a, k: record(f, types, a, k))


@contextmanager
def wide_defaults() -> Iterator[None]:
    """A program that sets a low default dtype gets f64 too."""
    set_default = torch.set_default_dtype

    def set_default_dtype(dtype: torch.dtype) -> None:
        set_default(WIDE.get(dtype, dtype))

    torch.set_default_dtype = set_default_dtype
    try:
        yield
    finally:
        torch.set_default_dtype = set_default
