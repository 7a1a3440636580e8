"""What all answers to a script share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.scripting.callers import Callers
from spmdtypes.errors import CannotCheck, shown_path

_LARGE = 4096  # elements; more are no number that anybody reads


@dataclass(frozen=True)
class Logged:
    """A value the script shows to people: by whom (`print`, `logging`, `wandb`, ...), under which name,
    where. `value` is what it was then; `source`, for a tensor, is the memory it was in. `resolution` is the
    size of the last digit of a number that was read out of text, 0 for a value that was handed over."""

    sink: str
    name: str
    value: Any
    file: str
    line: int
    resolution: float = 0.0
    source: Tensor | None = None


@dataclass
class Context:
    """One script on one rank. `node` is the number of ranks of a machine."""

    fake: bool
    folder: Path
    rank: int
    world: int
    node: int
    callers: Callers
    tell: Callable[[str], None]
    logged: list[Logged] = field(default_factory=list)
    initialised: bool = False  # has the script made a process group?
    at_exit: list[functools.partial[Any]] = field(default_factory=list)
    on_batch: Callable[[int, Any], Any] | None = None  # may replace the k-th batch of any data loader

    @property
    def local_rank(self) -> int:
        return self.rank % self.node

    @property
    def node_rank(self) -> int:
        return self.rank // self.node

    def note(self, text: str) -> None:
        """Tell once what is different from a real run, with the user's line."""
        place = self.callers.place()
        self.tell(f"{shown_path(place[0])}:{place[1]}: {text}" if place else text)

    def refuse(self, text: str) -> CannotCheck:
        """What to raise where the check cannot go on."""
        return CannotCheck(text, *(self.callers.place() or (None, None)))

    def log(self, sink: str, name: str, value: Any, resolution: float = 0.0) -> None:
        file, line = self.callers.place() or ("", 0)
        value, source = _kept(value)
        self.logged.append(Logged(sink, name, value, file, line, resolution, source))


def _kept(value: Any) -> tuple[Any, Tensor | None]:
    """A tensor as it is now, and an alias of it that holds no autograd graph."""
    if not isinstance(value, Tensor) or type(value).__name__ == "AsyncCollectiveTensor":
        return value, None
    with _disable_current_modes(), torch.no_grad():
        alias = value.detach()
        now = alias if isinstance(alias, FakeTensor) or alias.numel() > _LARGE else alias.clone()
    return now, alias
