"""Descriptions against kernels, by value; and what `coverage` promises."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from spmdtypes.core.spec import Operand, OpSpec, Out, Var
from spmdtypes.graph import Lit, Node, Ref
from spmdtypes.ops import build, coverage
from spmdtypes.rulecheck import CheckedCalls, check_call, check_spec, flat
from tests.ops.cases import Case, cases

RIGHT = ("right", "dependence")  # "dependence": an unknown function, of no element but those described


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.label)
def test_description_equals_kernel(case: Case) -> None:
    verdict, detail = check_call(case.function, case.args, case.kwargs)
    assert verdict in RIGHT, detail


def test_a_wrong_description_is_found() -> None:
    i, j = Var("i"), Var("j")
    x = Operand(0, (3, 4), (3, 4), "f64")
    transposed = OpSpec.of(Out((j, i), x[i, j]))
    doubled = OpSpec.of(Out((i, j), x[i, j] * 2))
    for spec in (transposed, doubled):
        verdict, _ = check_spec(spec, [torch.rand(3, 4)], lambda ts: ts[0].clone())
        assert verdict == "wrong"


def test_a_function_of_too_few_elements_is_found() -> None:
    from spmdtypes.core.spec import fn

    i = Var("i")
    x = Operand(0, (4,), (4,), "f64")
    alone = OpSpec.of(Out((i,), fn("opaque", x[i])))
    verdict, _ = check_spec(alone, [torch.rand(4)], lambda ts: ts[0].sort().values)
    assert verdict == "wrong"


UNDEFINED = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_permuted",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
}


@pytest.fixture(scope="module")
def sampled() -> CheckedCalls:
    """Every call below autograd that PyTorch's own samples of its operators make, forward and backward."""
    from torch.testing._internal.common_methods_invocations import op_db

    calls = CheckedCalls(per_op=6)
    for info in op_db:
        if torch.float64 not in info.dtypes or info.name.startswith("jiterator"):
            continue
        for count, sample in enumerate(
            info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd)
        ):
            if count == 4:
                break
            with calls:
                out = flat(info(sample.input, *sample.args, **sample.kwargs))
                real = [
                    y for y in out if isinstance(y, torch.Tensor) and y.requires_grad and not y.is_complex()
                ]
                if real:
                    torch.stack([y.sum() for y in real]).sum().backward()
    return calls


def test_descriptions_hold_on_the_samples_of_pytorch(sampled: CheckedCalls) -> None:
    wrong = {k: v for k, v in sampled.wrong.items() if k.rpartition(".")[0] not in UNDEFINED}
    assert not wrong
    checked = {op for (op, verdict) in sampled.found if verdict in RIGHT}
    assert len(checked) > 250


def test_at_least_200_overloads_are_described() -> None:
    assert len(coverage()) >= 200


def test_in_place_and_out_forms_have_the_description_of_the_functional_op() -> None:
    x, y = Operand(0, (2, 3), (2, 3), "f32"), Operand(1, (3,), (3,), "f32")
    for op in ("aten.add.Tensor", "aten.add_.Tensor", "aten.add.out"):
        spec = build(Node(0, op, (Ref(0), Ref(1))), [x, y])
        assert spec is not None
        assert len(spec.outs) == 1


def test_unknown_ops_have_no_description_and_bad_calls_say_so() -> None:
    assert build(Node(0, "aten.nonzero.default", (Ref(0),)), [Operand(0, (3,), (3,), "f32")]) is None
    with pytest.raises(ValueError, match="dim 5"):
        build(Node(0, "aten.select.int", (Ref(0), 5, 0)), [Operand(0, (3,), (3,), "f32")])


def test_numbers_may_differ_between_the_local_and_the_reference_program() -> None:
    node = Node(0, "aten.view.default", (Ref(0), (Lit(4, 8), 2)))
    spec = build(node, [Operand(0, (8,), (16,), "f32")])
    assert spec is not None
    (out,) = spec.outs
    assert (out.shape, out.ref_shape) == ((4, 2), (8, 2))  # type: ignore[union-attr]


def test_ops_know_no_torch() -> None:
    code = "import sys, spmdtypes.ops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
