"""Replays the ranks' collectives as they are issued and says at once when they cannot meet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from spmdtypes.differential.experiment import Call, Divergence, Place


class Rendezvous:
    """Members of a group must issue the same collectives in the same order.

    `issue` and `finish` return a `Divergence` as soon as one is certain. A rank that has failed is
    no divergence: its peers are merely blocked (`blocked`).
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.calls: dict[tuple[bool, tuple[int, ...]], dict[int, list[Call]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.last: dict[int, tuple[Call, int]] = {}
        self.finished: set[int] = set()
        self.failed: set[int] = set()
        self.crossed: list[Divergence] = []
        self.trails: dict[int, list[Place]] = defaultdict(list)
        self.marks: dict[tuple[bool, tuple[int, ...]], dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def issue(self, rank: int, call: Call, trail: Sequence[Place] = ()) -> Divergence | None:
        """`trail`: the places the rank passed since its collective before."""
        self.trails[rank] += trail
        self.marks[_queue(call)][rank].append(len(self.trails[rank]))
        found = self._issue(rank, call)
        return found and self._parting(found)

    def _issue(self, rank: int, call: Call) -> Divergence | None:
        queues = self.calls[_queue(call)]
        queue = queues[rank]
        index = len(queue)
        queue.append(call)
        self.last[rank] = (call, index)
        for other in call.group:
            theirs = queues[other]
            if other == rank:
                continue
            if index < len(theirs):
                reason = mismatch(rank, call, other, theirs[index])
                if reason:
                    return Divergence(reason, (rank, other), (call, theirs[index]))
                self._note_crossing(rank, call, other, theirs[index])
            elif other in self.finished:
                return Divergence("missing", (rank, other), (call, None))
        return self.deadlock()

    def finish(self, rank: int, trail: Sequence[Place] = ()) -> Divergence | None:
        self.trails[rank] += trail
        found = self._finish(rank)
        return found and self._parting(found)

    def _finish(self, rank: int) -> Divergence | None:
        self.finished.add(rank)
        for (_, group), queues in self.calls.items():
            if rank not in group:
                continue
            mine = len(queues[rank])
            for other in group:
                if other != rank and len(queues[other]) > mine:
                    return Divergence("missing", (other, rank), (queues[other][mine], None))
        return self.deadlock()

    def _parting(self, d: Divergence) -> Divergence:
        """Where the two ranks went different ways since they last met, or else before."""
        a, b = d.ranks
        call = d.calls[0]
        assert call is not None
        marks = self.marks[_queue(call)]
        met = min(len(marks[a]), len(marks[b])) - (2 if d.calls[1] and d.reason != "deadlock" else 1)
        for start in (met, -1):
            mine, theirs = (self.trails[r][marks[r][start] if start >= 0 else 0 :] for r in (a, b))
            same = 0
            while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
                same += 1
            if same < len(mine) or same < len(theirs):
                break
        parted = (next(iter(mine[same:]), None), next(iter(theirs[same:]), None))
        return replace(d, last=mine[same - 1] if same else None, parted=parted)

    def fail(self, rank: int) -> None:
        self.failed.add(rank)

    def waiting(self, rank: int) -> Call | None:
        """The collective that holds this rank up, as far as its blocking calls tell."""
        if rank in self.finished or rank in self.failed or rank not in self.last:
            return None
        call, index = self.last[rank]
        return call if call.blocking and self._missing(call, index) else None

    def blocked(self, rank: int) -> bool:
        """Held up by a rank that has failed."""
        return self.waits_for(rank, self.failed)

    def waits_for(self, rank: int, others: Set[int]) -> bool:
        """Did its last call, blocking or not, need one of these, who have not come?"""
        if rank not in self.last:
            return False
        call, index = self.last[rank]
        return any(m in others for m in self._missing(call, index))

    def deadlock(self) -> Divergence | None:
        """Every running rank waits for another that waits."""
        running = [r for r in range(self.world) if r not in self.finished and r not in self.failed]
        if not running or self.failed or any(self.waiting(r) is None for r in running):
            return None
        return self.stuck()

    def stuck(self) -> Divergence | None:
        """Two ranks that wait in collectives which cannot meet, given that nothing moves any more.

        None: some rank is held up by something else, and the collectives could all meet.
        """
        for rank in sorted(self.last):
            if rank in self.finished or rank in self.failed:
                continue
            for call, index in self._open(rank):
                for other in self._missing(call, index):
                    if other in self.finished or rank in self._waited_for(other):
                        theirs = next((c for c, _ in self._open(other)), None)
                        return Divergence("deadlock", (rank, other), (call, theirs))
        return None

    def _waited_for(self, rank: int) -> set[int]:
        """The ranks that have to come first, directly or not."""
        found: set[int] = set()
        stack = [rank]
        while stack:
            for call, index in self._open(stack.pop()):
                new = set(self._missing(call, index)) - found
                found |= new
                stack += new
        return found

    def _open(self, rank: int) -> Iterator[tuple[Call, int]]:
        """The rank's calls that somebody has not come to yet, the last one first."""
        if rank in self.finished or rank not in self.last:
            return
        issued = [self.last[rank]]
        issued += [(c, i) for queues in self.calls.values() for i, c in enumerate(queues.get(rank, ()))]
        yield from ((call, index) for call, index in issued if self._missing(call, index))

    def _missing(self, call: Call, index: int) -> list[int]:
        queues = self.calls[_queue(call)]
        return [m for m in call.group if len(queues[m]) <= index]

    def _note_crossing(self, rank: int, call: Call, other: int, theirs: Call) -> None:
        a, b = call.frames[:1], theirs.frames[:1]
        if call.kind in PAIRED or not a or not b or (a[0].file, a[0].line) == (b[0].file, b[0].line):
            return
        if not any(d.calls[0] and d.calls[0].frames[:1] in (a, b) for d in self.crossed):
            self.crossed.append(Divergence("line", (rank, other), (call, theirs)))


PAIRED = ("send", "recv")


def _queue(call: Call) -> tuple[bool, tuple[int, ...]]:
    """Collectives of a group meet in order, and so do the messages from one rank to another."""
    return call.kind in PAIRED, call.group


def mismatch(a_rank: int, a: Call, b_rank: int, b: Call) -> str:
    """Why two calls cannot be the same collective; "" when they can."""
    if a.kind in PAIRED or b.kind in PAIRED:
        if {a.kind, b.kind} != set(PAIRED):
            return "kind"
        return "" if _sizes(a) == _sizes(b) and a.dtype == b.dtype else "shape"
    if a.kind != b.kind:
        return "kind"
    if a.kind == "all_to_all":
        return _uneven(a_rank, a, b_rank, b)
    if a.root != b.root:
        return "root"
    if _sizes(a) != _sizes(b):
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if a.reduce_op and b.reduce_op and a.reduce_op != b.reduce_op:
        return "reduce_op"
    return ""


def _sizes(call: Call) -> list[int]:
    """Elements of each tensor: all that the transport sees of a shape."""
    return [math.prod(s) for s in call.shapes]


def _uneven(a_rank: int, a: Call, b_rank: int, b: Call) -> str:
    """An all-to-all may be split differently by every rank, but what one sends the other must expect."""
    if a.dtype != b.dtype:
        return "dtype"
    if a.splits is None or b.splits is None:
        return ""
    i, j = a.group.index(a_rank), a.group.index(b_rank)
    fits = a.splits[1][j] == b.splits[0][i] and b.splits[1][i] == a.splits[0][j]
    return "" if fits else "splits"


def group_axes(group: Iterable[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes a group of row-major ranks spans; empty when it is no product of axes."""
    ranks = sorted(group)
    strides, step = {}, 1
    for axis in reversed(list(mesh)):
        strides[axis] = step
        step *= mesh[axis]
    span = [a for a in mesh if mesh[a] > 1 and len({r // strides[a] % mesh[a] for r in ranks}) > 1]
    size = 1
    for a in span:
        size *= mesh[a]
    full = all(len({r // strides[a] % mesh[a] for r in ranks}) == mesh[a] for a in span)
    return tuple(span) if full and size == len(ranks) else ()
