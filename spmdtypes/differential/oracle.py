"""Answers about single nodes from what the ranks and the reference really computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from spmdtypes.capture.match import matched
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.simulate import coordinates
from spmdtypes.differential.experiment import Experiment, RankRun
from spmdtypes.differential.readings import Observation, holds, search
from spmdtypes.graph import Ref

Table = Sequence[int | None]  # node of rank 0 -> node of another run of the program


class Oracle:
    """Nodes are those of rank 0's graph. Denotations speak of the tested axes only.

    A value that was not kept on every rank, or whose node has no counterpart in the reference, is
    unknown: None.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.mesh = {a: n for a, n in experiment.mesh.items() if a not in experiment.kept_axes}
        self.tolerance = 1e-8 if experiment.tolerance <= 1e-6 else experiment.tolerance
        self._tables: list[Table] | None = None
        self._reference_tables: list[Table] = []
        self._seen: dict[Ref, tuple[Observation, ...]] = {}
        self._readings: dict[Ref, list[Denotation]] = {}
        self._agrees: dict[tuple[Ref, Denotation], bool | None] = {}

    def readings(self, ref: Ref) -> Sequence[Denotation] | None:
        """Placements that hold for every seed, simplest first; empty: none was found."""
        if ref not in self._readings:
            seen = self.observations(ref)
            if not seen:
                return None
            self._readings[ref] = search(seen)
        return self._readings[ref]

    def agrees(self, ref: Ref, den: Denotation) -> bool | None:
        """Does the reading hold for every seed?"""
        key = (ref, den)
        if key not in self._agrees:
            seen = self.observations(ref)
            found = [holds(den, s) for s in seen]
            self._agrees[key] = False if False in found else None if not found or None in found else True
        return self._agrees[key]

    def observations(self, ref: Ref) -> tuple[Observation, ...]:
        """The value's observations: one a seed and coordinate of the kept axes."""
        if ref not in self._seen:
            self._seen[ref] = tuple(self._observe(ref))
        return self._seen[ref]

    def _observe(self, ref: Ref) -> list[Observation]:
        out = []
        for seed in self.experiment.seeds:
            by_coords = self._values(self.experiment.ranks, self.tables, seed, ref)
            reference = self._values(self.experiment.reference, self._reference_tables, seed, ref)
            for kept, whole in reference.items():
                at = [_key({**dict(kept), **c}, self.experiment.mesh) for c in coordinates(self.mesh)]
                if all(k in by_coords for k in at):
                    parts = tuple(by_coords[k] for k in at)
                    out.append(Observation(self.mesh, parts, whole, self.tolerance))
        return out

    def _values(
        self, runs: Sequence[RankRun], tables: Sequence[Table], seed: int, ref: Ref
    ) -> dict[tuple[tuple[str, int], ...], Tensor]:
        """The value on the ranks that have it, by coordinates (of axes larger than one): along a kept
        axis, such as that of pipeline stages, ranks may run different programs."""
        out = {}
        for run, table in zip(runs, tables):
            node = table[ref.node] if ref.node < len(table) else None
            value = run.values.get(seed, {}).get(Ref(node, ref.out)) if node is not None else None
            if value is None or value.is_complex():
                continue
            sizes = self.experiment.mesh if runs is self.experiment.ranks else self.experiment.reference_mesh
            out[_key(run.coords, sizes)] = value
        return out

    @property
    def tables(self) -> list[Table]:
        """Where rank 0's nodes are on every rank."""
        if self._tables is None:
            ranks, reference = self.experiment.ranks, self.experiment.reference
            first, other = ranks[0].graph, reference[0].graph
            if first is None or other is None:
                self._tables = [[] for _ in ranks]
                self._reference_tables = [[] for _ in reference]
                return self._tables
            self._tables = [matched(first, r.graph) if r.graph else [] for r in ranks]
            into = matched(first, other)
            across = [matched(other, r.graph) if r.graph else [] for r in reference]
            self._reference_tables = [
                [t[i] if i is not None and i < len(t) else None for i in into] for t in across
            ]
        return self._tables


def _key(coords: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((a, coords[a]) for a in sizes if sizes[a] > 1)
