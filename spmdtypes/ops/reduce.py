"""Reductions and scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmdtypes.core.spec import Expr, Iota, Operand, OpSpec, Out, Var, expr, fn, mean, total
from spmdtypes.ops.cast import converted, short
from spmdtypes.ops.parts import (
    Ints,
    elementwise,
    extent,
    kept,
    names,
    replaced,
    shaped_like,
    whole_of,
    wrap_dim,
    wrap_dims,
)
from spmdtypes.ops.registry import op

Reduce = Callable[[list[Var], Expr], Expr]


def reduced(x: Operand, dim: Any, keepdim: bool, value: Reduce) -> OpSpec:
    """`value(vars reduced, element)` over `dim` (None or empty: all)."""
    vars, dims = names(x.ndim), wrap_dims(dim, x.ndim)
    return OpSpec.of(Out(kept(vars, dims, keepdim), value([vars[d] for d in dims], x[tuple(vars)])))


def _cast(x: Operand, dtype: Any, value: Reduce) -> Reduce:
    if dtype is None:
        return value
    return lambda vs, e: value(vs, converted(e, short(x.dtype), short(dtype)))


def _totals(names_: str, value: Reduce) -> None:
    @op(names_)
    def build(x: Operand, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> OpSpec:
        return reduced(x, dim, keepdim, _cast(x, dtype, value))


def _over(name: str) -> Reduce:
    return lambda vs, e: total(name, vs, e)


_totals("sum sum.dim_IntList nansum", _over("sum"))
_totals("mean mean.dim", mean)
_totals("prod prod.dim_int", _over("prod"))
_totals("amax max", _over("max"))
_totals("amin min", _over("min"))
_totals("any any.dim any.dims", lambda vs, e: total("max", vs, fn("ne", e, 0)))
_totals("all all.dim all.dims", lambda vs, e: total("min", vs, fn("ne", e, 0)))
_totals("count_nonzero count_nonzero.dim_IntList", lambda vs, e: total("sum", vs, fn("ne", e, 0)))
_totals("logsumexp", lambda vs, e: log_sum_exp(vs, e))


def log_sum_exp(vars: list[Var], x: Expr) -> Expr:
    top = total("max", vars, x)
    return top + fn("log", total("sum", vars, fn("exp", x - top)))


def _extreme(name: str) -> None:
    @op(f"{name}.dim")
    def build(x: Operand, dim: int, keepdim: bool = False) -> OpSpec:
        return OpSpec.of(reduced(x, dim, keepdim, _over(name)).outs[0], _where_it_is(x, dim, keepdim).outs[0])

    @op(f"arg{name}")
    def arg(x: Operand, dim: int | None = None, keepdim: bool = False) -> OpSpec:
        return _where_it_is(x, dim, keepdim)

    @op(f"{name}.other")
    def binary(x: Operand, y: Operand) -> OpSpec:
        return elementwise(lambda a, b: fn(name, a, b), x, y)


def _where_it_is(x: Operand, dim: int | None, keepdim: bool) -> OpSpec:
    vars, dims = names(x.ndim), wrap_dims(dim, x.ndim)
    return OpSpec.of(Out(kept(vars, dims, keepdim), fn("opaque", whole_of(x, vars, dims))))


_extreme("max")
_extreme("min")


@op("aminmax")
def aminmax(x: Operand, *, dim: int | None = None, keepdim: bool = False) -> OpSpec:
    return OpSpec.of(*(reduced(x, dim, keepdim, _over(n)).outs[0] for n in ("min", "max")))


@op("median.dim kthvalue mode nanmedian.dim")
def median_dim(x: Operand, *args: Any, **kwargs: Any) -> OpSpec:
    positional = [a for a in args if not isinstance(a, bool)]
    dim = kwargs.get("dim", positional[-1] if positional else -1)
    keep = kwargs.get("keepdim", any(a is True for a in args))
    return OpSpec.of(*(_where_it_is(x, dim, keep).outs[0] for _ in range(2)))


@op("median nanmedian")
def median(x: Operand) -> OpSpec:
    return _where_it_is(x, None, False)


def variance(vars: list[Var], x: Expr, correction: Any) -> Expr:
    """Mean square deviation; the denominator is the extent minus `correction`."""
    deviation = fn("sq", x - mean(vars, x))
    if correction == 0:
        return mean(vars, deviation)
    count: Expr = extent(vars) - correction
    return total("sum", vars, deviation) / count


@op("var.correction var.dim var")
def var(x: Operand, dim: Any = None, *args: Any, correction: Any = None, keepdim: bool = False) -> OpSpec:
    return _spread(x, dim, correction, keepdim, args, lambda v: v)


@op("std.correction std.dim std")
def std(x: Operand, dim: Any = None, *args: Any, correction: Any = None, keepdim: bool = False) -> OpSpec:
    return _spread(x, dim, correction, keepdim, args, lambda v: fn("sqrt", v))


def _spread(
    x: Operand, dim: Any, correction: Any, keepdim: bool, old: Any, finish: Callable[[Expr], Expr]
) -> OpSpec:
    if isinstance(dim, bool):
        dim, old = None, (dim, *old)
    unbiased = [a for a in old if isinstance(a, bool)]
    if unbiased:
        correction, keepdim = int(unbiased[0]), (unbiased[1:] or [keepdim])[0]
    correction = 1 if correction is None else correction
    return reduced(x, dim, keepdim, lambda vs, e: finish(variance(vs, e, correction)))


@op("var_mean.correction")
def var_mean(x: Operand, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> OpSpec:
    return OpSpec.of(
        var(x, dim, correction=correction, keepdim=keepdim).outs[0], reduced(x, dim, keepdim, mean).outs[0]
    )


def norm(vars: list[Var], x: Expr, ord: Any) -> Expr:
    """The p-norm of the elements along `vars`."""
    magnitude = fn("abs", x)
    if ord in (float("inf"), float("-inf")):
        return total("max" if ord > 0 else "min", vars, magnitude)
    if ord == 0:
        return total("sum", vars, fn("ne", x, 0))
    if ord == 1:
        return total("sum", vars, magnitude)
    if ord == 2:
        return fn("sqrt", total("sum", vars, fn("sq", x)))
    return fn("pow", total("sum", vars, fn("pow", magnitude, ord)), 1 / ord)


@op("linalg_vector_norm")
def vector_norm(x: Operand, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> OpSpec:
    return reduced(x, dim, keepdim, lambda vs, e: norm(vs, e, ord))


@op("norm.ScalarOpt_dim norm.Scalar norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype")
def norm_(x: Operand, p: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> OpSpec:
    return reduced(x, dim, keepdim, lambda vs, e: norm(vs, e, 2 if p is None else p))


def _scan(x: Operand, dim: int) -> tuple[list[Var], int, Var, Expr]:
    """Variables of a scan: outputs, the dim, the inner variable, and "inner is not after outer"."""
    vars, d, inner = names(x.ndim), wrap_dim(dim, x.ndim), Var("k")
    return vars, d, inner, fn("ge", Iota(vars[d]), Iota(inner)) if x.ndim else expr(1)


@op("cumsum")
def cumsum(x: Operand, dim: int, dtype: Any = None) -> OpSpec:
    vars, d, inner, upto = _scan(x, dim)
    if not vars:
        return OpSpec.of(Out((), x[()]))
    value = converted(x[replaced(vars, {d: inner})], short(x.dtype), short(dtype or x.dtype))
    return OpSpec.of(Out(tuple(vars), total("sum", [inner], upto * value)), uses=(shaped_like(x, vars),))


@op("cumprod")
def cumprod(x: Operand, dim: int, dtype: Any = None) -> OpSpec:
    vars, d, inner, upto = _scan(x, dim)
    if not vars:
        return OpSpec.of(Out((), x[()]))
    value = fn("where", upto, x[replaced(vars, {d: inner})], 1)
    return OpSpec.of(Out(tuple(vars), total("prod", [inner], value)), uses=(shaped_like(x, vars),))


@op("logcumsumexp _logcumsumexp")
def logcumsumexp(x: Operand, dim: int) -> OpSpec:
    return _scrambled(x, [dim], 1)


@op("cummax cummin")
def cummax(x: Operand, dim: int) -> OpSpec:
    return _scrambled(x, [dim], 2)


@op("sort sort.stable")
def sort(x: Operand, *args: Any, dim: int = -1, **_: Any) -> OpSpec:
    positions = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    return _scrambled(x, [positions[0] if positions else dim], 2)


@op("argsort argsort.stable")
def argsort(x: Operand, *args: Any, dim: int = -1, **_: Any) -> OpSpec:
    positions = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    return _scrambled(x, [positions[0] if positions else dim], 1)


def _scrambled(x: Operand, dims: Ints, outs: int) -> OpSpec:
    """Outputs shaped like `x`, each some function of everything along `dims`."""
    vars, ds = names(x.ndim), wrap_dims(dims, x.ndim)
    if not vars:
        return OpSpec.of(*[Out((), fn("opaque", x[()]))] * outs)
    value = fn("opaque", *[Iota(vars[d]) for d in ds], whole_of(x, vars, ds))
    return OpSpec.of(*[Out(tuple(vars), value)] * outs, uses=(shaped_like(x, vars),))


@op("topk")
def topk(x: Operand, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> OpSpec:
    vars, d = names(x.ndim), wrap_dim(dim, x.ndim)
    if not vars:
        return _scrambled(x, [], 2)
    value = fn("opaque", Iota(vars[d]), whole_of(x, vars, [d]))
    return OpSpec.of(*[Out(tuple(vars), value)] * 2, sizes={vars[d]: k})


@op("bincount")
def bincount(x: Operand, weights: Any = None, minlength: int = 0) -> OpSpec | None:
    """Counts per value; the length depends on the data unless `minlength` covers it."""
    if not minlength or x.ndim != 1 or isinstance(weights, (int, float)):
        return None
    inner, value = Var("k"), Var("value")
    hit = fn("eq", x[inner], Iota(value))
    counted = hit if weights is None else hit * weights[inner]
    return OpSpec.of(
        Out((value,), total("sum", [inner], counted)),
        sizes={value: minlength},
        assumes=(f"bincount: every value is below minlength={minlength}",),
    )


@op("std_mean.correction")
def std_mean(x: Operand, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> OpSpec:
    return OpSpec.of(
        std(x, dim, correction=correction, keepdim=keepdim).outs[0], reduced(x, dim, keepdim, mean).outs[0]
    )


@op("trace")
def trace(x: Operand) -> OpSpec:
    i, j = names(2)
    return OpSpec.of(Out((), total("sum", [i, j], fn("eq", Iota(i), Iota(j)) * x[i, j])))
