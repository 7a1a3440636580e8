"""An autocast for an accelerator runs each op in the precision it has there, though on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scripting import run

LOW, WIDE = torch.bfloat16, torch.float32
OPS = {
    "F.linear(x, x)": LOW,
    "x @ wide": LOW,
    "torch.einsum('ij,kj->ik', x, wide)": LOW,
    "torch.mv(wide, wide[0])": LOW,
    "F.scaled_dot_product_attention(x[None], x[None], x[None])": LOW,
    "x + x": LOW,
    "x + wide": WIDE,
    "F.gelu(x)": LOW,
    "F.relu(x)": LOW,
    "torch.tanh(x)": LOW,
    "x.mean()": LOW,
    "x.max()": LOW,
    "x.softmax(-1)": WIDE,
    "F.softmax(x, dim=-1)": WIDE,
    "F.softmax(x, dim=-1, dtype=torch.bfloat16)": LOW,
    "F.log_softmax(x, -1)": WIDE,
    "F.layer_norm(x, (4,))": WIDE,
    "torch.nn.LayerNorm(4)(x)": WIDE,
    "F.group_norm(x, 2)": WIDE,
    "F.cross_entropy(x, target)": WIDE,
    "F.nll_loss(x, target)": WIDE,
    "F.mse_loss(x, x)": WIDE,
    "F.binary_cross_entropy_with_logits(x, x)": WIDE,
    "x.sum()": WIDE,
    "x.sum(-1)": WIDE,
    "x.cumsum(0)": WIDE,
    "x.prod()": WIDE,
    "x.exp()": WIDE,
    "x.pow(2)": WIDE,
    "x ** 2": WIDE,
    "torch.logsumexp(x, -1)": WIDE,
    "torch.rsqrt(x.pow(2).mean(-1))": WIDE,
    "x.norm()": WIDE,
    "torch.linalg.vector_norm(x)": WIDE,
    "torch.cat([x, wide])": WIDE,
    "torch.dot(x[0], wide[0])": WIDE,
    "torch.addcmul(wide, x, x)": WIDE,
    "double.exp()": torch.float64,
    "torch.zeros(4, 4).scatter_add(0, index, x)": WIDE,
}


@pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])
def test_precision_under_autocast(tmp_path: Path, tensors: bool) -> None:
    lines = "\n".join(f"    found[{op!r}] = ({op}).dtype" for op in OPS)
    code = f"""
import torch, torch.nn.functional as F
wide = torch.ones(4, 4, device="cuda")
x, double = wide.bfloat16(), wide.double()
target = torch.zeros(4, dtype=torch.long, device="cuda")
index = torch.zeros(4, 4, dtype=torch.long, device="cuda")
found = {{}}
with torch.autocast("cuda", dtype=torch.bfloat16):
{lines}
"""
    found = run(code, tmp_path, tensors=tensors)["found"]
    assert {op: dtype for op, dtype in found.items() if dtype is not OPS[op]} == {}


def test_an_autocast_for_the_cpu_keeps_its_own_lists(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        x = torch.ones(4, 4, dtype=torch.bfloat16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                off = x.softmax(-1).dtype
            on = x.softmax(-1).dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cpu = x.softmax(-1).dtype
        """,
        tmp_path,
    )
    assert (ran["off"], ran["on"], ran["cpu"]) == (LOW, WIDE, LOW)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(2, dtype=LOW).softmax(-1).dtype == LOW


def test_gradients_pass_the_casts(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        x = torch.full((3, 4), 0.1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = (x.softmax(-1) * torch.arange(4.0, device="cuda")).sum()
        y.backward()
        """,
        tmp_path,
    )
    expected = torch.tensor([-0.375, -0.125, 0.125, 0.375]).expand(3, 4)
    torch.testing.assert_close(ran["x"].grad.float(), expected)
