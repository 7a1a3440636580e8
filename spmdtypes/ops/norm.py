"""Normalisations, forward and backward."""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import ONE, Const, Expr, Iota, Operand, OpSpec, Out, Size, Var, fn, mean, total
from spmdtypes.ops.parts import Ints, Maybe, names, shaped_like, size_of
from spmdtypes.ops.registry import op


def masked(outs: tuple[Out, ...], mask: Ints) -> tuple[Out | None, ...]:
    return tuple(o if wanted else None for o, wanted in zip(outs, mask))


def _split(x: Operand, normalized: Ints) -> tuple[list[Var], list[Var], list[Var]]:
    vars = names(x.ndim)
    cut = x.ndim - len(normalized)
    return vars, vars[:cut], vars[cut:]


def _stat(outer: list[Var], inner: list[Var]) -> tuple[Any, ...]:
    return (*outer, *[ONE] * len(inner))


def centred(over: list[Var], x: Expr, eps: Any) -> tuple[Expr, Expr, Expr]:
    """(mean, 1/deviation, normalised value) of `x` along `over`."""
    m = mean(over, x)
    r = fn("rsqrt", mean(over, fn("sq", x - m)) + eps)
    return m, r, (x - m) * r


def affine(y: Expr, w: Maybe, b: Maybe, index: tuple[Any, ...]) -> Expr:
    y = y if w is None else y * w[index]
    return y if b is None else y + b[index]


def centred_backward(over: list[Var], g: Expr, xhat: Expr, r: Expr) -> Expr:
    """Gradient of the normalised value's input, `g` being the gradient of the normalised value."""
    return r * (g - mean(over, g) - xhat * mean(over, g * xhat))


@op("native_layer_norm")
def layer_norm(x: Operand, normalized_shape: Ints, w: Maybe, b: Maybe, eps: float) -> OpSpec:
    vars, outer, inner = _split(x, normalized_shape)
    m, r, y = centred(inner, x[tuple(vars)], eps)
    stat = _stat(outer, inner)
    return OpSpec.of(Out(tuple(vars), affine(y, w, b, tuple(inner))), Out(stat, m), Out(stat, r))


@op("native_layer_norm_backward")
def layer_norm_backward(
    grad: Operand,
    x: Operand,
    normalized_shape: Ints,
    m: Operand,
    r: Operand,
    w: Maybe,
    b: Maybe,
    output_mask: Ints,
) -> OpSpec:
    vars, outer, inner = _split(x, normalized_shape)
    stat = _stat(outer, inner)
    g, rs = grad[tuple(vars)], r[stat]
    xhat = (x[tuple(vars)] - m[stat]) * rs
    scaled = affine(g, w, None, tuple(inner))
    outs = (
        Out(tuple(vars), centred_backward(inner, scaled, xhat, rs)),
        Out(tuple(inner), total("sum", outer, g * xhat)),
        Out(tuple(inner), total("sum", outer, g)),
    )
    return OpSpec(masked(outs, output_mask), uses=(shaped_like(b, inner),) if b is not None else ())


@op("_fused_rms_norm")
def rms_norm(x: Operand, normalized_shape: Ints, w: Maybe, eps: float | None) -> OpSpec:
    vars, outer, inner = _split(x, normalized_shape)
    value = x[tuple(vars)]
    r = fn("rsqrt", mean(inner, fn("sq", value)) + (EPS.get(x.dtype, 0.0) if eps is None else eps))
    return OpSpec.of(Out(tuple(vars), affine(value * r, w, None, tuple(inner))), Out(_stat(outer, inner), r))


EPS = {"f64": 2.220446049250313e-16, "f32": 1.1920928955078125e-07, "bf16": 0.0078125, "f16": 0.0009765625}


@op("rms_norm")
def rms_norm_only(x: Operand, normalized_shape: Ints, w: Maybe = None, eps: float | None = None) -> OpSpec:
    return OpSpec(rms_norm(x, normalized_shape, w, eps).outs[:1])


