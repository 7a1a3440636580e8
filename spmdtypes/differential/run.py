"""The experiment: reference first, then all ranks, then the comparison."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spmdtypes.borders import batch_axes
from spmdtypes.contracts import Program
from spmdtypes.core.simulate import coordinates
from spmdtypes.differential import precision, streams, values
from spmdtypes.differential.compare import compare_seed, finite, merge
from spmdtypes.differential.experiment import Border, Draw, Experiment, RankRun
from spmdtypes.differential.process import Execution, execute
from spmdtypes.differential.rank import Job, infer_types
from spmdtypes.differential.watch import Noted
from spmdtypes.notation import Type


def run(
    program: Program,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    reference_mesh: Mapping[str, int] | None = None,
    keep_values: bool = True,
    timeout: float = 60,
) -> Experiment:
    """Run a program on all ranks and on its reference mesh and compare every border.

    The reference mesh is the mesh of ones; when the program cannot run there, the smallest set of axes
    that lets it run keeps its size. `reference_mesh` forces the choice. What rounds to less than f32
    is run once more without its roundings.
    """
    start = time.monotonic()
    trial = _Trial(program, tuple(seeds), values.regimes(len(seeds)), keep_values, timeout)
    found = trial.run(reference_mesh)
    ran = not found.failures and found.divergence is None and found.reference[0].borders
    if ran and not found.seeds:  # roots and logarithms of numbers that are never negative
        trial = replace(trial, regimes=values.regimes(len(seeds), positive=True))
        found = trial.run(reference_mesh)
    if keep_values and found.failures:
        plain = replace(trial, keep_values=False).run(reference_mesh)
        if not plain.failures:
            f = found.failures[0]
            plain.notes += (f"the values of single steps are not known ({f.error}: {f.message})",)
            found, trial = plain, replace(trial, keep_values=False)
    if precision.is_coarse(found):
        found = precision.settle(found, replace(trial, wide=True).run(found.reference_mesh))
    found.seconds = time.monotonic() - start
    return found


@dataclass(frozen=True)
class _Trial:
    program: Program
    seeds: tuple[int, ...]
    regimes: tuple[values.Regime, ...]
    keep_values: bool
    timeout: float
    wide: bool = False

    def run(self, reference_mesh: Mapping[str, int] | None) -> Experiment:
        program, mesh = self.program, dict(self.program.mesh)
        reference, kept = self.reference(reference_mesh)
        small = {a: n if a in kept else 1 for a, n in mesh.items()}
        types = _all_types(program, reference)
        untyped = {n: t for n, t in types.items() if n not in program.params}
        ranks = self.execute(mesh, reference.job.seeds if reference.complete else self.seeds, untyped)
        draws: list[Draw] = []
        if reference.complete and ranks.complete:
            ranks, reference, draws = _with_equal_draws(ranks, reference, self.timeout)
        found = Experiment(
            mesh=mesh,
            reference_mesh=small,
            seeds=(),
            ranks=_runs(ranks, mesh),
            reference=_runs(reference, small),
            kept_axes=kept,
            divergence=ranks.divergence,
            failures=ranks.failures,
            crossed=ranks.crossed,
            draws=tuple(draws),
            tolerance=_tolerance(ranks, reference),
            grads=dict(program.grads),
            averaged=_averaged(program),
        )
        found.notes = _notes(found, reference, self.seeds, ranks)
        if reference.complete:
            _compare(found, program, types)
        return found

    def execute(
        self, mesh: Mapping[str, int], seeds: tuple[int, ...], types: Mapping[str, Type] | None = None
    ) -> Execution[Job]:
        """A run without the seeds at which only their uncommon values make the program raise."""
        while True:
            hows = tuple(how for seed, how in zip(self.seeds, self.regimes) if seed in seeds)
            got = execute(
                Job(self.program, mesh, seeds, hows, types, keep_values=self.keep_values, wide=self.wide),
                self.timeout,
            )
            late = {f.seed for f in got.failures} - {self.seeds[0]}
            if not late or len(late) < len({f.seed for f in got.failures}):
                return got
            seeds = tuple(s for s in seeds if s not in late)

    def reference(self, forced: Mapping[str, int] | None) -> tuple[Execution[Job], tuple[str, ...]]:
        """The run on the first mesh, from the mesh of ones upwards, that allows one; the axes it keeps."""
        axes = [a for a, n in self.program.mesh.items() if n > 1]
        if forced is not None:
            candidates = [tuple(a for a in axes if forced.get(a, 1) > 1)]
        else:
            candidates = [c for k in range(len(axes) + 1) for c in itertools.combinations(axes, k)]
        runs = []
        for kept in candidates:
            mesh = {a: n if a in kept else 1 for a, n in self.program.mesh.items()}
            runs.append(self.execute(mesh, self.seeds))
            if runs[-1].complete:
                return runs[-1], kept
        return runs[0], tuple(axes) if forced is None else candidates[0]


def _all_types(program: Program, reference: Execution[Job]) -> dict[str, Type]:
    """The declared types, and replicated ones for parameters without."""
    untyped = next((o.untyped for o in reference.outcomes[0]), {})
    return {**infer_types(untyped), **program.params}


def _with_equal_draws(
    ranks: Execution[Job], reference: Execution[Job], timeout: float
) -> tuple[Execution[Job], Execution[Job], list[Draw]]:
    """Both run again with numbers that agree, where that makes a difference."""
    mesh, small = ranks.job.mesh, reference.job.mesh
    mine, theirs = _noted(ranks), _noted(reference)
    batch = batch_axes(ranks.job.program)
    plans = {s: streams.plan(mine[s], theirs[s], mesh, small, batch) for s in mine if s in theirs}
    for_ranks = {s: p.ranks for s, p in plans.items()}
    for_reference = {s: p.reference for s, p in plans.items()}
    if any(streams.changes_anything(mine[s], new) for s, new in for_ranks.items()):
        ranks = execute(replace(ranks.job, draws=for_ranks), timeout)
    if any(streams.changes_anything(theirs[s], new) for s, new in for_reference.items()):
        reference = execute(replace(reference.job, draws=for_reference), timeout)
    return ranks, reference, next((p.draws for p in plans.values()), [])


def _noted(execution: Execution[Job]) -> dict[int, list[list[Noted]]]:
    """Every rank's draws, by seed."""
    return {
        seed: [outcomes[i].noted for outcomes in execution.outcomes]
        for i, seed in enumerate(execution.job.seeds)
    }


