"""Pieces that op descriptions share: numbers with two values, broadcasting, shapes, dims, slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmdtypes.core.spec import (
    ONE,
    Const,
    Expr,
    Fn,
    Iota,
    Load,
    Operand,
    OpSpec,
    Out,
    Rand,
    Red,
    Size,
    Var,
    Window,
    expr,
    fn,
    total,
)
from spmdtypes.graph import Lit

Sub = Any  # one subscript: Var, ONE, At, Window or Expr
Maybe = Operand | None
Ints = list[Any]  # sizes, dims or flags; numbers may be `Lit`


def local(x: Any) -> Any:
    return x.local if isinstance(x, Lit) else x


def ref(x: Any) -> Any:
    return x.ref if isinstance(x, Lit) else x


def number(loc: Any, reference: Any, rank: tuple[tuple[str, Any], ...] = ()) -> Any:
    """A plain number when nothing distinguishes the two programs, else a `Lit`."""
    return loc if loc == reference and not rank else Lit(loc, reference, rank)


def both(f: Callable[..., Any], *xs: Any) -> Any:
    """`f` applied in the local and in the reference program."""
    return number(f(*map(local, xs)), f(*map(ref, xs)))


def rank_steps(*signed: tuple[int, Any]) -> tuple[tuple[str, Any], ...]:
    """Growth per coordinate of a sum of +-literals."""
    steps: dict[str, Any] = {}
    for sign, x in signed:
        for axis, step in x.rank if isinstance(x, Lit) else ():
            steps[axis] = steps.get(axis, 0) + sign * step
    return tuple((a, s) for a, s in steps.items() if s)


def size_of(x: Operand, dim: int) -> Any:
    return number(x.shape[dim], x.ref_shape[dim])


def expect(x: Operand, dims: Iterable[int], sizes: Iterable[Any]) -> None:
    """Raises ValueError unless the dims have these local sizes: a kernel would broadcast or refuse."""
    for d, size in zip(dims, sizes):
        if x.shape[d] != local(size):
            raise ValueError(f"size {local(size)} for a dim of size {x.shape[d]}")


def wrap_dim(dim: int, ndim: int) -> int:
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ValueError(f"dim {dim} of a tensor with {ndim} dims")
    return dim % max(ndim, 1)


def wrap_dims(dims: Any, ndim: int) -> list[int]:
    """A `dim` argument as sorted dims; None and an empty list mean all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim))
    return sorted(wrap_dim(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)) if ndim else []


def names(n: int, prefix: str = "i") -> list[Var]:
    return [Var(f"{prefix}{j}") for j in range(n)]


def replaced(vars: Sequence[Sub], changes: dict[int, Sub]) -> tuple[Sub, ...]:
    return tuple(changes.get(d, v) for d, v in enumerate(vars))


def dropped(vars: Sequence[Sub], dims: Iterable[int]) -> tuple[Sub, ...]:
    gone = set(dims)
    return tuple(v for d, v in enumerate(vars) if d not in gone)


def kept(vars: Sequence[Sub], dims: Iterable[int], keepdim: bool) -> tuple[Sub, ...]:
    """Output dims of a reduction over `dims`."""
    return replaced(vars, dict.fromkeys(dims, ONE)) if keepdim else dropped(vars, dims)


def broadcast(*xs: Any) -> tuple[tuple[Sub, ...], list[Expr]]:
    """Output dims and elementwise values of operands (or numbers) broadcast together."""
    tensors = [x for x in xs if isinstance(x, Operand)]
    n = max((t.ndim for t in tensors), default=0)
    vars = names(n)
    real = {n - t.ndim + d for t in tensors for d, one in enumerate(t.one) if not one}
    return tuple(v if d in real else ONE for d, v in enumerate(vars)), [
        spread(x, vars) if isinstance(x, Operand) else expr(x) for x in xs
    ]


def spread(x: Operand, vars: Sequence[Sub]) -> Expr:
    """`x` read at right-aligned `vars`, its dims of size 1 broadcast."""
    skip = len(vars) - x.ndim
    return x[tuple(ONE if one else vars[skip + d] for d, one in enumerate(x.one))]


def elementwise(f: Callable[..., Any], *xs: Any) -> OpSpec:
    """out = f(xs...) position by position, with broadcasting."""
    vars, values = broadcast(*xs)
    return OpSpec.of(Out(vars, expr(f(*values))))


def shaped_like(x: Operand, vars: Sequence[Sub]) -> tuple[int, tuple[Sub, ...]]:
    """An entry of `OpSpec.uses`: `x` only gives `vars` their extents."""
    return x.position, tuple(vars)


def like(x: Operand, value: Callable[[list[Var]], Any]) -> OpSpec:
    """A value with the shape of `x`, whose elements are not read."""
    vars = names(x.ndim)
    return OpSpec.of(Out(tuple(vars), expr(value(vars))), uses=(shaped_like(x, vars),))


def new_dims(sizes: Sequence[Any], prefix: str = "n") -> tuple[tuple[Sub, ...], dict[Var, Any]]:
    """Dims of a created tensor: output dims and the extents of their variables."""
    vars = tuple(
        ONE if local(s) == 1 == ref(s) and not rank_steps((1, s)) else Var(f"{prefix}{d}")
        for d, s in enumerate(sizes)
    )
    return vars, {v: s for v, s in zip(vars, sizes) if isinstance(v, Var)}


