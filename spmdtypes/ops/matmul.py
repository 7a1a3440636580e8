"""Contractions: matrix products and convolutions, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdtypes.core.spec import ONE, Const, Expr, Iota, Load, Operand, OpSpec, Out, Var, axes, fn, total
from spmdtypes.graph import Lit
from spmdtypes.ops.parts import Ints, Maybe, both, broadcast, local, names, ref, shaped_like, size_of, spread
from spmdtypes.ops.reduce import norm
from spmdtypes.ops.registry import op


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
    """Index arithmetic of a convolution: which input position a (output, kernel) pair meets."""

    def __init__(
        self,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        groups: Any,
    ):
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.transposed, self.groups = transposed, groups

    def step(self, seq: Sequence[int], d: int) -> int:
        return seq[d] if len(seq) > d else seq[0]

    def big(self, small: Var, kernel: Var, d: int) -> Expr:
        """Position on the larger side: small * stride + kernel * dilation - padding."""
        at = Iota(small) * self.step(self.stride, d) + Iota(kernel) * self.step(self.dilation, d)
        return at - self.step(self.padding, d)

    def size(self, x: Operand, w: Operand, d: int, extra: int = 0) -> Any:
        s, p, dil = self.step(self.stride, d), self.step(self.padding, d), self.step(self.dilation, d)

        def extent(n: int, k: int) -> int:
            if self.transposed:
                return (n - 1) * s - 2 * p + dil * (k - 1) + extra + 1
            return (n + 2 * p - dil * (k - 1) - 1) // s + 1

        return both(extent, size_of(x, d + 2), size_of(w, d + 2))


def _inside(position: Expr, extent: Any) -> Expr:
    return fn("and", fn("ge", position, 0), fn("lt", position, Const(extent)))


def _all(conditions: Sequence[Expr]) -> Expr:
    value = conditions[0]
    for c in conditions[1:]:
        value = fn("and", value, c)
    return value


def _channels(groups: Any, w: Operand, out: Var, inner: Var) -> Any:
    """The input channel of output channel `out` and in-group channel `inner`."""
    if local(groups) == 1 == ref(groups):
        return inner
    per_group = both(lambda o, g: o // g, size_of(w, 0), groups)
    if size_of(w, 1) == 1 and local(per_group) == 1 == ref(per_group):
        return out
    return fn("floordiv", Iota(out), Const(per_group)) * Const(size_of(w, 1)) + Iota(inner)


def _read_x(x: Operand, b: Var, channel: Any, places: list[Expr]) -> Expr:
    inside = _all([_inside(p, size_of(x, d + 2)) for d, p in enumerate(places)])
    return fn("where", inside, x[(b, channel, *places)], 0)


@op("convolution convolution_overrideable _convolution mkldnn_convolution")
def convolution(
    x: Operand,
    w: Operand,
    bias: Maybe,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: Any,
    *_: Any,
) -> OpSpec | None:
    n = x.ndim - 2
    conv = _Conv(stride, padding, dilation, transposed, groups)
    b, o, c = axes("b o c")
    small, kernel = names(n, "y"), names(n, "k")
    sizes = {small[d]: conv.size(x, w, d, output_padding[d] if transposed else 0) for d in range(n)}
    if transposed:
        if not (local(groups) == 1 == ref(groups)):
            return None
        value = total("sum", [c, *kernel], _scattered(conv, x, (b, c), small, kernel) * w[(c, o, *kernel)])
    else:
        channel = _channels(groups, w, o, c)
        places = [conv.big(small[d], kernel[d], d) for d in range(n)]
        inner = () if channel is o else (c,)
        weight = w[(o, *(inner or (ONE,)), *kernel)]
        value = total("sum", [*inner, *kernel], _read_x(x, b, channel, places) * weight)
    return OpSpec.of(Out((b, o, *small), value if bias is None else value + bias[o]), sizes=sizes)


def _scattered(conv: _Conv, g: Operand, lead: tuple[Any, ...], big: list[Var], kernel: list[Var]) -> Expr:
    """`g` on the small side, seen from a position of the large side through one kernel tap."""
    at, conditions = [], []
    for d, (v, k) in enumerate(zip(big, kernel)):
        s = conv.step(conv.stride, d)
        offset = Iota(v) + conv.step(conv.padding, d) - Iota(k) * conv.step(conv.dilation, d)
        at.append(fn("floordiv", offset, s) if s != 1 else offset)
        conditions.append(_inside(at[-1], size_of(g, d + 2)))
        if s != 1:
            conditions.append(fn("eq", fn("mod", offset, s), 0))
    return fn("where", _all(conditions), g[(*lead, *at)], 0)


@op("convolution_backward")
def convolution_backward(
    grad: Operand,
    x: Operand,
    w: Operand,
    bias_sizes: Any,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: Any,
    output_mask: Ints,
) -> OpSpec | None:
    n = x.ndim - 2
    conv = _Conv(stride, padding, dilation, transposed, groups)
    b, o, c = axes("b o c")
    small, big, kernel = names(n, "y"), names(n, "z"), names(n, "k")
    if transposed:
        return None
    channel = _channels(groups, w, o, c)
    grouped = channel is not c
    if grouped and channel is not o:
        return None
    through = _scattered(conv, grad, (b, o), big, kernel)
    places = [conv.big(small[d], kernel[d], d) for d in range(n)]
    weight_index = (o, ONE if grouped else c, *kernel)
    gx = total("sum", [*([] if grouped else [o]), *kernel], through * w[weight_index])
    gw = total("sum", [b, *small], grad[(b, o, *small)] * _read_x(x, b, channel, places))
    gb = total("sum", [b, *small], grad[(b, o, *small)])
    outs = (Out((b, o if grouped else c, *big), gx), Out(weight_index, gw), Out((o,), gb))
    return OpSpec(
        tuple(out if wanted else None for out, wanted in zip(outs, output_mask)),
        uses=(shaped_like(x, (b, o if grouped else c, *big)), shaped_like(w, weight_index)),
    )
