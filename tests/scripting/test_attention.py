"""Attention of accelerators computes the same with the CPU's ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdtypes.capture.scripting.attention import dense
from tests.scripting import run


def loss_and_gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [y, *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), inputs)]


@pytest.fixture
def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 8, 6), (2, 2, 8, 6), (2, 2, 8, 5))
    return [torch.randn(s, dtype=torch.double, requires_grad=True) for s in shapes]


def test_plain_attention_of_grouped_heads(qkv: list[Tensor]) -> None:
    ours = loss_and_gradients(dense(*qkv, None, None, None)[0], *qkv)
    theirs = loss_and_gradients(F.scaled_dot_product_attention(*qkv, enable_gqa=True), *qkv)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])
def test_flex_attention(tmp_path: Path, tensors: bool) -> None:
    """Masks, scores that are changed, documents, and queries with nothing to attend to."""
    ran = run(
        """
        import torch
        import torch.nn.functional as F
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
        flex = torch.compile(flex_attention, dynamic=False)
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 12, 4, device="cuda", requires_grad=True) for _ in range(3))
        def causal(b, h, i, j):
            return i >= j
        mask = create_block_mask(causal, B=None, H=None, Q_LEN=12, KV_LEN=12, device="cuda")
        y = flex(q, k, v, block_mask=mask)
        y.sum().backward()
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        slopes = torch.tensor([0.5, 0.25], device="cuda")
        biased = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i))
        bias = slopes.view(1, 2, 1, 1) * (torch.arange(12) - torch.arange(12)[:, None])
        wanted_biased = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        document = torch.tensor([0] * 5 + [1] * 7, device="cuda")
        packed = create_block_mask(lambda b, h, i, j: document[i] == document[j], 1, 1, 12, 12)
        docs, lse = flex_attention(q, k, v, block_mask=packed, return_aux=AuxRequest(lse=True))
        wanted_docs = F.scaled_dot_product_attention(q, k, v, attn_mask=document[:, None] == document)
        empty = create_block_mask(lambda b, h, i, j: i < 3, None, None, 12, 12)
        none = flex_attention(q, k, v, block_mask=empty)[:, :, 3:]
        """,
        tmp_path,
        tensors=tensors,
    )
    pairs = [("y", "wanted"), ("biased", "wanted_biased"), ("docs", "wanted_docs")]
    assert all(ran[a].shape == ran[b].shape for a, b in pairs) and ran["lse"].lse.shape == (1, 2, 12)
    if not tensors:
        for a, b in pairs:
            torch.testing.assert_close(ran[a], ran[b])
        assert not ran["none"].any() and ran["q"].grad is not None


@pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])
def test_any_kernel_may_be_chosen(tmp_path: Path, tensors: bool) -> None:
    ran = run(
        """
        import torch
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q = torch.randn(1, 2, 4, 4, device="cuda", requires_grad=True)
        results = []
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, [SDPBackend.MATH]):
            with sdpa_kernel(backend):
                results.append(F.scaled_dot_product_attention(q, q, q, is_causal=True))
        with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=False):
            results.append(F.scaled_dot_product_attention(q, q, q, is_causal=True))
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.enable_flash_sdp(False)
        results.append(F.scaled_dot_product_attention(q, q, q, is_causal=True))
        chosen = torch.backends.cuda.math_sdp_enabled()
        torch.set_float32_matmul_precision("medium")
        precision = torch.get_float32_matmul_precision()
        """,
        tmp_path,
        tensors=tensors,
    )
    assert (ran["chosen"], ran["precision"]) == (False, "medium")
    assert tensors or all(torch.equal(r, ran["results"][0]) for r in ran["results"])
    assert torch.backends.cuda.math_sdp_enabled() and torch.get_float32_matmul_precision() == "highest"
