"""Scripts too large to run: a few ranks are recorded without values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from spmdtypes.capture.unpack import unpacked
from spmdtypes.graph import Comm, Graph, Node, Ref, TensorMeta
from spmdtypes.mesh import shrunk
from spmdtypes.script.choose import MOST_RANKS
from spmdtypes.script.fingerprints import fingerprints
from spmdtypes.script.large import check_large, representative_ranks
from spmdtypes.script.launch import Launch
from spmdtypes.script.layers import Survey

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range({layers})))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(100 + rank)
x = torch.randn(4, 8)
loss = model(x).square().sum() / (4 * world)
loss.backward()
for i, p in enumerate(model.parameters()):
    if i != {skipped}:
        dist.all_reduce(p.grad)
optimizer.step()
"""


def script(folder: Path, layers: int = 2, skipped: int = -1) -> Launch:
    file = folder / "train.py"
    file.write_text(SCRIPT.format(layers=layers, skipped=skipped))
    return Launch(str(file))


def test_a_right_script_of_many_ranks_is_proved(tmp_path: Path) -> None:
    report = check_large(script(tmp_path), 8192, {"dp": 8192}, 60.0)
    assert not report.findings
    assert report.counts["proved"] >= 6  # gradients, parameters, moments


def test_a_gradient_that_is_not_reduced_is_found(tmp_path: Path) -> None:
    report = check_large(script(tmp_path, skipped=1), 8192, {"dp": 8192}, 60.0)
    assert [f.code for f in report.errors] == ["SPMD201"]
    assert "1.weight" in report.errors[0].message


@pytest.mark.parametrize("skipped", [-1, 13])
def test_layers_that_do_the_same_are_checked_once_and_another_is_found(tmp_path: Path, skipped: int) -> None:
    report = check_large(script(tmp_path, 24, skipped), 64, {"dp": 64}, 60.0)
    once = any("layers, those that do the same are checked once" in a for a in report.assumptions)
    assert once == (skipped < 0)  # with few layers there is no 13th to skip: all are recorded
    assert [f.border for f in report.errors] == (["grad:13.weight"] if skipped == 13 else [])


def test_seen_from_another_rank(tmp_path: Path) -> None:
    report = check_large(script(tmp_path), 16, {"dp": 16}, 60.0, rank=5)
    assert not report.findings
    assert "recorded without values, seen from rank 5" in report.assumptions


def test_neighbours_along_each_axis_and_the_corner_stand_for_all() -> None:
    assert representative_ranks({"dp": 4, "tp": 8}, 0) == [8, 1, 31]
    assert representative_ranks({"dp": 2}, 1) == [0]


def test_layers_of_each_kind_are_kept() -> None:
    kinds = {i: 1 if i == 9 else 0 for i in range(20)}
    assert Survey({"blocks": kinds}).kept() == {"blocks": (0, 1, 9, 19)}
    assert Survey({"blocks": dict.fromkeys(range(4), 0)}).kept() == {}
    assert Survey({"blocks": {i: i for i in range(20)}}).kept() == {}


def test_few_layers_cover_all_when_each_kind_is_among_them() -> None:
    whole = Survey({"blocks": {0: 5, 1: 5, 2: 6}}, frozenset({1}))
    assert Survey({"blocks": {0: 5, 2: 6}}, frozenset({1})).covers(whole)
    assert not Survey({"blocks": {0: 5, 1: 5}}, frozenset({1})).covers(whole)
    assert not Survey({"blocks": {0: 5, 2: 6}}).covers(whole)


def test_long_axes_shrink_to_what_can_be_run() -> None:
    assert shrunk({"dp": 128, "tp": 8}, MOST_RANKS) == {"dp": 2, "tp": 8}
    assert shrunk({"a": 17, "b": 17}, MOST_RANKS) is None


# ---- buffers


def graph(*rows: tuple[str, tuple[object, ...], tuple[int, ...]], outputs: dict[str, int]) -> Graph:
    comm = Comm("all_reduce", ("dp",), (0, 1), "sum")
    nodes = [
        Node(i, op, args, {}, (TensorMeta(shape, "f32"),), comm=comm if op.startswith("comm.") else None)
        for i, (op, args, shape) in enumerate(rows)
    ]
    return Graph({"dp": 2}, {"dp": 0}, nodes, {k: Ref(i) for k, i in outputs.items()})


BUFFER: Sequence[tuple[str, tuple[object, ...], tuple[int, ...]]] = (
    ("input", (), (3,)),
    ("input", (), (5,)),
    ("aten.cat.default", ((Ref(0), Ref(1)), 0), (8,)),
    ("comm.all_reduce", (Ref(2),), (8,)),
    ("aten.mul.Tensor", (Ref(3), 0.5), (8,)),
)


def test_a_buffer_of_which_parts_are_read_is_taken_apart() -> None:
    first = ("aten.slice.Tensor", (Ref(4), 0, 0, 3, 1), (3,))
    second = ("aten.slice.Tensor", (Ref(4), 0, 3, 8, 1), (5,))
    result = unpacked(graph(*BUFFER, first, second, outputs={"a": 5, "b": 6}))
    assert [n.op for n in result.nodes[2:]] == ["comm.all_reduce"] * 2 + ["aten.mul.Tensor"] * 2
    assert [result.meta(result.outputs[k]) for k in "ab"] == [
        TensorMeta((3,), "f32"),
        TensorMeta((5,), "f32"),
    ]


def test_a_buffer_of_which_more_is_read_stays() -> None:
    across = ("aten.slice.Tensor", (Ref(4), 0, 1, 4, 1), (3,))
    kept = graph(*BUFFER, across, outputs={"a": 5})
    assert unpacked(kept) is kept
    whole = graph(*BUFFER, outputs={"a": 4})
    assert unpacked(whole) is whole


# ---- values that are not known


def test_equal_steps_give_equal_fingerprints() -> None:
    def made(stop: int, stream: str) -> str:
        g = graph(
            ("aten.randn", ((4,),), (4,)), ("aten.slice.Tensor", (Ref(0), 0, 0, stop), (2,)), outputs={}
        )
        g.nodes[0].rng = stream
        return fingerprints(g, [Ref(1)], {})[0]

    assert made(2, "a") == made(2, "a")
    assert made(2, "a") != made(3, "a")
    assert made(2, "a") != made(2, "b")
