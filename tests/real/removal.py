"""Taking one collective out of somebody else's program, by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


class _Done:
    """Stands for the handle of a collective that never was."""

    def wait(self) -> bool:
        return True


@contextmanager
def no_all_reduce(function: str, call: int | None = None) -> Iterator[None]:
    """`dist.all_reduce` does nothing when called from `function` (a qualified name).

    Each time `function` runs, only its call number `call` is dropped; None drops all of them.
    """
    original, calls = dist.all_reduce, (None, 0)

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        frame = sys._getframe(1)
        if frame.f_code.co_qualname != function:
            return original(tensor, *args, **kwargs)
        frame_of, count = calls
        calls = (frame, count + 1 if frame_of is frame else 0)
        if call is None or calls[1] == call:
            return _Done() if kwargs.get("async_op") else None
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield
