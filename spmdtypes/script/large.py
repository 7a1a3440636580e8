"""A script too large to run: a few of its ranks are recorded without values, and the rules decide."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from spmdtypes.capture.fake import coordinates
from spmdtypes.capture.raw import DTYPES
from spmdtypes.capture.unpack import unpacked
from spmdtypes.checker import conclude_recorded
from spmdtypes.contracts import Program
from spmdtypes.core.simulate import rank_of
from spmdtypes.graph import Graph, Ref
from spmdtypes.report import Report
from spmdtypes.script import axes, layers, represent
from spmdtypes.script.contract import Contract
from spmdtypes.script.contract import program as program_of
from spmdtypes.script.data import as_inputs
from spmdtypes.script.facts import Key, Replacement
from spmdtypes.script.fakes import Captured, FakeJob, capture_all, meta
from spmdtypes.script.launch import Launch
from spmdtypes.script.refusals import heard, too_early
from spmdtypes.script.stages import on_part


@dataclass
class Costs:
    """What a check cost: CPU seconds by stage, the largest process (GB), and nodes."""

    seconds: dict[str, float] = field(default_factory=dict)
    rss: float = 0.0
    raw: int = 0
    nodes: int = 0

    def captured(self, stage: str, found: Sequence[Captured]) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + sum(c.cpu for c in found)
        self.rss = max([self.rss, *(c.rss for c in found)])
        self.raw = max([self.raw, *(c.raw for c in found)])


def check_large(
    launch: Launch,
    world: int,
    declared: Mapping[str, int] | None,
    limit: float,
    rank: int = 0,
    costs: Costs | None = None,
) -> Report:
    """Does a step of this script compute on `world` ranks, seen from `rank`, what it computes on one?

    Raises `CannotCheck` when that cannot be found out.
    """
    start = time.perf_counter()
    report = _Large(launch, world, declared, limit, rank, costs or Costs()).report()
    return replace(report, seconds=time.perf_counter() - start)


@dataclass
class _Large:
    launch: Launch
    world: int
    declared: Mapping[str, int] | None
    limit: float
    rank: int
    costs: Costs
    remarks: list[str] = field(default_factory=list)

    def report(self) -> Report:
        flat = {"world": self.world}
        job = FakeJob(self.launch, self.declared or flat, self.limit)
        first, kept = self._first(job)
        job = replace(job, kept=kept)
        mesh = axes.mesh_of([first.facts], self.world, self.declared)
        sites = axes.axes_by_site(first.facts, mesh)
        given = Replacement(axes=sites, samplers=tuple(first.facts.samplers))
        ones = replace(job, mesh=dict.fromkeys(mesh, 1), replacement=given)
        (native,) = self.capture("reference", ones, [0])
        others = self.capture("other ranks", job, representative_ranks(mesh, self.rank))
        seen, mesh = self._represented(mesh, first, others)
        found = represent.contract(seen, native.facts, sites)
        reference = self._reference(found, native, ones, sites, first)
        graphs = [_graph(c, mesh, self.world_mesh, found.data) for c in (first, *(o for _, o in seen.others))]
        report = self._conclude(found, first, graphs, reference)
        counts = found.counts()
        if report.errors and counts and any(f.code in _SCALES for f in report.errors):
            again = self._with_counts(found, ones, sites, first, graphs, counts)
            report = again if len(again.errors) < len(report.errors) else report
        return replace(report, assumptions=(*report.assumptions, *_notes(first, self.rank), *self.remarks))

    def _first(self, job: FakeJob) -> tuple[Captured, layers.Kept]:
        """The first rank, and which layers stand for all; none when all are needed."""
        (whole,) = self.capture("first rank", replace(job, kept=None), [self.rank])
        kept = whole.survey.kept()
        if kept:
            short = replace(job, kept=kept)
            (few,) = capture_all(short, [self.rank])
            self.costs.captured("few layers", [few])
            if few.failure is None and few.survey.covers(whole.survey):
                n = sum(len(x) for x in whole.survey.layers.values())
                shown = ", ".join(f"{k or 'layers'} {', '.join(map(str, v))}" for k, v in kept.items())
                self.remarks.append(f"of {n} layers, those that do the same are checked once: {shown}")
                return few, kept
        if whole.graph is None:
            (whole,) = self.capture("first rank", job, [self.rank])
        return whole, {}

    def capture(self, stage: str, job: FakeJob, ranks: Sequence[int]) -> list[Captured]:
        found = capture_all(job, ranks)
        self.costs.captured(stage, found)
        for c in found:
            self._refuse(c, " on the mesh of ones (one rank)" if stage.startswith("reference") else "")
        return found

    def _refuse(self, c: Captured, where: str) -> None:
        if c.failure is not None:
            raise heard(c.failure, where, self.launch)
        if (early := too_early(c.facts, where, self.launch)) is not None:
            raise early

    def _represented(
        self, mesh: Mapping[str, int], first: Captured, others: Sequence[Captured]
    ) -> tuple[represent.Representatives, dict[str, int]]:
        """The ranks that hold the same parameters as the first, on the mesh they form."""
        self.world_mesh = mesh
        own = coordinates(mesh, first.rank)
        split = set()
        for o in others:
            apart = {a for a, c in coordinates(mesh, o.rank).items() if c != own[a]}
            if len(apart) == 1 and set(o.facts.held) != set(first.facts.held):
                split |= apart
        rest = {a: n for a, n in mesh.items() if a not in split}
        placed = [(coordinates(mesh, o.rank), o) for o in others]
        names = set(first.facts.held)
        same = [
            (c, o) for c, o in placed if all(c[a] == own[a] for a in split) and set(o.facts.held) == names
        ]
        return represent.Representatives(rest, first, tuple(same), own), rest

    def _reference(
        self,
        found: Contract,
        native: Captured,
        ones: FakeJob,
        sites: Mapping[str, tuple[str, ...]],
        first: Captured,
    ) -> Graph:
        """The graph on the mesh of ones, fed with data of the ranks' sizes all together. The native one
        will do when it had as much."""
        theirs = {a.key: a for a in native.facts.arrivals}
        fits = all(
            key in theirs and (v := theirs[key].value) is not None and v.shape == w.value.shape
            for key, (_, w) in found.data.items()
        )
        if fits:
            assert native.graph is not None
            return _with_inputs(native.graph, native, found.data)
        job = replace(ones, replacement=found.replacement(sites, tuple(first.facts.samplers)))
        return self._graph_of(job)

    def _graph_of(self, job: FakeJob) -> Graph:
        (reference,) = self.capture("reference again", job, [0])
        assert reference.graph is not None
        return unpacked(reference.graph)

    def _with_counts(
        self,
        found: Contract,
        ones: FakeJob,
        sites: Mapping[str, tuple[str, ...]],
        first: Captured,
        graphs: Sequence[Graph],
        counts: Mapping[int, int],
    ) -> Report:
        """What is wrong still when numbers that are a rank's count of samples are those of all its ranks?"""
        given = replace(found.replacement(sites, tuple(first.facts.samplers)), counts=counts)
        reference = self._graph_of(replace(ones, replacement=given))
        report = self._conclude(found, first, graphs, reference)
        note = "a number equal to one rank's count of samples is taken for that of all ranks"
        return replace(report, assumptions=(*report.assumptions, note))

    def _conclude(
        self, found: Contract, first: Captured, graphs: Sequence[Graph], reference: Graph
    ) -> Report:
        start = time.process_time()
        program = _program(self.launch, graphs[0], found, first)
        report = conclude_recorded(program, graphs[0], reference, graphs[1:], strict=False)
        self.costs.seconds["rules"] = self.costs.seconds.get("rules", 0.0) + time.process_time() - start
        self.costs.nodes = len(graphs[0].nodes)
        return report


