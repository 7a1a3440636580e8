"""What a differential run found: plain data, without torch except for tensor values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spmdtypes.graph import Frame, Graph, Node, Ref
from spmdtypes.notation import Type

if TYPE_CHECKING:
    from spmdtypes.differential.oracle import Oracle

Coords = Mapping[str, int]
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Call:
    """A collective as one rank issued it. `group` holds global ranks, `axes` the mesh axes they span
    (empty: no product of axes). Frames innermost first. `peer` is set for send and recv."""

    kind: str
    group: tuple[int, ...]
    axes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    reduce_op: str = ""
    root: int | None = None
    peer: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # all_to_all: (output, input)
    blocking: bool = True
    frames: tuple[Frame, ...] = ()

    def __str__(self) -> str:
        over = " over " + ",".join(self.axes) if self.axes else f" among ranks {list(self.group)}"
        what = " ".join(str(list(s)) for s in self.shapes)
        return f"{self.kind}{over}{' of ' + self.dtype + what if what else ''}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the user's program on one rank, or the death of its process.

    `stage` is "build" (constructor), "load" (a parameter's shape is not the declared one), "run".
    """

    rank: int
    stage: str
    error: str
    message: str
    frames: tuple[Frame, ...] = ()
    seed: int = 0
    output: str = ""  # tail of what the process printed


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two ranks of one group that do not issue the same collective next. `None`: nothing more.

    `reason`: "kind", "shape", "dtype", "reduce_op", "root", "splits", "missing", "deadlock".
    Both ranks went the same way up to `last`, then to `parted`: places (file, line) of ops, looked for
    since the last collective that did meet, or else from the start; None: nothing noted, no further op.
    """

    reason: str
    ranks: tuple[int, int]
    calls: tuple[Call | None, Call | None]
    coords: tuple[Coords, Coords] = ({}, {})
    seed: int = 0
    last: Place | None = None
    parted: tuple[Place | None, Place | None] = (None, None)

    def __str__(self) -> str:
        a, b = (str(c) if c else "nothing more" for c in self.calls)
        return f"rank {self.ranks[0]} issues {a} where rank {self.ranks[1]} issues {b}"


@dataclass(frozen=True, slots=True)
class Border:
    """One compared result.

    `kind` is "" (right), "off" (the ranks agree on a wrong value), "replicas differ", "shape",
    "missing" (no value on some rank) or "untested". `ratio` is set when the value is a uniform
    multiple of the reference value. Errors are relative to the scale of the reference value.
    `coarse`: right only as far as a low precision lets one see.
    """

    name: str
    type: Type | None
    kind: str = ""
    error: float = 0.0
    spread: float = 0.0
    ratio: float | None = None
    seed: int | None = None
    detail: str = ""
    coarse: bool = False

    @property
    def ok(self) -> bool:
        return self.kind in ("", "untested")


@dataclass(frozen=True, slots=True)
class Draw:
    """A random draw of the program, in program order, and what was done about it.

    `treatment`: "same" (replicated stream, reference's numbers), "block" (streams differ over `axes`,
    each rank got its part of the reference's numbers), "own" (fits neither; the ranks kept their own).
    `streams` says over which axes the ranks' streams differ.
    """

    op: str
    shape: tuple[int, ...]
    reference_shape: tuple[int, ...] | None
    streams: tuple[str, ...]
    treatment: str
    frames: tuple[Frame, ...] = ()
    axes: tuple[str, ...] = ()


@dataclass(slots=True)
class RankRun:
    """One rank's run. `graph` is the recorded program of the first seed, `values[seed]` what its nodes
    gave (only of seeds that ran the same ops); `borders[seed]` the raw local border values."""

    rank: int
    coords: dict[str, int]
    error: Failure | None = None
    graph: Graph | None = None
    values: dict[int, dict[Ref, Any]] = field(default_factory=dict)
    borders: dict[int, dict[str, Any]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of parameters, by FQN


@dataclass(slots=True)
class Experiment:
    """A program run for real on every rank, and on the reference mesh with the same global values.

    `kept_axes` had to keep their size in the reference; `tested_axes` are the others. `crossed` are
    equal-looking collectives that ranks issue from different source lines. `notes` are in user terms.
    """

    mesh: dict[str, int]
    reference_mesh: dict[str, int]
    seeds: tuple[int, ...]  # those that counted
    ranks: list[RankRun]
    reference: list[RankRun]
    kept_axes: tuple[str, ...] = ()
    borders: dict[str, Border] = field(default_factory=dict)
    divergence: Divergence | None = None
    failures: tuple[Failure, ...] = ()
    crossed: tuple[Divergence, ...] = ()
    draws: tuple[Draw, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    tolerance: float = 1e-6
    grads: dict[str, str] = field(default_factory=dict)  # what the outer wrapper does to gradients
    averaged: frozenset[str] = frozenset()  # axes over which the declared loss is a mean
    rounded: Experiment | None = None  # of a program in low precision: the run with its roundings
    _oracle: Oracle | None = field(default=None, repr=False)

    @property
    def tested_axes(self) -> tuple[str, ...]:
        return tuple(a for a, n in self.mesh.items() if n > 1 and a not in self.kept_axes)

    @property
    def wrong(self) -> tuple[Border, ...]:
        """Borders that are not what the reference computes, worst first."""
        return tuple(sorted((b for b in self.borders.values() if not b.ok), key=lambda b: -b.error))

    @property
    def stalled(self) -> bool:
        """The ranks stood still for no reason in the program: nothing was tested."""
        from spmdtypes.differential.process import stalled

        return stalled(self.failures)

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.divergence or self.failures)

    def oracle(self) -> Oracle:
        """Readings of single nodes, for the inference."""
        from spmdtypes.differential.oracle import Oracle

        if self._oracle is None:
            self._oracle = Oracle(self)
        return self._oracle

    def same_rounding(self, wide: Ref, low: Ref, node: Node) -> bool:
        """Is the sum of rounded summands always the rounding of the sum? Refs of rank 0's graph."""
        from spmdtypes.differential.precision import same_rounding

        return node.comm is not None and same_rounding(self, wide, low, node.comm)

    def suspects(self, border: str) -> list[tuple[int, str]]:
        """Nodes of rank 0's graph where a wrong border's value first loses its reading."""
        from spmdtypes.differential.suspects import suspects

        return suspects(self, border)
