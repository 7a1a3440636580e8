"""Contractions: matrix products and convolutions, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from spmdtypes.core.spec import ONE, Const, Expr, Iota, Load, Operand, OpSpec, Out, Var, axes, fn, total
from spmdtypes.graph import Lit
from spmdtypes.ops.parts import (
    Maybe,
    both,
    broadcast,
    local,
    masked,
    names,
    ref,
    shaped_like,
    size_of,
    spread,
)
from spmdtypes.ops.reduce import norm
from spmdtypes.ops.registry import Call, op


def contraction(equation: str, *operands: Operand) -> tuple[tuple[Var, ...], Expr]:
    """Output variables and value of an einsum of one letter per dim."""
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    value: Expr | None = None
    for term, x in zip(terms, operands, strict=True):
        factor = x[tuple(Var(c) for c in term)]
        value = factor if value is None else value * factor
    summed = sorted(set(inputs) - set(output) - {","})
    assert value is not None
    return tuple(map(Var, output)), total("sum", [Var(c) for c in summed], value)


def _product(name: str, equation: str) -> None:
    @op(name)
    def build(*operands: Operand, **_: Any) -> OpSpec:
        return OpSpec.of(Out(*contraction(equation, *operands)))


for _name, _equation in {
    "mm mm.dtype": "ik,kj->ij",
    "bmm bmm.dtype": "bik,bkj->bij",
    "mv": "ik,k->i",
    "dot": "k,k->",
    "vdot": "k,k->",
    "ger": "i,j->ij",
    "outer": "i,j->ij",
}.items():
    _product(_name, _equation)


def _with_addend(name: str, equation: str) -> None:
    @op(name)
    def build(bias: Operand, a: Operand, b: Operand, beta: Any = 1, alpha: Any = 1, **_: Any) -> OpSpec:
        vars, product = contraction(equation, a, b)
        added = spread(bias, vars)
        return OpSpec.of(Out(vars, _times(added, beta) + _times(product, alpha)))


for _name, _equation in {
    "addmm": "ik,kj->ij",
    "addmv": "ik,k->i",
    "baddbmm": "bik,bkj->bij",
    "addbmm": "bik,bkj->ij",
    "addr": "i,j->ij",
}.items():
    _with_addend(_name, _equation)


def _times(x: Expr, factor: Any) -> Expr:
    return x if not isinstance(factor, Lit) and factor == 1 else x * factor


@op("linear")
def linear(x: Operand, weight: Operand, bias: Maybe = None) -> OpSpec:
    rows, k, o = names(x.ndim - 1), Var("k"), Var("o")
    value = total("sum", [k], x[(*rows, k)] * weight[o, k])
    return OpSpec.of(Out((*rows, o), value if bias is None else value + bias[o]))


@op("matmul")
def matmul(a: Operand, b: Operand) -> OpSpec:
    k, i, j = axes("k i j")
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError("matmul of a scalar")
    n = max(a.ndim, b.ndim) - 2
    batch = names(max(n, 0), "b")
    lead = [d for d in (a, b) if d.ndim > 2]
    left, right = ((i, k) if a.ndim > 1 else (k,)), ((k, j) if b.ndim > 1 else (k,))

    def read(x: Operand, tail: tuple[Var, ...]) -> Expr:
        head = batch[len(batch) - (x.ndim - len(tail)) :]
        return x[(*(_one_or(x, d, v) for d, v in enumerate(head)), *tail)]

    used = {v for x in lead for d, v in enumerate(batch[len(batch) - x.ndim + 2 :]) if not x.one[d]}
    out = [*(v if v in used else ONE for v in batch), *left[:-1], *right[1:]]
    return OpSpec.of(Out(tuple(out), total("sum", [k], read(a, left) * read(b, right))))


def _one_or(x: Operand, dim: int, var: Var) -> Any:
    return ONE if x.one[dim] else var


@op("_euclidean_dist _cdist_forward")
def cdist(a: Operand, b: Operand, p: float = 2, *_: Any) -> OpSpec:
    i, j, k = axes("i j k")
    vars, values = broadcast(*[Operand(x.position, x.shape[:-2], x.ref_shape[:-2], x.dtype) for x in (a, b)])
    left, right = (Load(v.operand, (*v.index, t, k)) for v, t in zip(values, (i, j)) if isinstance(v, Load))
    return OpSpec.of(Out((*vars, i, j), norm([k], left - right, p)))


@op("_cdist_backward")
def cdist_backward(grad: Operand, a: Operand, b: Operand, p: float, dist: Operand) -> OpSpec:
    i, j, k, m = axes("i j k m")
    batch = names(a.ndim - 2, "b")
    gap = a[(*batch, i, k)] - b[(*batch, j, k)]
    step = fn("opaque", gap, dist[(*batch, i, j)], total("sum", [m], fn("opaque", a[(*batch, i, m)] * 0)))
    return OpSpec.of(Out((*batch, i, k), total("sum", [j], grad[(*batch, i, j)] * step)))


class _Conv:
    """Index arithmetic of a convolution call: which positions an output and a kernel tap meet."""

    def __init__(self, a: Call) -> None:
        self.a, self.n = a, a.x.ndim - 2
        self.small, self.big, self.taps = (names(self.n, p) for p in "yzk")
        self.b, self.o, self.c = axes("b o c")
        one = local(a.groups) == 1 == ref(a.groups)
        per_group = both(lambda o, g: o // g, size_of(a.w, 0), a.groups)
        depthwise = not one and size_of(a.w, 1) == 1 and local(per_group) == 1 == ref(per_group)
        self.grouped = not one and not depthwise
        width = Const(size_of(a.w, 1))
        first = fn("floordiv", Iota(self.o), Const(per_group)) * width
        # the input channel of output channel `o` and in-group channel `c`
        self.channel: Any = self.c if one else self.o if depthwise else first + Iota(self.c)
        self.inner = () if depthwise else (self.c,)
        self.weight = (self.o, *(self.inner or (ONE,)), *self.taps)

    def _at(self, option: Sequence[int], d: int) -> int:
        return option[d] if len(option) > d else option[0]

    def numbers(self, d: int) -> tuple[int, int, int]:
        """(stride, padding, dilation)"""
        return self._at(self.a.stride, d), self._at(self.a.padding, d), self._at(self.a.dilation, d)

    def extent(self, d: int) -> Any:
        s, p, dil = self.numbers(d)
        extra = self._at(self.a.output_padding, d) if self.a.transposed else 0

        def size(n: int, k: int) -> int:
            reach = dil * (k - 1) + 1
            return (n - 1) * s - 2 * p + reach + extra if self.a.transposed else (n + 2 * p - reach) // s + 1

        return both(size, size_of(self.a.x, d + 2), size_of(self.a.w, d + 2))

    def inputs(self, x: Operand) -> Expr:
        """`x` where (output position, tap) meet it; 0 in the padding."""
        at, inside = [], []
        for d in range(self.n):
            s, p, dil = self.numbers(d)
            at.append(Iota(self.small[d]) * s + Iota(self.taps[d]) * dil - p)
            inside += _inside(at[-1], size_of(x, d + 2))
        return fn("where", _all(inside), x[(self.b, self.channel, *at)], 0)

    def outputs(self, g: Operand, channel: Var) -> Expr:
        """`g` at the output position that meets an input position through a tap, if any."""
        at, inside = [], []
        for d in range(self.n):
            s, p, dil = self.numbers(d)
            offset = Iota(self.big[d]) + p - Iota(self.taps[d]) * dil
            at.append(fn("floordiv", offset, s) if s != 1 else offset)
            inside += _inside(at[-1], size_of(g, d + 2))
            inside += [fn("eq", fn("mod", offset, s), 0)] if s != 1 else []
        return fn("where", _all(inside), g[(self.b, channel, *at)], 0)


def _inside(position: Expr, size: Any) -> list[Expr]:
    return [fn("ge", position, 0), fn("lt", position, Const(size))]


def _all(conditions: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: fn("and", a, b), conditions)


_CONVOLUTION = "stride padding dilation transposed output_padding groups"


@op(
    "convolution convolution_overrideable _convolution",
    f"x w bias {_CONVOLUTION} benchmark=False deterministic=False cudnn_enabled=True allow_tf32=True",
)
def convolution(a: Call) -> OpSpec | None:
    v = _Conv(a)
    if a.transposed:
        if v.inner != (v.c,) or v.channel is not v.c:
            return None
        out = v.big
        value = total("sum", [v.c, *v.taps], v.outputs(a.x, v.c) * a.w[(v.c, v.o, *v.taps)])
    else:
        out = v.small
        value = total("sum", [*v.inner, *v.taps], v.inputs(a.x) * a.w[v.weight])
    sizes = {out[d]: v.extent(d) for d in range(v.n)}
    return OpSpec.of(Out((v.b, v.o, *out), value if a.bias is None else value + a.bias[v.o]), sizes=sizes)


@op("convolution_backward", f"grad x w bias_sizes {_CONVOLUTION} mask")
def convolution_backward(a: Call) -> OpSpec | None:
    v = _Conv(a)
    if a.transposed or v.grouped:
        return None
    image = (v.b, v.channel, *v.big)
    over = [v.b, *v.small]
    gx = total("sum", [*([v.o] if v.inner else []), *v.taps], v.outputs(a.grad, v.o) * a.w[v.weight])
    g = a.grad[(v.b, v.o, *v.small)]
    outs = (
        Out(image, gx),
        Out(v.weight, total("sum", over, g * v.inputs(a.x))),
        Out((v.o,), total("sum", over, g)),
    )
    return OpSpec(masked(outs, a.mask), uses=(shaped_like(a.x, image), shaped_like(a.w, v.weight)))
