"""What is raised when a program cannot be checked: bad input, never a finding."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = Path(__file__).resolve().parent
_LIBRARY = ("site-packages", "dist-packages", "<frozen", "<string>", "<__array_function__")


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


def _raised_by_us(tb: TracebackType | None) -> bool:
    """Is our code nearer to the error than the user's?"""
    frames = _frames(tb)
    return bool(frames) and _is_ours(frames[-1][0])


def _frames(tb: TracebackType | None) -> list[tuple[str, int]]:
    """Ours and the user's, innermost last."""
    frames = [(f.filename, f.lineno or 1) for f in traceback.extract_tb(tb)]
    return [f for f in frames if _is_ours(f[0]) or not _is_library(f[0])]


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
    if isinstance(error, SyntaxError) and error.filename:
        place = (error.filename, error.lineno or 1)
        text, excerpt = f"syntax error: {error.msg}", _caret(error)
    elif isinstance(error, RecursionError):
        text = f"{doing} recurses without end"
    elif _raised_by_us(error.__traceback__) and not hasattr(error, "excerpt"):
        place = (file, line)
        what = f"{type(error).__name__}: {_first_line(str(error))}"
        text = f"internal error while {doing}: {what} (--debug shows where)"
    else:
        message = getattr(error, "message", str(error))
        first = _first_line(str(message))
        excerpt = str(getattr(error, "excerpt", "") or "")
        kind = "" if excerpt else f"{type(error).__name__}"
        text = f"{doing}: " + ": ".join(p for p in (kind, first) if p)
    result = CannotCheck(text, *place, excerpt)
    result.__cause__ = error
    return result


def _first_line(text: str) -> str:
    return next((m.strip() for m in text.splitlines() if m.strip()), "")


def _caret(error: SyntaxError) -> str:
    if not error.text or not error.offset:
        return ""
    line = error.text.rstrip("\n")
    indent = len(line) - len(line.lstrip())
    return f"    {line.strip()}\n    {' ' * max(error.offset - 1 - indent, 0)}^"
