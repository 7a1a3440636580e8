"""Lines of the user's files, as renderers and hints read them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=128)
def source_lines(file: str) -> tuple[str, ...]:
    """All lines, tabs expanded; empty when the file cannot be read."""
    try:
        return tuple(Path(file).read_text(errors="replace").expandtabs(1).splitlines())
    except OSError:
        return ()


def line_at(file: str, line: int) -> str | None:
    lines = source_lines(file)
    return lines[line - 1] if 0 < line <= len(lines) else None
