"""`spmdtypes.rule`: descriptions of the user's own ops, checked before they are believed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import spmdtypes
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.engine import derive
from spmdtypes.core.spec import Operand, OpSpec
from spmdtypes.graph import Node, Ref
from spmdtypes.ops import build
from spmdtypes.ops.parts import elementwise
from spmdtypes.ops.registry import _BUILDERS


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    known = dict(_BUILDERS)
    yield
    _BUILDERS.clear()
    _BUILDERS.update(known)


@torch.library.custom_op("spmdtypes_test::scaled_mm", mutates_args=())
def scaled_mm(a: Tensor, b: Tensor, by: float) -> Tensor:
    return a @ b * by


def _spec(op: str, *shapes: tuple[int, ...], extra: tuple[object, ...] = ()) -> OpSpec:
    operands = [Operand(k, s, s, "f64") for k, s in enumerate(shapes)]
    spec = build(Node(0, op, (*(Ref(k) for k in range(len(shapes))), *extra)), operands)
    assert spec is not None
    return spec


def test_index_text_gives_a_partial_sum_for_a_sharded_contraction() -> None:
    spmdtypes.rule(scaled_mm, "out[i,j] = sum_k a[i,k] * b[k,j] * by")
    spec = _spec("spmdtypes_test.scaled_mm.default", (4, 4), (4, 4), extra=(0.5,))
    mesh = {"tp": 2}
    a = Denotation.from_type(spmdtypes.parse("4 8@tp"), (4, 8), mesh)
    b = Denotation.from_type(spmdtypes.parse("8@tp 4"), (8, 4), mesh)
    (out,) = derive(spec, [a, b], mesh)
    assert str(out) == "4 4 | tp:P"


def test_a_wrong_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="does not describe"):
        spmdtypes.rule(scaled_mm, "out[i,j] = sum_k a[i,k] * b[k,j]")


def test_builders_are_checked_on_the_arguments_given() -> None:
    def build_scaled(a: Operand, b: Operand, by: float) -> OpSpec:
        return elementwise(lambda x, y: x + y, a, b)

    with pytest.raises(ValueError, match="does not describe"):
        spmdtypes.rule(scaled_mm, build_scaled, check=[(torch.rand(2, 2), torch.rand(2, 2), 1.0)])
    spmdtypes.rule(scaled_mm, build_scaled, check=False)


def test_a_plain_function_becomes_an_op_that_differentiates() -> None:
    def gated(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.silu(a) * b

    op = spmdtypes.rule(gated, "out[..., j] = silu(a[..., j]) * b[..., j]")
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    y = torch.rand(3, 4, dtype=torch.float64)
    op(x, y).sum().backward()
    again = x.detach().clone().requires_grad_()
    gated(again, y).sum().backward()
    assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]


def test_an_autograd_function_becomes_an_op() -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * ctx.saved_tensors[0].exp()

    exp = spmdtypes.rule(Exp, "out[i] = exp(x[i])")
    x = torch.rand(3, requires_grad=True)
    exp(x).sum().backward()
    assert torch.allclose(x.grad, x.exp())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("out[i] = a[i", "cannot read"),
        ("a[i] + b[i]", "form out"),
        ("", "empty"),
    ],
)
def test_text_that_is_no_description(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        spmdtypes.rule(scaled_mm, text)


def test_a_reduction_reaches_to_the_end_of_its_term() -> None:
    def center(a: Tensor) -> Tensor:
        return a * 2 - a.mean(1, keepdim=True) * 3

    spmdtypes.rule(center, "out[i,j] = a[i,j]*2 - mean_k a[i,k]*3", check=[(torch.rand(3, 4),)])
