"""Equal random numbers: odd for the samples of data-parallel ranks, wrong for the shards of one value."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmdtypes
from spmdtypes import Spmd, program


@program(mesh={"dp": 2}, grads={"dp": "avg"})
class Unseeded(nn.Module):
    """Nobody folds the rank into the seed: every rank drops the same positions of its own samples."""

    weight: Spmd[nn.Parameter, "d d"]

    def __init__(self, mesh, d):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d, d))

    def forward(self, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
        return F.dropout(x @ self.weight, 0.3)


@program(mesh={"tp": 2})
class EqualMasks(nn.Module):
    """The shards of one hidden value get one mask."""

    weight: Spmd[nn.Parameter, "d f@tp"]

    def __init__(self, mesh, d, f):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d, f // mesh.size()))

    def forward(self, x: Spmd[Tensor, "b d"]) -> Spmd[Tensor, "b f@tp"]:
        return F.dropout(x.detach() @ self.weight, 0.3)


@pytest.mark.parametrize("test", [True, False])
def test_samples_with_equal_draws_are_a_warning(test):
    report = spmdtypes.check(Unseeded, test=test)
    assert [(f.code, f.severity) for f in report.findings] == [("SPMD502", "warning")], str(report)
    assert report.findings[0].axes == ("dp",)


@pytest.mark.parametrize("test", [True, False])
def test_shards_with_equal_draws_are_an_error(test):
    report = spmdtypes.check(EqualMasks, test=test)
    assert any(f.code == "SPMD502" and f.is_error for f in report.findings), str(report)
