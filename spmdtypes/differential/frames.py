"""Where in the user's source a call comes from: cheap to note, resolved only when somebody asks."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from types import CodeType, FrameType, TracebackType

import torch

from spmdtypes.graph import Frame

_LIBRARIES = tuple(
    os.path.realpath(p) + os.sep
    for p in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        *{sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib")},
    )
)
_RUNNER = os.path.join(os.path.dirname(__file__), "rank.py")  # who calls it is not the program
Spot = tuple[CodeType, int]
Places = tuple[tuple[str, int], ...]  # (file, line)


@functools.cache
def is_library(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith("<") or os.path.basename(name) == "typing_extensions.py":
        return True
    path = os.path.realpath(name)
    return path.startswith(_LIBRARIES) and "site-packages" not in path.removeprefix(_LIBRARIES[0])


def here(limit: int = 12) -> tuple[Spot, ...]:
    """The user's frames of the current call, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    spots: list[Spot] = []
    while frame is not None and len(spots) < limit:
        if frame.f_code.co_filename == _RUNNER:
            break
        if not is_library(frame.f_code):
            spots.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(spots)


@functools.cache
def resolve(spot: Spot) -> Frame:
    code, lasti = spot
    line, end_line, col, end_col = next(
        (p for i, p in enumerate(code.co_positions()) if i == lasti // 2), (None,) * 4
    )
    line = line or code.co_firstlineno
    return Frame(code.co_filename, line, col or 0, end_line or line, end_col or 0, code.co_name)


def from_engine() -> bool:
    """Whether the innermost caller that is no library code is beyond a run of the autograd engine: the
    op belongs to a backward formula written in C++."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        if not is_library(frame.f_code):
            return False
        frame = frame.f_back
    return False


def called_from(name: str) -> bool:
    """Whether a library function of this name called, with no user code in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code):
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


class Trail:
    """The places ops came from, in order, repeats left out; taken out piece by piece."""

    def __init__(self) -> None:
        self.places: list[tuple[str, int]] = []

    def step(self, spot: Spot) -> None:
        place = (spot[0].co_filename, line_of(spot))
        if not self.places or self.places[-1] != place:
            self.places.append(place)

    def take(self) -> Places:
        taken = tuple(self.places)
        self.places.clear()
        return taken


@functools.cache
def line_of(spot: Spot) -> int:
    return resolve(spot).line


def resolve_all(spots: tuple[Spot, ...]) -> tuple[Frame, ...]:
    return tuple(resolve(s) for s in spots)


def of_traceback(tb: TracebackType | None) -> tuple[Frame, ...]:
    """The user's frames of an exception, innermost first."""
    spots = [(f.f_code, _lasti(tb, f)) for f, _ in traceback.walk_tb(tb) if not is_library(f.f_code)]
    return resolve_all(tuple(reversed(spots)))


def _lasti(tb: TracebackType | None, frame: FrameType) -> int:
    while tb is not None:
        if tb.tb_frame is frame:
            return tb.tb_lasti
        tb = tb.tb_next
    return frame.f_lasti
