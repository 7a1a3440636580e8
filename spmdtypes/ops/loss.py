"""Losses and softmax, forward and backward. `reduction`: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmdtypes.core.spec import Const, Expr, Iota, Operand, OpSpec, Out, Size, Var, expr, fn, mean, total
from spmdtypes.ops.parts import Ints, Maybe, broadcast, extent, names, shaped_like, wrap_dim
from spmdtypes.ops.registry import op

Pair = Callable[..., Expr]


@op("_softmax softmax.int")
def softmax(x: Operand, dim: int, half_to_float: Any = None) -> OpSpec:
    vars, over, value = _along(x, dim)
    e = fn("exp", value - total("max", over, value))
    return OpSpec.of(Out(tuple(vars), e / total("sum", over, e)))


@op("_safe_softmax")
def safe_softmax(x: Operand, dim: int, dtype: Any = None) -> OpSpec:
    """Rows that are all -inf give 0."""
    vars, over, value = _along(x, dim)
    top = total("max", over, value)
    e = fn("exp", value - top)
    hidden = fn("eq", top, float("-inf"))
    return OpSpec.of(Out(tuple(vars), fn("where", hidden, 0, e / total("sum", over, e))))


@op("_log_softmax log_softmax.int")
def log_softmax(x: Operand, dim: int, half_to_float: Any = None) -> OpSpec:
    vars, over, value = _along(x, dim)
    z = value - total("max", over, value)
    return OpSpec.of(Out(tuple(vars), z - fn("log", total("sum", over, fn("exp", z)))))


def _along(x: Operand, dim: int) -> tuple[list[Var], list[Var], Expr]:
    vars = names(x.ndim)
    return vars, [vars[wrap_dim(dim, x.ndim)]] if vars else [], x[tuple(vars)]


@op("_softmax_backward_data")
def softmax_backward(grad: Operand, y: Operand, dim: int, input_dtype: Any = None) -> OpSpec:
    vars, over, g = _along(grad, dim)
    gy = g * y[tuple(vars)]
    return OpSpec.of(Out(tuple(vars), gy - y[tuple(vars)] * total("sum", over, gy)))


@op("_log_softmax_backward_data")
def log_softmax_backward(grad: Operand, y: Operand, dim: int, input_dtype: Any = None) -> OpSpec:
    vars, over, g = _along(grad, dim)
    return OpSpec.of(Out(tuple(vars), g - fn("exp", y[tuple(vars)]) * total("sum", over, g)))


def _reduce(vars: tuple[Any, ...], value: Expr, reduction: int) -> Out:
    over = [v for v in vars if isinstance(v, Var)]
    if reduction == 0:
        return Out(vars, value)
    return Out((), (mean if reduction == 1 else lambda vs, e: total("sum", vs, e))(over, value))


def _pairwise(name: str, value: Pair, slope: Pair, extra: int = 0) -> None:
    """A loss of (input, target) pairs; `slope` is its derivative by the input.

    `extra` says after how many operands `reduction` comes: tensors such as weights are operands.
    """

    @op(name)
    def forward(*args: Any, **kwargs: Any) -> OpSpec:
        operands, reduction, rest = _arguments(args, kwargs, 2 + extra)
        vars, values = broadcast(*[x for x in operands if x is not None])
        return OpSpec.of(_reduce(vars, value(*_placed(operands, values), *rest), reduction))

    @op(f"{name}_backward")
    def backward(grad: Operand, *args: Any, **kwargs: Any) -> OpSpec:
        operands, reduction, rest = _arguments(args, kwargs, 2 + extra)
        given = [grad, *[x for x in operands if x is not None]]
        vars, (g, *values) = broadcast(*given)
        result = g * slope(*_placed(operands, values), *rest)
        if reduction == 1:
            for v in vars:
                result = result / Size(v) if isinstance(v, Var) else result
        return OpSpec.of(Out(vars, result))


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: int
) -> tuple[list[Any], int, list[Any]]:
    operands = [*args[:tensors], *[kwargs.get(k) for k in ("weight", "pos_weight")]][:tensors]
    rest = list(args[tensors:])
    reduction = kwargs.get("reduction", rest.pop(0) if rest else 1)
    return operands, reduction, rest + [v for k, v in kwargs.items() if k in ("beta", "delta", "log_target")]


def _placed(operands: Ints, values: list[Expr]) -> list[Expr | None]:
    given = iter(values)
    return [None if x is None else next(given) for x in operands]


def _weighted(value: Expr, weight: Expr | None) -> Expr:
    return value if weight is None else value * weight


def _huber(x: Expr, t: Expr, delta: Any = 1.0) -> Expr:
    gap = fn("abs", x - t)
    return fn("where", fn("lt", gap, delta), fn("sq", gap) * 0.5, (gap - 0.5 * delta) * delta)


def _huber_slope(x: Expr, t: Expr, delta: Any = 1.0) -> Expr:
    return fn("min", fn("max", x - t, -delta), delta)


def _smooth(x: Expr, t: Expr, beta: Any = 1.0) -> Expr:
    return _huber(x, t, beta) / beta if beta else fn("abs", x - t)


def _smooth_slope(x: Expr, t: Expr, beta: Any = 1.0) -> Expr:
    return _huber_slope(x, t, beta) / beta if beta else fn("sign", x - t)


def _bce(x: Expr, t: Expr, w: Expr | None) -> Expr:
    def log(e: Expr) -> Expr:
        return fn("max", fn("log", e), -100)

    return _weighted((t - 1) * log(1 - x) - t * log(x), w)


def _bce_slope(x: Expr, t: Expr, w: Expr | None) -> Expr:
    return _weighted((x - t) / fn("max", (1 - x) * x, 1e-12), w)


def _bce_logits(x: Expr, t: Expr, w: Expr | None, positive: Expr | None) -> Expr:
    log_weight = expr(1) if positive is None else (positive - 1) * t + 1
    return _weighted((1 - t) * x + log_weight * fn("softplus", -x), w)


_pairwise("mse_loss", lambda x, t: fn("sq", x - t), lambda x, t: (x - t) * 2)
_pairwise("l1_loss", lambda x, t: fn("abs", x - t), lambda x, t: fn("sign", x - t))
_pairwise("smooth_l1_loss", _smooth, _smooth_slope)
_pairwise("huber_loss", _huber, _huber_slope)
_pairwise("binary_cross_entropy", _bce, _bce_slope, extra=1)
_pairwise("binary_cross_entropy_with_logits", _bce_logits, lambda x, t, w, p: fn("opaque", x, t), extra=2)
_pairwise(
    "soft_margin_loss", lambda x, t: fn("softplus", -(x * t)), lambda x, t: -(t * fn("sigmoid", -(x * t)))
)
_pairwise(
    "kl_div",
    lambda x, t, log_target=False: (fn("exp", t) * (t - x)) if log_target else fn("xlogy", t, t) - t * x,
    lambda x, t, log_target=False: -(fn("exp", t) if log_target else t),
)


@op("nll_loss_forward nll_loss nll_loss2d_forward nll_loss2d nll_loss_nd")
def nll_loss(
    x: Operand, target: Operand, weight: Maybe = None, reduction: int = 1, ignore_index: int = -100
) -> OpSpec:
    """Outputs: the loss, and the total weight of the targets that count."""
    places = tuple(names(target.ndim, "t"))
    valid, weights = _counted(target[places], weight, ignore_index)
    batch, space = (places[:1], places[1:]) if x.ndim > 1 else ((), ())
    each = -x[(*batch, target[places], *space)] * weights
    each = fn("where", valid, each, 0)
    shapes = (shaped_like(x, (*batch, Var("c"), *space)),)
    if reduction == 0:
        return OpSpec.of(Out(places, each), Out((), Const(0)))
    lossless = weight is None and ignore_index < 0
    if reduction == 1 and lossless:
        assumed = (f"no target equals ignore_index={ignore_index}",)
        return OpSpec.of(Out((), mean(places, each)), Out((), extent(places)), uses=shapes, assumes=assumed)
    sum_of_weights = total("sum", places, fn("where", valid, weights, 0))
    loss = total("sum", places, each)
    loss = loss / sum_of_weights if reduction == 1 else loss
    return OpSpec.of(Out((), loss), Out((), sum_of_weights), uses=shapes)


def _counted(t: Expr, weight: Maybe, ignore_index: int) -> tuple[Expr, Expr]:
    return fn("ne", t, ignore_index), expr(1) if weight is None else weight[t]


@op("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(
    grad: Operand,
    x: Operand,
    target: Operand,
    weight: Maybe,
    reduction: int,
    ignore_index: int,
    total_weight: Operand,
) -> OpSpec:
    places = tuple(names(target.ndim, "t"))
    c = Var("c")
    t = target[places]
    valid, weights = _counted(t, weight, ignore_index)
    vars = (places[0], c, *places[1:]) if x.ndim > 1 else (c,)
    g = grad[places if reduction == 0 else ()]
    value = fn("where", valid, fn("eq", t, Iota(c)) * g * -weights, 0)
    if reduction == 1:
        value = value / total_weight[()]
    return OpSpec.of(Out(vars, value), uses=(shaped_like(x, vars),))
