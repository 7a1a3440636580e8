"""The raw trace: what was executed, on which pieces of memory. Lives only until functionalised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spmdtypes.graph import Comm, TensorMeta

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.complex32: "c32",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.float8_e8m0fnu: "f8e8m0",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


class View(NamedTuple):
    """A strided reading of one storage; equal views see equal values."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    conj: bool = False

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def span(self) -> tuple[int, int]:
        """Bytes [low, high) of the storage this view can touch."""
        low = self.offset * self.itemsize
        if 0 in self.shape:
            return low, low
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride))
        return low, low + (last + 1) * self.itemsize

    @property
    def contiguous(self) -> bool:
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride)):
            if n != 1 and s != expected:
                return False
            expected *= n
        return True


class Res(NamedTuple):
    """Output `out` of raw node `node`, where the value is in no tensor of the program."""

    node: int
    out: int = 0


@dataclass(slots=True)
class Raw:
    """One recorded event.

    `op` is a dispatcher name, "comm.<kind>", or one of the markers "source" (a tensor that comes
    from outside), "bind" (a tensor becomes the graph input `name`), "write" (`args[0]`, a `Res` or
    `View`, is stored into `outs[0]`). `func` is the overload, None for markers and collectives.
    `outs` are views, `TensorMeta`s of values in no tensor, or None.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[Any, ...] = ()
    func: Any = None
    mutated: tuple[View, ...] = ()  # views written in place, in schema order, as they are afterwards
    stack: int = 0
    phase: str = "forward"
    module: str = ""
    forward: int | None = None
    forward_stack: int = 0
    name: str = ""
    comm: Comm | None = None
    rng: str | None = None
    assumed: str | None = None
    meta: TensorMeta | None = None
