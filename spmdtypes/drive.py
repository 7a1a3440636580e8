"""Makes a user's module a program with a loss, when its result is none.

A scalar result is back-propagated as it is. Any other is weighed with a random cotangent, an input
laid out as the result is: loss = sum(result * cotangent). Floating arguments become parameters, so
that their gradients are compared like every other. The module stays the user's own object: only its
`forward` is wrapped, so names of parameters and submodules are unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmdtypes.errors import CannotCheck
from spmdtypes.notation import Dim, Type, format_type, local_shape

COTANGENT = "cotangent"


@dataclass(frozen=True)
class Driver:
    """How a program is driven. `outputs` are types of the result by key ("output" for a single one),
    bound to numbers. `probes` are arguments turned into parameters: (argument, parameter name, type).
    `averaged`: axes over which an outer wrapper averages gradients."""

    outputs: Mapping[str, Type]
    probes: tuple[tuple[str, str, Type], ...] = ()
    averaged: tuple[str, ...] = ()
    file: str = ""
    line: int = 1

    @property
    def is_loss(self) -> bool:
        """The result is one scalar, back-propagated as it is."""
        return list(self.outputs) == ["output"] and self.outputs["output"].is_scalar

    def cotangents(self) -> dict[str, Type]:
        """Inputs that weigh the results: laid out like them, the same for all their summands."""
        if self.is_loss:
            return {}
        return {_cotangent(k): replace(t, partial=(), text="") for k, t in self._driven().items()}

    def _driven(self) -> dict[str, Type]:
        """Results that can be back-propagated: floating, and a sum of what the ranks hold."""
        return {k: t for k, t in self.outputs.items() if is_float(t) and t.dims is not None and _is_sum(t)}

    def loss(self) -> Type:
        """Type of the weighed sum: pending over every axis that cuts a result or leaves it partial."""
        partial: dict[str, str] = {}
        for t in self._driven().values():
            for d in t.dims or ():
                partial |= dict.fromkeys(d.axes, "sum")
            partial |= {a: op for a, op in t.partial if op in ("sum", "avg")}
        averaged = {a: "avg" for a in self.averaged if a in partial}
        return Type((), "f32", tuple((partial | averaged).items()))

    def contract(self) -> Type | dict[str, Type]:
        """What `Program.output` is."""
        if self.is_loss:
            return self.outputs["output"]
        return dict(self.outputs) | ({"loss": self.loss()} if self._driven() else {})

    def wrap(self, module: Any, mesh: Any, sizes: Mapping[str, int]) -> Any:
        """Give `module` (local parameters) the driven forward, and its probes."""
        original = module.forward
        for _, parameter, t in self.probes:
            module.register_parameter(parameter, empty_parameter(t, sizes))
        module.forward = _driven_forward(self, module, original, sizes)
        return module


def _driven_forward(
    driver: Driver, module: Any, original: Callable[..., Any], sizes: Mapping[str, int]
) -> Callable[..., Any]:
    weights = {key: _weight(driver, t, sizes) for key, t in driver._driven().items()}
    running = False

    def forward(*args: Any, **inputs: Any) -> Any:
        nonlocal running
        if running:  # the module calls itself
            return original(*args, **inputs)
        running = True
        try:
            return driven(**inputs)
        finally:
            running = False

    def driven(**inputs: Any) -> Any:
        cotangents = {k: inputs.pop(_cotangent(k)) for k in weights if _cotangent(k) in inputs}
        for argument, parameter, t in driver.probes:
            inputs[argument] = _rescaled(getattr(module, parameter), _rescaling(driver, t, sizes))
        results = by_key(call_by_name(original, inputs), driver, sizes)
        if driver.is_loss:
            return results["output"]
        terms = [_weighed(results[k], cotangents[k], w) for k, w in weights.items()]
        out = {k: v.detach() for k, v in results.items()}
        return out | ({"loss": sum(terms[1:], terms[0])} if terms else {})

    return forward


def call_by_name(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Positional-only arguments by position."""
    parameters = inspect.signature(function).parameters.values()
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in values]
    return function(*(values[n] for n in first), **{n: v for n, v in values.items() if n not in first})


