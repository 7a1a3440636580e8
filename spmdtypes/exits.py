"""A program under check must not end the process that checks it, nor wait for someone to type, nor
write into the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


@contextmanager
def exits_refused() -> Iterator[None]:
    """`os._exit` raises SystemExit in here; in processes forked in here it is as ever."""
    real, owner = os._exit, os.getpid()

    def refuse(status: int) -> Any:
        if os.getpid() != owner:
            real(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = real


@contextmanager
def nothing_typed() -> Iterator[None]:
    """`input()` finds the end of a file in here."""
    before = sys.stdin
    with open(os.devnull) as empty:
        sys.stdin = empty
        try:
            yield
        finally:
            sys.stdin = before


@contextmanager
def stdout_to_ourselves() -> Iterator[IO[str]]:
    """Where stdout goes. What programs, their libraries and subprocesses write to descriptor 1 in here
    goes nowhere. A stdout that is no descriptor 1 (captured by a test, a notebook) is given as it is."""
    try:
        captured = sys.stdout.fileno() != 1
    except (AttributeError, OSError, ValueError):
        captured = True
    if captured:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        with open(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False) as stream:
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)