def created(sizes: Sequence[Any], value: Callable[[list[Var]], Any]) -> OpSpec:
    """A new tensor of the given sizes; `value` gets its variables."""
    vars, extents = new_dims(sizes)
    return OpSpec.of(Out(vars, expr(value([v for v in vars if isinstance(v, Var)]))), sizes=extents)


def window(x: Operand, dim: int, var: Var, start: Any, end: Any, step: int = 1) -> Sub:
    """Python slice `start:end:step` of a dim as a subscript."""

    def bounds(n: int, s: Any, e: Any) -> tuple[int, int]:
        first, last, _ = slice(s, e, 1).indices(n)
        return first, max(0, -((first - last) // step))

    loc, reference = (
        bounds(n[dim], get(start), get(end)) for get, n in ((local, x.shape), (ref, x.ref_shape))
    )
    begin = number(loc[0], reference[0], rank_steps((1, start)))
    length = number(loc[1], reference[1], rank_steps((1, end), (-1, start)) if isinstance(end, Lit) else ())
    whole = step == 1 and begin == 0 and loc[1] == x.shape[dim] and reference[1] == x.ref_shape[dim]
    return var if whole else Window(var, begin, length, step)


def prefix_of(x: Operand, dim: int, var: Var, other: Operand) -> Sub:
    """Subscript of a dim of which only the first `other.shape[dim]` positions are read."""
    return window(x, dim, var, 0, size_of(other, dim))


def position(index: Any, x: Operand, dim: int) -> Any:
    """A select index with negative values resolved."""
    at = both(lambda i, n: i + n if i < 0 else i, index, size_of(x, dim))
    return number(local(at), ref(at), rank_steps((1, index)))


def whole_of(x: Operand, vars: Sequence[Sub], dims: Sequence[int], tag: str = "k") -> Expr:
    """An unknown function of everything along `dims` (position by position along the others)."""
    inner = {d: Var(f"{tag}{d}") for d in dims}
    marks = [Iota(v) for v in inner.values()]
    return total("sum", list(inner.values()), fn("opaque", *marks, x[replaced(vars, inner)]))


def mixed(x: Operand, vars: Sequence[Sub], dims: Sequence[int], weight: Sequence[Expr] = ()) -> Expr:
    """An unknown LINEAR map of `x` along `dims`; the output's variables there are its others' `vars`."""
    inner = {d: Var(f"k{d}") for d in dims}
    out = [Iota(vars[d]) for d in dims if isinstance(vars[d], Var)]
    factor = fn("opaque", *[Iota(v) for v in inner.values()], *out, *weight)
    return total("sum", list(inner.values()), factor * x[replaced(vars, inner)])


def extent(vars: Iterable[Var]) -> Expr:
    """How many positions the variables have together."""
    count: Expr = Const(1)
    for v in vars:
        count = count * Size(v)
    return count


def masked(outs: Sequence[Out], mask: Sequence[bool]) -> tuple[Out | None, ...]:
    """A backward's outputs, of which only some are wanted."""
    return tuple(o if wanted else None for o, wanted in zip(outs, mask))


def rename(spec: OpSpec, suffix: str) -> OpSpec:
    """The same description with every variable's name extended, to stand beside others."""
    memo: dict[int, Expr] = {}

    def sub(s: Any) -> Any:
        if isinstance(s, Var):
            return Var(s.name + suffix)
        if isinstance(s, tuple):
            return tuple(map(sub, s))
        if isinstance(s, Window):
            return Window(Var(s.var.name + suffix), s.start, s.length, s.step)
        return walk(s) if isinstance(s, Expr) else s

    def walk(e: Expr) -> Expr:
        if id(e) not in memo:
            memo[id(e)] = step(e)
        return memo[id(e)]

    def step(e: Expr) -> Expr:
        match e:
            case Load(operand, index):
                return Load(operand, tuple(map(sub, index)))
            case Fn(name, args):
                return Fn(name, tuple(map(walk, args)))
            case Red(name, vars, body):
                return Red(name, tuple(map(sub, vars)), walk(body))
            case Rand(vars):
                return Rand(tuple(map(sub, vars)))
            case Size(var):
                return Size(sub(var))
            case Iota(var):
                return Iota(sub(var))
        return e

    outs = tuple(Out(tuple(map(sub, o.vars)), walk(o.value)) if isinstance(o, Out) else o for o in spec.outs)
    return OpSpec(
        outs,
        {sub(v): s for v, s in spec.sizes.items()},
        tuple((sub(a), sub(b)) for a, b in spec.same),
        tuple((t, tuple(map(sub, vs))) for t, vs in spec.uses),
        spec.assumes,
    )


def join(specs: Iterable[OpSpec]) -> OpSpec:
    """Several descriptions as one op with all their outputs."""
    parts = [rename(s, f"_{i}") for i, s in enumerate(specs)]
    return OpSpec(
        tuple(o for p in parts for o in p.outs),
        {v: s for p in parts for v, s in p.sizes.items()},
        tuple(x for p in parts for x in p.same),
        tuple(x for p in parts for x in p.uses),
        tuple(dict.fromkeys(x for p in parts for x in p.assumes)),
    )
