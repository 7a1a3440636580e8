"""Copies and changes of dtype: the identity, except where the target dtype loses values."""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import At, Expr, Iota, Operand, OpSpec, Out, Var, fn
from spmdtypes.ops.parts import elementwise, names, shaped_like, spread
from spmdtypes.ops.registry import op

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def short(dtype: Any) -> str:
    """ "torch.bfloat16", "bfloat16" and "bf16" all give "bf16"."""
    text = str(dtype).removeprefix("torch.")
    stem = text.rstrip("0123456789")
    return _SHORT.get(stem, stem) + text[len(stem) :]


def converted(value: Expr, source: str, target: str) -> Expr:
    """`value` cast from one dtype to another. Rounding between float dtypes is left out."""
    if target == source:
        return value
    if target == "bool":
        return fn("ne", value, 0)
    if target[0] in "iu" and source[0] in "fb" and source != "bool":
        return fn("trunc", value)
    return value


@op("_to_copy to.dtype")
def to_copy(x: Operand, dtype: Any = None, *_: Any, **__: Any) -> OpSpec:
    target = short(dtype) if dtype is not None else x.dtype
    return elementwise(lambda a: converted(a, short(x.dtype), target), x)


@op("prims.convert_element_type.default")
def convert(x: Operand, dtype: Any) -> OpSpec:
    return to_copy(x, dtype)


@op("clone detach alias contiguous lift lift_fresh lift_fresh_copy detach_copy alias_copy")
@op("resolve_conj resolve_neg prims.view_of.default prims.device_put.default")
def same(x: Operand, *_: Any, **__: Any) -> OpSpec:
    return elementwise(lambda a: a, x)


@op("copy")
def copy(x: Operand, source: Operand, *_: Any) -> OpSpec:
    """`source` broadcast to the shape of `x` and cast to its dtype."""
    vars = names(x.ndim)
    value = converted(spread(source, vars), short(source.dtype), short(x.dtype))
    return OpSpec.of(Out(tuple(vars), value), uses=(shaped_like(x, vars),))


@op("view.dtype")
def reinterpret(x: Operand, dtype: Any) -> OpSpec | None:
    """The same bits as another dtype: some function of the element when the widths agree."""
    target, source = short(dtype), short(x.dtype)
    width = [d.lstrip("abcdefghijklmnopqrstuvwxyz") or "8" for d in (target, source)]
    if target == source:
        return same(x)
    return elementwise(lambda a: fn("opaque", a), x) if width[0] == width[1] else None


@op("view_as_real")
def view_as_real(x: Operand) -> OpSpec:

    vars, part = names(x.ndim), Var("part")
    value = x[tuple(vars)]
    split = fn("where", fn("eq", Iota(part), 0), fn("real", value), fn("imag", value))
    return OpSpec.of(Out((*vars, part), split), sizes={part: 2})


@op("view_as_complex")
def view_as_complex(x: Operand) -> OpSpec:

    vars = names(x.ndim - 1)
    return OpSpec.of(Out(tuple(vars), fn("complex", x[(*vars, At(0))], x[(*vars, At(1))])))
