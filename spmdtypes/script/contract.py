"""What a script's borders must denote, read off what the ranks hold before the first step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from torch import Tensor

from spmdtypes.contracts import Program
from spmdtypes.diagnostics.finding import Finding, Span
from spmdtypes.drive import short_dtype
from spmdtypes.notation import Dim, Type
from spmdtypes.script.axes import axes_named
from spmdtypes.script.facts import Arrival, Facts, Held, Key, Replacement
from spmdtypes.script.launch import Launch
from spmdtypes.script.stages import common
from spmdtypes.script.stitch import Parts, Whole, data, parameter

# made of nothing but numbers of the script: equal values are meant to be equal
CERTAIN = ("aten.arange", "aten.linspace", "aten.full", "aten.ones", "aten.eye", "aten.scalar_tensor")
_SHARD = re.compile(r"^_?(?:Strided)?S(?:hard)?\((?:dim=)?(\d+)")


@dataclass
class Contract:
    """Types and global values of parameters and of data, and what was noticed while finding them.

    `parted`: parameters whose replicas differ before the first step, and the axes. `unplaced`:
    those that are not known to fit together, and are not compared.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    held: dict[str, Whole] = field(default_factory=dict)
    data: dict[Key, tuple[str, Whole]] = field(default_factory=dict)
    parted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def replacement(self, axes: Mapping[str, tuple[str, ...]], samplers: Sequence[int]) -> Replacement:
        """What the reference is given."""
        return Replacement(
            {n: w.value for n, w in self.held.items()},
            {k: (name, w.value) for k, (name, w) in self.data.items()},
            axes,
            tuple(samplers),
        )

    def is_as(self, native: Facts) -> bool:
        """Does the run on the mesh of ones have all these values by itself?"""
        return not self.data and all(_is(w.value, native.held[n].value) for n, w in self.held.items())

    def counts(self) -> dict[int, int]:
        """A rank's counts of samples, and of the elements of its samples, and those of all ranks."""
        found: dict[int, int] = {}
        for _, w in self.data.values():
            dims = w.type.dims or ()
            whole = local = 1
            for d, n in zip(dims, w.value.shape):
                cut = prod(self.mesh[a] for a in d.axes)
                whole, local = whole * n, local * (n // cut)
                if whole > local > 1:
                    found.setdefault(local, whole)
        return found

    def read_off_sizes(self, guessed: Sequence[str]) -> None:
        """Say of which parameters only the sizes tell how they are cut."""
        if guessed:
            shown = ", ".join(guessed[:3]) + (f" and {len(guessed) - 3} more" if len(guessed) > 3 else "")
            self.assumptions.append(f"how {shown} are cut is read off their sizes")

    def name_data(self, key: Key, line: int, whole: Whole) -> None:
        """Data as an input of the program, with a name of its own."""
        name = f"data of line {line}" if line else f"batch {key.nth} of the data loader"
        taken = sum(n.startswith(name) for n, _ in self.data.values())
        self.data[key] = (f"{name} ({taken + 1})" if taken else name, whole)

    def types(self) -> dict[str, Type]:
        return {n: w.type for n, w in self.held.items()}


def contract(
    ranks: Sequence[Facts], native: Facts, mesh: Mapping[str, int], axes: Mapping[str, tuple[str, ...]]
) -> Contract:
    """`native` is the run on the mesh of ones with its own values; `axes` what groups stand for, by site."""
    found = Contract(mesh)
    _held(found, ranks, native, mesh, axes)
    _data(found, ranks, native, mesh)
    return found


# ---- parameters


def _held(
    found: Contract,
    ranks: Sequence[Facts],
    native: Facts,
    mesh: Mapping[str, int],
    axes: Mapping[str, tuple[str, ...]],
) -> None:
    names = dict.fromkeys(n for r in ranks for n in r.held if n in native.held)
    likely: Counter[str] = Counter()
    guessed: list[str] = []
    for name in names:
        holders = [i for i, r in enumerate(ranks) if name in r.held]
        free = mesh if len(holders) == len(ranks) else common(holders, mesh)
        if free is None:
            found.unplaced.append(name)
            continue
        rows = [ranks[i].held[name] for i in holders]
        first, whole = rows[0], native.held[name]
        parts = Parts(tuple(h.value for h in rows), free)
        if first.placements is not None:
            placed = _by_placements(first, parts, free, axes)
        elif first.buffer and _no_values_needed(parts, whole):
            placed = None
        else:
            shape = whole.shape if whole.placements is not None else tuple(whole.value.shape)
            placed = parameter(parts, shape, first.cut, [a for a, _ in likely.most_common()])
            if placed is not None and any(d.axes for d in placed.type.dims or ()):
                guessed.append(name)
        if placed is None:
            if not first.buffer:
                found.unplaced.append(name)
            continue
        if placed.parted and first.buffer:
            continue
        found.held[name] = placed
        if placed.parted:
            found.parted[name] = placed.parted
        likely.update(a for d in placed.type.dims or () for a in d.axes)
    found.read_off_sizes(guessed)


def _no_values_needed(parts: Parts, whole: Held) -> bool:
    """A buffer that has another shape on the mesh of ones, or differs between ranks: a cache of its own."""
    return parts.values[0].shape != whole.value.shape or bool(parts.differing)


def _by_placements(
    first: Held, parts: Parts, mesh: Mapping[str, int], sites: Mapping[str, tuple[str, ...]]
) -> Whole | None:
    """A DTensor says how it is cut."""
    dims = placed_dims(first, mesh, sites)
    if dims is None:
        return None
    t = Type(tuple(Dim(n, tuple(a)) for n, a in zip(first.shape, dims)), short_dtype(first.value.dtype))
    from spmdtypes.differential.layout import ShapeError, assemble

    try:
        value = assemble(parts.values, t, mesh)
    except ShapeError:
        return None
    cut = {a for d in dims for a in d}
    left = tuple(a for a in parts.differing if a not in cut)
    return Whole(t, value.value.to(first.value.dtype), left)


def placed_dims(
    held: Held, mesh: Mapping[str, int], sites: Mapping[str, tuple[str, ...]]
) -> list[list[str]] | None:
    """The axes that cut each dim, as a DTensor's placements say. Strided shards lie inside the axes that
    follow them. None: it is pending, or cut over what is no axis of ours."""
    dims: list[list[str]] = [[] for _ in held.shape]
    pairs = list(held.placements or ())
    strided = [p for p in pairs if "Strided" in p[1] or p[1].startswith("_S")]
    for axis, placement in [p for p in pairs if p not in strided] + strided:
        m = _SHARD.match(placement)
        axes = axes_named(axis, mesh, sites)
        if m and axes:
            dims[int(m.group(1))] += [a for a in axes if mesh[a] > 1]
        elif m or placement.startswith("P"):
            return None
    return dims


def parted_replicas(found: Contract, ranks: Sequence[Facts]) -> Finding | None:
    """Replicas of parameters that hold different values before the first step, told of the first one."""
    trained = [n for n in found.parted if any(n in r.held and r.held[n].requires_grad for r in ranks)]
    if not trained:
        return None
    first, axes = trained[0], found.parted[trained[0]]
    frames = next(r.held[first].frames for r in ranks if first in r.held)
    others = f" (and {len(trained) - 1} more)" if len(trained) > 1 else ""
    over = " and ".join(axes)
    return Finding(
        "SPMD501",
        "error",
        f"{first}{others} is not the same on the ranks of {over} before the first step: the replicas start "
        "from different values",
        Span.of(frames[0]) if frames else None,
        hint=f"seed alike over {over} before the model is made, or broadcast its parameters",
        evidence="tested",
        axes=axes,
        border=f"param:{first}",
    )


# ---- data


def _data(found: Contract, ranks: Sequence[Facts], native: Facts, mesh: Mapping[str, int]) -> None:
    mine = [{a.key: a for a in r.arrivals} for r in ranks]
    theirs = {a.key: a for a in native.arrivals}
    rows: dict[Key, Parts] = {}
    apart: dict[int, set[str]] = {}
    everything = {key: a for m in reversed(mine) for key, a in m.items()}
    for key, first in everything.items():
        holders = [i for i, m in enumerate(mine) if key in m]
        known = tuple(v for i in holders if (v := mine[i][key].value) is not None)
        free = common(holders, mesh) if len(known) == len(holders) else None
        if free is not None:
            rows[key] = Parts(known, free)
            apart.setdefault(first.group, set()).update(rows[key].differing)
    placed: dict[Key, Whole] = {}
    for key, parts in rows.items():
        first, there = everything[key], theirs.get(key)
        differing = [a for a in parts.mesh if a in apart[first.group]]
        if key.op.startswith(CERTAIN):
            differing = list(parts.differing)
        whole = data(parts, there.value if there is not None else None, differing)
        if whole is not None:
            placed[key] = whole
    if _has_all(placed, theirs):
        placed = {k: w for k, w in placed.items() if k in theirs and _is(w.value, theirs[k].value)}
    for key, whole in placed.items():
        found.name_data(key, everything[key].line, whole)


def _has_all(placed: Mapping[Key, Whole], theirs: Mapping[Key, Arrival]) -> bool:
    """Does the mesh of ones meet the ranks' data by itself, cut into other pieces? So it is when the global
    batch is sliced by rank and then split into microbatches of one size."""
    cut = {k for k, w in placed.items() if any(d.axes for d in w.type.dims or ())}
    families = {(k.op, k.places) for k in cut}
    pieces = {f: [k for k in theirs if (k.op, k.places) == f] for f in families}
    if not families or all(set(pieces[f]) <= cut for f in families):
        return False
    for f in families:
        mine = [placed[k].value for k in cut if (k.op, k.places) == f]
        whole = [v for k in pieces[f] if (v := theirs[k].value) is not None]
        if not whole or _rows(mine) != _rows(whole):
            return False
    return True


def _rows(values: Sequence[Tensor]) -> Counter[bytes]:
    """All rows, in no order."""
    return Counter(
        r.contiguous().view(-1).numpy().tobytes() for v in values for r in (v if v.ndim else v.reshape(1))
    )


def _is(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and bool((a == b).all())


# ---- the program


def program(
    launch: Launch,
    mesh: Mapping[str, int],
    found: Contract,
    facts: Facts,
    borders: Sequence[Mapping[str, Tensor]],
    reference: Mapping[str, Tensor],
) -> Program:
    """The contract of what a step leaves: parameters and states denote what they did, gradients are those
    of one device, norms and what is read are the same everywhere."""
    params = found.types()
    results: dict[str, Type] = {}
    owners = facts.owners
    for border, value in (borders[0] if borders else {}).items():
        kind = border.partition(":")[0]
        if kind in ("norm", "metric"):
            results[border] = Type(tuple(Dim(n) for n in value.shape))
        elif kind == "state" and border in owners and all(border in b for b in borders):
            t = params.get(owners[border])
            held = facts.held.get(owners[border])
            if t is not None and held is not None and held.value.shape == value.shape and value.ndim:
                results[border] = replace(t, dtype=None)
            elif value.ndim == 0:
                results[border] = Type(())
            elif border in reference and all(border in b for b in borders):
                parts = Parts(tuple(b[border] for b in borders), mesh)
                likely = [a for d in (t.dims or () if t is not None else ()) for a in d.axes]
                placed = parameter(parts, tuple(reference[border].shape), None, likely)
                if placed is not None:
                    results[border] = replace(placed.type, dtype=None)
    return Program(
        name=launch.name,
        mesh=dict(mesh),
        build=_never,
        inputs={name: w.type for name, w in found.data.values()},
        params=params,
        results=results,
        step=_never,
        file=None if launch.module else Path(launch.target),
        assumptions=tuple(found.assumptions),
    )


def _never(*args: object) -> object:
    raise AssertionError("a script's program is not built by the checker")
