"""From a script to a report: run the ranks, run the reference with their values, compare, explain."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from spmdtypes.checker import conclude
from spmdtypes.contracts import Program
from spmdtypes.core.simulate import coordinates
from spmdtypes.diagnostics.finding import Finding, in_order
from spmdtypes.dialects.spmd_types import Claims, judged
from spmdtypes.differential import streams
from spmdtypes.differential.compare import compare_seed, merge
from spmdtypes.differential.experiment import Border, Experiment, RankRun
from spmdtypes.differential.process import Execution, execute
from spmdtypes.graph import Graph
from spmdtypes.report import Report
from spmdtypes.script import axes, contract, stages
from spmdtypes.script.data import as_inputs
from spmdtypes.script.facts import Facts, ScriptOutcome
from spmdtypes.script.job import ScriptJob
from spmdtypes.script.launch import Launch
from spmdtypes.script.refusals import heard, incomplete, too_early

_UNUSUAL = 64.0  # seconds a rank runs before it is stopped


@dataclass(frozen=True)
class ScriptOptions:
    """`limit`: seconds a run may take."""

    limit: float = _UNUSUAL


def check_script(
    launch: Launch,
    world: int,
    mesh: Mapping[str, int] | None = None,
    options: ScriptOptions | None = None,
) -> Report:
    """Does a step of this script on `world` ranks compute what it computes on one?

    Raises `CannotCheck` when that cannot be found out.
    """
    start = time.perf_counter()
    report = _Check(launch, world, mesh, options or ScriptOptions()).report()
    return replace(report, seconds=time.perf_counter() - start)


@dataclass
class _Check:
    launch: Launch
    world: int
    declared: Mapping[str, int] | None
    options: ScriptOptions

    def execute(self, job: ScriptJob) -> Execution[ScriptJob]:
        return execute(job, self.options.limit + 30)

    def report(self) -> Report:
        flat = dict(self.declared or {"world": self.world})
        if prod(flat.values()) != self.world:
            axes.mesh_of([], self.world, self.declared)
        ranks = self.execute(ScriptJob(self.launch, flat, self.options.limit))
        if ranks.failures:  # some code insists on the precision it is written for
            plain = self.execute(ScriptJob(self.launch, flat, self.options.limit, wide=False))
            ranks = plain if plain.complete else ranks
        if ranks.divergence is not None:
            return conclude(self._blank(flat), self._failed(ranks, flat))
        self._refuse(ranks, "")
        mesh = axes.mesh_of(_facts(ranks), self.world, self.declared)
        run = _Runs(self, ranks, mesh, axes.axes_by_site(_facts(ranks)[0], mesh))
        return run.report()

    def _blank(self, mesh: Mapping[str, int]) -> Program:
        return contract.program(self.launch, mesh, contract.Contract(), Facts(), [], {})

    def _failed(self, ranks: Execution[ScriptJob], mesh: Mapping[str, int]) -> Experiment:
        small = dict.fromkeys(mesh, 1)
        return Experiment(dict(mesh), small, (), [], [], divergence=ranks.divergence, failures=ranks.failures)

    def _refuse(self, execution: Execution[ScriptJob], where: str) -> None:
        """Raise what a user should hear of a run that says nothing."""
        for f in execution.failures:
            raise heard(f, where, self.launch)
        for outcome in _outcomes(execution):
            if (early := too_early(outcome.facts, where, self.launch)) is not None:
                raise early


@dataclass
class _Runs:
    """The ranks' run and what follows from it."""

    check: _Check
    ranks: Execution[ScriptJob]
    mesh: Mapping[str, int]
    sites: Mapping[str, tuple[str, ...]]

    def report(self) -> Report:
        facts = _facts(self.ranks)
        small = dict.fromkeys(self.mesh, 1)
        nothing = contract.Contract().replacement(self.sites, facts[0].samplers)
        job = ScriptJob(self.check.launch, small, self.check.options.limit, nothing, wide=self.ranks.job.wide)
        native = self.check.execute(job)
        self.check._refuse(native, " on the mesh of ones (one rank)")
        names = stages.renamed(_outcomes(self.ranks), _facts(native)[0], self.mesh)
        self._rename(names)
        self.found = contract.contract(_facts(self.ranks), _facts(native)[0], self.mesh, self.sites)
        remarks = [incomplete(f, self.check.launch.steps) for f in (*facts, *_facts(native))]
        self.found.assumptions += [r for r in dict.fromkeys(remarks) if r][:1]
        given = self.found.replacement(self.sites, facts[0].samplers)
        if self.found.is_as(_facts(native)[0]):
            reference = native
        else:
            reference = self.check.execute(replace(job, replacement=given))
            self.check._refuse(reference, " on the mesh of ones, given the ranks' values,")
        reference = self._with_equal_draws(reference, small)
        self._rename(names)
        parts = [self._part(p, reference) for p in self._parts()]
        if any(e.wrong for _, e in parts):
            again = self._with_counts(reference)
            if again is not None:
                parts, reference = again
        claims = Claims(_facts(self.ranks)[0].claims)
        report = _merged([conclude(program, e, partial(judged, claims)) for program, e in parts])
        parted = contract.parted_replicas(self.found, _facts(self.ranks))
        if parted is None or not report.errors:  # experts and stages may differ where that changes nothing
            return report
        return replace(report, findings=in_order([parted, *report.findings]))

    def _rename(self, names: Sequence[Mapping[str, str]]) -> None:
        for o, n in zip(_outcomes(self.ranks), names):
            if not set(n.values()) & set(o.facts.held) - set(n):
                stages.rename(o, n)

    def _parts(self) -> list[stages.Part]:
        return list(stages.parts_of(self.mesh, stages.split_axes(_facts(self.ranks), self.mesh)))

    def _part(self, part: stages.Part, reference: Execution[ScriptJob]) -> tuple[Program, Experiment]:
        outcomes = [_outcomes(self.ranks)[r] for r in part.ranks]
        held = {n: w for n, w in self.found.held.items() if n in outcomes[0].facts.held}
        found = replace(self.found, held=held)
        program = contract.program(
            self.check.launch,
            part.mesh,
            found,
            outcomes[0].facts,
            [o.borders for o in outcomes],
            _outcomes(reference)[0].borders,
        )
        wide = self.ranks.job.wide
        return program, _experiment(program, outcomes, self.mesh, part, _outcomes(reference)[0], found, wide)

    def _with_counts(
        self, reference: Execution[ScriptJob]
    ) -> tuple[list[tuple[Program, Experiment]], Execution[ScriptJob]] | None:
        """All parts right, when numbers that are a rank's count of samples are those of all its ranks? A
        script that divides by its batch size says so in a number, which does not grow with the batch."""
        counts = self.found.counts()
        given = reference.job.replacement
        if not counts or given is None:
            return None
        again = self.check.execute(replace(reference.job, replacement=replace(given, counts=counts)))
        if not again.complete:
            return None
        parts = [self._part(p, again) for p in self._parts()]
        if any(e.wrong for _, e in parts):
            return None
        for _, e in parts:
            e.notes += ("a number equal to one rank's count of samples is taken for that of all ranks",)
        return parts, again

    def _with_equal_draws(
        self, reference: Execution[ScriptJob], small: Mapping[str, int]
    ) -> Execution[ScriptJob]:
        """Both run again with random numbers that agree, where that makes a difference."""
        mine = [o.noted for o in _outcomes(self.ranks)]
        theirs = [o.noted for o in _outcomes(reference)]
        batch = {a for _, w in self.found.data.values() for a in (w.type.dims or ())[0].axes}
        plan = streams.plan(mine, theirs, self.mesh, small, batch)
        if streams.changes_anything(mine, plan.ranks):
            again = self.check.execute(replace(self.ranks.job, draws=tuple(plan.ranks)))
            self.ranks = again if again.complete else self.ranks
        if streams.changes_anything(theirs, plan.reference):
            again = self.check.execute(replace(reference.job, draws=tuple(plan.reference)))
            reference = again if again.complete else reference
        return reference


