"""Elementwise ops: one table of scalar functions, and the few whose arguments need arranging."""

from __future__ import annotations

from math import log
from typing import Any

from spmdtypes.core.spec import Expr, Operand, OpSpec, fn
from spmdtypes.graph import Lit
from spmdtypes.ops.parts import elementwise
from spmdtypes.ops.registry import op

UNARY = {
    name: name
    for name in """neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh
    asinh acosh atanh erf erfc erfinv lgamma digamma sign floor ceil trunc frac isnan isinf isfinite relu
    sigmoid tanh sgn conj real imag angle""".split()
} | {
    "reciprocal": "recip",
    "square": "sq",
    "positive": "id",
    "_conj": "conj",
    "_conj_physical": "conj",
    "conj_physical": "conj",
    "special_entr": "entr",
    "relu6": "relu6",
}
BINARY = {
    "maximum": "max",
    "minimum": "min",
    "fmax": "max",
    "fmin": "min",
    "atan2": "atan2",
    "hypot": "hypot",
    "logaddexp": "logaddexp",
    "logaddexp2": "logaddexp2",
    "complex": "complex",
}
COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
BITWISE = {"and": "bitand", "or": "bitor", "xor": "bitxor", "left_shift": "shl", "right_shift": "shr"}
POWERS = {0.5: "sqrt", 1: "id", 2: "sq", 3: "cube", -0.5: "rsqrt", -1: "recip"}


def _register(names: str, function: str) -> None:
    @op(names)
    def build(*operands: Any) -> OpSpec:
        return elementwise(lambda *xs: fn(function, *xs), *operands)


for _aten, _function in UNARY.items():
    _register(_aten, _function)
for _aten, _function in BINARY.items():
    _register(_aten, _function)
for _aten, _function in COMPARE.items():
    _register(f"{_aten}.Tensor {_aten}.Scalar", _function)
for _aten, _function in (("xlogy", "xlogy"), ("special_xlog1py", "xlog1py"), ("float_power", "pow")):
    _register(
        f"{_aten}.Tensor {_aten}.Tensor_Tensor {_aten}.OutScalar_Other {_aten}.OutScalar_Self", _function
    )
_register("copysign.Tensor copysign.Scalar", "copysign")
_register("fmod.Tensor fmod.Scalar", "fmod")
_register("remainder.Tensor remainder.Scalar remainder.Scalar_Tensor", "mod")
_register("floor_divide floor_divide.Scalar", "floordiv")


def _scaled(x: Any, alpha: Any) -> Any:
    return x if not isinstance(alpha, Lit) and alpha == 1 else x * alpha


def is_bool(x: Any) -> bool:
    return isinstance(x, bool) or (isinstance(x, Operand) and x.dtype == "bool")


def truth(x: Any, value: Expr) -> Expr:
    """Whether an argument is not 0, as 0 or 1."""
    return fn("ne", value, 0) if isinstance(x, Operand) else value


def _logic(name: str, names: str, on_integers: str = "") -> None:
    @op(names)
    def build(*xs: Any) -> OpSpec:
        if on_integers and not all(map(is_bool, xs)):
            return elementwise(lambda *vs: fn(on_integers, *vs), *xs)
        return elementwise(lambda *vs: fn(name, *map(truth, xs, vs)), *xs)


_logic("not", "logical_not")
_logic("not", "bitwise_not", "bitnot")
for _name, _function in BITWISE.items():
    _aten = f"bitwise_{_name}"
    _names = f"{_aten}.Tensor {_aten}.Scalar {_aten}.Tensor_Scalar {_aten}.Scalar_Tensor"
    _logic(_name, _names, _function)
for _name in ("and", "or", "xor"):
    _logic(_name, f"logical_{_name}")
    _logic(_name, f"__{_name}__.Tensor __{_name}__.Scalar", BITWISE[_name])


@op("add.Tensor add.Scalar")
def add(x: Any, y: Any, alpha: Any = 1) -> OpSpec:
    if is_bool(x) and is_bool(y):
        return elementwise(lambda a, b: fn("or", a, b), x, y)
    return elementwise(lambda a, b: a + _scaled(b, alpha), x, y)


@op("sub.Tensor sub.Scalar")
def sub(x: Any, y: Any, alpha: Any = 1) -> OpSpec:
    return elementwise(lambda a, b: a - _scaled(b, alpha), x, y)


