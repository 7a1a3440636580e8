"""Moves: elements in another place or shape, values unchanged."""

from __future__ import annotations

from math import prod
from typing import Any

from spmdtypes.core.spec import (
    ONE,
    At,
    Concat,
    Const,
    Expr,
    Iota,
    Operand,
    OpSpec,
    Out,
    Reshape,
    Var,
    Window,
    fn,
)
from spmdtypes.ops.parts import (
    Ints,
    Sub,
    both,
    dropped,
    expect,
    local,
    names,
    new_dims,
    number,
    position,
    rank_steps,
    ref,
    replaced,
    shaped_like,
    size_of,
    window,
    wrap_dim,
)
from spmdtypes.ops.registry import op


def resolved(shape: Ints, have: tuple[int, ...]) -> tuple[int, ...]:
    """A target shape with its -1 filled in."""
    if -1 not in shape:
        return tuple(shape)
    rest = prod(s for s in shape if s != -1)
    return tuple((prod(have) // rest if rest else 0) if s == -1 else s for s in shape)


def reshaped(x: Operand, shape: Ints) -> OpSpec:
    loc = resolved([local(s) for s in shape], x.shape)
    reference = resolved([ref(s) for s in shape], x.ref_shape)
    return OpSpec.of(Reshape(x.position, loc, reference))


@op("view _unsafe_view reshape view_copy _reshape_copy _reshape_alias")
def view(x: Operand, size: Ints, *_: Any) -> OpSpec:
    return reshaped(x, size)


@op("flatten.using_ints")
def flatten(x: Operand, start_dim: int = 0, end_dim: int = -1) -> OpSpec:
    first, last = wrap_dim(start_dim, x.ndim), wrap_dim(end_dim, x.ndim)
    sizes = [size_of(x, d) for d in range(x.ndim)]
    return reshaped(x, [*sizes[:first], -1, *sizes[last + 1 :]])


@op("unflatten.int")
def unflatten(x: Operand, dim: int, sizes: Ints) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    have = [size_of(x, k) for k in range(x.ndim)]
    inner_local = resolved([local(s) for s in sizes], (x.shape[d],))
    inner_ref = resolved([ref(s) for s in sizes], (x.ref_shape[d],))
    return reshaped(x, [*have[:d], *map(number, inner_local, inner_ref), *have[d + 1 :]])


@op("permute permute_copy")
def permute(x: Operand, dims: Ints) -> OpSpec:
    vars = names(x.ndim)
    return OpSpec.of(Out(tuple(vars[wrap_dim(d, x.ndim)] for d in dims), x[tuple(vars)]))


@op("transpose.int transpose_copy.int swapaxes")
def transpose(x: Operand, dim0: int, dim1: int) -> OpSpec:
    order = list(range(x.ndim))
    if order:
        a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
        order[a], order[b] = b, a
    return permute(x, order)


@op("t t_copy numpy_T mT adjoint")
def t(x: Operand) -> OpSpec:
    return transpose(x, 0, 1) if x.ndim == 2 else permute(x, list(range(x.ndim)))


@op("movedim.int movedim.intlist")
def movedim(x: Operand, source: Any, destination: Any) -> OpSpec:
    src, dst = (
        [wrap_dim(d, x.ndim) for d in ([ds] if isinstance(ds, int) else ds)] for ds in (source, destination)
    )
    rest = iter(d for d in range(x.ndim) if d not in src)
    order = [src[dst.index(k)] if k in dst else next(rest) for k in range(x.ndim)]
    return permute(x, order)


@op("expand expand_copy broadcast_to")
def expand(x: Operand, size: Ints, **_: Any) -> OpSpec:
    """Dims of size 1 in the reference program that grow get a variable of their own."""
    new = len(size) - x.ndim
    vars: list[Sub] = list(names(len(size)))
    index: list[Sub] = []
    extents: dict[Var, Any] = {}
    for d, s in enumerate(size):
        grown = d < new or (x.one[d - new] and s != -1 and (local(s), ref(s)) != (1, 1))
        if d >= new:
            index.append(ONE if x.one[d - new] else vars[d])
            expect(x, [d - new], [] if x.one[d - new] or s == -1 else [s])
        if grown and (local(s), ref(s)) != (1, 1):
            extents[vars[d]] = s
        elif d < new or x.one[d - new]:
            vars[d] = ONE
    return OpSpec.of(Out(tuple(vars), x[tuple(index)]), sizes=extents)


@op("expand_as")
def expand_as(x: Operand, other: Operand) -> OpSpec:
    return expand(x, [size_of(other, d) for d in range(other.ndim)])


@op("unsqueeze unsqueeze_copy")
def unsqueeze(x: Operand, dim: int) -> OpSpec:
    vars: list[Sub] = list(names(x.ndim))
    d = wrap_dim(dim, x.ndim + 1)
    return OpSpec.of(Out((*vars[:d], ONE, *vars[d:]), x[tuple(vars)]))


@op("squeeze squeeze.dim squeeze.dims squeeze_copy.dim squeeze_copy")
def squeeze(x: Operand, dim: Any = None) -> OpSpec:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for d in (wrap_dim(d, x.ndim) for d in dims) if x.ndim and x.one[d]}
    if any(x.shape[d] == 1 and d not in gone for d in (wrap_dim(d, x.ndim) for d in dims) if x.ndim):
        raise ValueError("squeeze of a dim that has size 1 on this mesh only")
    vars = names(x.ndim)
    return OpSpec.of(Out(dropped(vars, gone), x[replaced(vars, dict.fromkeys(gone, ONE))]))


@op("slice.Tensor slice_copy.Tensor")
def slice_(x: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    vars = names(x.ndim)
    return OpSpec.of(Out(tuple(vars), x[replaced(vars, {d: window(x, d, vars[d], start, end, step)})]))


@op("narrow")
def narrow(x: Operand, dim: int, start: Any, length: Any) -> OpSpec:
    end = both(lambda s, n: s + n, start, length)
    return slice_(x, dim, start, number(local(end), ref(end), rank_steps((1, start), (1, length))))


@op("select.int select_copy.int")
def select(x: Operand, dim: int, index: Any) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    vars = names(x.ndim)
    return OpSpec.of(Out(dropped(vars, [d]), x[replaced(vars, {d: At(position(index, x, d))})]))


@op("unbind.int unbind_copy.int")
def unbind(x: Operand, dim: int = 0) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    vars = names(x.ndim)
    return OpSpec.of(*(Out(dropped(vars, [d]), x[replaced(vars, {d: At(k)})]) for k in range(x.shape[d])))


def _pieces(x: Operand, dim: int, sizes: Ints) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    outs, start = [], 0
    for j, size in enumerate(sizes):
        vars = replaced(names(x.ndim), {d: Var(f"piece{j}")})
        end = both(lambda a, b: a + b, start, size)
        outs.append(Out(vars, x[replaced(vars, {d: window(x, d, vars[d], start, end)})]))
        start = end
    return OpSpec.of(*outs)


@op("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy split.sizes")
def split_with_sizes(x: Operand, split_sizes: Ints, dim: int = 0) -> OpSpec:
    return _pieces(x, dim, split_sizes)


@op("split.Tensor split_copy.Tensor unsafe_split.Tensor")
def split(x: Operand, split_size: Any, dim: int = 0) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    count = -(-x.shape[d] // local(split_size)) if local(split_size) else 1

    def piece(j: int) -> Any:
        return both(lambda n, s: max(0, min(s, n - j * s)), size_of(x, d), split_size)

    return _pieces(x, dim, [piece(j) for j in range(count)])


@op("chunk")
def chunk(x: Operand, chunks: int, dim: int = 0) -> OpSpec:
    d = wrap_dim(dim, x.ndim)
    return split(x, both(lambda n: -(-n // chunks), size_of(x, d)), dim)


@op("cat concat")
def cat(tensors: list[Operand], dim: int = 0) -> OpSpec:
    real = [t for t in tensors if not (t.ndim == 1 and t.ref_shape == (0,))] or tensors[:1]
    return OpSpec.of(Concat(tuple(t.position for t in real), wrap_dim(dim, real[0].ndim)))


@op("stack")
def stack(tensors: list[Operand], dim: int = 0) -> OpSpec:
    d = wrap_dim(dim, tensors[0].ndim + 1)
    vars = names(tensors[0].ndim)
    which = Var("which")
    value: Expr = tensors[-1][tuple(vars)]
    for j in range(len(tensors) - 2, -1, -1):
        value = fn("where", fn("eq", Iota(which), j), tensors[j][tuple(vars)], value)
    if len(tensors) == 1:
        return OpSpec.of(Out((*vars[:d], ONE, *vars[d:]), value))
    return OpSpec.of(Out((*vars[:d], which, *vars[d:]), value), sizes={which: len(tensors)})


@op("repeat tile")
def repeat(x: Operand, repeats: Ints) -> OpSpec:
    """Each copy is a new outer digit of its dim."""
    new = len(repeats) - x.ndim
    copies, sizes = new_dims(repeats, "copy")
    own = [ONE if one else v for one, v in zip(x.one, names(x.ndim))]
    dims: list[Sub] = list(copies[:new])
    for copy, v in zip(copies[new:], own):
        dims.append((copy, v) if ONE not in (copy, v) else copy if v is ONE else v)
    return OpSpec.of(Out(tuple(dims), x[tuple(own)]), sizes=sizes)


@op("repeat_interleave.self_int")
def repeat_interleave(x: Operand, repeats: Any, dim: int | None = None, **_: Any) -> OpSpec | None:
    if dim is None:
        return None
    d, vars, copy = wrap_dim(dim, x.ndim), names(x.ndim), Var("copy")
    dims = replaced(vars, {d: (vars[d], copy)})
    return OpSpec.of(Out(dims, x[tuple(vars)]), sizes={copy: repeats})


@op("flip")
def flip(x: Operand, dims: Ints) -> OpSpec:
    vars = names(x.ndim)
    back = {
        d: fn("sub", Const(both(lambda n: n - 1, size_of(x, d))), Iota(vars[d]))
        for d in (wrap_dim(d, x.ndim) for d in dims)
    }
    return OpSpec.of(Out(tuple(vars), x[replaced(vars, back)]), uses=(shaped_like(x, vars),))


@op("roll")
def roll(x: Operand, shifts: Any, dims: Any = ()) -> OpSpec | None:
    shift_list = [shifts] if isinstance(shifts, int) else list(shifts)
    dim_list = [dims] if isinstance(dims, int) else list(dims)
    if not dim_list and x.ndim != 1:
        return None
    vars = names(x.ndim)
    moved = {
        wrap_dim(d, x.ndim): fn("mod", Iota(vars[wrap_dim(d, x.ndim)]) - s, Const(size_of(x, d)))
        for d, s in zip(dim_list or [0], shift_list)
    }
    return OpSpec.of(Out(tuple(vars), x[replaced(vars, moved)]), uses=(shaped_like(x, vars),))


@op("diagonal diagonal_copy")
def diagonal(x: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> OpSpec:
    a, b = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    vars, along = names(x.ndim), Var("diag")
    rows, cols = max(0, -offset), max(0, offset)
    length = both(lambda n, m: max(0, min(n - rows, m - cols)), size_of(x, a), size_of(x, b))
    at = {a: Iota(along) + rows if rows else Iota(along), b: Iota(along) + cols if cols else Iota(along)}
    return OpSpec.of(Out((*dropped(vars, [a, b]), along), x[replaced(vars, at)]), sizes={along: length})


@op("unfold")
def unfold(x: Operand, dimension: int, size: int, step: int) -> OpSpec:
    if x.ndim == 0:
        return OpSpec.of(Out((ONE,), x[()]))
    d = wrap_dim(dimension, x.ndim)
    vars, inner = names(x.ndim), Var("inside")
    count = both(lambda n: (n - size) // step + 1, size_of(x, d))
    at = fn("add", Iota(vars[d]) * step, Iota(inner))
    return OpSpec.of(Out((*vars, inner), x[replaced(vars, {d: at})]), sizes={vars[d]: count, inner: size})


@op("as_strided as_strided_copy")
def as_strided(x: Operand, size: Ints, stride: Ints, storage_offset: Any = None) -> OpSpec | None:
    """Only of a contiguous tensor whose dims it keeps, drops, swaps or narrows."""
    have = [prod(x.shape[d + 1 :]) for d in range(x.ndim)]
    want = [local(s) for s in stride]
    offset = local(storage_offset) or 0
    if offset == 0 and _row_major([local(s) for s in size], want) and prod(map(local, size)) == prod(x.shape):
        return reshaped(x, size)
    index: list[Sub] = []
    vars: list[Sub] = [ONE if local(s) == 1 == ref(s) else v for s, v in zip(size, names(len(size)))]
    free = [j for j, v in enumerate(vars) if isinstance(v, Var)]
    for d, step in enumerate(have):
        at, offset = divmod(offset, step)
        j = next((j for j in free if want[j] == step and local(size[j]) + at <= x.shape[d]), None)
        if j is None:
            index.append(ONE if x.one[d] else At(at))
        else:
            free.remove(j)
            whole = at == 0 and local(size[j]) == x.shape[d] and ref(size[j]) == x.ref_shape[d]
            index.append(vars[j] if whole else Window(vars[j], at, size[j]))
    return None if free or offset else OpSpec.of(Out(tuple(vars), x[tuple(index)]))


def _row_major(size: Ints, stride: Ints) -> bool:
    return all(n == 1 or s == prod(size[d + 1 :]) for d, (n, s) in enumerate(zip(size, stride)))


@op("fsdp.split_with_sizes_copy.default")
def fsdp_split(x: Operand, split_sizes: Ints, dim: int = 0, **_: Any) -> OpSpec:
    return _pieces(x, dim, split_sizes)
