"""Which random numbers the ranks get, so that a right program draws what the reference draws.

Ranks whose streams are equal over an axis draw replicated numbers there; ranks whose streams differ
over an axis are meant to draw the parts of a sharded tensor. Where that fits the shapes the ranks get
the reference's numbers, whole or in blocks. Where it does not, they keep their own, and a program that
draws the same numbers for different shards, or different ones for a replica, comes out wrong.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmdtypes.core.simulate import coordinates, rank_of
from spmdtypes.differential.experiment import Draw
from spmdtypes.differential.layout import span
from spmdtypes.differential.watch import Noted

Key = tuple[Any, ...]
Substitution = dict[int, torch.Tensor]  # number of a rank's draw -> values


@dataclass
class Plan:
    """Per rank, and per rank of the reference, the draws to replace; and an account of every draw."""

    ranks: list[Substitution]
    reference: list[Substitution]
    draws: list[Draw]


def plan(
    ranks: Sequence[Sequence[Noted]],
    reference: Sequence[Sequence[Noted]],
    mesh: Mapping[str, int],
    reference_mesh: Mapping[str, int],
    batch: Collection[str] = (),
) -> Plan:
    """What to replace so that a right program's ranks and reference draw the same.

    Ranks along a `batch` axis each have samples of their own: that they draw the same numbers for them
    (nobody folded the rank into the seed) is odd, but computes no other function. Numbers for a cut dim
    are made constant along it: then it does not matter which rank has which part.
    """
    out = Plan([{} for _ in ranks], [{} for _ in reference], [])
    keyed = [_by_place(r) for r in ranks]
    theirs = [_by_place(r) for r in reference]
    coords = coordinates(mesh)
    free = tuple(a for a in mesh if reference_mesh[a] == 1 and mesh[a] > 1)
    for key in dict.fromkeys(k for r in keyed for k in r):
        if any(key not in r for r in (*keyed, *theirs)):
            continue
        noted = [ranks[i][r[key]] for i, r in enumerate(keyed)]
        wanted = [reference[i][r[key]] for i, r in enumerate(theirs)]
        differing = tuple(a for a in free if _streams_differ(noted, coords, a))
        cut = _cut(noted[0].shape, wanted[0].shape, differing, mesh)
        spare = [a for a in free if a in batch and a not in differing and not noted[0].building]
        for k in range(1, len(spare) + 1):
            for more in itertools.combinations(spare, k):
                if cut is None:
                    dealt = tuple(a for a in free if a in differing or a in more)
                    cut = _cut(noted[0].shape, wanted[0].shape, dealt, mesh)
                    differing = dealt if cut is not None else differing
        treatment = "own" if cut is None else "block" if differing else "same"
        first = noted[0]
        out.draws.append(
            Draw(
                first.op,
                first.shape,
                wanted[0].shape,
                differing,
                treatment,
                first.frames,
                differing if cut else (),
            )
        )
        if cut is None:
            continue
        sources = [_constant_along(w.value, cut) for w in wanted]
        for i, source in enumerate(sources):
            if source is not None and any(cut):
                out.reference[i][theirs[i][key]] = source
        for r, c in enumerate(coords):
            source, own = sources[_reference_rank(c, reference_mesh)], noted[r].value
            if source is None or own is None or source.dtype != own.dtype:
                continue
            part = source[tuple(slice(*span(n, axes, c, mesh)) for n, axes in zip(source.shape, cut))]
            if part.shape == own.shape:
                out.ranks[r][keyed[r][key]] = part.clone()
    return out


def _constant_along(x: torch.Tensor | None, cut: Sequence[Sequence[str]]) -> torch.Tensor | None:
    """Along every cut dim the number at position 0; a tensor cut in all its dims keeps its largest."""
    if x is None or x.numel() == 0 or not any(cut):
        return x
    if all(cut):
        return x.max().expand(x.shape).clone()
    thin = x
    for d, axes in enumerate(cut):
        if axes:
            thin = thin.narrow(d, 0, 1)
    return thin.expand(x.shape).clone()


def changes_anything(ranks: Sequence[Sequence[Noted]], substitutions: Sequence[Substitution]) -> bool:
    """Whether some rank would get other numbers than it drew by itself."""
    return any(
        noted[k].value is None or not torch.equal(noted[k].value, new)  # type: ignore[arg-type]
        for noted, by_index in zip(ranks, substitutions)
        for k, new in by_index.items()
    )


def _by_place(noted: Sequence[Noted]) -> dict[Key, int]:
    """Draws keyed by op, place in the source, and how often they came from there."""
    seen: dict[Key, int] = defaultdict(int)
    out: dict[Key, int] = {}
    for i, n in enumerate(noted):
        if n.initial:
            continue
        place = (n.op, n.frames[:4])
        out[(*place, seen[place])] = i
        seen[place] += 1
    return out


def _streams_differ(noted: Sequence[Noted], coords: Sequence[Mapping[str, int]], axis: str) -> bool:
    lines: dict[Key, set[str]] = defaultdict(set)
    for n, c in zip(noted, coords):
        lines[tuple(v for a, v in c.items() if a != axis)].add(n.stream)
    return any(len(s) > 1 for s in lines.values())


def _cut(
    local: Sequence[int], whole: Sequence[int], axes: Sequence[str], mesh: Mapping[str, int]
) -> tuple[tuple[str, ...], ...] | None:
    """Which dims the axes cut, all of them used: axes in mesh order go to dims from the left."""
    if len(local) != len(whole):
        return None
    for assignment in itertools.product(range(len(whole)), repeat=len(axes)):
        cut = tuple(tuple(a for a, d in zip(axes, assignment) if d == dim) for dim in range(len(whole)))
        first = dict.fromkeys(mesh, 0)
        if all(span(n, c, first, mesh)[1] == m for n, m, c in zip(whole, local, cut)):
            return cut
    return None


def _reference_rank(coords: Mapping[str, int], reference_mesh: Mapping[str, int]) -> int:
    return rank_of({a: coords[a] if n > 1 else 0 for a, n in reference_mesh.items()}, reference_mesh)
