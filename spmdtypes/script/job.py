"""A script as work for forked ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from spmdtypes.capture.environment import environment
from spmdtypes.capture.functionalise import functionalise
from spmdtypes.capture.replay import complete
from spmdtypes.capture.scripting import scripting
from spmdtypes.core.simulate import coordinates
from spmdtypes.dialects.spmd_types import watching
from spmdtypes.differential import frames
from spmdtypes.differential.experiment import Call
from spmdtypes.differential.rank import Outcome, Report, fingerprint, join, within_limit
from spmdtypes.differential.rendezvous import PAIRED
from spmdtypes.differential.streams import Substitution
from spmdtypes.differential.watch import Watch
from spmdtypes.differential.widen import wide_defaults
from spmdtypes.script import data, host
from spmdtypes.script.facts import Replacement, ScriptOutcome
from spmdtypes.script.launch import Launch
from spmdtypes.script.recorder import EndOfSteps, ScriptRecorder
from spmdtypes.script.refusals import failure


@dataclass(frozen=True)
class ScriptJob:
    """One execution of a script. With `replacement` it is the reference, given what the ranks had."""

    launch: Launch
    mesh: Mapping[str, int]
    limit: float
    replacement: Replacement | None = None
    draws: Sequence[Substitution] = ()  # by rank
    wide: bool = True
    seeds: tuple[int, ...] = field(default=(0,))

    def enter(self, rank: int, store: str, timeout: float) -> Path:
        """The folder for what the script writes: that of all ranks, which outlives each."""
        join(rank, prod(self.mesh.values()), store, timeout)
        torch.set_default_dtype(torch.float64 if self.wide else torch.float32)
        return Path(store).parent / "written"

    def run(self, folder: Path, rank: int, index: int, report: Report) -> Outcome:
        def heard(call: Call, places: frames.Places) -> None:
            """A stage of a pipeline that waits for the next step's input has done its steps."""
            if call.kind in PAIRED and rec.finished:
                raise EndOfSteps
            report(call, places)

        watch = Watch(self.mesh, heard, self.draws[rank] if self.draws else None, self.wide)
        rec = ScriptRecorder(
            self.mesh,
            coordinates(self.mesh)[rank],
            wide=self.wide,
            steps=self.launch.steps,
            own=host.own_files(self.launch),
            replacement=self.replacement,
        )
        out = ScriptOutcome(rank, 0, facts=rec.facts)
        notes: list[str] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(watch)
                if self.wide:
                    stack.enter_context(wide_defaults())
                stack.enter_context(environment(prod(self.mesh.values()), rank, fake=False))
                around = stack.enter_context(scripting(fake=False, folder=folder, note=notes.append))
                around.on_batch(rec.batch)
                claims = stack.enter_context(watching(rec))
                rec.facts.ended = host.run(self.launch, self.mesh, rec, self.limit)
            rec.outputs.views |= claims.views
            rec.facts.claims = claims.claims
            self._finish(rec, watch, out)
        except (Exception, SystemExit) as e:
            out.failure = failure(rank, e)
        rec.facts.notes = tuple(dict.fromkeys([*notes, *rec.notes]))
        out.noted, out.eps, out.trail = watch.noted, watch.eps, watch.trail.take()
        return out

    def _finish(self, rec: ScriptRecorder, watch: Watch, out: ScriptOutcome) -> None:
        """The graph, its values, and where data entered."""
        with torch.utils._python_dispatch._disable_current_modes():
            done = functionalise(rec, rec.outputs.views)
            done.graph.dtensors = rec.outputs.placements
            complete(done.graph, done.values)
            rec.facts.arrivals = data.arrivals(rec, done)
        out.borders = {b: done.values[r] for b, r in done.graph.outputs.items() if r in done.values}
        out.borders |= rec.values_of
        out.values = within_limit(done.values)
        out.graph = done.graph
        out.program = fingerprint(done.graph)
