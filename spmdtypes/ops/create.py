"""Tensors made from nothing but sizes and numbers."""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import Const, Iota, Operand, OpSpec, Out, Var, fn
from spmdtypes.ops.parts import Ints, both, created, like, new_dims, number, rank_steps
from spmdtypes.ops.registry import op


def _fill(name: str, value: float) -> None:
    @op(f"{name} {name}.memory_format")
    def from_sizes(size: Ints, *_: Any, **__: Any) -> OpSpec:
        return created(size, lambda _: Const(value))

    @op(f"{name}_like {name}_like.memory_format")
    def from_tensor(x: Operand, *_: Any, **__: Any) -> OpSpec:
        return like(x, lambda _: Const(value))

    @op(f"new_{name} new_{name}_strided {name}_strided")
    def from_other(x: Any, size: Any = None, *_: Any, **__: Any) -> OpSpec:
        return created(size if isinstance(x, Operand) else x, lambda _: Const(value))


_fill("zeros", 0)
_fill("ones", 1)
_fill("empty", 0)


@op("zero")
def zero(x: Operand) -> OpSpec:
    return like(x, lambda _: Const(0))


@op("full")
def full(size: Ints, fill_value: Any, **_: Any) -> OpSpec:
    return created(size, lambda _: Const(fill_value))


@op("new_full")
def new_full(x: Operand, size: Ints, fill_value: Any, **_: Any) -> OpSpec:
    return created(size, lambda _: Const(fill_value))


@op("full_like fill.Scalar")
def full_like(x: Operand, fill_value: Any, **_: Any) -> OpSpec:
    return like(x, lambda _: Const(fill_value))


@op("fill.Tensor")
def fill(x: Operand, value: Operand) -> OpSpec:
    return like(x, lambda _: value[()])


@op("scalar_tensor")
def scalar_tensor(value: Any, **_: Any) -> OpSpec:
    return OpSpec.of(Out((), Const(value)))


def _progression(start: Any, end: Any, step: Any) -> OpSpec:
    length = both(lambda a, b, s: max(0, -int((a - b) // s)), start, end, step)
    steps = rank_steps((1, end), (-1, start)) if step == 1 else ()
    vars, sizes = new_dims([number(getattr(length, "local", length), getattr(length, "ref", length), steps)])
    if not sizes:
        return OpSpec.of(Out(vars, Const(start)))
    return OpSpec.of(Out(vars, Iota(vars[0]) * step + start), sizes=sizes)


@op("arange")
def arange(end: Any, **_: Any) -> OpSpec:
    return _progression(0, end, 1)


@op("arange.start arange.start_step")
def arange_start(start: Any, end: Any, step: Any = 1, **_: Any) -> OpSpec:
    return _progression(start, end, step)


@op("linspace")
def linspace(start: Any, end: Any, steps: Any, **_: Any) -> OpSpec:
    gap = both(lambda a, b, n: (b - a) / max(n - 1, 1), start, end, steps)
    return created([steps], lambda vs: Iota(vs[0]) * gap + start if vs else Const(start))


@op("eye eye.m")
def eye(n: Any, m: Any = None, **_: Any) -> OpSpec:
    vars, sizes = new_dims([n, n if m is None else m])
    marks = [Iota(v) if isinstance(v, Var) else Const(0) for v in vars]
    return OpSpec.of(Out(vars, fn("eq", *marks)), sizes=sizes)


@op("empty_permuted")
def empty_permuted(size: Ints, *_: Any, **__: Any) -> OpSpec:
    return created(size, lambda _: Const(0))


@op("new_empty_strided")
def new_empty_strided(x: Operand, size: Ints, *_: Any, **__: Any) -> OpSpec:
    return created(size, lambda _: Const(0))
