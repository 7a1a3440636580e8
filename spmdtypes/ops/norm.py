"""Normalisations, forward and backward."""

from __future__ import annotations

from math import prod
from typing import Any

from spmdtypes.core.spec import ONE, Const, Expr, Iota, Operand, OpSpec, Out, Var, fn, mean, total
from spmdtypes.ops.parts import Maybe, extent, local, masked, names, shaped_like, size_of
from spmdtypes.ops.registry import Call, op

EPS = {"f64": 2.220446049250313e-16, "f32": 1.1920928955078125e-07, "bf16": 0.0078125, "f16": 0.0009765625}


def _split(
    x: Operand, normalized: list[Any]
) -> tuple[tuple[Var, ...], list[Var], list[Var], tuple[Any, ...]]:
    """All variables, those outside and inside the normalised dims, and the dims of a statistic."""
    vars, cut = names(x.ndim), x.ndim - len(normalized)
    return tuple(vars), vars[:cut], vars[cut:], (*vars[:cut], *[ONE] * len(normalized))


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


@op("native_layer_norm", "x shape w b eps")
def layer_norm(a: Call) -> OpSpec:
    vars, _, inner, stat = _split(a.x, a.shape)
    m, r, y = centred(inner, a.x[vars], a.eps)
    return OpSpec.of(Out(vars, affine(y, a.w, a.b, tuple(inner))), Out(stat, m), Out(stat, r))


@op("layer_norm", "x shape w=None b=None eps=1e-5 cudnn=True")
def layer_norm_only(a: Call) -> OpSpec:
    return OpSpec(layer_norm(a).outs[:1])


@op("native_layer_norm_backward", "grad x shape mean rstd w b mask")
def layer_norm_backward(a: Call) -> OpSpec:
    vars, outer, inner, stat = _split(a.x, a.shape)
    g, r = a.grad[vars], a.rstd[stat]
    xhat = (a.x[vars] - a.mean[stat]) * r
    outs = (
        Out(vars, centred_backward(inner, affine(g, a.w, None, tuple(inner)), xhat, r)),
        Out(tuple(inner), total("sum", outer, g * xhat)),
        Out(tuple(inner), total("sum", outer, g)),
    )
    shapes = (shaped_like(a.x, vars), *(() if a.b is None else (shaped_like(a.b, inner),)))
    return OpSpec(masked(outs, a.mask), uses=shapes)


@op("_fused_rms_norm", "x shape w eps")
def rms_norm(a: Call) -> OpSpec:
    vars, _, inner, stat = _split(a.x, a.shape)
    value, eps = a.x[vars], EPS.get(a.x.dtype, 0.0) if a.eps is None else a.eps
    r = fn("rsqrt", mean(inner, fn("sq", value)) + eps)
    return OpSpec.of(Out(vars, affine(value * r, a.w, None, tuple(inner))), Out(stat, r))


@op("rms_norm", "x shape w=None eps=None")
def rms_norm_only(a: Call) -> OpSpec:
    return OpSpec(rms_norm(a).outs[:1])


@op("_fused_rms_norm_backward", "grad x shape rstd w mask")
def rms_norm_backward(a: Call) -> OpSpec:
    vars, outer, inner, stat = _split(a.x, a.shape)
    g, r = a.grad[vars], a.rstd[stat]
    xhat, scaled = a.x[vars] * r, affine(g, a.w, None, tuple(inner))
    outs = (
        Out(vars, r * (scaled - xhat * mean(inner, scaled * xhat))),
        Out(tuple(inner), total("sum", outer, g * xhat)),
    )
    return OpSpec(masked(outs, a.mask), uses=(shaped_like(a.x, vars),))


def _channel(x: Operand) -> tuple[tuple[Var, ...], Var, list[Var]]:
    vars = names(x.ndim)
    return tuple(vars), vars[1], [vars[0], *vars[2:]]


def _batch_norm(a: Call) -> tuple[Out, ...]:
    """(output, saved mean, saved 1/deviation, new running mean, new running variance)."""
    vars, c, over = _channel(a.x)
    value = a.x[vars]
    if not a.training:
        r = fn("rsqrt", a.rv[c] + a.eps)
        y = affine((value - a.rm[c]) * r, a.w, a.b, (c,))
        nothing = Out((_NONE,), Const(0))
        return Out(vars, y), nothing, nothing, Out((c,), a.rm[c]), Out((c,), a.rv[c])
    m, r, y = centred(over, value, a.eps)
    stats = [Out((c,), m), Out((c,), r)]
    if a.rm is not None:
        unbiased = total("sum", over, fn("sq", value - m)) / (extent(over) - 1)
        stats.append(Out((c,), a.rm[c] * (1 - a.momentum) + m * a.momentum))
        stats.append(Out((c,), a.rv[c] * (1 - a.momentum) + unbiased * a.momentum))
    return Out(vars, affine(y, a.w, a.b, (c,))), *stats


_NONE = Var("none")
_BATCH = "x w b rm rv"


def _with_empty(outs: tuple[Out | None, ...]) -> OpSpec:
    return OpSpec(outs, sizes={_NONE: 0} if any(o and _NONE in o.vars for o in outs) else {})


