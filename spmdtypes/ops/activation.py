"""Activation functions with parameters, and the backward of all of them: grad times a slope."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

from spmdtypes.core.spec import Const, Expr, Iota, Operand, OpSpec, Out, Window, fn
from spmdtypes.ops.parts import both, broadcast, elementwise, names, replaced, shaped_like, size_of, wrap_dim
from spmdtypes.ops.registry import op

Slope = Callable[..., Any]


def _function(names_: str, value: Slope) -> None:
    @op(names_)
    def build(x: Operand, *args: Any, **kwargs: Any) -> OpSpec:
        return elementwise(lambda a: value(a, *args, **kwargs), x)


def _backward(names_: str, slope: Slope) -> None:
    """`slope(saved, *parameters)`: what the gradient is multiplied with."""

    @op(names_)
    def build(grad: Operand, saved: Operand, *args: Any, **kwargs: Any) -> OpSpec:
        return elementwise(lambda g, s: g * slope(s, *args, **kwargs), grad, saved)


def _gelu(x: Expr, approximate: str = "none") -> Expr:
    return fn("gelu" if approximate == "none" else "gelu_tanh", x)


def _gelu_slope(x: Expr, approximate: str = "none") -> Expr:
    if approximate == "none":
        bell = fn("exp", fn("sq", x) * -0.5) * (1 / sqrt(2 * pi))
        return (1 + fn("erf", x * sqrt(0.5))) * 0.5 + x * bell
    t = fn("tanh", (x + fn("cube", x) * 0.044715) * sqrt(2 / pi))
    return (1 + t) * 0.5 + x * (1 - fn("sq", t)) * (fn("sq", x) * 0.134145 + 1) * (0.5 * sqrt(2 / pi))


def _mish_slope(x: Expr) -> Expr:
    t = fn("tanh", fn("softplus", x))
    return t + x * (1 - fn("sq", t)) * fn("sigmoid", x)


def _leaky(x: Expr, slope: Any = 0.01) -> Expr:
    return fn("max" if slope <= 1 else "min", x, x * slope)


def _elu(x: Expr, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Expr:
    return fn("where", fn("gt", x, 0), x * scale, fn("expm1", x * input_scale) * (alpha * scale))


def _elu_slope(saved: Expr, alpha: Any, scale: Any, input_scale: Any, is_result: bool) -> Expr:
    below = (
        (saved + alpha * scale) * input_scale
        if is_result
        else fn("exp", saved * input_scale) * (alpha * scale * input_scale)
    )
    return fn("where", fn("gt", saved, 0), scale, below)


def _softplus(x: Expr, beta: Any = 1, threshold: Any = 20) -> Expr:
    return fn("where", fn("gt", x * beta, threshold), x, fn("softplus", x * beta) / beta)


def _shrink(x: Expr, lambd: Any = 0.5) -> Expr:
    return x - fn("min", fn("max", x, -lambd), lambd)


def _outside(x: Expr, low: Any, high: Any) -> Expr:
    return fn("or", fn("lt", x, low), fn("gt", x, high))


def _between(x: Expr, low: Any = -1, high: Any = 1) -> Expr:
    return fn("and", fn("gt", x, low), fn("lt", x, high))


_function("gelu", _gelu)
_function("silu", lambda x: fn("silu", x))
_function("mish", lambda x: x * fn("tanh", fn("softplus", x)))
_function("leaky_relu", _leaky)
_function("elu celu", lambda x, *a: _elu(x, *a))
_function("selu", lambda x: _elu(x, 1.6732632423543772, 1.0507009873554805))
_function("softplus", _softplus)
_function("hardsigmoid", lambda x: fn("min", fn("max", x + 3, 0), 6) / 6)
_function("hardswish", lambda x: x * fn("min", fn("max", x + 3, 0), 6) / 6)
_function("softshrink", _shrink)
_function("hardshrink", lambda x, lambd=0.5: fn("where", _outside(x, -lambd, lambd), x, 0))
_function("threshold", lambda x, threshold, value: fn("where", fn("gt", x, threshold), x, value))

_backward("sigmoid_backward", lambda y: y * (1 - y))
_backward("tanh_backward", lambda y: 1 - fn("sq", y))
_backward("threshold_backward", lambda x, threshold: fn("gt", x, threshold))
_backward("gelu_backward", _gelu_slope)
_backward("silu_backward", lambda x: fn("sigmoid", x) * (1 + x * (1 - fn("sigmoid", x))))
_backward("mish_backward", _mish_slope)
_backward("leaky_relu_backward", lambda x, slope, is_result: fn("where", fn("gt", x, 0), 1, slope))
_backward(
    "softplus_backward",
    lambda x, beta, limit: fn("where", fn("gt", x * beta, limit), 1, fn("sigmoid", x * beta)),
)
_backward("hardsigmoid_backward", lambda x: _between(x, -3, 3) / 6)
_backward("hardswish_backward", lambda x: fn("where", _between(x, -3, 3), x / 3 + 0.5, fn("ge", x, 3)))
_backward("hardtanh_backward", _between)
_backward("softshrink_backward hardshrink_backward", lambda x, lambd: _outside(x, -lambd, lambd))


@op("elu_backward")
def elu_backward(
    grad: Operand, alpha: Any, scale: Any, input_scale: Any, is_result: bool, saved: Operand
) -> OpSpec:
    return elementwise(lambda g, s: g * _elu_slope(s, alpha, scale, input_scale, is_result), grad, saved)


@op("log_sigmoid_forward")
def log_sigmoid(x: Operand) -> OpSpec:
    """The second output is the buffer exp(-|x|), which some devices leave empty."""
    vars = tuple(names(x.ndim))
    return OpSpec.of(Out(vars, -fn("softplus", -x[vars])), Out(vars, fn("exp", -fn("abs", x[vars]))))


@op("log_sigmoid_backward")
def log_sigmoid_backward(grad: Operand, x: Operand, buffer: Operand) -> OpSpec:
    if buffer.ref_shape != x.ref_shape:
        return elementwise(lambda g, a: g * fn("sigmoid", -a), grad, x)

    def slope(g: Expr, a: Expr, b: Expr) -> Expr:
        return g * (fn("lt", a, 0) - fn("where", fn("lt", a, 0), 1, -1) * b / (b + 1))

    return elementwise(slope, grad, x, buffer)


@op("prelu _prelu_kernel")
def prelu(x: Operand, weight: Operand) -> OpSpec:
    return elementwise(lambda a, w: fn("where", fn("gt", a, 0), a, a * w), x, weight)


@op("_prelu_kernel_backward")
def prelu_backward(grad: Operand, x: Operand, weight: Operand) -> OpSpec:
    gx = elementwise(lambda g, a, w: g * fn("where", fn("gt", a, 0), 1, w), grad, x, weight)
    gw = elementwise(lambda g, a: g * fn("min", a, 0), grad, x)
    shape = broadcast(weight)[0]
    return OpSpec.of(gx.outs[0], gw.outs[0], uses=(shaped_like(weight, shape),))


def _halves(x: Operand, dim: int) -> tuple[list[Any], int, Expr, Expr]:
    d = wrap_dim(dim, x.ndim)
    vars = names(x.ndim)
    half = both(lambda n: n // 2, size_of(x, d))
    first, second = (x[replaced(vars, {d: Window(vars[d], start, half)})] for start in (0, half))
    return vars, d, first, second


@op("glu")
def glu(x: Operand, dim: int = -1) -> OpSpec:
    vars, _, a, b = _halves(x, dim)
    return OpSpec.of(Out(tuple(vars), a * fn("sigmoid", b)))


@op("glu_backward")
def glu_backward(grad: Operand, x: Operand, dim: int) -> OpSpec:
    """Both halves depend on both halves of `x`, at positions the gradient has once."""
    vars, d, _, _ = _halves(x, dim)
    half = both(lambda n: n // 2, size_of(x, d))
    at = fn("mod", Iota(vars[d]), Const(half))
    g = grad[replaced(vars, {d: at})]
    gate = fn("sigmoid", x[replaced(vars, {d: at + Const(half)})])
    value = x[replaced(vars, {d: at})]
    slope = fn("where", fn("lt", Iota(vars[d]), Const(half)), gate, value * gate * (1 - gate))
    return OpSpec.of(Out(tuple(vars), g * slope), uses=(shaped_like(x, vars),))