_SCALES = ("SPMD202", "SPMD301", "SPMD302", "SPMD303")


def representative_ranks(mesh: Mapping[str, int], base: int) -> list[int]:
    """Along each axis the rank next to `base`, and one that is last, or first, along all: whatever is no
    linear function of the coordinates shows there."""
    own = coordinates(mesh, base)
    corner = {a: n - 1 if own[a] != n - 1 else 0 for a, n in mesh.items()}
    around = [own | {a: (own[a] + 1) % n} for a, n in mesh.items()]
    ranks = [rank_of(c, mesh) for c in (*around, corner)]
    return [r for r in dict.fromkeys(ranks) if r != base]


def _graph(
    c: Captured,
    mesh: Mapping[str, int],
    whole: Mapping[str, int],
    data: Mapping[Key, tuple[str, object]],
) -> Graph:
    """A rank's graph on the mesh of its part, its data as inputs."""
    assert c.graph is not None
    graph = axes.on_mesh(c.graph, whole, c.rank)
    return on_part(_with_inputs(graph, c, data), mesh)


def _with_inputs(graph: Graph, c: Captured, data: Mapping[Key, tuple[str, object]]) -> Graph:
    return unpacked(as_inputs(graph, c.facts.arrivals, {key: name for key, (name, _) in data.items()}))


def _program(launch: Launch, graph: Graph, found: Contract, first: Captured) -> Program:
    borders = {b: _like(graph, ref) for b, ref in graph.outputs.items()}
    return program_of(launch, graph.mesh, found, first.facts, [borders], {})


def _like(graph: Graph, ref: Ref) -> torch.Tensor:
    known = graph.meta(ref)
    return meta(known.shape if known else (), DTYPES.get(known.dtype if known else "f32", torch.float32))


def _notes(first: Captured, rank: int) -> tuple[str, ...]:
    seen = f"recorded without values, seen from rank {rank}"
    return (seen, *first.notes)