def _merged(reports: Sequence[Report]) -> Report:
    """One report of the parts of a program: stages, experts."""
    if len(reports) == 1:
        return reports[0]
    findings: dict[object, Finding] = {}
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for r in reports:
        counts.update(r.counts)
        unknown.update(r.unknown_ops)
        for f in r.findings:
            findings.setdefault((f.code, f.span and f.span.line), f)
    return replace(
        reports[0],
        findings=in_order(list(findings.values())),
        counts=dict(counts),
        unknown_ops=dict(unknown),
        assumptions=tuple(dict.fromkeys(a for r in reports for a in r.assumptions)),
        nodes=max(r.nodes for r in reports),
    )


def _outcomes(execution: Execution[ScriptJob]) -> list[ScriptOutcome]:
    """What each rank has to say."""
    found = []
    for outcomes in execution.outcomes:
        assert isinstance(outcomes[0], ScriptOutcome)
        found.append(outcomes[0])
    return found


def _facts(execution: Execution[ScriptJob]) -> list[Facts]:
    return [o.facts for o in _outcomes(execution)]


def _experiment(
    program: Program,
    outcomes: Sequence[ScriptOutcome],
    mesh: Mapping[str, int],
    part: stages.Part,
    reference: ScriptOutcome,
    found: contract.Contract,
    wide: bool,
) -> Experiment:
    """The ranks of one part against the reference."""
    small = dict.fromkeys(part.mesh, 1)
    experiment = Experiment(
        mesh=dict(part.mesh),
        reference_mesh=small,
        seeds=(0,),
        ranks=[
            _run(i, c, o, _graph(o, mesh, r, part, found))
            for i, (c, o, r) in enumerate(zip(coordinates(part.mesh), outcomes, part.ranks))
        ],
        reference=[_run(0, dict.fromkeys(part.mesh, 0), reference, reference.graph)],
        tolerance=_tolerance([*outcomes, reference], wide),
        notes=outcomes[0].facts.notes,
    )
    borders = _read_by_some([o.borders for o in outcomes])
    wanted = {b: v for b, v in reference.borders.items() if _compared(b, borders)}
    seen = compare_seed(program, program.params, part.mesh, borders, small, [wanted], 0, experiment.tolerance)
    compared = {n: _as_read(b, part.mesh) for n, b in merge([seen]).items()}
    owners = outcomes[0].facts.owners
    experiment.borders = {n: _as_used(b, compared, owners, reference, found) for n, b in compared.items()}
    return experiment


