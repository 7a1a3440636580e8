"""Scaled dot-product attention: fused kernels, forward and backward.

Outputs beyond the result and the log-sum-exp (random state, sizes) have no description.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmdtypes.core.spec import Const, Expr, Iota, OpSpec, Out, Rand, Size, axes, fn, total
from spmdtypes.ops.parts import masked, spread
from spmdtypes.ops.registry import Call, op

B, H, S, T, D, E = axes("b h s t d e")
SAME_WIDTH = ((D, E),)


@dataclass(frozen=True)
class Scores:
    """Attention probabilities of (query, key) pairs and the log of their normaliser."""

    scale: Expr
    raw: Expr
    weights: Expr
    lse: Expr


def scores(a: Call) -> Scores:
    if a.q.ref_shape[1] != a.k.ref_shape[1]:
        raise ValueError("grouped queries inside the kernel")
    by = fn("rsqrt", Size(D)) if a.scale is None else Const(a.scale)
    raw = total("sum", [D], a.q[B, H, S, D] * a.k[B, H, T, D]) * by
    if a.attn_mask is not None:
        shown = spread(a.attn_mask, (B, H, S, T))
        raw = fn("where", shown, raw, float("-inf")) if a.attn_mask.dtype == "bool" else raw + shown
    if a.is_causal:
        raw = fn("where", fn("ge", Iota(S), Iota(T)), raw, float("-inf"))
    top = total("max", [T], raw)
    e = fn("exp", raw - top)
    z = total("sum", [T], e)
    return Scores(by, raw, e / z, top + fn("log", z))


def forward(a: Call) -> tuple[Out, Out]:
    p = scores(a)
    weights = p.weights * fn("opaque", Rand((B, H, S, T))) if a.dropout_p else p.weights
    return Out((B, H, S, E), total("sum", [T], weights * a.v[B, H, T, E])), Out((B, H, S), p.lse)


def backward(a: Call) -> tuple[Out, Out, Out]:
    if a.dropout_p:
        raise ValueError("the gradient of attention with dropout")
    s = scores(a)
    p = fn("exp", s.raw - a.lse[B, H, S])
    g = a.grad[B, H, S, E]
    delta = total("sum", [E], g * a.out[B, H, S, E])
    gs = p * (total("sum", [E], g * a.v[B, H, T, E]) - delta) * s.scale
    return (
        Out((B, H, S, D), total("sum", [T], gs * a.k[B, H, T, D])),
        Out((B, H, T, D), total("sum", [S], gs * a.q[B, H, S, D])),
        Out((B, H, T, E), total("sum", [S], p * g)),
    )


_CPU = "dropout_p=0.0 is_causal=False attn_mask=None scale=None"
_SAVED = "grad q k v out lse"


@op("_scaled_dot_product_flash_attention_for_cpu", f"q k v {_CPU}")
def flash_cpu(a: Call) -> OpSpec:
    return OpSpec(forward(a), same=SAME_WIDTH)


@op("_scaled_dot_product_flash_attention_for_cpu_backward", f"{_SAVED} {_CPU}")
def flash_cpu_backward(a: Call) -> OpSpec:
    return OpSpec(backward(a), same=SAME_WIDTH)


@op(
    "_scaled_dot_product_flash_attention",
    "q k v dropout_p=0.0 is_causal=False return_debug_mask=False scale=None attn_mask=None",
)
def flash(a: Call) -> OpSpec:
    return OpSpec((*forward(a), *[None] * 7), same=SAME_WIDTH)


@op(
    "_scaled_dot_product_flash_attention_backward",
    f"{_SAVED} cum_q cum_k max_q max_k dropout_p is_causal seed offset scale=None attn_mask=None",
)
def flash_backward(a: Call) -> OpSpec:
    return OpSpec(backward(a), same=SAME_WIDTH)


@op(
    "_scaled_dot_product_efficient_attention",
    "q k v attn_mask compute_log_sumexp dropout_p=0.0 is_causal=False scale=None",
)
def efficient(a: Call) -> OpSpec:
    return OpSpec((*forward(a), None, None), same=SAME_WIDTH)


@op(
    "_scaled_dot_product_efficient_attention_backward",
    "grad q k v attn_mask out lse seed offset dropout_p mask is_causal=False scale=None",
)
def efficient_backward(a: Call) -> OpSpec | None:
    if a.attn_mask is not None and a.mask[3]:
        return None
    return OpSpec((*masked(backward(a), a.mask), None), same=SAME_WIDTH)


@op(
    "_scaled_dot_product_cudnn_attention",
    "q k v attn_mask compute_log_sumexp dropout_p=0.0 is_causal=False return_debug_mask=False scale=None",
)
def cudnn(a: Call) -> OpSpec:
    return OpSpec((*forward(a), *[None] * 7), same=SAME_WIDTH)


@op(
    "_scaled_dot_product_attention_math",
    "q k v attn_mask=None dropout_p=0.0 is_causal=False dropout_mask=None scale=None enable_gqa=False",
)
def math(a: Call) -> OpSpec | None:
    if a.dropout_mask is not None or a.q.ndim != 4:
        return None
    return OpSpec.of(forward(a)[0], None, same=SAME_WIDTH)