@op("layer_norm")
def layer_norm_only(
    x: Operand, shape: Ints, w: Maybe = None, b: Maybe = None, eps: float = 1e-5, *_: Any
) -> OpSpec:
    return OpSpec(layer_norm(x, shape, w, b, eps).outs[:1])


@op("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Operand, x: Operand, normalized_shape: Ints, r: Operand, w: Maybe, output_mask: Ints
) -> OpSpec:
    vars, outer, inner = _split(x, normalized_shape)
    rs = r[_stat(outer, inner)]
    xhat = x[tuple(vars)] * rs
    g = grad[tuple(vars)]
    scaled = affine(g, w, None, tuple(inner))
    outs = (
        Out(tuple(vars), rs * (scaled - xhat * mean(inner, scaled * xhat))),
        Out(tuple(inner), total("sum", outer, g * xhat)),
    )
    return OpSpec(masked(outs, output_mask))


def _channel(x: Operand) -> tuple[list[Var], Var, list[Var]]:
    vars = names(x.ndim)
    return vars, vars[1], [vars[0], *vars[2:]]


def _batch_norm(
    x: Operand, w: Maybe, b: Maybe, mean_: Maybe, var_: Maybe, training: bool, momentum: float, eps: float
) -> tuple[Out, ...]:
    """(output, saved mean, saved 1/deviation, new running mean, new running variance)."""
    vars, c, over = _channel(x)
    value = x[tuple(vars)]
    if not training:
        assert mean_ is not None and var_ is not None
        r = fn("rsqrt", var_[c] + eps)
        y = affine((value - mean_[c]) * r, w, b, (c,))
        nothing = Out((_empty(),), Const(0))
        return Out(tuple(vars), y), nothing, nothing, Out((c,), mean_[c]), Out((c,), var_[c])
    m, r, y = centred(over, value, eps)
    stats = [Out((c,), m), Out((c,), r)]
    if mean_ is not None and var_ is not None:
        count: Expr = Size(over[0])
        for v in over[1:]:
            count = count * Size(v)
        unbiased = total("sum", over, fn("sq", value - m)) / (count - 1)
        stats.append(Out((c,), mean_[c] * (1 - momentum) + m * momentum))
        stats.append(Out((c,), var_[c] * (1 - momentum) + unbiased * momentum))
    return Out(tuple(vars), affine(y, w, b, (c,))), *stats


def _empty() -> Var:
    return Var("none")


def _norm_spec(x: Operand, outs: tuple[Out, ...]) -> OpSpec:
    none = _empty()
    return OpSpec(outs, sizes={none: 0} if any(none in o.vars for o in outs) else {})