def _compared(border: str, ranks: Sequence[Mapping[str, Tensor]]) -> bool:
    """Optimizer state may be dealt out to the ranks; everything else is on all of them or on none."""
    having = [border in r for r in ranks]
    return all(having) if border.startswith("state:") else any(having)


def _as_used(
    b: Border,
    compared: Mapping[str, Border],
    owners: Mapping[str, str],
    reference: ScriptOutcome,
    found: contract.Contract,
) -> Border:
    """A gradient that an optimizer completes by itself is judged by what the step made of it."""
    kind, _, name = b.name.partition(":")
    after = compared.get(f"param:{name}")
    if kind != "grad" or b.ok or after is None or after.kind:
        return b
    changed = name in found.held and not torch.equal(
        reference.borders[after.name].to(found.held[name].value.dtype), found.held[name].value
    )
    states = [compared[s] for s, owner in owners.items() if owner == name and s in compared]
    if not changed or any(s.kind for s in states):
        return b
    return replace(b, kind="", detail="what the optimizer makes of it is right")


def _as_read(b: Border, mesh: Mapping[str, int]) -> Border:
    """A number off by a product of axis sizes may be divided by it before anybody sees it."""
    if not b.name.startswith("metric:") or b.ratio is None or b.kind != "off":
        return b
    sizes = {prod(c) for k in range(len(mesh) + 1) for c in itertools.combinations(mesh.values(), k)}
    for n in sizes:
        if min(abs(b.ratio / n - 1), abs(b.ratio * n - 1)) < 1e-9:
            return replace(b, kind="", detail="a factor of axis sizes is left to the script")
    return b


def _read_by_some(borders: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """A number that only some ranks read counts as theirs: often it is rank 0 that logs."""
    first: dict[str, Tensor] = {}
    for rank in borders:
        for name, value in rank.items():
            if name.startswith("metric:"):
                first.setdefault(name, value)
    return [first | dict(rank) for rank in borders]


def _tolerance(outcomes: Sequence[ScriptOutcome], wide: bool) -> float:
    eps = max((o.eps for o in outcomes), default=0.0)
    return 1e-6 if wide and eps <= 2.0**-24 else max(1e-6, 64 * eps)


def _run(rank: int, coords: Mapping[str, int], o: ScriptOutcome, graph: Graph | None) -> RankRun:
    run = RankRun(rank, dict(coords))
    run.borders[0], run.values[0], run.graph = o.borders, o.values, graph
    return run


def _graph(
    o: ScriptOutcome, mesh: Mapping[str, int], rank: int, part: stages.Part, found: contract.Contract
) -> Graph | None:
    """A rank's graph on the mesh of its part, its data as inputs."""
    if o.graph is None:
        return None
    graph = axes.on_mesh(o.graph, mesh, rank)
    names = {key: name for key, (name, _) in found.data.items()}
    return stages.on_part(as_inputs(graph, o.facts.arrivals, names), part.mesh)
