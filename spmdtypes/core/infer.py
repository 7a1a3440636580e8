"""One pass over a graph: what every value denotes, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.spec import Operand, OpSpec
from spmdtypes.graph import Graph, Node, Ref


class Oracle(Protocol):
    """What really running the ranks and the reference shows."""

    def readings(self, ref: Ref) -> Sequence[Denotation] | None:
        """Placements under which the ranks' values give the reference value; None: nothing known."""

    def agrees(self, ref: Ref, den: Denotation) -> bool | None:
        """Does this reading hold? None: nothing known."""


@dataclass(frozen=True)
class Problem:
    """A value without a reading, at the node where it began."""

    node: int
    error: RuleError
    operands: tuple[Ref, ...]


@dataclass
class Inference:
    graph: Graph
    values: dict[Ref, Denotation] = field(default_factory=dict)
    problems: dict[Ref, Problem] = field(default_factory=dict)
    evidence: dict[Ref, str] = field(default_factory=dict)
    unknown_ops: Counter[str] = field(default_factory=Counter)
    assumptions: list[tuple[int, str]] = field(default_factory=list)
    conflicts: list[tuple[Ref, Denotation, Sequence[Denotation]]] = field(default_factory=list)
    constraints: dict[tuple[str, int], int] = field(default_factory=dict)

    def became(self, ref: Ref, axis: str) -> list[tuple[int, str]]:
        """The nodes where this value's standing over `axis` arose, with a sentence each."""
        raise NotImplementedError


def infer(
    graph: Graph,
    inputs: Mapping[str, Denotation],
    build_spec: Callable[[Node, Sequence[Operand]], OpSpec | None],
    *,
    oracle: Oracle | None = None,
    averaged: frozenset[str] = frozenset(),
) -> Inference:
    raise NotImplementedError
