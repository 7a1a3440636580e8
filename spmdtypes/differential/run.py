"""The experiment: reference first, then all ranks, then the comparison."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdtypes.contracts import Program
from spmdtypes.differential import streams
from spmdtypes.differential.compare import compare_seed, finite, merge
from spmdtypes.differential.experiment import Border, Draw, Experiment, RankRun
from spmdtypes.differential.layout import all_coords
from spmdtypes.differential.process import Execution, execute
from spmdtypes.differential.rank import Job, infer_types
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
    that lets it run keeps its size. `reference_mesh` forces the choice.
    """
    found = _run(program, tuple(seeds), reference_mesh, keep_values, timeout)
    if keep_values and found.failures:
        plain = _run(program, tuple(seeds), reference_mesh, False, timeout)
        if not plain.failures:
            f = found.failures[0]
            plain.notes += (f"the values of single steps are not known ({f.error}: {f.message})",)
            return plain
    return found


def _run(
    program: Program,
    seeds: tuple[int, ...],
    reference_mesh: Mapping[str, int] | None,
    keep_values: bool,
    timeout: float,
) -> Experiment:
    start = time.monotonic()
    mesh = dict(program.mesh)
    reference, kept = _reference(program, seeds, reference_mesh, keep_values, timeout)
    small = {a: n if a in kept else 1 for a, n in mesh.items()}
    types = _all_types(program, reference)
    untyped = {n: t for n, t in types.items() if n not in program.params}
    job = Job(program, mesh, seeds, untyped, keep_values=keep_values)
    ranks = execute(job, timeout)
    draws: list[Draw] = []
    if reference.complete and ranks.complete:
        ranks, reference, draws = _with_equal_draws(job, ranks, reference, small, timeout)
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
    found.notes = _notes(found, reference)
    if reference.complete:
        _compare(found, program, types)
    found.seconds = time.monotonic() - start
    return found


def _reference(
    program: Program,
    seeds: tuple[int, ...],
    forced: Mapping[str, int] | None,
    keep_values: bool,
    timeout: float,
) -> tuple[Execution, tuple[str, ...]]:
    """The first mesh, from the mesh of ones upwards, on which the program runs; and the axes it keeps."""
    axes = [a for a, n in program.mesh.items() if n > 1]
    if forced is not None:
        candidates = [tuple(a for a in axes if forced.get(a, 1) > 1)]
    else:
        candidates = [c for k in range(len(axes) + 1) for c in itertools.combinations(axes, k)]
    first: Execution | None = None
    for kept in candidates:
        mesh = {a: n if a in kept else 1 for a, n in program.mesh.items()}
        got = execute(Job(program, mesh, seeds, keep_values=keep_values), timeout)
        if got.complete:
            return got, kept
        first = first or got
    assert first is not None
    return first, tuple(axes) if forced is None else candidates[0]


def _all_types(program: Program, reference: Execution) -> dict[str, Type]:
    """The declared types, and replicated ones for parameters without."""
    untyped = next((o.untyped for o in reference.outcomes[0]), {})
    return {**infer_types(untyped), **program.params}


def _with_equal_draws(
    job: Job, ranks: Execution, reference: Execution, small: Mapping[str, int], timeout: float
) -> tuple[Execution, Execution, list[Draw]]:
    """Both run again with numbers that agree, where that makes a difference."""
    plans = {
        seed: streams.plan(
            [r[i].noted for r in ranks.outcomes], [r[i].noted for r in reference.outcomes], job.mesh, small
        )
        for i, seed in enumerate(job.seeds)
    }
    for_ranks = {s: p.ranks for s, p in plans.items()}
    for_reference = {s: p.reference for s, p in plans.items()}
    if _changes(job, ranks, for_ranks):
        ranks = execute(replace(job, draws=for_ranks), timeout)
    if _changes(job, reference, for_reference):
        reference = execute(replace(job, mesh=small, types=None, draws=for_reference), timeout)
    return ranks, reference, next(iter(plans.values())).draws


def _changes(job: Job, run_: Execution, draws: Mapping[int, Sequence[streams.Substitution]]) -> bool:
    return any(
        streams.changes_anything([r[i].noted for r in run_.outcomes], draws[seed])
        for i, seed in enumerate(job.seeds)
    )


def _runs(execution: Execution, mesh: Mapping[str, int]) -> list[RankRun]:
    out = []
    for rank, (coords, outcomes) in enumerate(zip(all_coords(mesh), execution.outcomes)):
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


def _tolerance(*executions: Execution) -> float:
    """Rounding of the lowest precision the program used, with room for other orders of summation."""
    eps = max((o.eps for e in executions for r in e.outcomes for o in r), default=0.0)
    return max(1e-6, 64 * eps)


def _notes(found: Experiment, reference: Execution) -> tuple[str, ...]:
    notes = []
    if found.kept_axes and not found.tested_axes:
        notes.append("the program runs only at its full size; no axis was tested")
    elif found.kept_axes:
        notes.append(f"the reference keeps {', '.join(found.kept_axes)} at full size")
    for f in reference.failures[:1]:
        notes.append(f"the reference fails: {f.error}: {f.message}")
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
    if not found.tested_axes:
        found.borders = {n: replace(b, kind="untested") for n, b in found.borders.items()}
