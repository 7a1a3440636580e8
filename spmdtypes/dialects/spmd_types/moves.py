"""What the operations of spmd_types compute, in index notation.

Its collectives are ordinary ones of torch.distributed. `convert` also cuts, pads and zeroes by rank, in
three operations of its own:

    replicate_to_varying   the rank's part of a dim
    varying_to_partial     zeros, with the rank's value at its place
    replicate_to_partial   the value on the first rank, zeros elsewhere
"""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import Const, Iota, Operand, OpSpec, Out, Var, fn
from spmdtypes.graph import Lit
from spmdtypes.ops import view
from spmdtypes.ops.parts import both, names, replaced, size_of, wrap_dim
from spmdtypes.ops.registry import op


def _times(rank: Any, by: Any) -> Any:
    """rank * by, where `by` is the same on all ranks."""
    here, there = (by.local, by.ref) if isinstance(by, Lit) else (by, by)
    if not isinstance(rank, Lit):
        return Lit(rank * here, rank * there) if here != there else rank * here
    grown = tuple((axis, step * here) for axis, step in rank.rank)
    return Lit(rank.local * here, rank.ref * there, grown, rank.affine)


@op("spmd_types.replicate_to_varying.default")
def part_of_rank(x: Operand, parts: Any, dim: int, rank: Any, stack: bool) -> OpSpec | None:
    if stack:
        return view.select(x, dim, rank)
    d = wrap_dim(dim, x.ndim)
    length = both(lambda n, k: -(-n // k), size_of(x, d), parts)
    return view.narrow(x, d, _times(rank, length), length)


@op("spmd_types.varying_to_partial.default")
def padded_at_rank(x: Operand, parts: Any, dim: int, rank: Any, stack: bool) -> OpSpec:
    if stack:
        d, whole = wrap_dim(dim, x.ndim + 1), names(x.ndim + 1)
        hit = fn("eq", Iota(whole[d]), Const(rank))
        value = x[tuple(v for k, v in enumerate(whole) if k != d)]
        return OpSpec.of(Out(tuple(whole), fn("where", hit, value, 0)), sizes={whole[d]: parts})
    d, vars = wrap_dim(dim, x.ndim), names(x.ndim)
    length = size_of(x, d)
    j = Var("j")
    at = Iota(j) - Const(_times(rank, length))
    inside = fn("where", fn("lt", at, Const(length)), x[replaced(vars, {d: at})], 0)
    value = fn("where", fn("ge", at, 0), inside, 0)
    grown = both(lambda n, k: n * k, length, parts)
    return OpSpec.of(Out(replaced(vars, {d: j}), value), sizes={j: grown})


@op("spmd_types.replicate_to_partial.default")
def on_first_rank(x: Operand, rank: Any) -> OpSpec:
    vars = tuple(names(x.ndim))
    return OpSpec.of(Out(vars, fn("where", fn("eq", Const(rank), 0), x[vars], 0)))
