"""From a script to a report: run the ranks, run the reference with their values, compare, explain."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from spmdtypes.checker import conclude
from spmdtypes.contracts import Program
from spmdtypes.core.simulate import coordinates
from spmdtypes.differential import streams
from spmdtypes.differential.compare import compare_seed, merge
from spmdtypes.differential.experiment import Border, Experiment, Failure, RankRun
from spmdtypes.differential.process import STALLED, Execution, execute
from spmdtypes.errors import CannotCheck
from spmdtypes.report import Report
from spmdtypes.script import axes, contract
from spmdtypes.script.facts import Facts, ScriptOutcome
from spmdtypes.script.job import ScriptJob
from spmdtypes.script.launch import Launch

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
        if ranks.divergence is not None:
            return conclude(self._blank(flat), self._failed(ranks, flat))
        self._refuse(ranks, "")
        facts = _facts(ranks)
        mesh = axes.mesh_of(facts, self.world, self.declared)
        sites = axes.axes_by_site(facts[0], mesh)
        small = dict.fromkeys(mesh, 1)
        empty = contract.Contract().replacement(sites, facts[0].samplers)
        reference = self.execute(ScriptJob(self.launch, small, self.options.limit, empty))
        self._refuse(reference, " on the mesh of ones (one rank)")
        found = contract.contract(facts, _facts(reference)[0], mesh, sites)
        job = replace(reference.job, replacement=found.replacement(sites, facts[0].samplers))
        reference = self.execute(job)
        self._refuse(reference, " on the mesh of ones, given the ranks' values,")
        ranks, reference = self._with_equal_draws(ranks, reference, mesh, small, found)
        program = contract.program(
            self.launch, mesh, found, facts, ranks.outcomes[0][0].borders
        )
        experiment = _experiment(program, ranks, reference, mesh, small, found)
        return conclude(program, experiment)

    def _blank(self, mesh: Mapping[str, int]) -> Program:
        return contract.program(self.launch, mesh, contract.Contract(), [Facts()], {})

    def _failed(self, ranks: Execution[ScriptJob], mesh: Mapping[str, int]) -> Experiment:
        small = dict.fromkeys(mesh, 1)
        return Experiment(dict(mesh), small, (), [], [], divergence=ranks.divergence, failures=ranks.failures)

    def _refuse(self, execution: Execution[ScriptJob], where: str) -> None:
        """Raise what a user should hear of a run that says nothing."""
        for f in execution.failures:
            raise _heard(f, where, self.launch)
        for outcomes in execution.outcomes:
            facts = outcomes[0].facts  # type: ignore[attr-defined]
            if not facts.held:
                raise CannotCheck(f"{_ENDED[facts.ended]}{where} before any module was called", self._file, 1)

    @property
    def _file(self) -> str | None:
        return None if self.launch.module else self.launch.target

    def _with_equal_draws(
        self,
        ranks: Execution[ScriptJob],
        reference: Execution[ScriptJob],
        mesh: Mapping[str, int],
        small: Mapping[str, int],
        found: contract.Contract,
    ) -> tuple[Execution[ScriptJob], Execution[ScriptJob]]:
        """Both run again with random numbers that agree, where that makes a difference."""
        mine = [o[0].noted for o in ranks.outcomes]
        theirs = [o[0].noted for o in reference.outcomes]
        batch = {a for _, w in found.data.values() for a in (w.type.dims or ())[0].axes}
        plan = streams.plan(mine, theirs, mesh, small, batch)
        if streams.changes_anything(mine, plan.ranks):
            again = self.execute(replace(ranks.job, draws=tuple(plan.ranks)))
            ranks = again if again.complete else ranks
        if streams.changes_anything(theirs, plan.reference):
            again = self.execute(replace(reference.job, draws=tuple(plan.reference)))
            reference = again if again.complete else reference
        return ranks, reference


_ENDED = {
    "steps": "the script ended",
    "end": "the script ended",
    "exit": "the script called sys.exit",
    "time": "the script ran out of time",
    "": "the script ended",
}


def _heard(f: Failure, where: str, launch: Launch) -> CannotCheck:
    at = f.frames[0] if f.frames else None
    file, line = (at.file, at.line) if at else (None if launch.module else launch.target, 1)
    first = next((x.strip() for x in f.message.splitlines() if x.strip()), "")
    if f.error == STALLED:
        return CannotCheck(f"the ranks stood still{where}: {first}", file, line)
    if f.error == "SystemExit":
        return CannotCheck(f"the script ended with exit code {first}{where}", file, line)
    if f.error == "Died":
        first += f" ({f.output.strip().splitlines()[-1][:300]})" if f.output.strip() else ""
    said = first if f.error == "CannotCheck" else f"{f.error}: {first}"
    return CannotCheck(f"rank {f.rank}{where} raised {said}" if f.error != "CannotCheck" else said, file, line)


def _facts(execution: Execution[ScriptJob]) -> list[Facts]:
    found = []
    for outcomes in execution.outcomes:
        assert isinstance(outcomes[0], ScriptOutcome)
        found.append(outcomes[0].facts)
    return found


def _experiment(
    program: Program,
    ranks: Execution[ScriptJob],
    reference: Execution[ScriptJob],
    mesh: Mapping[str, int],
    small: Mapping[str, int],
    found: contract.Contract,
) -> Experiment:
    experiment = Experiment(
        mesh=dict(mesh),
        reference_mesh=dict(small),
        seeds=(0,),
        ranks=_runs(ranks, mesh, found),
        reference=_runs(reference, small, found),
        crossed=ranks.crossed,
        tolerance=_tolerance(ranks, reference),
        notes=tuple(dict.fromkeys(n for f in _facts(ranks)[:1] for n in f.notes)),
    )
    borders = _read_by_some([o[0].borders for o in ranks.outcomes])
    theirs = [o[0].borders for o in reference.outcomes]
    seen = compare_seed(
        program, program.params, mesh, borders, small, theirs, 0, experiment.tolerance
    )
    experiment.borders = {n: _as_read(b, mesh) for n, b in merge([seen]).items()}
    return experiment


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


def _tolerance(*executions: Execution[ScriptJob]) -> float:
    wide = all(e.job.wide for e in executions)
    eps = max((o.eps for e in executions for r in e.outcomes for o in r), default=0.0)
    return 1e-6 if wide and eps <= 2.0**-24 else max(1e-6, 64 * eps)


def _runs(
    execution: Execution[ScriptJob], mesh: Mapping[str, int], found: contract.Contract
) -> list[RankRun]:
    out = []
    for rank, (coords, outcomes) in enumerate(zip(coordinates(mesh), execution.outcomes)):
        o = outcomes[0]
        assert isinstance(o, ScriptOutcome)
        run = RankRun(rank, coords)
        run.borders[0] = o.borders
        run.values[0] = o.values
        graph = o.graph
        if graph is not None and prod(mesh.values()) > 1:
            graph = axes.on_mesh(graph, mesh, rank)
            named = {a.ref: found.data[a.key][0] for a in o.facts.arrivals if a.key in found.data}
            for ref, name in named.items():
                if ref.out == 0 and len(graph.nodes[ref.node].outs) == 1:
                    node = graph.nodes[ref.node]
                    graph.nodes[ref.node] = replace(node, op="input", args=(), kwargs={}, name=name)
        run.graph = graph
        out.append(run)
    return out
