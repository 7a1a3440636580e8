"""Forks one process a rank, follows their collectives, ends them all at the first that cannot meet."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import pickle
import queue
import selectors
import shutil
import signal
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from spmdtypes.core.simulate import coordinates
from spmdtypes.differential import wire
from spmdtypes.differential.experiment import Divergence, Failure
from spmdtypes.differential.rank import Outcome, Report
from spmdtypes.differential.rendezvous import Rendezvous
from spmdtypes.forking import garbage_left_alone

STALLED = "Stalled"  # the `error` of ranks that had to be given up
QUIET = 8.0  # seconds without a message or CPU time after which ranks count as stuck


class Work(Protocol):
    """What ranks do: `enter` joins the process group of a freshly forked rank, and `run` runs one seed."""

    @property
    def mesh(self) -> Mapping[str, int]: ...

    @property
    def seeds(self) -> tuple[int, ...]: ...

    def enter(self, rank: int, store: str, timeout: float) -> Any: ...

    def run(self, state: Any, rank: int, index: int, report: Report) -> Outcome: ...


W = TypeVar("W", bound=Work)


@dataclass
class Execution(Generic[W]):
    """`outcomes[rank]` holds one `Outcome` a seed; the last ones may lack when the run was ended."""

    job: W
    outcomes: list[list[Outcome]]
    divergence: Divergence | None = None
    failures: tuple[Failure, ...] = ()
    crossed: tuple[Divergence, ...] = ()

    @property
    def complete(self) -> bool:
        return self.divergence is None and not self.failures

    @property
    def stalled(self) -> bool:
        return stalled(self.failures)


def stalled(failures: Sequence[Failure]) -> bool:
    """Did the ranks stop although their collectives could meet? Then nothing is known of the program."""
    return bool(failures) and all(f.error == STALLED for f in failures)


# what programs commonly pull in late: imported once here, not once in every rank
_EARLY = (
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)


def execute(job: W, timeout: float) -> Execution[W]:
    """Run a job on all ranks of its mesh. What a fork inherits may hold it up: then once more."""
    for name in _EARLY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    start = time.monotonic()
    found = _execute(job, timeout)
    spent = time.monotonic() - start
    return _execute(job, timeout) if found.stalled and spent < timeout / 2 else found


def _execute(job: W, timeout: float) -> Execution[W]:
    world = math.prod(job.mesh.values())
    folder = tempfile.mkdtemp(prefix="ranks")
    ranks: list[_Rank] = []
    try:
        with garbage_left_alone():
            for rank in range(world):
                ranks.append(_fork(job, rank, os.path.join(folder, "store"), timeout, ranks))
        return _Supervisor(job, ranks, timeout).follow()
    finally:
        for r in ranks:
            r.end()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Rank:
    """The parent's view of a rank."""

    number: int
    pid: int
    reports: int  # read end
    control: int  # write end
    results: BinaryIO
    printed: BinaryIO
    buffer: bytearray = field(default_factory=bytearray)
    outcomes: list[Outcome] = field(default_factory=list)
    closed: bool = False

    def messages(self) -> Iterator[Any]:
        """What has arrived; sets `closed` at the end of the stream."""
        data = os.read(self.reports, 1 << 16)
        self.closed = not data
        self.buffer += data
        while len(self.buffer) >= 4:
            size = struct.unpack_from("<I", self.buffer)[0]
            if len(self.buffer) < 4 + size:
                break
            body = bytes(self.buffer[4 : 4 + size])
            del self.buffer[: 4 + size]
            yield pickle.loads(body)

    def fetch(self, offset: int, size: int) -> Outcome:
        self.results.seek(offset)
        outcome: Outcome = wire.load(self.results.read(size))
        self.outcomes.append(outcome)
        return outcome

    def tail(self, limit: int = 2000) -> str:
        end = self.printed.seek(0, io.SEEK_END)
        self.printed.seek(max(0, end - limit))
        return self.printed.read().decode(errors="replace")

    def cpu(self) -> float | None:
        """CPU seconds so far, None where the system does not tell."""
        try:
            with open(f"/proc/{self.pid}/stat") as f:
                fields = f.read().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for fd in (self.reports, self.control):
            os.close(fd)
        self.results.close()
        self.printed.close()


def _fork(job: Work, rank: int, store: str, timeout: float, earlier: list[_Rank]) -> _Rank:
    report_read, report_write = os.pipe()
    control_read, control_write = os.pipe()
    results, printed = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
    pid = os.fork()
    if pid:
        os.close(report_write)
        os.close(control_read)
        return _Rank(rank, pid, report_read, control_write, results, printed)
    try:  # from here on in the child, which never returns
        os.close(report_read)
        os.close(control_write)
        for other in earlier:  # else this rank would keep the others' control pipes open
            os.close(other.reports)
            os.close(other.control)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        _Child(job, rank, store, timeout, report_write, control_read, results).run()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)


