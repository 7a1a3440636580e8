"""Reads and writes at positions that are data, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from operator import floordiv
from typing import Any

from spmdtypes.core.spec import ONE, Const, Expr, Iota, Operand, OpSpec, Out, Var, expr, fn, total
from spmdtypes.graph import Lit
from spmdtypes.ops.parts import (
    Ints,
    Maybe,
    both,
    broadcast,
    dropped,
    expect,
    local,
    names,
    new_dims,
    number,
    position,
    prefix_of,
    rank_steps,
    ref,
    replaced,
    shaped_like,
    size_of,
    spread,
    wrap_dim,
)
from spmdtypes.ops.registry import op


@op("embedding")
def embedding(weight: Operand, indices: Operand, *_: Any, **__: Any) -> OpSpec:
    vars, width = names(indices.ndim), Var("d")
    return OpSpec.of(Out((*vars, width), weight[indices[tuple(vars)], width]))


@op("embedding_dense_backward")
def embedding_backward(
    grad: Operand, indices: Operand, num_weights: Any, padding_idx: Any, scale_grad_by_freq: bool
) -> OpSpec | None:
    if scale_grad_by_freq:
        return None
    vars, row, width = names(indices.ndim), Var("row"), Var("d")
    i = indices[tuple(vars)]
    value = fn("eq", i, Iota(row)) * grad[(*vars, width)]
    if ref(padding_idx) >= 0:
        value = fn("where", fn("eq", i, Const(padding_idx)), 0, value)
    return OpSpec.of(Out((row, width), total("sum", vars, value)), sizes={row: num_weights})


@op("index_select index_select_copy")
def index_select(x: Operand, dim: int, index: Operand) -> OpSpec:
    vars = names(x.ndim)
    if not vars:
        return OpSpec.of(Out((), x[()]))
    d = wrap_dim(dim, x.ndim)
    j = Var("j")
    at = index[j] if index.ndim else index[()]
    return OpSpec.of(Out(replaced(vars, {d: j if index.ndim else ONE}), x[replaced(vars, {d: at})]))


def _reading(x: Operand, d: int, index: Operand, vars: Sequence[Var]) -> list[Any]:
    """Subscripts of `x` beside `d`: where `index` is shorter only a prefix of `x` is read."""
    return [v if k == d else prefix_of(x, k, v, index) for k, v in enumerate(vars)]


@op("gather")
def gather(x: Operand, dim: int, index: Operand, **_: Any) -> OpSpec:
    vars = names(index.ndim)
    if not vars or not x.ndim:
        return OpSpec.of(Out(tuple(vars), x[tuple(ONE for _ in range(x.ndim))] if x.ndim else x[()]))
    d = wrap_dim(dim, x.ndim)
    at = _reading(x, d, index, vars)
    at[d] = index[tuple(vars)]
    return OpSpec.of(Out(tuple(vars), x[tuple(at)]))


def _written(x: Operand, dim: int, index: Operand, source: Any) -> tuple[Any, Expr, Expr, list[Var]] | None:
    """(output variables, hit, value, inner variables) of a scatter; None unless shapes match off `dim`."""
    if not x.ndim or not index.ndim:
        return None
    d = wrap_dim(dim, x.ndim)
    vars, inner = names(x.ndim), Var("k")
    others = [k for k in range(x.ndim) if k != d]
    if any(size_of(index, k) != size_of(x, k) for k in others):
        return None
    at = replaced(vars, {d: inner})
    hit = fn("eq", index[at], Iota(vars[d]))
    if not isinstance(source, Operand):
        return vars, hit, expr(source), [inner]
    return vars, hit, source[tuple(prefix_of(source, k, v, index) for k, v in enumerate(at))], [inner]


@op("scatter_add")
def scatter_add(x: Operand, dim: int, index: Operand, src: Operand) -> OpSpec | None:
    return scatter_reduce(x, dim, index, src, "sum")


@op("scatter_reduce.two")
def scatter_reduce(
    x: Operand, dim: int, index: Operand, src: Operand, reduce: str, *, include_self: bool = True
) -> OpSpec | None:
    parts = _written(x, dim, index, src)
    if parts is None or not include_self or reduce not in ("sum", "amax", "amin"):
        return None
    vars, hit, value, inner = parts
    own = x[tuple(vars)]
    if reduce == "sum":
        return OpSpec.of(Out(tuple(vars), own + total("sum", inner, hit * value)))
    name, worst = ("max", float("-inf")) if reduce == "amax" else ("min", float("inf"))
    return OpSpec.of(Out(tuple(vars), fn(name, own, total(name, inner, fn("where", hit, value, worst)))))


@op("scatter.src scatter.value")
def scatter(x: Operand, dim: int, index: Operand, src: Any) -> OpSpec | None:
    """Positions written twice keep one of the values; here, as in most programs, none is."""
    parts = _written(x, dim, index, src)
    if parts is None:
        return None
    vars, hit, value, inner = parts
    any_hit = total("max", inner, hit)
    written = value if not isinstance(src, Operand) else total("sum", inner, hit * value)
    return OpSpec.of(Out(tuple(vars), fn("where", any_hit, written, x[tuple(vars)])))


@op("scatter.reduce scatter.value_reduce")
def scatter_old(x: Operand, dim: int, index: Operand, src: Any, *, reduce: str) -> OpSpec | None:
    return scatter_add(x, dim, index, src) if reduce == "add" else None


def _rows(x: Operand, dim: int, index: Operand, source: Any) -> tuple[Any, Expr, Expr, list[Var]]:
    """As `_written`, for an index that numbers whole slices along `dim`."""
    vars = names(x.ndim)
    if not vars:
        raise ValueError("index along a dim of a scalar")
    d, inner = wrap_dim(dim, x.ndim), Var("k")
    at = index[inner] if index.ndim else index[()]
    hit = fn("eq", at, Iota(vars[d]))
    along = inner if index.ndim else ONE
    if not isinstance(source, Operand):
        value = expr(source)
    else:
        value = source[replaced(vars, {d: along})] if source.ndim else source[()]
    return vars, hit, value, [inner] if index.ndim else []


@op("index_add")
def index_add(x: Operand, dim: int, index: Operand, source: Operand, alpha: Any = 1) -> OpSpec:
    vars, hit, value, inner = _rows(x, dim, index, source)
    added = total("sum", inner, hit * value)
    scaled = added if not isinstance(alpha, Lit) and alpha == 1 else added * alpha
    return OpSpec.of(Out(tuple(vars), x[tuple(vars)] + scaled))


@op("index_copy")
def index_copy(x: Operand, dim: int, index: Operand, source: Operand) -> OpSpec:
    vars, hit, value, inner = _rows(x, dim, index, source)
    written = total("sum", inner, hit * value)
    return OpSpec.of(Out(tuple(vars), fn("where", total("max", inner, hit), written, x[tuple(vars)])))


@op("index_fill.int_Scalar index_fill.int_Tensor")
def index_fill(x: Operand, dim: int, index: Operand, value: Any) -> OpSpec:
    fill = value[()] if isinstance(value, Operand) else expr(value)
    vars, hit, _, inner = _rows(x, dim, index, 0)
    return OpSpec.of(Out(tuple(vars), fn("where", total("max", inner, hit), fill, x[tuple(vars)])))


def _advanced(x: Operand, indices: list[Maybe]) -> tuple[list[Any], list[Any], int, dict[int, Expr]]:
    """(index dims, variables of `x`, where the index dims go, subscript per indexed dim)."""
    at = [d for d, i in enumerate(indices) if i is not None]
    vars, _ = broadcast(*[indices[d] for d in at])
    index_vars = {v: Var(f"at{v.name}") for v in vars if isinstance(v, Var)}
    renamed = [_renamed(i, len(vars), index_vars, vars) for i in (indices[d] for d in at) if i is not None]
    adjacent = at == list(range(at[0], at[0] + len(at)))
    out_vars = [index_vars[v] if isinstance(v, Var) else ONE for v in vars]
    return out_vars, list(names(x.ndim)), at[0] if adjacent else 0, dict(zip(at, renamed))


def _renamed(i: Operand, n: int, index_vars: dict[Var, Var], vars: Sequence[Any]) -> Expr:
    return spread(i, [index_vars.get(v, ONE) if isinstance(v, Var) else ONE for v in vars])


@op("index.Tensor _unsafe_index.Tensor")
def index(x: Operand, indices: list[Maybe]) -> OpSpec | None:
    """A boolean index gives a shape that depends on data: no description."""
    if any(i is not None and i.dtype in ("bool", "u8") for i in indices):
        return None
    picked, vars, place, at = _advanced(x, indices)
    rest = [v for d, v in enumerate(vars) if d not in at]
    return OpSpec.of(Out((*rest[:place], *picked, *rest[place:]), x[replaced(vars, at)]))


@op("index_put _unsafe_index_put _index_put_impl")
def index_put(
    x: Operand, indices: list[Maybe], values: Operand, accumulate: bool = False, *_: Any
) -> OpSpec | None:
    if any(i is not None and i.dtype in ("bool", "u8") for i in indices):
        return _put_where(x, indices, values, accumulate)
    picked, vars, place, at = _advanced(x, indices)
    rest = [v for d, v in enumerate(vars) if d not in at]
    value = spread(values, [*rest[:place], *picked, *rest[place:]])
    hit: Expr = expr(1)
    for d, i in at.items():
        hit = (
            fn("and", hit, fn("eq", i, Iota(vars[d]))) if d != next(iter(at)) else fn("eq", i, Iota(vars[d]))
        )
    inner = [v for v in picked if isinstance(v, Var)]
    added, own = total("sum", inner, hit * value), x[tuple(vars)]
    if accumulate:
        return OpSpec.of(Out(tuple(vars), own + added))
    return OpSpec.of(Out(tuple(vars), fn("where", total("max", inner, hit), added, own)))


def _put_where(x: Operand, indices: Ints, values: Operand, accumulate: bool) -> OpSpec | None:
    """A mask with one value for all places; other values are consumed in a data-dependent order."""
    masks = [i for i in indices if i is not None]
    if len(masks) != 1 or indices[0] is None or any(not one for one in values.one):
        return None
    vars = names(x.ndim)
    mask = masks[0][tuple(vars[: masks[0].ndim])]
    value, own = values[(ONE,) * values.ndim], x[tuple(vars)]
    return OpSpec.of(Out(tuple(vars), fn("where", mask, own + value if accumulate else value, own)))


@op("take")
def take(x: Operand, index: Operand) -> OpSpec | None:
    if x.ndim != 1:
        return None
    vars = names(index.ndim)
    return OpSpec.of(Out(tuple(vars), x[index[tuple(vars)]]))


def _block(sizes: Any, start: Any, width: Any) -> tuple[Any, int] | None:
    """(how many blocks of `width` make `sizes`, which one begins at `start`), if so in both programs."""
    if not all(f(width) and f(sizes) % f(width) == 0 and f(start) % f(width) == 0 for f in (local, ref)):
        return None
    count, place = both(floordiv, sizes, width), both(floordiv, start, width)
    return (count, place) if isinstance(count, int) and isinstance(place, int) and count > 1 else None


def _begin(start: Any, n: Any) -> Any:
    at = both(lambda s, m: slice(s, None, 1).indices(m)[0], start, n)
    return number(local(at), ref(at), rank_steps((1, start)))


def _inside(at: Var, start: Any, step: int, length: Any) -> tuple[Expr, Expr]:
    """(whether position `at` is one of `length` positions from `start` by `step`, which one)"""
    offset = Iota(at) - Const(start)
    which = fn("floordiv", offset, step) if step != 1 else offset
    hit = fn("and", fn("ge", offset, 0), fn("lt", which, Const(length)))
    return (fn("and", hit, fn("eq", fn("mod", offset, step), 0)) if step != 1 else hit), which


@op("slice_backward")
def slice_backward(grad: Operand, input_sizes: Ints, dim: int, start: Any, end: Any, step: int) -> OpSpec:
    """`grad` inside zeros. A slice that is one of several equal blocks is a digit of its own."""
    d, vars, n = wrap_dim(dim, grad.ndim), names(grad.ndim), size_of(grad, dim)
    size, begin = input_sizes[d], _begin(start, input_sizes[d])
    length = both(lambda m, s, e: len(range(*slice(s, e, step).indices(m))), size, start, end)
    expect(grad, range(grad.ndim), replaced(input_sizes, {d: length}))
    if step == 1 and (local(size), ref(size)) == (local(n), ref(n)):
        return OpSpec.of(Out(tuple(vars), grad[tuple(vars)]))
    block = _block(size, begin, n) if step == 1 else None
    if block:
        count, which = Var("block"), block[1]
        value = fn("where", fn("eq", Iota(count), which), grad[tuple(vars)], 0)
        return OpSpec.of(Out(replaced(vars, {d: (count, vars[d])}), value), sizes={count: block[0]})
    hit, at = _inside(vars[d], begin, step, n)
    return OpSpec.of(
        Out(tuple(vars), fn("where", hit, grad[replaced(vars, {d: at})], 0)), sizes={vars[d]: size}
    )


@op("select_backward")
def select_backward(grad: Operand, input_sizes: Ints, dim: int, index: Any) -> OpSpec:
    n = len(input_sizes)
    d = wrap_dim(dim, n)
    vars, sizes = new_dims([input_sizes[d]], "at")
    place = both(lambda i, m: i + m if i < 0 else i, index, input_sizes[d])
    rest = names(n - 1)
    expect(grad, range(n - 1), dropped(input_sizes, [d]))
    value = grad[tuple(rest)]
    if sizes:
        value = fn(
            "where",
            fn("eq", Iota(vars[0]), Const(number(local(place), ref(place), rank_steps((1, index))))),
            value,
            0,
        )
    return OpSpec.of(Out((*rest[:d], *vars, *rest[d:]), value), sizes=sizes)


@op("slice_scatter")
def slice_scatter(
    x: Operand, src: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> OpSpec:
    d, vars = wrap_dim(dim, x.ndim), names(x.ndim)
    if step == 1 and size_of(src, d) == size_of(x, d):
        return OpSpec.of(Out(tuple(vars), src[tuple(vars)]), uses=(shaped_like(x, vars),))
    hit, at = _inside(vars[d], _begin(start, size_of(x, d)), step, size_of(src, d))
    return OpSpec.of(Out(tuple(vars), fn("where", hit, src[replaced(vars, {d: at})], x[tuple(vars)])))


@op("select_scatter")
def select_scatter(x: Operand, src: Operand, dim: int, index: Any) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    vars = names(x.ndim)
    hit = fn("eq", Iota(vars[d]), Const(position(index, x, d)))
    value = src[tuple(v for k, v in enumerate(vars) if k != d)]
    return OpSpec.of(Out(tuple(vars), fn("where", hit, value, x[tuple(vars)])))


@op("constant_pad_nd")
def pad(x: Operand, pad: Ints, value: Any = 0) -> OpSpec:
    vars = names(x.ndim)
    at: dict[int, Any] = {}
    sizes: dict[Var, Any] = {}
    hit: list[Expr] = []
    for j in range(len(pad) // 2):
        before, after, d = pad[2 * j], pad[2 * j + 1], x.ndim - 1 - j
        if not any((local(before), local(after), ref(before), ref(after))):
            continue
        at[d] = Iota(vars[d]) - Const(before)
        sizes[vars[d]] = both(lambda n, a, b: n + a + b, size_of(x, d), before, after)
        hit += [fn("ge", at[d], 0), fn("lt", at[d], Const(size_of(x, d)))]
    inside = x[replaced(vars, at)]
    for h in hit:
        inside = fn("where", h, inside, value)
    return OpSpec.of(Out(tuple(vars), inside), sizes=sizes)


def _triangle(name: str, compare: str) -> None:
    @op(name)
    def build(x: Operand, diagonal: Any = 0) -> OpSpec:
        vars = names(x.ndim)
        inside = fn(compare, Iota(vars[-1]) - Iota(vars[-2]), Const(diagonal))
        return OpSpec.of(Out(tuple(vars), fn("where", inside, x[tuple(vars)], 0)))


_triangle("tril", "le")
_triangle("triu", "ge")


@op("diagonal_backward")
def diagonal_backward(grad: Operand, input_sizes: Ints, offset: int, dim1: int, dim2: int) -> OpSpec:
    n = len(input_sizes)
    a, b = wrap_dim(dim1, n), wrap_dim(dim2, n)
    vars = names(n)
    rest = dropped(vars, (a, b))
    expect(grad, range(n - 2), dropped(input_sizes, (a, b)))
    at = Iota(vars[a]) + min(offset, 0)
    hit = fn("eq", Iota(vars[b]) - Iota(vars[a]), offset)
    return OpSpec.of(
        Out(tuple(vars), fn("where", hit, grad[(*rest, at)], 0)),
        sizes={vars[a]: input_sizes[a], vars[b]: input_sizes[b]},
    )


@op("unfold_backward")
def unfold_backward(grad: Operand, input_sizes: Ints, dim: int, size: int, step: int) -> OpSpec:
    n = len(input_sizes)
    d = wrap_dim(dim, n)
    vars, count, inside = names(n), Var("count"), Var("inside")
    expect(grad, [k for k in range(n) if k != d], dropped(input_sizes, [d]))
    hit = fn("eq", Iota(count) * step + Iota(inside), Iota(vars[d]))
    value = total("sum", [count, inside], hit * grad[(*replaced(vars, {d: count}), inside)])
    return OpSpec.of(Out(tuple(vars), value), sizes={vars[d]: input_sizes[d]})


@op("isin.Tensor_Tensor")
def isin(x: Operand, candidates: Operand, **_: Any) -> OpSpec:
    vars, inner = names(x.ndim), names(candidates.ndim, "c")
    hit = fn("eq", x[tuple(vars)], candidates[tuple(inner)])
    return OpSpec.of(Out(tuple(vars), total("max", inner, hit)))


@op("bucketize.Tensor")
def bucketize(x: Operand, boundaries: Operand, *, right: bool = False, **_: Any) -> OpSpec:
    """How many boundaries lie below."""
    vars, k = names(x.ndim), Var("k")
    below = fn("le" if right else "lt", boundaries[k], x[tuple(vars)])
    return OpSpec.of(Out(tuple(vars), total("sum", [k], below)))


@op("masked_scatter")
def masked_scatter(x: Operand, mask: Operand, source: Operand) -> OpSpec:
    """Which element of `source` goes where depends on the whole mask."""
    vars = names(x.ndim)
    shown = spread(mask, vars)
    inner = names(mask.ndim, "m")
    every = total("sum", inner, fn("opaque", *map(Iota, inner), mask[tuple(inner)]))
    inner = names(source.ndim, "s")
    taken = fn("opaque", *map(Iota, vars), *map(Iota, inner), every) * source[tuple(inner)]
    value = total("sum", inner, taken)
    return OpSpec.of(Out(tuple(vars), fn("where", shown, value, x[tuple(vars)])))
