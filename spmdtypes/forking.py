"""Forking a process that may hold leftovers of distributed runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Fork in here: the child never collects what was garbage before it came to be.

    Such garbage may hold process groups and stores. Their threads do not exist in the child, which
    crashes when it frees them. The parent's collector is as before afterwards; a child that starts
    and ends in here never gets there.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
