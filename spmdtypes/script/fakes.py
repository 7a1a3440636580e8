"""One rank of a script too large to run: under a process group that does not communicate and on tensors
without values, in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from spmdtypes.capture.collector import no_collection
from spmdtypes.capture.environment import environment
from spmdtypes.capture.fake import coordinates
from spmdtypes.capture.functionalise import Functional, functionalise
from spmdtypes.capture.raw import DTYPES, Raw, View
from spmdtypes.capture.run import local
from spmdtypes.capture.scripting import scripting
from spmdtypes.differential.experiment import Failure
from spmdtypes.forking import garbage_left_alone
from spmdtypes.graph import Graph, Ref
from spmdtypes.script import data, host, layers
from spmdtypes.script.facts import Arrival, Facts, Held, Key, Replacement
from spmdtypes.script.fingerprints import fingerprints, of_value
from spmdtypes.script.launch import Launch
from spmdtypes.script.recorder import EndOfSteps, ScriptRecorder, map_tensors, roots_of
from spmdtypes.script.refusals import failure

# what fake tensors import when they are first used; a child that imports it does so for itself alone
_IMPORTED_LATE = ("torch._dynamo", "torch.distributed.tensor")


@dataclass(frozen=True)
class FakeJob:
    """A script on a flat mesh. With `replacement` it is the reference: only the names and shapes of data
    in it count. `limit`: seconds. `probe`: only up to the first call of a module. With
    `kept`, only these layers of long lists are run; without (None), what all layers do is surveyed."""

    launch: Launch
    mesh: Mapping[str, int]
    limit: float
    replacement: Replacement | None = None
    probe: bool = False
    kept: layers.Kept | None = field(default_factory=dict)


@dataclass
class Captured:
    """What one rank's program is. `prints`: fingerprints of arriving data and, by name, of parameters, equal
    where values are. `raw` counts what was recorded, `cpu` and `rss` (GB) what it cost, `modules` are
    imports worth sharing."""

    rank: int
    facts: Facts = field(default_factory=Facts)
    graph: Graph | None = None
    prints: dict[Key | str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    raw: int = 0
    cpu: float = 0.0
    rss: float = 0.0
    modules: tuple[str, ...] = ()
    survey: layers.Survey = field(default_factory=layers.Survey)


class FakeScriptRecorder(ScriptRecorder):  # type: ignore[no-untyped-call]
    """A script's recorder that looks at no values."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        coords: Mapping[str, int],
        job: FakeJob,
        replacement: Replacement | None,
    ) -> None:
        super().__init__(
            mesh,
            coords,
            wide=False,
            steps=job.launch.steps,
            own=host.own_files(job.launch),
            replacement=replacement,
            keep_values=False,
        )
        self.probe, self.kept = job.probe, job.kept
        self.hashes: dict[int, str] = {}  # of raw nodes that stand for real values
        self.begun: dict[str, View] = {}  # parameters and buffers as the program began, which was at
        self.began = 0
        self._written: set[int] = set()  # storages the program wrote to

    def append(self, raw: Raw) -> int:
        if self.loaded:
            self._written.update(v.storage for v in raw.mutated)
            if raw.op == "write":
                self._written.update(v.storage for v in raw.outs if type(v) is View)
        return super().append(raw)

    def _source(self, view: View, t: Tensor) -> None:
        super()._source(view, t)
        if not hasattr(t, "fake_mode") and t.layout is torch.strided and not t.is_meta:
            with self.quiet():
                self.hashes[len(self.trace) - 1] = of_value(t)

    def unchanged(self, t: Tensor, held: Held) -> bool:
        return self.view(local(t)).storage not in self._written

    def load(self) -> None:
        roots = roots_of(sys._getframe(1))
        if self.kept is None and not layers.can_be_shortened(roots):
            self.kept = {}
        layers.shorten(roots, self.kept or {})
        self.start(roots)
        if self.probe:
            raise EndOfSteps

    def batch(self, number: int, batch: Any) -> Any:
        """Batches are real: they are told apart by value, and small integers stay known."""
        leaves = itertools.count()

        def arrive(t: Tensor) -> Tensor:
            key = Key("batch", (), number, next(leaves))
            new = self.replacement.data.get(key) if self.replacement is not None else None
            with self.pause():
                if new is not None:
                    fake = new[1].to(t.dtype).clone()
                    self.bind(fake, new[0])
                    return fake
                fake = t.clone()
                view = self.view(fake)
                index = len(self.trace) - 1
                self.batch_keys[index] = key
                with self.quiet():
                    self.hashes[index] = of_value(t)
                    self.shadows.learn(view, t.contiguous())
            return fake

        return map_tensors(arrive, batch)

    def _held(self, t: Tensor, is_buffer: bool) -> Held:
        held = super()._held(t, is_buffer)
        with self.pause():
            self.begun[self.names_of[id(t)]] = self.view(local(t))
            self.began = self.began or len(self.trace)
        with self.quiet():
            return replace(held, value=meta(held.value.shape, held.value.dtype))

    def _overwrite(self, fresh: Mapping[str, Tensor]) -> None:
        """There are no values to give."""

    def gradient(self, border: str, p: Any) -> None:
        self.snapshot(border, p.grad)


def meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that has only a shape."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# ---- in a process of its own


def capture_all(job: FakeJob, ranks: Iterable[int], at_once: int = 2) -> list[Captured]:
    """The programs of some ranks, each recorded by a forked child, a few at a time."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    order = list(ranks)
    waiting, done = list(order), dict[int, Captured]()
    running: list[_Child] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(_Child(job, waiting.pop(0)))
        child = running.pop(0)
        found = child.result()
        for name in found.modules:
            with suppress(Exception):
                importlib.import_module(name)
        done[found.rank] = found
    return [done[r] for r in order]


class _Child:
    """A forked process that records one rank and sends what it found."""

    def __init__(self, job: FakeJob, rank: int) -> None:
        self.rank = rank
        self.limit = job.limit
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by result()
        read, write = os.pipe()
        with garbage_left_alone():
            self.pid = os.fork()
            if self.pid == 0:
                os.close(read)
                for stream in (1, 2):
                    os.dup2(self.said.fileno(), stream)
                _child(job, rank, write)
        os.close(write)
        self.pipe = open(read, "rb")  # noqa: SIM115 - closed by result()

    def result(self) -> Captured:
        """Wait for the child. One that sends nothing has died."""
        with self.pipe:
            sent = self.pipe.read()
        _, status = os.waitpid(self.pid, 0)
        with self.said:
            self.said.seek(0)
            said = self.said.read().decode(errors="replace")
        with no_collection():
            if sent:
                found = pickle.loads(sent)
                assert isinstance(found, Captured)
                return found
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        died = Failure(self.rank, "run", "Died", f"the process ended with {how}", (), output=said)
        return Captured(self.rank, failure=died)


def _child(job: FakeJob, rank: int, pipe: int) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        torch.set_num_threads(1)
        before = set(sys.modules)
        found = capture(job, rank)
        late = set(sys.modules) - before
        found.modules = tuple(sorted(m for m in late if m.startswith("torch.") and "test" not in m))
        times = resource.getrusage(resource.RUSAGE_SELF)
        found.cpu, found.rss = times.ru_utime + times.ru_stime, times.ru_maxrss / 2**20
        with no_collection(), open(pipe, "wb") as out:
            pickle.dump(found, out, protocol=pickle.HIGHEST_PROTOCOL)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def capture(job: FakeJob, rank: int) -> Captured:
    """Record one rank, in this process. What the script raises is told as its `failure`."""
    world = prod(job.mesh.values())
    out = Captured(rank)
    said: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(environment(world, rank, fake=True))
        around = stack.enter_context(scripting(fake=True, folder=folder, note=said.append))
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with fakes:
            given = _faked(job.replacement)
        rec = FakeScriptRecorder(job.mesh, coordinates(job.mesh, rank), job, given)
        try:
            with fakes, no_collection():
                around.on_batch(rec.batch)
                rec.facts.ended = host.run(job.launch, job.mesh, rec, job.limit)
            if not job.probe:
                _finish(rec, out)
        except (Exception, SystemExit) as e:
            out.failure = failure(rank, e)
    out.facts, out.raw = rec.facts, len(rec.trace)
    out.notes = tuple(dict.fromkeys([*said, *rec.notes]))
    return out


def _faked(given: Replacement | None) -> Replacement | None:
    """Data of the right shapes, and no values of parameters."""
    if given is None:
        return None
    new = {k: (name, torch.empty(t.shape, dtype=t.dtype)) for k, (name, t) in given.data.items()}
    return replace(given, held={}, data=new)


def _finish(rec: FakeScriptRecorder, out: Captured) -> None:
    if rec.kept != {}:
        out.survey = layers.survey(rec)
        if rec.kept is None and out.survey.kept():
            return  # it will be run again, with few layers
    done = functionalise(rec, rec.outputs.views)
    done.graph.dtensors = rec.outputs.placements
    rec.facts.arrivals = [_shaped(a, done.graph) for a in data.arrivals(rec, done)]
    out.prints = {a.key: p for a, p in zip(rec.facts.arrivals, _prints(rec, done))}
    out.prints |= _initial(rec)
    out.graph = done.graph


def _shaped(a: Arrival, graph: Graph) -> Arrival:
    known = graph.meta(a.ref)
    dtype = DTYPES.get(known.dtype) if known is not None else None
    return a if known is None or dtype is None else replace(a, value=meta(known.shape, dtype))


def _prints(rec: FakeScriptRecorder, done: Functional) -> list[str]:
    return fingerprints(done.graph, [a.ref for a in rec.facts.arrivals], _known(rec, done))


def _known(rec: FakeScriptRecorder, done: Functional) -> dict[Ref, str]:
    """Fingerprints of what had values."""
    return {ref: rec.hashes[i] for ref, (i, _) in done.origins.items() if i in rec.hashes}


def _initial(rec: FakeScriptRecorder) -> dict[Key | str, str]:
    """Fingerprints of parameters as the program began."""
    whole = rec.trace
    rec.trace = whole[: rec.began]
    try:
        done = functionalise(rec, rec.begun)
    finally:
        rec.trace = whole
    outputs = done.graph.outputs
    return dict(zip(outputs, fingerprints(done.graph, list(outputs.values()), _known(rec, done))))
