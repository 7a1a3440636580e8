"""Whatever a program draws can be replaced, and its streams have identities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes.capture.environment import environment
from spmdtypes.capture.recorder import Recorder

DRAWS: list[tuple[str, Callable[[], Tensor]]] = [
    ("rand", lambda: torch.rand(3, 4)),
    ("randn", lambda: torch.randn(3, 4)),
    ("randn_like", lambda: torch.randn_like(torch.zeros(3, 4))),
    ("randint", lambda: torch.randint(2, 9, (3, 4))),
    ("randperm", lambda: torch.randperm(12)),
    ("normal", lambda: torch.normal(torch.zeros(3), torch.ones(3))),
    ("bernoulli", lambda: torch.bernoulli(torch.full((3, 4), 0.5))),
    ("bernoulli_", lambda: torch.empty(3, 4).bernoulli_(0.5)),
    ("uniform_", lambda: torch.empty(3, 4).uniform_(-1, 1)),
    ("normal_", lambda: torch.empty(3, 4).normal_()),
    ("exponential_", lambda: torch.empty(3, 4).exponential_()),
    ("cauchy_", lambda: torch.empty(3, 4).cauchy_()),
    ("random_", lambda: torch.empty(3, 4).random_(10)),
    ("multinomial", lambda: torch.multinomial(torch.ones(4, 5), 2)),
    ("poisson", lambda: torch.poisson(torch.full((3,), 4.0))),
    ("trunc_normal_", lambda: nn.init.trunc_normal_(torch.empty(3, 4), a=-9, b=9)),
    ("module", lambda: nn.Linear(4, 3).weight),
    ("gumbel", lambda: F.gumbel_softmax(torch.zeros(3, 4), hard=True)),
]


@pytest.mark.parametrize(("name", "draw"), DRAWS)
def test_every_draw_can_be_replaced(name: str, draw: Callable[[], Tensor]) -> None:
    def run(seed: int, replace: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(seed)
        rec = Recorder({}, {}, keep_values=True)
        seen: list[Tensor] = []

        def on_random(
            index: int, shape: tuple[int, ...], dtype: torch.dtype, thunk: Callable[[], Tensor]
        ) -> Tensor:
            own = thunk()
            assert (tuple(own.shape), own.dtype) == (shape, dtype)
            assert rec.draw is not None and rec.draw.rng
            seen.append(own.clone() if replace is None else replace[len(seen)])
            return seen[-1]

        rec.on_random = on_random
        with rec.recording():
            return draw().detach().clone(), seen

    first, drawn = run(1, None)
    assert drawn
    again, _ = run(2, drawn)
    torch.testing.assert_close(again, first)


def test_dropout_is_replaced_by_its_mask() -> None:
    rec = Recorder({}, {}, keep_values=True)
    mask = torch.tensor([True, False, True, False])
    rec.on_random = lambda index, shape, dtype, thunk: mask if dtype is torch.bool else mask.to(dtype)
    x = torch.ones(4, requires_grad=True)
    with rec.recording():
        y = F.dropout(x, 0.5)
        y.sum().backward()
    torch.testing.assert_close(y.detach(), torch.tensor([2.0, 0.0, 2.0, 0.0]))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([2.0, 0.0, 2.0, 0.0]))


def test_a_dropout_that_draws_nothing_has_no_stream() -> None:
    rec = Recorder({}, {})
    with rec.recording():
        F.dropout(torch.ones(4, requires_grad=True), 0.5, training=False)
        F.scaled_dot_product_attention(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert all(raw.rng is None for raw in rec.trace)


def test_equal_seeds_are_equal_streams() -> None:
    def streams(seed: int) -> list[str | None]:
        rec = Recorder({}, {})
        with rec.recording():
            torch.manual_seed(seed)
            torch.rand(3)
            torch.rand(3, generator=torch.Generator().manual_seed(seed))
            torch.rand(3)
        return [raw.rng for raw in rec.trace if raw.rng is not None]

    a, b, c = streams(5)
    assert a == b != c
    assert streams(5) == [a, b, c] and streams(6)[0] != a


def test_fake_draws_leave_the_callers_generator_alone() -> None:
    from torch._subclasses import FakeTensorMode

    before = torch.get_rng_state()
    with environment(2, 0), FakeTensorMode(), Recorder({"tp": 2}, {"tp": 0}).recording():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
