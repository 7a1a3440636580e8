"""Readings of single nodes of a program that really ran, and where a wrong value begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdtypes import differential
from spmdtypes.contracts import Program
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.layout import Layout
from spmdtypes.differential import Experiment
from spmdtypes.graph import Ref
from spmdtypes.notation import parse

MESH = {"dp": 2, "tp": 2}


class Wide(nn.Module):
    """A row-parallel layer; `reduced` sums its pending result before the nonlinearity."""

    reduced = True

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.tp = mesh.get_group("tp")
        self.w = nn.Parameter(torch.empty(6 // mesh["tp"].size(), 3))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w).detach().requires_grad_()
        if self.reduced:
            dist.all_reduce(y.data, group=self.tp)
        return y.tanh().sum()


class Unreduced(Wide):
    reduced = False


@pytest.fixture(scope="module")
def found() -> dict[type, Experiment]:
    def run(build: type[nn.Module]) -> Experiment:
        types = {"inputs": {"x": parse("[8@dp, 6@tp]")}, "params": {"w": parse("[6@tp, 3]")}}
        return differential.run(Program("wide", MESH, build, output=parse("[] | dp:P"), **types))  # type: ignore[arg-type]

    return {build: run(build) for build in (Wide, Unreduced)}


def node(e: Experiment, op: str) -> Ref:
    graph = e.ranks[0].graph
    assert graph is not None
    return Ref(next(n.id for n in graph.nodes if n.op.startswith(op)))


def test_every_value_has_its_reading(found: dict[type, Experiment]) -> None:
    e = found[Wide]
    assert e.ok
    oracle = e.oracle()
    for op, text in [
        ("aten.mm", "8@dp 3 | tp:P"),
        ("comm.all_reduce", "8@dp 3"),
        ("aten.tanh", "8@dp 3"),
        ("aten.sum", "| dp:P"),
    ]:
        readings = oracle.readings(node(e, op))
        assert readings is not None
        assert str(readings[0]).strip() == text


def test_a_proposed_reading_is_confirmed_or_refuted(found: dict[type, Experiment]) -> None:
    e = found[Wide]
    oracle, product = e.oracle(), node(e, "aten.mm")
    rows = Layout.sharded((8, 3), {0: ("dp",)}, MESH)
    assert oracle.agrees(product, Denotation(rows, frozenset({"tp"}), "sum")) is True
    assert oracle.agrees(product, Denotation(rows)) is False
    assert oracle.agrees(Ref(10**6), Denotation(rows)) is None


def test_a_wrong_border_is_traced_to_where_its_value_lost_its_reading(found: dict[type, Experiment]) -> None:
    e = found[Unreduced]
    assert [b.name for b in e.wrong] == ["output"]
    (lost, lost_because), (cause, became) = e.suspects("output")
    assert lost == node(e, "aten.tanh").node
    assert '"8@dp 3 | tp:P"' in lost_because
    assert cause == node(e, "aten.mm").node
    assert became == "becomes a pending sum over tp here"


def test_without_values_there_are_no_readings() -> None:
    types = {"inputs": {"x": parse("[8@dp, 6@tp]")}, "params": {"w": parse("[6@tp, 3]")}}
    program = Program("wide", MESH, Unreduced, output=parse("[] | dp:P"), **types)  # type: ignore[arg-type]
    e = differential.run(program, keep_values=False)
    assert e.wrong
    assert e.suspects("output") == []
    assert e.oracle().readings(Ref(0)) is None
