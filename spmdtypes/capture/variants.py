"""In-place and out= overloads as functions that return what the original writes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

_RENAMED = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten._index_put_impl_.default": "aten.index_put.default",
    "aten._native_batch_norm_legit.default": "aten._native_batch_norm_legit_functional.default",
    "aten.native_batch_norm.default": "aten._native_batch_norm_legit_functional.default",
}


class Variant(NamedTuple):
    """`name` computes the written values; `written[j]` is the output that holds the j-th one.
    `dropped` are argument names the functional form does not take."""

    name: str
    func: Any
    written: tuple[int, ...]
    dropped: tuple[str, ...]


def overload(name: str) -> Any:
    """The torch op called `name`, or None."""
    try:
        space, op, variant = name.split(".", 2)
        return getattr(getattr(getattr(torch.ops, space), op), variant)
    except (AttributeError, ValueError):
        return None


@functools.cache
def variant(func: Any) -> Variant | None:
    """The functional form of a mutating overload; None when there is none."""
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    space, op = schema.name.split("::")
    renamed = _RENAMED.get(str(func))
    if renamed is not None:
        target = overload(renamed)
        n = len(target._schema.returns)
        return Variant(renamed, target, tuple(range(n - len(written), n)), ())
    if all(a.kwarg_only for a in written):
        out = _without_out(func, [a.name for a in written])
        return (
            None
            if out is None
            else Variant(str(out), out, tuple(range(len(written))), tuple(a.name for a in written))
        )
    if op.endswith("_") and len(written) == 1:
        packet = getattr(getattr(torch.ops, space), op[:-1], None)
        target = _same_arguments(func, packet) if packet is not None else None
        if target is not None:
            return Variant(str(target), target, (0,), ())
    return None


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments]


def _same_arguments(func: Any, packet: Any) -> Any:
    """The overload of `packet` that takes what `func` takes, preferably of the same name."""
    names = packet.overloads()
    names.sort(key=lambda n: n != (func._schema.overload_name or "default"))
    return next((f for n in names if _arguments(f := getattr(packet, n)) == _arguments(func)), None)


def _without_out(func: Any, outs: list[str]) -> Any:
    """The overload with the same arguments save `out`."""
    want = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in outs]
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if other is func or any(
            a.alias_info is not None and a.alias_info.is_write for a in other._schema.arguments
        ):
            continue
        have = [(a.name, str(a.type)) for a in other._schema.arguments]
        if have[: len(want)] == want and len(other._schema.returns) == len(func._schema.returns):
            return other
    return None


def foreach_base(func: Any) -> tuple[Any, bool] | None:
    """The per-tensor overload of a `_foreach_` op and whether it writes in place."""
    name = func._schema.name.split("::")[1]
    if not name.startswith("_foreach_"):
        return None
    base = name.removeprefix("_foreach_")
    in_place = base.endswith("_")
    return base.rstrip("_"), in_place
