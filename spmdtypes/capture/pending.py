"""Collectives that have been issued and whose results are not in the program's tensors yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spmdtypes.capture.raw import Raw, View

_EXACT = 4096  # elements up to which strided views are compared one by one
_UNREAD = tuple(  # beginnings of ops that look at a tensor's shape, or at nothing
    "empty_like zeros_like ones_like full_like rand_like randn_like new_ resize_ set_ "
    "record_stream detach_".split()
)


@dataclass
class Started:
    """A collective that has been issued; `complete` stores its result into the program's tensors.

    Until then it reads `inputs` and writes `outputs`. `node` is its place in the trace.
    """

    complete: Callable[[], None]
    done: bool = False
    node: int = -1
    inputs: tuple[View, ...] = ()
    outputs: tuple[View, ...] = ()

    def disturbed_by(self, reads: Sequence[View], writes: Sequence[View]) -> bool:
        """Is the outcome open when somebody reads and writes these meanwhile?"""
        own = (*self.inputs, *self.outputs)
        return any(meet(a, b) for a in writes for b in own) or any(
            meet(a, b) for a in reads for b in self.outputs
        )

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.complete()


@dataclass
class Pending:
    """Collectives whose result is not yet in the program's tensors, by the Work that completes them.

    `reduce` is the operator of the call in progress, read from its Python entry point.
    """

    reduce: tuple[str, float | None] = ("unknown", None)
    premul: float | None = None
    issued: list[Started] | None = None  # None: no Python call in progress, C++ will wait by itself
    works: dict[int, tuple[Any, list[Started]]] = field(default_factory=dict)
    loose: list[Started] = field(default_factory=list)  # issued inside a coalescing block
    hazards: list[tuple[Raw, int, bool]] = field(default_factory=list)  # who, node of the collective, writes

    @contextmanager
    def call(self, reduce: tuple[str, float | None]) -> Iterator[list[Started]]:
        before = self.reduce, self.issued
        issued: list[Started] = []
        self.reduce, self.issued = reduce, issued
        try:
            yield issued
        finally:
            self.reduce, self.issued = before

    def attach(self, work: Any, issued: list[Started]) -> None:
        todo = [s for s in issued if not s.done]
        if todo and work is not None:
            self.works.setdefault(id(work), (work, []))[1].extend(todo)
        self.loose.extend(todo)

    def wait(self, key: int) -> None:
        """`key`: id of a Work, or -1 - storage for the result of a functional collective."""
        _, started = self.works.pop(key, (None, []))
        for s in started:
            s.finish()
        self.loose = [s for s in self.loose if not s.done]

    def used(self, raw: Raw) -> None:
        """An op was recorded: note what it does to memory that a collective is at work on."""
        started = [s for _, many in self.works.values() for s in many if not s.done and s.node >= 0]
        if not started or not raw.op.startswith("aten.") or raw.op.split(".")[1].startswith(_UNREAD):
            return
        reads = [v for v in _views((raw.args, *raw.kwargs.values())) if v not in raw.mutated]
        if not raw.mutated:
            aliased = {o.storage for o in raw.outs if type(o) is View}
            reads = [v for v in reads if v.storage not in aliased]
        self.hazards += [
            (raw, s.node, bool(raw.mutated)) for s in started if s.disturbed_by(reads, raw.mutated)
        ]


def _views(x: Any) -> Iterator[View]:
    if type(x) is View:
        yield x
    elif isinstance(x, tuple):
        for y in x:
            yield from _views(y)


def meet(a: View, b: View) -> bool:
    """Do two views certainly share memory?"""
    (p, q), (r, s) = a.span, b.span
    if a.storage != b.storage or p >= s or r >= q:
        return False
    if all(v.numel * v.itemsize == v.span[1] - v.span[0] for v in (a, b)):
        return True
    return a.numel <= _EXACT and b.numel <= _EXACT and not _bytes(a).isdisjoint(_bytes(b))


def _bytes(v: View) -> set[int]:
    """Where the elements begin, and all they cover."""
    at = [v.offset]
    for n, stride in zip(v.shape, v.stride):
        at = [x + i * stride for x in at for i in range(n)]
    return {x * v.itemsize + k for x in at for k in range(v.itemsize)}
