"""What is raised when a program cannot be checked: bad input, never a finding."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = Path(__file__).resolve().parent
_LIBRARY = ("site-packages", "dist-packages", "<frozen", "<string>", "<__array_function__")

_WIDTH = 100  # columns of a line of source that are shown


class CannotCheck(Exception):
    """Bad input, with the place in the user's source. `excerpt` is more lines to show (a caret)."""

    def __init__(
        self, message: str, file: str | Path | None = None, line: int | None = None, excerpt: str = ""
    ) -> None:
        self.message, self.file, self.line, self.excerpt = message, file, line, excerpt
        super().__init__(message)

    def __str__(self) -> str:
        place = "" if self.file is None else f"{shown_path(self.file)}:{self.line or 1}: "
        return f"{place}error: {self.message}" + (f"\n{self.excerpt}" if self.excerpt else "")

    def at(self, file: str | Path | None, line: int | None) -> CannotCheck:
        """The same with a place, unless it has one."""
        if self.file is None:
            self.file, self.line = file, line
        return self


def shown_path(path: str | Path) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def user_frame(tb: TracebackType | None, file: str | Path | None = None) -> tuple[str, int] | None:
    """The user's innermost frame, in `file` if any is."""
    frames = [f for f in _frames(tb) if not _is_ours(f[0])]
    own = [f for f in frames if file is not None and f[0] == str(file)]
    found = own or frames
    return found[-1] if found else None


def user_place(frame: FrameType | None) -> tuple[str, int] | None:
    """Where the user's code is, while it runs."""
    places = [(f.filename, f.lineno or 1) for f in traceback.extract_stack(frame)]
    return next((p for p in reversed(places) if not _is_ours(p[0]) and not _is_library(p[0])), None)


def _raised_by_us(tb: TracebackType | None) -> bool:
    """Is our code nearer to the error than the user's?"""
    frames = _frames(tb)
    return bool(frames) and _is_ours(frames[-1][0])


def _frames(tb: TracebackType | None) -> list[tuple[str, int]]:
    """Ours and the user's, innermost last."""
    frames = [(f.filename, f.lineno or 1) for f in traceback.extract_tb(tb)]
    return [f for f in frames if _is_ours(f[0]) or not _is_library(f[0])]


def is_user_file(filename: str) -> bool:
    """Neither ours, nor Python's, nor an installed package's?"""
    return not (_is_ours(filename) or _is_library(filename))


def _is_library(filename: str) -> bool:
    """Python's own, or an installed package's."""
    return any(part in filename for part in _LIBRARY) or filename.startswith(sys.base_prefix + "/lib")


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_PACKAGE)


def blame(error: BaseException, doing: str, file: str | Path | None = None, line: int = 1) -> CannotCheck:
    """Turn whatever was raised while `doing` into one line about the user's file.

    The place is the user's innermost frame, or `file:line` where the error has none.
    """
    if isinstance(error, CannotCheck):
        return error.at(file, line)
    place = user_frame(error.__traceback__, file) or (file, line)
    excerpt = ""
    if isinstance(error, SyntaxError):
        if error.filename and Path(error.filename).is_file():
            place = (error.filename, error.lineno or 1)
        text, excerpt = f"syntax error: {error.msg}", _caret(error)
    elif isinstance(error, SystemExit):
        text = f"{doing} ends the process" + (f" (exit code {error.code})" if error.code else "")
    elif isinstance(error, RecursionError):
        text = f"{doing} recurses without end"
    elif _raised_by_us(error.__traceback__) and not hasattr(error, "excerpt"):
        place = (file, line)
        what = f"{type(error).__name__}: {_first_line(_said(error))}"
        text = f"internal error while {doing}: {what} (--debug shows where)"
    else:
        first = _first_line(_said(error))
        excerpt = str(getattr(error, "excerpt", "") or "")
        kind = "" if excerpt else f"{type(error).__name__}"
        text = f"{doing}: " + ": ".join(p for p in (kind, first) if p)
    result = CannotCheck(text, *place, excerpt)
    result.__cause__ = error
    return result


def _said(error: BaseException) -> str:
    """Its message; `str` of a user's exception may raise."""
    try:
        return str(getattr(error, "message", None) or error)
    except Exception:
        return ""


def _first_line(text: str) -> str:
    return next((m.strip() for m in text.splitlines() if m.strip()), "")


def _caret(error: SyntaxError) -> str:
    if not error.text or not error.offset:
        return ""
    line = error.text.rstrip("\n")
    start = max(len(line) - len(line.lstrip()), error.offset - _WIDTH)
    shown = line[start : start + _WIDTH].rstrip()
    return f"    {shown}\n    {' ' * max(error.offset - 1 - start, 0)}^"
