"""Programs annotated for spmd_types: what the annotations say, and whether it is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes.contracts import Program
from spmdtypes.diagnostics.compose import compose
from spmdtypes.dialects.spmd_types.calls import judge
from spmdtypes.dialects.spmd_types.meaning import Annotation, contradiction
from spmdtypes.dialects.spmd_types.transfers import judge_transfer
from spmdtypes.notation import parse

ROOT = Path(__file__).resolve().parent.parent
MESH = {"dp": 2, "tp": 4}


def note(text: str, ndim: int = 2) -> Annotation:
    """ "dp:S0 tp:P" as an annotation."""
    letters, cuts = {}, [()] * ndim
    for word in text.split():
        axis, letter = word.split(":")
        letters[axis] = letter[0]
        if letter[0] == "S":
            letters[axis] = "V"
            cuts[int(letter[1:])] += (axis,)
    return Annotation(letters, tuple(cuts) if any(cuts) else None)


# -- meaning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "local", "expected"),
    [
        ("tp:R", (8, 4), "8 4"),
        ("tp:I", (8, 4), "8 4 | tp:I"),
        ("tp:P", (8, 4), "8 4 | tp:P"),
        ("tp:V", (8, 4), "8 4 | tp:V"),
        ("tp:S1", (8, 4), "8 16@tp"),
        ("dp:S0 tp:S0", (8, 4), "64@dp@tp 4"),
        ("tp:S0 dp:S0", (8, 4), "64@tp@dp 4"),
        ("dp:S0 tp:P", (8, 4), "16@dp 4 | tp:P"),
    ],
)
def test_letters_as_types(written, local, expected):
    assert str(note(written).type(local, MESH)) == expected


def test_a_gradient_is_of_the_dual_type():
    assert note("dp:R tp:P").gradient() == note("dp:P tp:R")
    assert note("dp:I tp:S1").gradient() == note("dp:I tp:S1")


@pytest.mark.parametrize(
    ("old", "new", "contradicts"),
    [
        ("tp:V", "tp:P", False),  # the ranks' values are terms of a sum
        ("tp:V", "tp:S0", False),
        ("tp:P", "tp:V", True),
        ("tp:R", "tp:V", True),
        ("tp:S0", "tp:S1", True),
        ("tp:S0", "dp:S1", False),
        ("dp:S0 tp:S0", "tp:S0 dp:S0", True),
    ],
)
def test_two_annotations_of_one_value(old, new, contradicts):
    assert (contradiction(note(old), note(new), True) is not None) == contradicts


def test_r_and_i_differ_for_a_gradient_only():
    assert contradiction(note("tp:R"), note("tp:I"), needs_grad=True)
    assert contradiction(note("tp:R"), note("tp:I"), needs_grad=False) is None


# -- one call -----------------------------------------------------------------------------------


def judged(call, *operands, grad=True, **more):
    """`operands`: annotations; the tensors are 4 x 4 and need gradients."""
    tensors = [torch.empty(4, 4, requires_grad=grad) for _ in operands]
    said = {id(t): note(o) for t, o in zip(tensors, operands)}
    return judge(call, tensors, {}, lambda t: said.get(id(t)), {"tp": 4}, **more)


@pytest.mark.parametrize(
    ("call", "operands", "verdict"),
    [
        (torch.add, ("tp:P", "tp:P"), "right"),
        (torch.add, ("tp:P", "tp:R"), "wrong"),  # R would be added by every rank
        (torch.mul, ("tp:P", "tp:R"), "right"),
        (torch.mul, ("tp:P", "tp:P"), "wrong"),
        (torch.mul, ("tp:P", "tp:V"), "wrong"),
        (torch.add, ("tp:P", "tp:V"), "wrong"),
        (torch.mul, ("tp:R", "tp:V"), "right"),
        (torch.mul, ("tp:I", "tp:V"), "wrong"),  # its gradient is a pending sum
        (torch.mul, ("tp:I", "tp:R"), "wrong"),  # no gradient of the product is right for both
        (torch.mul, ("tp:I", "tp:I"), "right"),
        (torch.exp, ("tp:P",), "wrong"),
        (torch.exp, ("tp:V",), "right"),
        (torch.matmul, ("tp:P", "tp:R"), "right"),
        (torch.matmul, ("tp:P", "tp:P"), "wrong"),
        (lambda x: x + 1, ("tp:P",), "wrong"),
        (lambda x: 2 / x, ("tp:P",), "wrong"),
        (lambda x, y: torch.cat([x, y]), ("tp:P", "tp:P"), "right"),
        (lambda x, y: torch.cat([x, y]), ("tp:R", "tp:V"), "right"),
        (lambda x, y: torch.cat([x, y]), ("tp:P", "tp:R"), "wrong"),
        (lambda x, y: torch.where(x > 0, y, y), ("tp:P", "tp:R"), "wrong"),
    ],
)
def test_local_operations(call, operands, verdict):
    assert judged(call, *operands).verdict == verdict


def test_i_beside_others_is_sound_where_no_gradient_flows():
    assert judged(torch.mul, "tp:I", "tp:V", grad=False).verdict == "right"
    assert judged(torch.mul, "tp:I", "tp:R", grad=False).verdict == "right"


def test_what_comes_out():
    (result,) = judged(torch.mul, "tp:R", "tp:V").results
    assert result.letters == {"tp": "V"}
    (result,) = judged(torch.mul, "tp:R", "tp:R").results
    assert result.letters == {"tp": "="}  # R or I: both give right gradients
    # one value per rank stays one, whatever is done with its dims
    (result,) = judged(lambda x: x.sum(0).view(2, 2).t(), "tp:V").results
    assert result.letters == {"tp": "V"}


def test_an_operand_nobody_spoke_of():
    x, y = torch.empty(4), torch.empty(4)
    said = {id(x): note("tp:R", 1)}
    strict = judge(torch.add, (x, y), {}, lambda t: said.get(id(t)), MESH)
    assert strict.wrong[0].startswith("nothing says how operand 1 lies over tp")
    loose = judge(torch.add, (x, y), {}, lambda t: said.get(id(t)), MESH, strict=False)
    assert loose.verdict == "unknown"


def test_parts_of_a_whole_ask_for_more_than_values_per_rank():
    """Two halves cut along different dims can be added on every rank, and mean nothing together."""
    assert judged(torch.add, "tp:S0", "tp:S1").verdict == "right"
    assert judged(torch.add, "tp:S0", "tp:S1", whole=True).verdict == "wrong"
    assert judged(torch.add, "tp:S0", "tp:S0", whole=True).verdict == "right"


def test_a_contracted_dim_that_is_cut_gives_a_pending_sum():
    (result,) = judged(torch.matmul, "tp:S1", "tp:S0", whole=True).results
    assert result.letters == {"tp": "P"}


def test_numbers_of_the_whole_tensor_are_found():
    x = torch.empty(4, 6)
    said = {id(x): note("tp:S0")}
    found = judge(torch.Tensor.view, (x, 4, 2, 3), {}, lambda t: said.get(id(t)), {"tp": 4}, whole=True)
    assert found.verdict == "right"
    assert found.results[0].cuts == (("tp",), (), ())


@pytest.mark.parametrize(
    ("x", "src", "dst", "verdict"),
    [
        ("tp:P", "P", "R", "right"),
        ("tp:V", "P", "R", "right"),  # one term per rank
        ("tp:R", "P", "R", "wrong"),
        ("tp:V", "V", "R", "right"),
        ("tp:R", "V", "R", "wrong"),
        ("tp:P", "V", "R", "wrong"),
        ("tp:I", "I", "R", "right"),
        ("tp:R", "I", "R", "wrong"),
        ("tp:S1", 0, "R", "wrong"),
        ("tp:S0", 0, "R", "right"),
        ("tp:S0 dp:S0", 0, "R", "wrong"),  # the parts of dp lie within those of tp
    ],
)
def test_a_transfer_is_a_contract_on_its_operand(x, src, dst, verdict):
    found = judge_transfer(note(x), ["tp"], src, dst, needs_grad=True, whole=isinstance(src, int))
    assert found.verdict == verdict


# -- whole programs -----------------------------------------------------------------------------

spmd = pytest.importorskip("spmd_types", reason="needs the package spmd_types")
R, I, V, P, S = spmd.R, spmd.I, spmd.V, spmd.P, spmd.S  # noqa: E741


class Block(nn.Module):
    """A tensor-parallel MLP. `change` is what a test does to it."""

    def __init__(self, mesh, change=""):
        super().__init__()
        self.group, self.change = mesh.get_group("tp"), change
        n = mesh["tp"].size()
        self.scale = nn.Parameter(torch.empty(8))
        self.up, self.down = nn.Parameter(torch.empty(16 // n, 8)), nn.Parameter(torch.empty(8, 16 // n))

    def forward(self, x: Tensor) -> Tensor:
        tp, change = self.group, self.change
        spmd.assert_type(self.up, {tp: S(0)})
        h = spmd.assert_type(x * self.scale, {tp: I})
        if change != "not converted":
            h = spmd.convert(h, tp, src=I, dst=R)
        h = spmd.assert_type(F.gelu(F.linear(h, self.up)), {tp: V if change == "only V" else S(1)})
        y = F.linear(h, self.down)
        if change == "wrong claim":
            spmd.assert_type(y, {tp: R})
            return y.sum()
        y = spmd.assert_type(self.reduced(y), {tp: I})
        return y.sum()

    def reduced(self, y: Tensor) -> Tensor:
        tp = self.group
        match self.change:
            case "by shards":
                y = spmd.assert_type(spmd.reduce_scatter(y, tp, src=P, dst=S(0)), {tp: S(0)})
                return spmd.all_gather(y, tp, src=S(0), dst=I)
            case "a part of each":
                y = spmd.convert(spmd.all_reduce(y, tp, src=P, dst=I), tp, src=I, dst=S(1))
                return spmd.all_gather(spmd.assert_type(y, {tp: S(1)}), tp, src=S(1), dst=I)
            case "padded":
                y = spmd.reduce_scatter(y, tp, src=P, dst=S(0))
                y = spmd.assert_type(spmd.convert(y, tp, src=S(0), dst=P, expert_mode=True), {tp: P})
            case "kept by one":
                y = spmd.convert(spmd.all_reduce(y, tp, src=P, dst=R), tp, src=R, dst=P)
                spmd.assert_type(y, {tp: P})
            case "mapped":
                local = spmd.local_map(out_types={tp: R})(lambda t: t * 2)
                return local(y)
        return spmd.all_reduce(y, tp, src=P, dst=I)


def checked(change="", tp=2):
    from spmdtypes.dialects.spmd_types.program import check

    program = Program(
        "block",
        {"tp": tp},
        lambda mesh: Block(mesh, change),
        inputs={"x": parse("4 8")},
        params={"scale": parse("8"), "up": parse("16@tp 8"), "down": parse("8 16@tp")},
        output=parse("[]"),
    )
    return program, check(program)


@pytest.mark.parametrize("change", ["", "by shards", "a part of each", "padded", "kept by one"])
def test_a_right_program_keeps_all_its_claims(change):
    _, found = checked(change)
    assert [(v.border, v.status) for v in found.verdicts if v.status != "right"] == []
    assert len(found.verdicts) >= 6
    assert not found.inference.problems
    assert not found.inference.unknown_ops


def test_its_collectives_are_ordinary_ones():
    _, found = checked("by shards")
    kinds = [n.comm.kind for n in found.inference.graph.nodes if n.comm is not None]
    # the last two: gradients of the sum and of the input
    assert kinds == ["reduce_scatter", "all_gather", "all_gather", "all_reduce"]


def test_a_wrong_claim_is_a_finding_at_its_line():
    program, found = checked("wrong claim")
    (wrong,) = found.wrong
    assert wrong.border.startswith("assert:{tp: R} at test_dialect_spmd_types.py:")
    assert wrong.mismatch.kind == "partial"
    (finding,) = compose(found.verdicts, program, found.inference, {})
    assert finding.code == "SPMD101"
    assert "what is asserted to be {tp: R}" in finding.message


def test_a_missing_conversion_is_seen_in_the_gradient():
    program, found = checked("not converted")
    (wrong,) = found.wrong
    assert wrong.border.startswith("grad:what is asserted to be {tp: I}")
    (finding,) = compose(found.verdicts, program, found.inference, {})
    assert finding.code == "SPMD201"


def test_v_claims_nothing():
    _, found = checked("only V")
    assert not found.wrong


def test_what_local_map_returns_is_a_claim():
    _, found = checked("mapped")
    assert any(v.border.startswith("assert:{tp: R}") for v in found.wrong)


class Watched(nn.Module):
    """Runs under the checker of spmd_types itself, with a loss that is a sum over dp."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, n = mesh, mesh["tp"].size()
        self.up, self.down = nn.Parameter(torch.empty(16 // n, 8)), nn.Parameter(torch.empty(8, 16 // n))

    def forward(self, x: Tensor) -> Tensor:
        from spmd_types.checker import typecheck

        with typecheck(local=False), spmd.set_current_mesh(self.mesh):
            spmd.assert_type(x, {"dp": S(0), "tp": R})
            spmd.assert_type(self.up, {"dp": R}, spmd.PartitionSpec("tp", None))
            spmd.assert_type(self.down, {"dp": R, "tp": S(1)})
            y = F.linear(F.gelu(F.linear(x, self.up)), self.down)
            y = spmd.all_reduce(y, "tp", src=P, dst=I)
            return spmd.assert_type(y.sum(), {"dp": P, "tp": I})


def test_its_own_checker_may_be_at_work():
    from spmdtypes.dialects.spmd_types.program import check

    program = Program(
        "watched",
        {"dp": 2, "tp": 2},
        Watched,
        inputs={"x": parse("8@dp 8")},
        params={"up": parse("16@tp 8"), "down": parse("8 16@tp")},
        output=parse("[] | dp:P"),
    )
    verdicts = check(program).verdicts
    assert {v.status for v in verdicts} == {"right"}
    assert sum(v.border.startswith("assert:") for v in verdicts) == 4  # none of its checker's own


def test_a_claim_about_a_parameter_is_its_placement():
    _, found = checked()
    assert {str(t) for t in found.claims.placed.values()} == {"16@tp 8"}


def test_nothing_is_left_behind():
    before = spmd.assert_type, spmd.mutate_type, spmd.local_map
    checked()
    assert (spmd.assert_type, spmd.mutate_type, spmd.local_map) == before


SUITE = """
import torch
from spmd_types import P, R, S, SpmdTypeError, V, all_reduce, assert_type
from spmd_types._test_utils import SpmdTypeCheckedTestCase


class Test(SpmdTypeCheckedTestCase):
    WORLD_SIZE = 3

    def test_states_an_error(self):
        x = self._generate_inputs((4,), self.pg, P)
        with self.assertRaises(SpmdTypeError):
            torch.add(x, 1.0)

    def test_must_pass(self):
        x = self._generate_inputs((4,), self.pg, P)
        all_reduce(x * 2, self.pg, src=P, dst=R).exp()

    def test_asks_something_else(self):
        with self.assertRaises(SpmdTypeError):
            assert_type(torch.empty(2), {self.pg: S(3)})
"""


@pytest.mark.slow
def test_a_suite_of_tests_is_input(tmp_path):
    (tmp_path / "some_test.py").write_text(SUITE)
    command = [sys.executable, "-m", "benchmarks.spmd_types_suite", str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()]
    assert ["type", "errors", "it", "states,", "reported", "by", "us", "1", "1"] in rows
    assert ["tests", "that", "must", "pass,", "passed", "by", "us", "1", "1"] in rows
    assert "an annotation that contradicts itself or does not fit its tensor" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "some_test.py"]
