"""The mesh a script runs on, read off the device meshes and process groups it made."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from spmdtypes.capture.groups import Groups
from spmdtypes.core.simulate import coordinates
from spmdtypes.errors import CannotCheck
from spmdtypes.graph import Graph
from spmdtypes.script.facts import Facts

_KNOWN = (
    ("tp", re.compile(r"(^|[^a-z])tp([^a-z]|$)|tensor|model", re.I)),
    ("cp", re.compile(r"(^|[^a-z])cp([^a-z]|$)|context|sequence|ulysses|ring", re.I)),
    ("ep", re.compile(r"(^|[^a-z])ep([^a-z]|$)|expert", re.I)),
    ("pp", re.compile(r"(^|[^a-z])pp([^a-z]|$)|pipe|stage", re.I)),
    ("dp", re.compile(r"(^|[^a-z])(dp|fsdp|ddp)([^a-z]|$)|data|replica|shard", re.I)),
)


def mesh_of(facts: Sequence[Facts], world: int, declared: Mapping[str, int] | None) -> dict[str, int]:
    """Axes and sizes, outermost first, that all groups are products of where that is possible.

    Raises `CannotCheck` when the declared mesh has not `world` ranks.
    """
    if declared:
        if prod(declared.values()) != world:
            raise CannotCheck(f"the mesh {_shown(declared)} has {prod(declared.values())} ranks, not {world}")
        return dict(declared)
    sets = {ranks for f in facts for ranks in f.groups.values() if 1 < len(ranks) < world}
    named = [
        (names, shape)
        for names, shape, ranks in facts[0].meshes
        if prod(shape) == world and ranks == tuple(range(world)) and len(names) == len(shape)
    ]
    if named:
        names, shape = max(named, key=lambda m: sum(n > 1 for n in m[1]))
        mesh = dict(zip(names, shape))
        if all(_is_product(s, mesh) for s in sets):
            return mesh
    cuts = _boundaries(sets, world)
    if len(cuts) == 2:
        return {"dp": world}
    lengths = [b // a for a, b in pairwise(cuts)][::-1]
    return dict(zip(_names(facts, lengths), lengths))


def _shown(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{a}={n}" for a, n in mesh.items())


def _is_product(ranks: tuple[int, ...], mesh: Mapping[str, int]) -> bool:
    return bool(Groups(mesh, {}).axes(ranks))


def _boundaries(sets: Iterable[tuple[int, ...]], world: int) -> list[int]:
    """Strides at which the number of a rank is cut into coordinates, from 1 to `world`."""
    cuts = {1, world}
    for ranks in sets:
        rest = list(ranks)
        while len(rest) > 1:
            step = rest[1] - rest[0]
            run = 1
            while run < len(rest) and rest[run] == rest[0] + run * step:
                run += 1
            cuts |= {step, step * run}
            rest = rest[::run]
    kept = [1]
    for c in sorted(cuts):
        if c > kept[-1] and c <= world and c % kept[-1] == 0 and world % c == 0:
            kept.append(c)
    return kept if kept[-1] == world else [*kept, world]


def _names(facts: Sequence[Facts], sizes: Sequence[int]) -> list[str]:
    """A name for each axis, from what the groups along it alone are called."""
    plain = {f"axis{i}": n for i, n in enumerate(sizes)}
    names: dict[str, str] = {}
    for site, ranks in facts[0].groups.items():
        axes = Groups(plain, {}).axes(ranks) if len(ranks) > 1 else ()
        if len(axes) == 1:
            found = _called(site)
            if found and found not in names.values():
                names.setdefault(axes[0], found)
    out = []
    for i, axis in enumerate(plain):
        name = names.get(axis, "")
        if not name:
            spare = [n for n in ("dp", "tp", "cp", "ep") if n not in names.values() and n not in out]
            name = spare[0] if i == 0 else spare[min(1, len(spare) - 1)]
        out.append(name)
    return out


def _called(site: str) -> str | None:
    """An axis name for a group, from its description or the line that made it."""
    if " < " in site or re.search(r":\d+$", site):
        texts = [_line(place) for place in site.split(" < ")]
    else:
        texts = [site.removeprefix("mesh_")]
    for text in texts:
        target = _assigned(text)
        for words in (target, text):
            for name, pattern in _KNOWN:
                if words and pattern.search(words.replace("_", " ")):
                    return name
    return None


def _line(place: str) -> str:
    file, _, number = place.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdecimal() else ""


def _assigned(text: str) -> str:
    """The targets of an assignment."""
    try:
        (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return ""
    return " ".join(ast.unparse(t) for t in statement.targets) if isinstance(statement, ast.Assign) else ""


def on_mesh(graph: Graph, mesh: Mapping[str, int], rank: int) -> Graph:
    """A graph recorded on a flat mesh, with its collectives over the axes of `mesh`."""
    groups = Groups(mesh, {})
    nodes = []
    for n in graph.nodes:
        if n.comm is not None:
            axes = groups.axes(n.comm.ranks) if len(n.comm.ranks) > 1 else n.comm.axes
            n = replace(n, comm=replace(n.comm, axes=axes))
        nodes.append(n)
    said = {
        border: {a: p for name, p in placed.items() for a in axes_named(name, mesh, {})}
        for border, placed in graph.dtensors.items()
    }
    coords = dict(coordinates(mesh)[rank])
    return replace(graph, mesh=dict(mesh), coords=coords, nodes=nodes, dtensors=said)


def axes_named(name: str, mesh: Mapping[str, int], sites: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The axes a dim of a device mesh stands for: one of ours, a flattened one, or one known by its ranks."""
    if name in mesh:
        return (name,)
    if name.startswith("ranks:"):
        ranks = tuple(int(r) for r in name.removeprefix("ranks:").split(","))
        return Groups(mesh, {}).axes(ranks) if len(ranks) > 1 else ()
    return sites.get(f"mesh_{name}", ())


def axes_by_site(facts: Facts, mesh: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """What the group made at a site stands for."""
    groups = Groups(mesh, {})
    found = {site: groups.axes(ranks) for site, ranks in facts.groups.items() if len(ranks) > 1}
    for names, _, _ in facts.meshes:
        for name in names:
            if name in mesh:
                found.setdefault(f"mesh_{name}", (name,))
    return found