@op("rsub.Tensor rsub.Scalar")
def rsub(x: Any, y: Any, alpha: Any = 1) -> OpSpec:
    return elementwise(lambda a, b: b - _scaled(a, alpha), x, y)


@op("mul.Tensor mul.Scalar")
def mul(x: Any, y: Any) -> OpSpec:
    if is_bool(x) and is_bool(y):
        return elementwise(lambda a, b: fn("and", a, b), x, y)
    return elementwise(lambda a, b: _counted(x, a) * _counted(y, b), x, y)


def _counted(x: Any, value: Expr) -> Expr:
    return truth(x, value) if is_bool(x) else value


@op("div.Tensor div.Scalar true_divide.Tensor")
def div(x: Any, y: Any) -> OpSpec:
    return elementwise(lambda a, b: a / b, x, y)


@op("div.Tensor_mode div.Scalar_mode")
def div_mode(x: Any, y: Any, rounding_mode: str | None = None) -> OpSpec:
    rounded = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[rounding_mode]
    return elementwise(lambda a, b: fn(rounded, a, b), x, y)


def power(x: Expr, exponent: Any) -> Expr:
    name = None if isinstance(exponent, Lit) else POWERS.get(exponent)
    return fn(name, x) if name else fn("pow", x, exponent)


@op("pow.Tensor_Scalar")
def pow_scalar(x: Operand, exponent: Any) -> OpSpec:
    return elementwise(lambda a: power(a, exponent), x)


@op("pow.Tensor_Tensor pow.Scalar")
def pow_tensor(x: Any, exponent: Any) -> OpSpec:
    if isinstance(x, (int, float)) and x > 0:
        return elementwise(lambda b: fn("exp", b * log(x)), exponent)
    return elementwise(lambda a, b: fn("pow", a, b), x, exponent)


@op("round round.decimals")
def round_(x: Operand, decimals: int = 0) -> OpSpec:
    return elementwise(
        lambda a: fn("round", a * 10**decimals) / 10**decimals if decimals else fn("round", a), x
    )


@op("clamp clamp.Tensor hardtanh")
def clamp(x: Any, min: Any = None, max: Any = None) -> OpSpec:
    def value(a: Expr, *bounds: Expr) -> Expr:
        given = iter(bounds)
        a = a if min is None else fn("max", a, next(given))
        return a if max is None else fn("min", a, next(given))

    return elementwise(value, x, *[b for b in (min, max) if b is not None])


@op("clamp_min clamp_min.Tensor")
def clamp_min(x: Operand, min: Any) -> OpSpec:
    return clamp(x, min)


@op("clamp_max clamp_max.Tensor")
def clamp_max(x: Operand, max: Any) -> OpSpec:
    return clamp(x, None, max)


@op("where.self where.ScalarSelf where.ScalarOther where.Scalar")
def where(condition: Operand, x: Any, y: Any) -> OpSpec:
    return elementwise(lambda c, a, b: fn("where", c, a, b), condition, x, y)


@op("masked_fill.Scalar masked_fill.Tensor")
def masked_fill(x: Operand, mask: Operand, value: Any) -> OpSpec:
    return elementwise(lambda a, c, v: fn("where", c, v, a), x, mask, value)


@op("nan_to_num")
def nan_to_num(x: Operand, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> OpSpec:
    return elementwise(lambda a: fn("opaque", a), x)


@op("addcmul")
def addcmul(x: Operand, a: Operand, b: Operand, value: Any = 1) -> OpSpec:
    return elementwise(lambda x, a, b: x + _scaled(a * b, value), x, a, b)


@op("addcdiv")
def addcdiv(x: Operand, a: Operand, b: Operand, value: Any = 1) -> OpSpec:
    return elementwise(lambda x, a, b: x + _scaled(a / b, value), x, a, b)


@op("lerp.Scalar lerp.Tensor")
def lerp(x: Operand, end: Operand, weight: Any) -> OpSpec:
    if isinstance(weight, (int, float)):
        return elementwise(lambda a, b: a * (1 - weight) + b * weight, x, end)
    return elementwise(lambda a, b, w: a * (1 - w) + b * w, x, end, weight)


@op("polar")
def polar(magnitude: Operand, angle: Operand) -> OpSpec:
    return elementwise(lambda r, a: fn("complex", r * fn("cos", a), r * fn("sin", a)), magnitude, angle)


@op("logit")
def logit(x: Operand, eps: float | None = None) -> OpSpec:
    return elementwise(lambda a: fn("opaque", a), x)
