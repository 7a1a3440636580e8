"""Ranks that hold different parameters: stages of a pipeline, experts of their own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from spmdtypes.checker import replace_mesh
from spmdtypes.core.simulate import coordinates
from spmdtypes.graph import Graph
from spmdtypes.script.facts import Facts, ScriptOutcome
from spmdtypes.script.stitch import Parts

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True)
class Part:
    """The ranks at one combination of coordinates of the `split` axes, as a mesh of their own."""

    at: Mapping[str, int]
    ranks: tuple[int, ...]
    mesh: Mapping[str, int]


def split_axes(facts: Sequence[Facts], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Axes along which ranks hold parameters of other names."""
    coords = coordinates(mesh)
    names = {tuple(c.items()): frozenset(f.held) for c, f in zip(coords, facts)}
    return tuple(
        a for a in mesh if any(names[tuple(c.items())] != names[tuple((c | {a: 0}).items())] for c in coords)
    )


def parts_of(mesh: Mapping[str, int], split: Sequence[str]) -> Iterator[Part]:
    """One part for each combination of coordinates of the split axes; all ranks when there are none."""
    coords = coordinates(mesh)
    rest = {a: n for a, n in mesh.items() if a not in split}
    for at in itertools.product(*(range(mesh[a]) for a in split)):
        fixed = dict(zip(split, at))
        ranks = tuple(r for r, c in enumerate(coords) if all(c[a] == k for a, k in fixed.items()))
        yield Part(fixed, ranks, rest)


def common(ranks: Sequence[int], mesh: Mapping[str, int]) -> Mapping[str, int] | None:
    """The mesh that some ranks form when they share coordinates on some axes and have all others; None when
    they form none."""
    coords = coordinates(mesh)
    free = {a: n for a, n in mesh.items() if len({coords[r][a] for r in ranks}) == n}
    return free if prod(free.values()) == len(ranks) else None


def on_part(graph: Graph, mesh: Mapping[str, int]) -> Graph:
    """A graph seen on the mesh of its part."""
    if len(mesh) == len(graph.mesh):
        return graph
    return replace(replace_mesh(graph, mesh), coords={a: c for a, c in graph.coords.items() if a in mesh})


# ---- lists of modules that every rank numbers from 0


def renamed(
    outcomes: Sequence[ScriptOutcome], native: Facts, mesh: Mapping[str, int]
) -> list[dict[str, str]]:
    """For every rank, the names its parameters have on one rank, where its lists of modules hold only a part
    of the whole list: index i on coordinate c becomes c * length + i."""
    facts = [o.facts for o in outcomes]
    known = set(facts[0].held)
    if any(set(f.held) != known for f in facts) or not set(native.held) - known:
        return [{} for _ in outcomes]
    found: list[dict[str, str]] = [{} for _ in outcomes]
    for stem, length in _lengths(known).items():
        whole = _lengths(native.held).get(stem, length)
        ratio = whole // length if whole % length == 0 else 1
        if ratio < 2:
            continue
        members = [n for n in known if _stem(n) == stem]
        axis = _axis(facts, members, ratio, mesh)
        if axis is None:
            continue
        for r, c in enumerate(coordinates(mesh)):
            found[r] |= {n: _shifted(n, c[axis] * length) for n in members}
    return found


def _stem(name: str) -> str | None:
    """The name before its first index, and what follows that."""
    m = _INDEX.search(name)
    return name[: m.start()] if m else None


def _lengths(names: Mapping[str, object] | set[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for n in names:
        m = _INDEX.search(n)
        if m:
            out[n[: m.start()]] = max(out.get(n[: m.start()], 0), int(m.group()) + 1)
    return out


def _shifted(name: str, by: int) -> str:
    m = _INDEX.search(name)
    assert m is not None
    return f"{name[: m.start()]}{int(m.group()) + by}{name[m.end() :]}"


def _axis(facts: Sequence[Facts], members: Sequence[str], ratio: int, mesh: Mapping[str, int]) -> str | None:
    """The axis of that size along which the members differ."""
    for a, n in mesh.items():
        if n == ratio:
            for name in members:
                if a in Parts(tuple(f.held[name].value for f in facts), mesh).differing:
                    return a
    return None


def rename(outcome: ScriptOutcome, names: Mapping[str, str]) -> None:
    """Give an outcome's parameters their names on one rank."""
    if not names:
        return
    facts = outcome.facts
    facts.held = {names.get(n, n): h for n, h in facts.held.items()}
    owners = facts.owners
    borders = {b: _border(b, names, owners) for b in outcome.borders}
    outcome.borders = {borders[b]: v for b, v in outcome.borders.items()}
    facts.owners = {_border(b, names, owners): names.get(n, n) for b, n in owners.items()}
    graph = outcome.graph
    if graph is not None:
        graph.outputs = {_border(b, names, owners): r for b, r in graph.outputs.items()}
        graph.dtensors = {_border(b, names, owners): p for b, p in graph.dtensors.items()}
        graph.nodes = [
            replace(n, name=names[n.name]) if n.op == "input" and n.name in names else n for n in graph.nodes
        ]


def _border(border: str, names: Mapping[str, str], owners: Mapping[str, str]) -> str:
    kind, _, key = border.partition(":")
    if border in owners and owners[border] in names:
        return f"{kind}:{names[owners[border]]}{key.removeprefix(owners[border])}"
    return f"{kind}:{names[key]}" if key in names else border
