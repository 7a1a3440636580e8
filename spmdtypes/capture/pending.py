"""Collectives that have been issued and whose results are not in the program's tensors yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Started:
    """A collective that has been issued; `complete` stores its result into the program's tensors."""

    complete: Callable[[], None]
    done: bool = False

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
