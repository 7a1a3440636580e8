"""Derived rules against the kernels, by brute force over a sample of placements.

`python -m benchmarks.soundness` does the same at length.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.soundness import Tally, check_case
from tests.ops.cases import cases

ONE, TWO = {"x": 2}, {"a": 2, "b": 2}
EVERY = 8  # one case in so many, another one for each mesh


def _check(indices: Sequence[int], mesh: dict[str, int], limit: int, uneven: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tally = Tally()
    for k in indices:
        tally.merge(check_case(cases()[k], mesh, limit, 0, uneven))
    pipe.send(tally)


def _in_child(indices: Sequence[int], mesh: dict[str, int], limit: int, uneven: bool = False) -> Tally:
    """Kernels given mismatched shapes may take the process with them."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(indices, mesh, limit, uneven, send))
    process.start()
    send.close()
    try:
        return receive.recv()  # type: ignore[no-any-return]
    except EOFError:
        pytest.fail("a kernel ended the process")
    finally:
        process.join()


@pytest.mark.parametrize(
    ("mesh", "uneven", "limit"),
    [(ONE, False, 15), (TWO, False, 10), ({"x": 3}, True, 15)],
    ids=["one axis", "two axes", "uneven"],
)
def test_what_is_promised_holds(mesh: dict[str, int], uneven: bool, limit: int) -> None:
    offset = len(mesh) + uneven
    tally = _in_child(range(offset % EVERY, len(cases()), EVERY), mesh, limit, uneven)
    assert tally.counts["UNSOUND"] == 0, tally.examples["UNSOUND"][:5]
    assert tally.counts["promised but refused"] <= tally.counts["right"] / 10, tally.examples
    assert tally.counts["right"] > 40


def test_little_is_missed() -> None:
    tally = _in_child(range(0, len(cases()), EVERY), ONE, 15)
    missed, right = tally.counts["missed"], tally.counts["right"]
    assert missed <= 0.03 * (missed + right), tally.examples["missed"][:10]
