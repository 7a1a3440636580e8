"""Borders of the ranks against borders of the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from spmdtypes.borders import sharding_axes
from spmdtypes.contracts import Program
from spmdtypes.differential.experiment import Border
from spmdtypes.differential.layout import ShapeError, assemble, distance, reduce_over
from spmdtypes.differential.rank import output_type
from spmdtypes.notation import Type

Values = Mapping[str, torch.Tensor]  # border name -> a rank's local value
REPLICATED = Type(None)
FLOOR = 1e-6  # a difference counts against at least this share of the largest border


def border_type(program: Program, name: str, types: Mapping[str, Type]) -> Type | None:
    """The declared type of a border, None where nothing is declared."""
    kind, _, key = name.partition(":")
    if kind.startswith("output"):
        return output_type(program, name)
    if kind == "result":
        return program.results.get(key) or types.get(key) or REPLICATED
    if kind in ("state", "norm", "metric"):
        return program.results.get(name)
    return types.get(key)


def compare_seed(
    program: Program,
    types: Mapping[str, Type],
    mesh: Mapping[str, int],
    ranks: Sequence[Values],
    reference_mesh: Mapping[str, int],
    reference: Sequence[Values],
    seed: int,
    tolerance: float,
) -> dict[str, Border]:
    """Every border the reference has."""
    floor = FLOOR * _largest(reference)
    out = {}
    for name in reference[0]:
        type_ = border_type(program, name, types)
        if type_ is None or any(op == "V" for _, op in type_.partial):
            out[name] = Border(name, type_, "untested", seed=seed, detail="no type is declared")
        elif any(name not in r for r in ranks):
            rank = next(i for i, r in enumerate(ranks) if name not in r)
            out[name] = Border(name, type_, "missing", float("inf"), seed=seed, detail=f"none on rank {rank}")
        else:
            mine = after_wrapper(program, name, type_, [r[name] for r in ranks], mesh)
            theirs = after_wrapper(program, name, type_, [r[name] for r in reference], reference_mesh)
            out[name] = _compare(name, type_, mine, mesh, theirs, reference_mesh, seed, tolerance, floor)
    return out


def after_wrapper(
    program: Program, name: str, type_: Type, locals_: Sequence[torch.Tensor], mesh: Mapping[str, int]
) -> list[torch.Tensor]:
    """Gradients as the declared outer wrapper leaves them; it skips axes the parameter is cut over."""
    out = list(locals_)
    if name.startswith("grad:"):
        for axis, op in program.grads.items():
            if axis not in sharding_axes(type_) and len({tuple(t.shape) for t in out}) == 1:
                out = reduce_over(out, axis, op, mesh)
    return out


def _compare(
    name: str,
    type_: Type,
    mine: Sequence[torch.Tensor],
    mesh: Mapping[str, int],
    theirs: Sequence[torch.Tensor],
    reference_mesh: Mapping[str, int],
    seed: int,
    tolerance: float,
    floor: float,
) -> Border:
    try:
        want = assemble(theirs, type_, reference_mesh)
    except ShapeError as e:
        return Border(name, type_, "untested", seed=seed, detail=f"in the reference: {e}")
    try:
        got = assemble(mine, type_, mesh)
    except ShapeError as e:
        return Border(name, type_, "shape", float("inf"), seed=seed, detail=str(e))
    if got.value.shape != want.value.shape:
        detail = f"{list(got.value.shape)}, in the reference {list(want.value.shape)}"
        return Border(name, type_, "shape", float("inf"), seed=seed, detail=detail)
    scale = max(_magnitude(want.value), floor, 1e-30)
    error, spread = distance(got.value, want.value) / scale, got.spread / scale
    kind = "off" if error > tolerance else ""
    if spread > tolerance or want.spread / scale > tolerance:
        kind = "replicas differ"
    ratio = _ratio(got.value, want.value, tolerance) if kind == "off" else None
    return Border(name, type_, kind, error, spread, ratio, seed)


def merge(by_seed: Sequence[Mapping[str, Border]]) -> dict[str, Border]:
    """Per border the worst seed. A ratio stays only when every seed shows it."""
    out: dict[str, Border] = {}
    for borders in by_seed:
        for name, b in borders.items():
            old = out.get(name)
            if old is None or (not b.ok, b.kind != "untested", max(b.error, b.spread)) > (
                not old.ok, old.kind != "untested", max(old.error, old.spread)
            ):  # fmt: skip
                out[name] = b
    return {n: _agreed(b, [s[n] for s in by_seed if n in s]) for n, b in out.items()}


def _agreed(worst: Border, all_: Sequence[Border]) -> Border:
    if worst.ratio is None:
        return worst
    same = all(b.ratio is not None and abs(b.ratio / worst.ratio - 1) < 1e-6 for b in all_)
    return worst if same else replace(worst, ratio=None)


def finite(reference: Sequence[Values]) -> bool:
    return all(bool(t.isfinite().all()) for r in reference for t in r.values() if t.is_floating_point())


def _largest(ranks: Sequence[Values]) -> float:
    return max((_magnitude(t) for r in ranks for t in r.values()), default=0.0)


def _magnitude(x: torch.Tensor) -> float:
    x = x.double()
    return float(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0


def _ratio(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float | None:
    """c when got = c * want, for a want that is not all zero."""
    norm = float((want * want).sum())
    if not norm > 0:
        return None
    c = float((got * want).sum()) / norm
    fits = distance(got, c * want) <= tolerance * _magnitude(got)
    return c if fits and c != 0 else None