def by_key(result: Any, driver: Driver, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The tensors of a forward's result by their declared keys. A shape that is wrong on one device too
    is bad input; one that is wrong on the mesh only is found by whoever compares results."""
    declared = driver.outputs
    if list(declared) == ["output"]:
        results = {"output": result}
    elif isinstance(result, Mapping):
        results = dict(result)
    elif is_dataclass(result) and not isinstance(result, type):
        results = {f.name: getattr(result, f.name) for f in fields(result)}
    elif isinstance(result, tuple) and hasattr(result, "_asdict") and not declared.keys() & {"0"}:
        results = result._asdict()
    elif isinstance(result, tuple | list):
        results = {str(i): r for i, r in enumerate(result)}
    else:
        results = {"": result}
    for key, t in declared.items():
        what = "forward" if key == "output" else f"forward's entry {key!r}"
        if key not in results:
            have = ", ".join(map(repr, results)) if "" not in results else type(result).__name__
            raise CannotCheck(f"forward returns no entry {key!r}, only {have}", driver.file, driver.line)
        if not isinstance(results[key], Tensor):
            kind = type(results[key]).__name__
            raise CannotCheck(f"{what} returns {kind}, not a tensor", driver.file, driver.line)
        if t.dims is None:
            continue
        want, got = local_shape(t, sizes), tuple(_local(results[key]).shape)
        alone = all(n == 1 for n in sizes.values())
        if want != got and (alone or len(want) != len(got)):
            raise CannotCheck(
                f"{what} returns shape {list(got)} where {t.text or format_type(t)!r} means {list(want)}",
                driver.file,
                driver.line,
            )
    return {k: results[k] for k in declared}


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _cotangent(key: str) -> str:
    return COTANGENT if key == "output" else f"{COTANGENT}_{key}"


def is_float(t: Type) -> bool:
    return t.dtype is None or t.dtype.startswith(("f", "bf"))


def _is_sum(t: Type) -> bool:
    return all(op in ("sum", "avg", "I") for _, op in t.partial)


def _weight(driver: Driver, t: Type, sizes: Mapping[str, int]) -> int | None:
    """A wrapper that averages turns the sum over its axis into a mean: the local loss makes up for it.
    None: no axis of the type is averaged."""
    pending = {a for d in t.dims or () for a in d.axes} | {a for a, op in t.partial if op == "sum"}
    return _blocks([a for a in driver.averaged if a in pending], sizes)


def _rescaling(driver: Driver, t: Type, sizes: Mapping[str, int]) -> int | None:
    """No wrapper averages the gradient of an argument that is cut over an averaged axis."""
    cut = {a for d in t.dims or () for a in d.axes}
    return _blocks([a for a in driver.averaged if a in cut], sizes)


def _blocks(axes: list[str], sizes: Mapping[str, int]) -> int | None:
    return prod(sizes[a] for a in axes) if axes else None


def _weighed(result: Tensor, cotangent: Tensor, weight: int | None) -> Tensor:
    local = _local(result)
    if local.shape != cotangent.shape:  # the wrong shape is what will be reported
        return local.sum()
    total = (local * cotangent.to(local.dtype)).sum()
    return total if weight is None else total * weight


class _DivideGradient(torch.autograd.Function):
    """Identity whose gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None


def _rescaled(x: Tensor, divisor: int | None) -> Tensor:
    if divisor is None:
        return x
    divided: Tensor = _DivideGradient.apply(x, divisor)  # type: ignore[no-untyped-call]
    return divided


_TORCH_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}


def torch_dtype(t: Type) -> Any:
    return getattr(torch, _TORCH_NAMES[t.dtype or "f32"])


def short_dtype(dtype: Any) -> str:
    """ "f32" of torch.float32."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, full in _TORCH_NAMES.items() if full == name), "f32")


def empty_parameter(t: Type, sizes: Mapping[str, int]) -> nn.Parameter:
    """This rank's block of a parameter of type `t`, not initialised. Single precision is the default
    dtype: tests run in double precision."""
    dtype = None if t.dtype in (None, "f32") else torch_dtype(t)
    return nn.Parameter(torch.empty(local_shape(t, sizes), dtype=dtype))


def replicated(shape: tuple[int, ...], dtype: str | None) -> Type:
    return Type(tuple(Dim(n) for n in shape), dtype)
