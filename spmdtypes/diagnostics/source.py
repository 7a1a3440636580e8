"""Lines of the user's files, as renderers and hints read them."""

from __future__ import annotations

import tokenize
from functools import lru_cache
from io import BytesIO
from pathlib import Path


@lru_cache(maxsize=128)
def source_lines(file: str) -> tuple[str, ...]:
    """All lines, tabs expanded; empty when the file cannot be read."""
    try:
        return tuple(_decoded(Path(file).read_bytes()).expandtabs(1).splitlines())
    except OSError:
        return ()


def _decoded(source: bytes) -> str:
    """The text of a file in the encoding that its first lines declare."""
    try:
        encoding = tokenize.detect_encoding(BytesIO(source).readline)[0]
    except SyntaxError:
        encoding = "utf-8"
    return source.decode(encoding, errors="replace").replace("\r\n", "\n")


def line_at(file: str, line: int) -> str | None:
    lines = source_lines(file)
    return lines[line - 1] if 0 < line <= len(lines) else None
