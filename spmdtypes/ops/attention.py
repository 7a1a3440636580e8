"""Scaled dot-product attention: fused kernels, forward and backward.

Outputs beyond the result and the log-sum-exp (random state, sizes) have no description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmdtypes.core.spec import Const, Expr, Iota, Operand, OpSpec, Out, Rand, Size, axes, fn, total
from spmdtypes.ops.parts import Ints, Maybe, spread
from spmdtypes.ops.registry import op

B, H, S, T, D, E = axes("b h s t d e")
SAME_WIDTH = ((D, E),)


@dataclass(frozen=True)
class Scores:
    """Attention probabilities of (query, key) pairs and the log of their normaliser."""

    scale: Expr
    raw: Expr
    weights: Expr
    lse: Expr


def visible(is_causal: bool, s: Expr, otherwise: Any) -> Expr:
    return fn("where", fn("ge", Iota(S), Iota(T)), s, otherwise) if is_causal else s


def factor(scale: float | None) -> Expr:
    return fn("rsqrt", Size(D)) if scale is None else Const(scale)


def scores(q: Operand, k: Operand, causal: bool, mask: Maybe, scale: float | None) -> Scores:
    by = factor(scale)
    raw = total("sum", [D], q[B, H, S, D] * k[B, H, T, D]) * by
    if mask is not None:
        shown = spread(mask, (B, H, S, T))
        raw = fn("where", shown, raw, float("-inf")) if mask.dtype == "bool" else raw + shown
    raw = visible(causal, raw, float("-inf"))
    top = total("max", [T], raw)
    e = fn("exp", raw - top)
    z = total("sum", [T], e)
    return Scores(by, raw, e / z, top + fn("log", z))


def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    causal: bool,
    mask: Maybe = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> tuple[Out, Out]:
    if q.ref_shape[1] != k.ref_shape[1]:
        raise ValueError("grouped queries inside the kernel")
    p = scores(q, k, causal, mask, scale)
    weights = p.weights * fn("opaque", Rand((B, H, S, T))) if dropout else p.weights
    return Out((B, H, S, E), total("sum", [T], weights * v[B, H, T, E])), Out((B, H, S), p.lse)


def attention_backward(
    grad: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    causal: bool,
    mask: Maybe = None,
    scale: float | None = None,
) -> tuple[Out, Out, Out]:
    if q.ref_shape[1] != k.ref_shape[1]:
        raise ValueError("grouped queries inside the kernel")
    s = scores(q, k, causal, mask, scale)
    p = fn("exp", s.raw - lse[B, H, S])
    g = grad[B, H, S, E]
    gp = total("sum", [E], g * v[B, H, T, E])
    delta = total("sum", [E], g * out[B, H, S, E])
    gs = p * (gp - delta) * s.scale
    return (
        Out((B, H, S, D), total("sum", [T], gs * k[B, H, T, D])),
        Out((B, H, T, D), total("sum", [S], gs * q[B, H, S, D])),
        Out((B, H, T, E), total("sum", [S], p * g)),
    )


@op("_scaled_dot_product_flash_attention_for_cpu")
def flash_cpu(
    q: Operand,
    k: Operand,
    v: Operand,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Maybe = None,
    scale: float | None = None,
) -> OpSpec:
    outs = attention(q, k, v, is_causal, attn_mask, dropout_p, scale)
    return OpSpec.of(*outs, same=SAME_WIDTH)


@op("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_cpu_backward(
    grad: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Maybe = None,
    scale: float | None = None,
) -> OpSpec:
    return OpSpec(attention_backward(grad, q, k, v, out, lse, is_causal, attn_mask, scale), same=SAME_WIDTH)


@op("_scaled_dot_product_flash_attention")
def flash(
    q: Operand,
    k: Operand,
    v: Operand,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> OpSpec:
    outs = attention(q, k, v, is_causal, None, dropout_p, scale)
    return OpSpec((*outs, *[None] * 7), same=SAME_WIDTH)


@op("_scaled_dot_product_flash_attention_backward")
def flash_backward(
    grad: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
) -> OpSpec | None:
    if dropout_p:
        return None
    return OpSpec(attention_backward(grad, q, k, v, out, lse, is_causal, None, scale), same=SAME_WIDTH)


@op("_scaled_dot_product_efficient_attention")
def efficient(
    q: Operand,
    k: Operand,
    v: Operand,
    attn_bias: Maybe,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> OpSpec:
    outs = attention(q, k, v, is_causal, attn_bias, dropout_p, scale)
    return OpSpec((*outs, None, None), same=SAME_WIDTH)


@op("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(
    grad: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    attn_bias: Maybe,
    out: Operand,
    lse: Operand,
    seed: Any,
    offset: Any,
    dropout_p: float,
    grad_input_mask: Ints,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> OpSpec | None:
    if dropout_p or (attn_bias is not None and grad_input_mask[3]):
        return None
    outs = attention_backward(grad, q, k, v, out, lse, is_causal, attn_bias, scale)
    kept = tuple(o if wanted else None for o, wanted in zip(outs, grad_input_mask))
    return OpSpec((*kept, None), same=SAME_WIDTH)


@op("_scaled_dot_product_cudnn_attention")
def cudnn(
    q: Operand,
    k: Operand,
    v: Operand,
    attn_bias: Maybe,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> OpSpec:
    outs = attention(q, k, v, is_causal, attn_bias, dropout_p, scale)
    return OpSpec((*outs, *[None] * 7), same=SAME_WIDTH)


@op("_scaled_dot_product_attention_math")
def math(
    q: Operand,
    k: Operand,
    v: Operand,
    attn_mask: Maybe = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Maybe = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> OpSpec | None:
    if dropout_mask is not None or q.ndim != 4:
        return None
    out, _ = attention(q, k, v, is_causal, attn_mask, dropout_p, scale)
    return OpSpec.of(out, None, same=SAME_WIDTH)
