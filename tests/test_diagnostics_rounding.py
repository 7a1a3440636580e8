"""A sum over ranks of rounded summands is told when the sum itself is wanted in full precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdtypes.checker import Options, check_program
from tests.test_differential_run import program

TYPES = {"inputs": {"x": "f32[8@dp, 4]"}, "params": {"w": "[4]"}, "results": {"total": "f32[4]"}}


class Model(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(4))


def rounds_the_summands(model: Model, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    wire = (x * model.w.detach()).sum(0).to(torch.bfloat16)
    dist.all_reduce(wire, group=mesh.get_group("dp"))
    return {"total": wire.to(x.dtype) * 2}


def rounds_the_sum(model: Model, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    wire = (x * model.w.detach()).sum(0)
    dist.all_reduce(wire, group=mesh.get_group("dp"))
    return {"total": wire.to(torch.bfloat16).to(x.dtype) * 2}


def sends_whole_numbers(model: Model, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    wire = (x > 0).sum(0).to(x.dtype).to(torch.bfloat16)
    dist.all_reduce(wire, group=mesh.get_group("dp"))
    return {"total": wire.to(x.dtype) * 2}


def stays_low(model: Model, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    wire = (x * model.w.detach()).sum(0).to(torch.bfloat16)
    dist.all_reduce(wire, group=mesh.get_group("dp"))
    return {"total": wire.tanh()}


@pytest.mark.parametrize("test", [True, False])
def test_summands_rounded_on_the_wire_are_an_error(test: bool) -> None:
    report = check_program(
        program(Model, {"dp": 2}, step=rounds_the_summands, **TYPES), Options(test=test, seeds=(0,))
    )
    assert [f.code for f in report.errors] == ["SPMD801"]


@pytest.mark.parametrize("step", [rounds_the_sum, sends_whole_numbers, stays_low])
def test_no_other_rounding_is(step: Any) -> None:
    report = check_program(program(Model, {"dp": 2}, step=step, **TYPES), Options(seeds=(0,)))
    assert report.errors == ()
