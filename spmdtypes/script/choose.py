"""Which way a script is checked: run for real, recorded without values, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from spmdtypes.checker import both
from spmdtypes.errors import CannotCheck
from spmdtypes.mesh import shrunk
from spmdtypes.report import Report
from spmdtypes.script.check import ScriptOptions, check_script
from spmdtypes.script.fakes import FakeJob, capture_all
from spmdtypes.script.large import check_large
from spmdtypes.script.launch import Launch

MOST_RANKS = 16  # that are run for real
MOST_ELEMENTS = 4_000_000  # of all parameters, on every rank at most


@dataclass(frozen=True)
class Choice:
    """`real`: the mesh to run on for real, None for none. `large`: record some ranks of the whole mesh."""

    real: Mapping[str, int] | None
    large: bool


def check_any(
    launch: Launch, world: int, mesh: Mapping[str, int] | None, limit: float, test: bool, rank: int | None
) -> Report:
    """Does a step of the script compute on `world` ranks what it computes on one? With `rank` it is seen
    from there. Raises `CannotCheck`."""
    choice = choose(launch, world, mesh, limit, test and rank is None)
    options = ScriptOptions(limit=limit)
    if choice.real is None:
        return check_large(launch, world, mesh, limit, rank or 0)
    if not choice.large:
        return check_script(launch, world, mesh, options)
    tested = check_script(launch, prod(choice.real.values()), choice.real, options)
    try:
        proved = check_large(launch, world, mesh, limit)
    except CannotCheck:
        return tested
    return both(proved, tested, choice.real)


def choose(launch: Launch, world: int, mesh: Mapping[str, int] | None, limit: float, test: bool) -> Choice:
    """A program is run where that is cheap: few ranks, few parameters. One of many ranks is run on a
    smaller mesh if its arguments say how."""
    if not test:
        return Choice(None, True)
    own = dict(mesh or {"world": world})
    smaller: Mapping[str, int] | None = own
    if world > MOST_RANKS:
        smaller = shrunk(own, MOST_RANKS) if mesh and _scales(launch, mesh) else None
    if smaller is None or not _is_small(launch, own, limit):
        return Choice(None, True)
    return Choice(smaller, smaller != own)


def _scales(launch: Launch, mesh: Mapping[str, int]) -> bool:
    """Do the arguments follow the mesh?"""
    return launch.argv(mesh) != list(launch.args)


def _is_small(launch: Launch, mesh: Mapping[str, int], limit: float) -> bool:
    """How much rank 0 holds when it first calls a module. What cannot be found out this way is run."""
    (probe,) = capture_all(FakeJob(launch, mesh, limit, probe=True), [0])
    if probe.failure is not None:
        return prod(mesh.values()) <= MOST_RANKS
    held = probe.facts.held.values()
    return sum(prod(h.shape if h.placements is not None else h.value.shape) for h in held) <= MOST_ELEMENTS