@op("native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm")
def batch_norm(
    x: Operand,
    w: Maybe,
    b: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> OpSpec:
    return _norm_spec(x, _batch_norm(x, w, b, running_mean, running_var, training, momentum, eps)[:3])


@op("_native_batch_norm_legit_functional")
def batch_norm_functional(*args: Any) -> OpSpec:
    return _norm_spec(args[0], _batch_norm(*args))


@op("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Operand, w: Maybe, b: Maybe, training: bool, momentum: float, eps: float
) -> OpSpec:
    return _norm_spec(x, _batch_norm(x, w, b, None, None, training, momentum, eps)[:3])


@op("_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    x: Operand, w: Maybe, b: Maybe, m: Operand, v: Operand, momentum: float, eps: float
) -> OpSpec:
    return _norm_spec(x, _batch_norm(x, w, b, m, v, False, momentum, eps)[:3])


@op("_batch_norm_with_update_functional")
def batch_norm_with_update(
    x: Operand, w: Maybe, b: Maybe, m: Operand, v: Operand, momentum: float, eps: float
) -> OpSpec:
    y, mean_, r, *running = _batch_norm(x, w, b, m, v, True, momentum, eps)
    return OpSpec((y, mean_, r, None, *running))


@op("_batch_norm_with_update")
def batch_norm_update(*args: Any) -> OpSpec:
    return OpSpec(batch_norm_with_update(*args).outs[:4])


@op("native_batch_norm_backward")
def batch_norm_backward(
    grad: Operand,
    x: Operand,
    w: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_invstd: Maybe,
    train: bool,
    eps: float,
    output_mask: Ints,
) -> OpSpec:
    vars, c, over = _channel(x)
    g, value = grad[tuple(vars)], x[tuple(vars)]
    if train:
        assert save_mean is not None and save_invstd is not None
        m, r = save_mean[c], save_invstd[c]
    else:
        assert running_mean is not None and running_var is not None
        m, r = running_mean[c], fn("rsqrt", running_var[c] + eps)
    xhat = (value - m) * r
    scaled = affine(g, w, None, (c,))
    outs = (
        Out(tuple(vars), centred_backward(over, scaled, xhat, r) if train else scaled * r),
        Out((c,), total("sum", over, g * xhat)),
        Out((c,), total("sum", over, g)),
    )
    return OpSpec(masked(outs, output_mask))


@op("native_group_norm")
def group_norm(
    x: Operand, w: Maybe, b: Maybe, N: Any, C: Any, HxW: Any, group: Any, eps: float
) -> OpSpec | None:
    """Statistics couple the channels of a group: channels must be whole unless groups are dims."""
    vars = names(x.ndim)
    n, c, space = vars[0], vars[1], vars[2:]
    other, inner, g = Var("other"), [Var(f"s{d}") for d in range(len(space))], Var("group")
    per_group = size_of(x, 1) // group if isinstance(group, int) and isinstance(size_of(x, 1), int) else None
    if per_group is None:
        return None
    value = x[(n, other, *inner)]

    def stats(of_group: Expr) -> tuple[Expr, Expr]:
        mine = fn("eq", fn("floordiv", Iota(other), per_group), of_group)
        count: Expr = Const(per_group)
        for v in inner:
            count = count * Size(v)
        m = total("sum", [other, *inner], mine * value) / count
        square = total("sum", [other, *inner], mine * fn("sq", value - m)) / count
        return m, fn("rsqrt", square + eps)

    m, r = stats(fn("floordiv", Iota(c), per_group))
    y = affine((x[tuple(vars)] - m) * r, w, b, (c,))
    gm, gr = stats(Iota(g))
    return OpSpec.of(Out(tuple(vars), y), Out((n, g), gm), Out((n, g), gr), sizes={g: group})


@op("native_group_norm_backward")
def group_norm_backward(
    grad: Operand,
    x: Operand,
    m: Operand,
    r: Operand,
    w: Maybe,
    N: Any,
    C: Any,
    HxW: Any,
    group: Any,
    output_mask: Ints,
) -> OpSpec | None:
    if not isinstance(group, int) or not isinstance(size_of(x, 1), int):
        return None
    per_group = size_of(x, 1) // group
    vars = names(x.ndim)
    n, c, space = vars[0], vars[1], vars[2:]
    other, inner = Var("other"), [Var(f"s{d}") for d in range(len(space))]
    mine = fn("floordiv", Iota(c), per_group)
    same = fn("eq", fn("floordiv", Iota(other), per_group), mine)

    def at(channel: Var, places: list[Var], group_of: Expr) -> tuple[Expr, Expr, Expr]:
        g = grad[(n, channel, *places)]
        scale = r[n, group_of]
        return g, (x[(n, channel, *places)] - m[n, group_of]) * scale, scale

    g, xhat, scale = at(c, space, mine)
    og, oxhat, _ = at(other, inner, mine)
    oscaled = affine(og, w, None, (other,))
    count: Expr = Const(per_group)
    for v in inner:
        count = count * Size(v)
    first = total("sum", [other, *inner], same * oscaled) / count
    second = total("sum", [other, *inner], same * oscaled * oxhat) / count
    over = [n, *space]
    outs = (
        Out(tuple(vars), scale * (affine(g, w, None, (c,)) - first - xhat * second)),
        Out((c,), total("sum", over, g * xhat)),
        Out((c,), total("sum", over, g)),
    )
    return OpSpec(masked(outs, output_mask))


@op("batch_norm_backward")
def batch_norm_backward_reserve(*args: Any) -> OpSpec:
    return batch_norm_backward(*args[:10])