def _runs(execution: Execution[Job], mesh: Mapping[str, int]) -> list[RankRun]:
    out = []
    for rank, (coords, outcomes) in enumerate(zip(coordinates(mesh), execution.outcomes)):
        error = next((f for f in execution.failures if f.rank == rank), None)
        run_ = RankRun(rank, coords, error)
        for o in outcomes:
            run_.borders[o.seed] = o.borders
            run_.shapes = run_.shapes or o.shapes
            run_.graph = run_.graph or o.graph
            if o.program == outcomes[0].program:
                run_.values[o.seed] = o.values
        out.append(run_)
    return out


def _averaged(program: Program) -> frozenset[str]:
    outputs = program.output.values() if isinstance(program.output, Mapping) else [program.output]
    return frozenset(a for t in outputs if t is not None for a, op in t.partial if op == "avg")


def _tolerance(*executions: Execution[Job]) -> float:
    """Rounding of the lowest precision the program used, with room for other orders of summation."""
    eps = max((o.eps for e in executions for r in e.outcomes for o in r), default=0.0)
    return max(1e-6, 64 * eps)


def _notes(
    found: Experiment, reference: Execution[Job], seeds: Sequence[int], ranks: Execution[Job]
) -> tuple[str, ...]:
    notes = []
    if found.kept_axes and not found.tested_axes:
        notes.append("the program runs only at its full size; no axis was tested")
    elif found.kept_axes:
        notes.append(f"the reference keeps {', '.join(found.kept_axes)} at full size")
    for f in reference.failures[:1]:
        notes.append(f"the reference fails: {f.error}: {f.message}")
    for seed in seeds:
        if seed not in ranks.job.seeds:
            notes.append(f"seed {seed} does not count: its values make the program raise")
    return tuple(notes)


def _compare(found: Experiment, program: Program, types: Mapping[str, Type]) -> None:
    """Fill in the borders from the seeds that count."""
    kept: list[int] = []
    by_seed: list[dict[str, Border]] = []
    all_seeds = [s for s in found.reference[0].borders if all(s in r.borders for r in found.ranks)]
    for seed in all_seeds:
        reference = [r.borders[seed] for r in found.reference]
        ranks = [r.borders[seed] for r in found.ranks]
        if not finite(reference) or (by_seed and not finite(ranks)):
            found.notes += (f"seed {seed} does not count: not all values are finite",)
            continue
        kept.append(seed)
        by_seed.append(
            compare_seed(
                program, types, found.mesh, ranks, found.reference_mesh, reference, seed, found.tolerance
            )
        )
    found.seeds = tuple(kept)
    found.borders = merge(by_seed)
    if not found.tested_axes:  # the same run twice: only what ranks should share is tested
        found.borders = {
            n: b if b.kind == "replicas differ" else replace(b, kind="untested")
            for n, b in found.borders.items()
        }
