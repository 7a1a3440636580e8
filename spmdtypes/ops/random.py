"""Random numbers: a fresh one per position, whatever the distribution."""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import Expr, Operand, OpSpec, Out, Rand, Var, fn
from spmdtypes.ops.parts import Ints, Maybe, broadcast, created, like, names, whole_of
from spmdtypes.ops.registry import op


def draw(vars: Ints, *parameters: Any) -> Expr:
    return fn("opaque", Rand(tuple(v for v in vars if isinstance(v, Var))), *parameters)


@op("rand rand.generator randn randn.generator")
def rand(size: Ints, **_: Any) -> OpSpec:
    return created(size, draw)


@op("randint randint.generator")
def randint(high: Any, size: Ints, **_: Any) -> OpSpec:
    return created(size, lambda vs: draw(vs, high))


@op("randint.low randint.low_generator")
def randint_low(low: Any, high: Any, size: Ints, **_: Any) -> OpSpec:
    return created(size, lambda vs: draw(vs, low, high))


@op("normal.float_float")
def normal_sizes(mean: Any, std: Any, size: Ints, **_: Any) -> OpSpec:
    return created(size, lambda vs: draw(vs, mean, std))


@op("randperm randperm.generator")
def randperm(n: Any, **_: Any) -> OpSpec:
    return created([n], draw)


@op("rand_like randn_like randint_like randint_like.low_dtype uniform normal normal_functional exponential")
@op("random random.from random.to log_normal geometric cauchy bernoulli.p bernoulli.float")
def redrawn(x: Operand, *parameters: Any, **_: Any) -> OpSpec:
    return like(x, lambda vs: draw(vs, *[p for p in parameters if isinstance(p, (int, float))]))


@op("bernoulli bernoulli.Tensor poisson")
def from_parameters(x: Operand, p: Maybe = None, **_: Any) -> OpSpec:
    vars = names(x.ndim)
    return OpSpec.of(Out(tuple(vars), draw(vars, (p or x)[tuple(vars)])))


@op("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor")
def normal(mean: Any, std: Any = 1.0, **_: Any) -> OpSpec:
    vars, values = broadcast(mean, std)
    return OpSpec.of(Out(vars, draw(list(vars), *values)))


@op("multinomial")
def multinomial(x: Operand, num_samples: Any, replacement: bool = False, **_: Any) -> OpSpec:
    *rows, draws = names(x.ndim)
    return OpSpec.of(
        Out((*rows, draws), draw([*rows, draws], whole_of(x, [*rows, draws], [x.ndim - 1]))),
        sizes={draws: num_samples},
    )


@op("native_dropout")
def native_dropout(x: Operand, p: float, train: bool | None = True) -> OpSpec:
    vars = names(x.ndim)
    kept = fn("ge", draw(vars), p) if train else fn("ge", p, 0)
    scale = 1 / (1 - p) if train and p < 1 else 1.0
    return OpSpec.of(
        Out(tuple(vars), x[tuple(vars)] * kept * scale if train else x[tuple(vars)]), Out(tuple(vars), kept)
    )


@op("dropout")
def dropout(x: Operand, p: float, train: bool) -> OpSpec:
    return OpSpec(native_dropout(x, p, train).outs[:1])


@op("native_dropout_backward")
def native_dropout_backward(grad: Operand, mask: Operand, scale: float) -> OpSpec:
    vars = tuple(names(grad.ndim))
    return OpSpec.of(Out(vars, grad[vars] * mask[vars] * scale))