@op(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm",
    f"{_BATCH} training momentum eps",
)
def batch_norm(a: Call) -> OpSpec:
    return _with_empty(_batch_norm(a)[:3])


@op("_native_batch_norm_legit_functional", f"{_BATCH} training momentum eps")
def batch_norm_functional(a: Call) -> OpSpec:
    return _with_empty(_batch_norm(a))


@op("_native_batch_norm_legit.no_stats", "x w b training momentum eps rm=None rv=None")
def batch_norm_no_stats(a: Call) -> OpSpec:
    return _with_empty(_batch_norm(a)[:3])


@op("_native_batch_norm_legit_no_training", f"{_BATCH} momentum eps training=False")
def batch_norm_no_training(a: Call) -> OpSpec:
    return _with_empty(_batch_norm(a)[:3])


@op("_batch_norm_with_update_functional", f"{_BATCH} momentum eps training=True")
def batch_norm_with_update(a: Call) -> OpSpec:
    y, m, r, *running = _batch_norm(a)
    return OpSpec((y, m, r, None, *running))


@op("_batch_norm_with_update", f"{_BATCH} momentum eps training=True")
def batch_norm_update(a: Call) -> OpSpec:
    return OpSpec((*_batch_norm(a)[:3], None))


@op("native_batch_norm_backward batch_norm_backward", "grad x w rm rv mean rstd train eps mask reserve=None")
def batch_norm_backward(a: Call) -> OpSpec:
    vars, c, over = _channel(a.x)
    g, value = a.grad[vars], a.x[vars]
    m, r = (a.mean[c], a.rstd[c]) if a.train else (a.rm[c], fn("rsqrt", a.rv[c] + a.eps))
    xhat, scaled = (value - m) * r, affine(g, a.w, None, (c,))
    outs = (
        Out(vars, centred_backward(over, scaled, xhat, r) if a.train else scaled * r),
        Out((c,), total("sum", over, g * xhat)),
        Out((c,), total("sum", over, g)),
    )
    return OpSpec(masked(outs, a.mask), uses=(shaped_like(a.x, vars),))


class _Groups:
    """Index arithmetic of a group norm: which channels share statistics."""

    def __init__(self, a: Call) -> None:
        x, group, channels = a.x, a.group, size_of(a.x, 1)
        if (local(a.N), local(a.C), local(a.HxW)) != (*x.shape[:2], prod(x.shape[2:])):
            raise ValueError("sizes that are not those of the input")
        if not (isinstance(channels, int) and isinstance(group, int)):
            raise ValueError("groups of channels that are cut")
        self.vars = tuple(names(x.ndim))
        self.n, self.c, self.space = self.vars[0], self.vars[1], list(self.vars[2:])
        self.width, self.other = channels // group, Var("other")
        self.over = [self.other, *(Var(f"s{d}") for d in range(len(self.space)))]

    def of(self, channel: Var) -> Expr:
        return fn("floordiv", Iota(channel), self.width)

    def mean(self, group: Expr, value: Expr) -> Expr:
        """Over the positions `over` whose channel is in `group`."""
        members = fn("eq", self.of(self.other), group) * value
        return total("sum", self.over, members) / (extent(self.over[1:]) * self.width)


@op("native_group_norm", "x w b N C HxW group eps")
def group_norm(a: Call) -> OpSpec:
    s, g = _Groups(a), Var("group")
    inner = a.x[(s.n, *s.over)]

    def stats(group: Expr) -> tuple[Expr, Expr]:
        m = s.mean(group, inner)
        return m, fn("rsqrt", s.mean(group, fn("sq", inner - m)) + a.eps)

    m, r = stats(s.of(s.c))
    y = affine((a.x[s.vars] - m) * r, a.w, a.b, (s.c,))
    gm, gr = stats(Iota(g))
    return OpSpec.of(Out(s.vars, y), Out((s.n, g), gm), Out((s.n, g), gr), sizes={g: a.group})


@op("native_group_norm_backward", "grad x mean rstd w N C HxW group mask")
def group_norm_backward(a: Call) -> OpSpec:
    s = _Groups(a)
    mine = s.of(s.c)

    def at(channel: Var, places: list[Var]) -> tuple[Expr, Expr]:
        index = (s.n, channel, *places)
        return a.grad[index], (a.x[index] - a.mean[s.n, mine]) * a.rstd[s.n, mine]

    (g, xhat), (og, oxhat) = at(s.c, s.space), at(s.other, s.over[1:])
    scaled = affine(og, a.w, None, (s.other,))
    gx = affine(g, a.w, None, (s.c,)) - s.mean(mine, scaled) - xhat * s.mean(mine, scaled * oxhat)
    over = [s.n, *s.space]
    outs = (
        Out(s.vars, a.rstd[s.n, mine] * gx),
        Out((s.c,), total("sum", over, g * xhat)),
        Out((s.c,), total("sum", over, g)),
    )
    return OpSpec(masked(outs, a.mask), uses=(shaped_like(a.x, s.vars),))


def by_batch(name: str) -> bool:
    """Does the op take statistics of the batch a rank sees? Data-parallel training leaves them per rank
    by convention, so that its result depends on how samples are dealt to ranks."""
    return "batch_norm" in name