@dataclass
class _Child:
    job: Work
    rank: int
    store: str
    timeout: float
    reports: int
    control: int
    results: BinaryIO
    go: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        state = self.job.enter(self.rank, self.store, self.timeout + 60)
        for index in range(len(self.job.seeds)):
            outcome = self.job.run(state, self.rank, index, lambda *call: self.send("call", call))
            data = wire.dump(outcome)
            offset = self.results.seek(0, io.SEEK_END)
            self.results.write(data)
            self.results.flush()
            self.send("done", (offset, len(data), outcome.failure is not None))
            self.go.get()

    def send(self, what: str, body: Any) -> None:
        data = pickle.dumps((what, body))
        data = struct.pack("<I", len(data)) + data
        while data:
            data = data[os.write(self.reports, data) :]

    def _listen(self) -> None:
        """Passes on the parent's go-aheads; the end of the pipe is the end of the parent."""
        while True:
            signal_ = os.read(self.control, 1)
            if not signal_:
                os._exit(1)
            self.go.put(signal_)


class _Supervisor:
    """Follows the ranks through all seeds."""

    def __init__(self, job: Work, ranks: list[_Rank], timeout: float) -> None:
        self.job, self.ranks = job, ranks
        self.deadline = time.monotonic() + timeout
        self.coords = coordinates(job.mesh)
        self.failures: list[Failure] = []
        self.divergence: Divergence | None = None
        self.crossed: list[Divergence] = []
        self.seed_index = 0
        self.meeting = Rendezvous(len(ranks))

    def follow(self) -> Execution[Any]:
        with selectors.DefaultSelector() as selector:
            for r in self.ranks:
                selector.register(r.reports, selectors.EVENT_READ, r)
            while not self._over():
                ready = selector.select(timeout=0.25)
                for key, _ in ready:
                    self._hear(key.data)
                    if key.data.closed:
                        selector.unregister(key.fd)
                    if self.divergence:
                        break
                self._watch_the_clock(bool(ready))
        return Execution(
            self.job, [r.outcomes for r in self.ranks], self.divergence, self._causes(), tuple(self.crossed)
        )

    def _causes(self) -> tuple[Failure, ...]:
        """The failures, without broken connections of ranks that were waiting for one that died."""
        dead = {f.rank for f in self.failures if f.error == "Died"}
        return tuple(f for f in self.failures if f.rank in dead or not self.meeting.waits_for(f.rank, dead))

    def _over(self) -> bool:
        if self.divergence:
            return True
        settled = self.meeting.finished | self.meeting.failed
        rest = [r.number for r in self.ranks if r.number not in settled]
        if self.meeting.failed:
            return all(self.meeting.blocked(r) for r in rest)
        if rest:
            return False
        self.crossed += self.meeting.crossed
        self.seed_index += 1
        if self.seed_index == len(self.job.seeds):
            return True
        self.meeting = Rendezvous(len(self.ranks))
        for r in self.ranks:
            os.write(r.control, b"g")
        return False

    def _hear(self, rank: _Rank) -> None:
        for what, body in rank.messages():
            found: Divergence | None = None
            if what == "call":
                found = self.meeting.issue(rank.number, *body)
            else:
                offset, size, failed = body
                outcome = rank.fetch(offset, size)
                if failed and outcome.failure:
                    self.failures.append(replace(outcome.failure, output=rank.tail()))
                    self.meeting.fail(rank.number)
                else:
                    found = self.meeting.finish(rank.number, outcome.trail)
            if found and not self.failures:
                self.divergence = self._placed(found)
                return
        if rank.closed and rank.number not in self.meeting.finished | self.meeting.failed:
            self.failures.append(self._death(rank))
            self.meeting.fail(rank.number)

    def _placed(self, d: Divergence) -> Divergence:
        a, b = d.ranks
        return replace(d, coords=(self.coords[a], self.coords[b]), seed=self._seed)

    @property
    def _seed(self) -> int:
        return self.job.seeds[min(self.seed_index, len(self.job.seeds) - 1)]

    def _death(self, rank: _Rank) -> Failure:
        return Failure(rank.number, "run", "Died", "the process ended by itself", (), self._seed, rank.tail())

    _quiet_since: float | None = None
    _cpu: float = 0.0

    def _watch_the_clock(self, active: bool) -> None:
        now = time.monotonic()
        if now > self.deadline:
            self._give_up("ran out of time")
            return
        cpu = [r.cpu() for r in self.ranks if not r.closed]
        if active or any(c is None for c in cpu):
            self._quiet_since = None
            return
        used = sum(c for c in cpu if c is not None)
        if self._quiet_since is None or used - self._cpu > 0.05 * (now - self._quiet_since) + 0.02:
            self._quiet_since, self._cpu = now, used
        elif now - self._quiet_since > QUIET:
            self._give_up("nothing moves any more")

    def _give_up(self, why: str) -> None:
        stuck = self.meeting.stuck()
        if stuck and not self.failures:
            self.divergence = self._placed(stuck)
            return
        for r in self.ranks:
            if r.number not in self.meeting.finished | self.meeting.failed:
                self.failures.append(Failure(r.number, "run", STALLED, why, (), self._seed, r.tail()))
                self.meeting.fail(r.number)
