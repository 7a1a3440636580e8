"""A child leaves alone what its parent has not collected yet."""

from __future__ import annotations

import gc
import multiprocessing
import os

from spmdtypes.forking import garbage_left_alone


class Ring:
    """Garbage that only the collector frees, and that must not be freed in another process."""

    def __init__(self) -> None:
        self.itself = self
        self.owner = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(9)


def test_the_child_does_not_collect_the_parents_garbage() -> None:
    gc.disable()
    try:
        Ring()
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        with garbage_left_alone():
            child.start()
        child.join()
    finally:
        gc.enable()
    assert child.exitcode == 0


def test_the_parent_collects_again_afterwards() -> None:
    with garbage_left_alone():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
