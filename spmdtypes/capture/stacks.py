"""Where an op was issued: the user's frames, and what kind of library code stood between.

Stacks are stored as tuples of (code id, instruction) and resolved to lines and columns only when
asked for, so recording one costs a walk over the frames and a dict lookup.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

from spmdtypes.graph import Frame

USER, LIBRARY, MODULE, ENGINE, OPTIMIZER, CLIP, STOP = range(7)

_TORCH = str(Path(torch.__file__).parent) + "/"
_OWN = str(Path(__file__).parent.parent) + "/"
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_LIMIT = 24
# Decorators around functions of torch, never a place in the user's program.
_WRAPPERS = ("/typing_extensions.py",)


class Walk:
    """What one walk up the frames found. `inner` user frames are below the autograd engine."""

    __slots__ = ("create_graph", "engine", "inner", "key", "marker")

    def __init__(self) -> None:
        self.key: tuple[int, ...] = ()
        self.marker = LIBRARY
        self.engine = False
        self.inner = 0
        self.create_graph = False


class Stacks:
    """Interned user stacks. `stop` are code objects above which nothing belongs to the program."""

    def __init__(self) -> None:
        self.kinds: dict[int, int] = {}
        self.codes: dict[int, CodeType] = {}
        self.ids: dict[tuple[int, ...], int] = {(): 0}
        self.keys: list[tuple[int, ...]] = [()]
        self._mark(torch.nn.Module._call_impl.__code__, MODULE)
        self._mark(torch.autograd.graph._engine_run_backward.__code__, ENGINE)

    def _mark(self, code: CodeType, kind: int) -> None:
        self.codes[id(code)] = code
        self.kinds[id(code)] = kind

    def stop_at(self, code: CodeType) -> None:
        self._mark(code, STOP)

    def walk(self, frame: FrameType | None) -> Walk:
        """The user stack seen from `frame`, innermost first."""
        found = Walk()
        kinds, key, marker = self.kinds, [], LIBRARY
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = _classify(code)
                self._mark(code, kind)
            if kind == USER:
                key.append(id(code))
                key.append(frame.f_lasti)
            elif kind >= MODULE:
                if kind == STOP:
                    break
                if marker == LIBRARY:
                    marker = kind
                if kind == ENGINE and not found.engine:
                    found.engine = True
                    found.inner = len(key) // 2
                    if torch.is_grad_enabled():
                        found.create_graph = _create_graph(frame)
            frame = frame.f_back
        found.key = tuple(key[: 2 * _LIMIT])
        found.marker = marker
        return found

    def intern(self, key: tuple[int, ...]) -> int:
        index = self.ids.get(key)
        if index is None:
            index = self.ids[key] = len(self.keys)
            self.keys.append(key)
        return index

    def resolve(self, index: int) -> tuple[Frame, ...]:
        key = self.keys[index]
        return tuple(_frame(self.codes[c], lasti) for c, lasti in zip(key[::2], key[1::2]))


def _classify(code: CodeType) -> int:
    file = code.co_filename
    if file.startswith(_TORCH):
        if file.startswith(_TORCH + "optim/"):
            return OPTIMIZER
        return CLIP if file.endswith("/clip_grad.py") else LIBRARY
    if file.startswith((_OWN, "<")) or file.endswith(_WRAPPERS):
        return LIBRARY
    return LIBRARY if file.startswith(_STDLIB) and "site-packages" not in file else USER


def _create_graph(frame: FrameType) -> bool:
    args = frame.f_locals.get("args", ())
    return bool(args[2]) if len(args) > 2 else False


def _frame(code: CodeType, lasti: int) -> Frame:
    first = code.co_firstlineno
    position = (first, first, 0, 0)
    if lasti >= 0:
        for i, p in enumerate(code.co_positions()):
            if i == lasti // 2:
                position = tuple(first if v is None and j < 2 else v or 0 for j, v in enumerate(p))  # type: ignore[assignment]
                break
    line, end_line, col, end_col = position
    return Frame(code.co_filename, line, col, end_line, end_col, code.co_qualname)
