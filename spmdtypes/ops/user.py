"""Descriptions of the user's own ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from spmdtypes.core.spec import Operand, OpSpec
from spmdtypes.ops import text
from spmdtypes.ops.registry import Builder, op

Check = bool | Sequence[tuple[Any, ...]]


def rule(target: Any, description: str | Builder, *, check: Check = True) -> Any:
    """Say what an op of yours computes, so that shards and partial sums pass through it.

    `target`: a `torch.library` op or its name ("mylib::scale"), or any Python callable or
    `autograd.Function` (a Triton wrapper, say), which is made into such an op. `description`: index
    text, "out[i,j] = sum_k a[i,k] * b[k,j]", or a builder with the op's signature that takes
    `Operand`s and returns an `OpSpec`. Names in the text are the op's argument names where they
    match, else its tensor arguments in order.

    The claim is compared with the op on random inputs (text), or on the argument tuples given as
    `check`; a wrong claim raises ValueError. `check=False` trusts it. Returns what to call.

        @torch.library.custom_op("mylib::scale", mutates_args=())
        def scale(x: torch.Tensor, by: float) -> torch.Tensor: ...
        spmdtypes.rule(scale, "out[...] = x[...] * by")
    """
    parsed = text.parse(description) if isinstance(description, str) else None
    if not isinstance(target, str) and _is_plain(target):
        target = import_module("spmdtypes.userops").make_op(target, parsed)
    name = op_name(target)
    builder = _from_text(parsed, _parameters(target)) if parsed is not None else description
    if check is not False:
        import_module("spmdtypes.userops").check_claim(target, builder, parsed, check)
    assert callable(builder)
    op(name)(builder)
    return target


def op_name(target: Any) -> str:
    """The name capture records: "mylib.scale.default"."""
    name = target if isinstance(target, str) else getattr(target, "_qualname", None) or str(target)
    name = name.replace("::", ".")
    return name if name.count(".") >= 2 else f"{name}.default"


def _is_plain(target: Any) -> bool:
    """A Python callable that the dispatcher does not know."""
    return (
        callable(target)
        and not hasattr(target, "_qualname")
        and not hasattr(target, "_schema")
        and not hasattr(target, "_qualified_op_name")
    )


def _parameters(target: Any) -> tuple[str, ...]:
    return () if isinstance(target, str) else parameters_of(target)


def parameters_of(target: Any) -> tuple[str, ...]:
    """Argument names, from the op's schema or the function's signature."""
    overload = getattr(target, "_opoverload", target)
    overload = getattr(overload, "default", overload)
    schema = getattr(overload, "_schema", None)
    if schema is not None:
        return tuple(a.name for a in schema.arguments)
    return tuple(inspect.signature(target).parameters)


def _from_text(parsed: text.Text, parameters: tuple[str, ...]) -> Callable[..., OpSpec]:
    """A builder that binds the call's arguments to the names in the text."""

    def build(*args: Any, **kwargs: Any) -> OpSpec:
        given = dict(zip(parameters, args)) | kwargs
        if not set(parsed.operands) <= set(given):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Operand)]
            given |= dict(zip(parsed.operands, tensors))
        return parsed.build(text.with_leading(parsed, given))

    return build
