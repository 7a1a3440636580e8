"""What one rank reports of its run of a script: plain data and tensor values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from spmdtypes.dialects.spmd_types.claims import Claim
from spmdtypes.differential.rank import Outcome
from spmdtypes.graph import Frame, Ref


class Key(NamedTuple):
    """Which result of the script this is, told alike on every rank: the op, where it was called, the how
    manyth result of that op from there, and which of its outputs. A batch of a data loader has "batch" as
    op and its number as count."""

    op: str
    places: tuple[tuple[str, int, int], ...]
    nth: int
    out: int = 0


@dataclass(frozen=True)
class Held:
    """A parameter or buffer as it was before the first step. `value` is local; for a DTensor `placements`
    are (axis name, placement as text) pairs of its mesh and `shape` the global shape. `cut` is the dim a
    framework's attributes say is cut."""

    value: torch.Tensor
    requires_grad: bool
    placements: tuple[tuple[str, str], ...] | None = None
    shape: tuple[int, ...] = ()
    cut: int | None = None
    buffer: bool = False
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Arrival:
    """Data that meets what depends on parameters: where it came into being, and what it was. Data of one
    `group` has its rows in common."""

    key: Key
    ref: Ref
    value: torch.Tensor | None
    line: int = 0
    group: int = 0


@dataclass
class Facts:
    """`groups`: the site of every process group of this rank and its ranks. `meshes`: (names, shape, ranks)
    of device meshes. `steps` counts optimizer steps. `ended` says how the script ended, `stopped` where
    it did so by itself or for want of time."""

    held: dict[str, Held] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    meshes: list[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)  # border of a state -> parameter
    samplers: list[int] = field(default_factory=list)  # replicas of each distributed sampler
    claims: list[Claim] = field(default_factory=list)  # of the program's own annotations
    steps: int = 0
    ended: str = ""
    stopped: tuple[str, int] | None = None
    notes: tuple[str, ...] = ()


@dataclass
class ScriptOutcome(Outcome):
    """One run of a script on one rank."""

    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Replacement:
    """What the reference is given: values of parameters and buffers by name, and of data by key; for
    groups, by site, the axes they stand for. `samplers`: how many replicas distributed samplers have.
    `counts`: numbers that stand for one rank's samples, and what stands for those of all."""

    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    data: Mapping[Key, tuple[str, torch.Tensor]] = field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    samplers: tuple[int, ...] = ()
    counts: Mapping[int, int] = field(default_factory=dict)
