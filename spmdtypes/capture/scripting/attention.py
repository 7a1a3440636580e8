"""Attention kernels of accelerators: whichever a script chooses, plain ops compute the same."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spmdtypes.capture.accelerator import returning
from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.imports import Hooks


def install(patches: Patches, context: Context) -> None:
    """A choice of kernels is remembered and has no effect: those of the CPU are others."""
    cuda = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        _patch_flag(patches, cuda, name)
    patches.set(cuda, "sdp_kernel", lambda *args, **kwargs: contextlib.nullcontext())
    patches.everywhere(torch.nn.attention.sdpa_kernel, _any_kernel)
    precision = [torch.get_float32_matmul_precision()]
    patches.set(torch, "set_float32_matmul_precision", lambda p: precision.__setitem__(0, p))
    patches.set(torch, "get_float32_matmul_precision", lambda: precision[0])
    hooks = Hooks(patches, context)
    hooks.when("torch.nn.attention.flex_attention", lambda m: _patch_flex(patches, m))


def _patch_flag(patches: Patches, cuda: Any, name: str) -> None:
    chosen = [getattr(cuda, f"{name}_sdp_enabled")()]
    patches.set(cuda, f"enable_{name}_sdp", lambda enabled: chosen.__setitem__(0, bool(enabled)))
    patches.set(cuda, f"{name}_sdp_enabled", lambda: chosen[0])
    if hasattr(cuda, f"is_{name}_attention_available"):
        patches.set(cuda, f"is_{name}_attention_available", returning(True))


@contextlib.contextmanager
def _any_kernel(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _patch_flex(patches: Patches, module: Any) -> None:
    """The kernel has no backward on a CPU."""
    real = module.flex_attention

    @functools.wraps(real)
    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        out, lse, largest = dense(query, key, value, score_mod, block_mask, scale)
        if return_aux is not None:
            return out, module.AuxOutput(
                lse=lse if return_aux.lse else None, max_scores=largest if return_aux.max_scores else None
            )
        return (out, lse) if return_lse else out

    patches.everywhere(real, flex_attention)


def dense(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(result, log-sum-exp, largest score) of attention of `query` [b, h, i, e] to `key` [b, k, j, e] and
    `value` [b, k, j, f], where each of k heads serves h / k of the queries'. Scores have
    at least float32; a query that the mask leaves nothing for gets zeros."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1)
    scores = (scores.float() if scores.dtype.itemsize < 4 else scores) * scale
    places = [
        torch.arange(n, device=query.device).view([-1 if d == k else 1 for k in range(4)])
        for d, n in enumerate(scores.shape)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    mask = None if block_mask is None else _mask(block_mask, places, scores)
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights * mask
    return weights.to(value.dtype) @ value, scores.logsumexp(-1), scores.amax(-1)


def _mask(block_mask: Any, places: list[Tensor], scores: Tensor) -> Tensor:
    mod = block_mask.mask_mod
    if mod is not None and getattr(mod, "__name__", "") != "noop_mask":
        kept: Tensor = mod(*places)
        return kept
    rows, columns = block_mask.BLOCK_SIZE
    blocks = block_mask.to_dense().bool()
    whole: Tensor = blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return whole[..., : scores.shape[-2], : scores.shape[-1]]
