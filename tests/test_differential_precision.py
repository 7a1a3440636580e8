"""What a program rounds away hides nothing: it is run once more without its roundings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdtypes import differential
from spmdtypes.checker import Options, check_program
from spmdtypes.core.infer import Inference
from spmdtypes.differential import Border
from spmdtypes.graph import Graph
from spmdtypes.notation import Type
from spmdtypes.verdict import Verdict
from tests.test_differential_run import MESH, MLP, Copy, Mlp, Reduce, Uncopied, program


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class Rounding(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rounded(x))


class RoundingUncopied(Uncopied):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rounded(x))


class SmallTermOnEveryRank(Mlp):
    """Wrong by less than bf16 shows: a small bias is added before the sum over tp."""

    def forward(self, x: Tensor) -> Tensor:
        x = rounded(x)
        h = Copy.apply(self.norm(x), self.tp)
        y = Reduce.apply(F.gelu(h @ self.up.t()) @ self.down.t() + 0.01, self.tp)
        return (x + y).square().mean()


class InsistsOnBf16(SmallTermOnEveryRank):
    def forward(self, x: Tensor) -> Tensor:
        if x.bfloat16().dtype != torch.bfloat16:
            raise TypeError("bf16 wanted")
        return super().forward(x)


class LowParameters(Mlp):
    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x.bfloat16() * table).float()


@pytest.mark.parametrize("right", [Rounding, LowParameters])
def test_a_right_program_in_low_precision_agrees_to_the_last_digits(right: type[Mlp]) -> None:
    found = differential.run(program(right, MESH, **MLP), seeds=(0, 1))
    assert found.ok
    assert not any(b.coarse for b in found.borders.values())
    assert max(b.error for b in found.borders.values()) < 1e-12
    assert found.rounded is not None
    assert found.rounded.tolerance > 0.1


@pytest.mark.parametrize("wrong", [RoundingUncopied, SmallTermOnEveryRank])
def test_rounding_hides_no_bug(wrong: type[Mlp]) -> None:
    found = differential.run(program(wrong, MESH, **MLP), seeds=(0, 1))
    assert {"grad:norm.weight", "grad:norm.bias"} <= {b.name for b in found.wrong}


def test_where_the_rounding_cannot_be_left_out_the_result_says_that_it_is_coarse() -> None:
    found = differential.run(program(InsistsOnBf16, MESH, **MLP), seeds=(0, 1))
    assert found.ok
    assert all(b.coarse for b in found.borders.values())
    assert any("bf16 wanted" in n for n in found.notes)


def test_a_coarse_experiment_does_not_overrule_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmdtypes import verdict

    wrong = Verdict("output", "wrong", "proved", None, Type(()))
    monkeypatch.setattr(verdict, "_by_rule", lambda *_: wrong)
    sharp = Border("output", Type(()))
    blank = Inference(Graph({}, {}))
    assert verdict.judge("output", Type(()), blank, {}, sharp).status == "right"
    assert verdict.judge("output", Type(()), blank, {}, replace(sharp, coarse=True)).status == "unknown"


def test_what_a_coarse_experiment_leaves_open_is_not_called_right() -> None:
    report = check_program(program(InsistsOnBf16, MESH, **MLP), Options(seeds=(0,)))
    assert report.counts.get("unknown", 0) > 0
    assert report.counts.get("tested", 0) == 0
