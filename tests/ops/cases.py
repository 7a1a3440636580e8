"""Calls of every described op on tensors whose dims divide by 2 and 4, to be cut and compared.

`N(8)` marks a number in the arguments that a program running on shards may write as 8, 4 or 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spmdtypes.ops.pointwise import BINARY, BITWISE, COMPARE, UNARY


class N(int):
    """A size or position that scales with the shard."""


@dataclass(frozen=True)
class Case:
    """`op(*args, **kwargs)`. `name` distinguishes cases of one op."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        return f"{self.op.removeprefix('aten.').removesuffix('.default')} {self.name}".strip()

    @property
    def function(self) -> Any:
        found: Any = torch.ops
        for part in self.op.split("."):
            found = getattr(found, part)
        return found


_POSITIVE = "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma special_entr acosh".split()
_UNIT = "asin acos atanh erfinv".split()
_COMPLEX = "conj _conj _conj_physical conj_physical real imag angle sgn positive resolve_conj".split()


class _Make:
    """Random tensors from one seed."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.found: list[Case] = []

    def real(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.8 + 0.1

    def below(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.generator)

    def truth(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) > 0.5

    def distinct(self, limit: int, rows: int, count: int) -> Tensor:
        return torch.stack([torch.randperm(limit, generator=self.generator)[:count] for _ in range(rows)])

    def __call__(self, op: str, *args: Any, name: str = "", **kwargs: Any) -> None:
        full = op if op.count(".") == 2 else f"aten.{op}" if "." in op else f"aten.{op}.default"
        self.found.append(Case(full, args, kwargs, name))


@cache
def cases() -> tuple[Case, ...]:
    make = _Make()
    for family in (_pointwise, _views, _reductions, _products, _indexing, _norms, _losses, _rest):
        family(make)
    return tuple(make.found)


def _pointwise(c: _Make) -> None:
    x, y, row, p = c.real(4, 8), c.real(4, 8), c.real(8), c.positive(4, 8)
    for name in UNARY:
        if name not in _COMPLEX:
            c(name, p + 1 if name == "acosh" else p if name in _POSITIVE + _UNIT else x)
    for name in BINARY:
        if name != "complex":
            c(name, x, y)
    for name in COMPARE:
        c(f"{name}.Tensor", x.round(), y.round())
        c(f"{name}.Scalar", x.round(), 1.0)
    for name in BITWISE:
        c(f"bitwise_{name}.Tensor", c.below(4, 4, 8), c.below(4, 4, 8))
    for name in ("and", "or", "xor"):
        c(f"logical_{name}", x, y)
        c(f"bitwise_{name}.Tensor", c.truth(4, 8), c.truth(4, 8), name="bool")
        c(f"__{name}__.Tensor", c.truth(4, 8), c.truth(4, 8), name="bool")
        c(f"__{name}__.Tensor", c.below(4, 4, 8), c.below(4, 4, 8))
    c("logical_not", x)
    for name in ("add", "sub", "mul", "div"):
        c(f"{name}.Tensor", x, y)
        c(f"{name}.Tensor", c.real(2, 4, 8), row, name="broadcast")
        c(f"{name}.Tensor", x, c.real(4, 1), name="column")
        c(f"{name}.Scalar", x, 1.5)
        c(f"{name}.Scalar", x, -1.5, name="negative")
    c("add.Tensor", x, y, alpha=2.0, name="alpha")
    c("add.Tensor", c.truth(4, 8), c.truth(4, 8), name="bool")
    c("mul.Tensor", c.truth(4, 8), x, name="mask")
    c("rsub.Scalar", x, 1.0)
    c("div.Tensor_mode", x, p, rounding_mode="floor")
    for power in (1, 2, 3, 4):
        c("pow.Tensor_Scalar", x, power, name=str(power))
    for power in (0.5, -0.5, -1, 1.7):
        c("pow.Tensor_Scalar", p, power, name=str(power))
    c("pow.Tensor_Tensor", p, y)
    c("pow.Scalar", 2.0, x)
    c("remainder.Scalar", x, 0.7)
    c("fmod.Scalar", x, 0.7)
    c("floor_divide", x, p)
    c("xlogy.Tensor", x, p)
    c("copysign.Tensor", x, y)
    c("bitwise_not", c.below(4, 4, 8))
    c("round", x)
    c("clamp", x, -0.5, 0.5)
    c("clamp", x, None, 0.5, name="upper")
    c("clamp.Tensor", x, y - 1, y + 1)
    c("clamp_min", x, 0.0)
    c("clamp_max", x, 0.0)
    c("hardtanh", x, -0.5, 0.5)
    c("nan_to_num", x)
    c("where.self", c.truth(4, 8), x, y)
    c("where.self", c.truth(8), x, c.real(4, 1), name="broadcast")
    c("masked_fill.Scalar", x, c.truth(4, 8), -1e3)
    c("masked_fill.Scalar", x, c.truth(4, 8), 0.0, name="zero")
    c("addcmul", x, y, c.real(4, 8), value=0.5)
    c("addcdiv", x, y, p, value=0.5)
    c("lerp.Scalar", x, y, 0.3)
    c("lerp.Tensor", x, y, p)
    c("clone", x)
    c("copy", x, row)
    c("_to_copy", x, dtype=torch.int64, name="int")
    c("_to_copy", x, dtype=torch.bool, name="bool")
    c("_to_copy", c.below(5, 4, 8), dtype=torch.float64, name="float")
    for name in ("gelu", "silu", "mish", "leaky_relu", "elu", "celu", "softplus", "hardsigmoid", "hardswish"):
        c(name, x)
    for name in ("softshrink", "hardshrink", "log_sigmoid_forward"):
        c(name, x)
    c("gelu", x, approximate="tanh", name="tanh")
    c("threshold", x, 0.1, 0.2)
    for name in ("sigmoid", "tanh", "gelu", "silu", "mish", "hardsigmoid", "hardswish"):
        c(f"{name}_backward", x, y)
    c("threshold_backward", x, y, 0.0)
    c("gelu_backward", x, y, approximate="tanh", name="tanh")
    c("leaky_relu_backward", x, y, 0.1, False)
    c("elu_backward", x, 1.0, 1.0, 1.0, False, y)
    c("softplus_backward", x, y, 1.0, 20.0)
    c("hardtanh_backward", x, y, -0.5, 0.5)
    c("softshrink_backward", x, y, 0.5)
    c("log_sigmoid_backward", x, y, torch.ops.aten.log_sigmoid_forward(y)[1])
    c("glu", x, 1)
    c("glu_backward", c.real(4, 4), x, 1)
    c("_prelu_kernel", x, c.real(1, 8))
    c("_prelu_kernel_backward", x, y, c.real(1, 8))


def _views(c: _Make) -> None:
    x, cube = c.real(4, 8), c.real(4, 4, 8)
    c("view", c.real(4, 4, 32), [N(4), N(4), N(4), N(8)], name="split")
    c("view", cube, [N(16), N(8)], name="merge")
    c("view", cube, [N(4), N(32)], name="merge last")
    c("view", x, [N(32)], name="flat")
    c("view", x, [N(8), N(4)], name="regroup")
    c("view", c.real(4, 16), [N(4), N(2), N(8)], name="few heads")
    c("view", x, [-1], name="infer")
    c("_unsafe_view", cube, [N(4), N(4), 1, N(8)])
    c("permute", c.real(4, 8, 4), [2, 0, 1])
    c("transpose.int", cube, 1, 2)
    c("t", x)
    c("expand", c.real(4, 1, 8), [N(4), N(4), N(8)])
    c("expand", x, [2, N(4), N(8)], name="new dim")
    c("expand", c.real(1, 8), [-1, -1], name="kept")
    c("unsqueeze", x, 1)
    c("squeeze.dim", c.real(4, 1, 8), 1)
    c("squeeze.dims", c.real(4, 1, 8, 1), [1, 3])
    c("slice.Tensor", c.real(8, 8), 0, 0, N(4), name="first half")
    c("slice.Tensor", c.real(8, 8), 1, N(4), N(8), name="second half")
    c("slice.Tensor", c.real(8, 8), 0, 0, 9223372036854775807, name="whole")
    c("slice.Tensor", c.real(8, 8), 1, 2, 6, name="middle")
    c("slice.Tensor", c.real(8, 8), 1, 0, 8, 2, name="step")
    c("select.int", x, 0, 1)
    c("select.int", x, 1, -1, name="last")
    c("unbind.int", c.real(2, 8), 0)
    c("split.Tensor", c.real(8, 8), N(4), 1)
    c("split_with_sizes", c.real(4, 12), [N(4), N(8)], 1)
    c("cat", [x, c.real(4, 8)], 0)
    c("cat", [x, c.real(4, 4)], 1, name="last")
    c("stack", [x, c.real(4, 8)], 1)
    c("repeat", x, [2, 1])
    c("repeat", x, [2, 1, 1], name="new dim")
    c("repeat_interleave.self_int", x, 2, 1)
    c("flip", x, [1])
    c("roll", x, [1], [0])
    c("diagonal", c.real(8, 8))
    c("unfold", x, 1, 2, 2)
    c("as_strided", x, [N(4), N(8)], [N(8), 1])
    c("constant_pad_nd", x, [1, 1])
    c("constant_pad_nd", x, [0, 0, 1, 0], 2.0, name="rows")
    c("tril", c.real(8, 8))
    c("triu", c.real(8, 8), 1)
    c("slice_backward", c.real(8, 4), [N(8), N(8)], 1, 0, N(4), 1)
    c("slice_backward", c.real(8, 2), [N(8), N(8)], 1, 3, 7, 2, name="step")
    c("select_backward", c.real(8), [N(4), N(8)], 0, 2)
    c("slice_scatter", c.real(8, 8), c.real(8, 4), 1, 0, N(4))
    c("select_scatter", x, c.real(8), 0, 1)
    c("diagonal_backward", c.real(8), [N(8), N(8)], 0, 0, 1)
    c("unfold_backward", c.real(4, 4, 2), [N(4), N(8)], 1, 2, 2)
    for op in ("zeros", "ones", "full"):
        c(op if op == "full" else f"{op}", [N(4), N(8)], *([2.0] if op == "full" else []))
    c("zeros_like", x)
    c("ones_like", x)
    c("full_like", x, 3.0)
    c("new_zeros", x, [N(4), N(8)])
    c("fill.Scalar", x, 2.0)
    c("arange", N(8))
    c("eye", 4)


def _reductions(c: _Make) -> None:
    x = c.real(4, 8)
    for dims, keep in (([0], False), ([1], True), ([0, 1], False)):
        tag = f"{dims}{'k' if keep else ''}"
        c("sum.dim_IntList", x, dims, keep, name=tag)
        c("mean.dim", x, dims, keep, name=tag)
        c("amax", x, dims, keep, name=tag)
        c("amin", x, dims, keep, name=tag)
        c("var.correction", x, dims, correction=0, keepdim=keep, name=tag)
        c("std.correction", x, dims, correction=1, keepdim=keep, name=tag)
        c("logsumexp", x, dims, keep, name=tag)
        for p in (1, 2, float("inf")):
            c("linalg_vector_norm", x, p, dims, keep, name=f"{p} {tag}")
    c("sum", x)
    c("mean", x)
    c("max", x)
    c("prod", x)
    c("prod.dim_int", x, 1)
    c("any.dim", c.truth(4, 8), 1)
    c("all.dim", c.truth(4, 8), 0)
    c("sum", c.truth(4, 8), name="bool")
    c("max.dim", x, 1)
    c("min.dim", x, 0, True)
    c("argmax", x, 1)
    c("aminmax", x, dim=1)
    c("median.dim", x, 1)
    c("cumsum", x, 1)
    c("cumprod", x, 1)
    c("logcumsumexp", x, 0)
    c("cummax", x, 1)
    c("sort", x, 1)
    c("argsort", x, 1)
    c("topk", x, 2, 1)
    c("var_mean.correction", x, [1], correction=0)
    c("bincount", c.below(4, 8), None, 4)
    c("trace", c.real(8, 8))
    c("count_nonzero.dim_IntList", c.truth(4, 8), [0])


def _products(c: _Make) -> None:
    c("mm", c.real(4, 8), c.real(8, 4))
    c("bmm", c.real(4, 4, 8), c.real(4, 8, 4))
    c("mv", c.real(4, 8), c.real(8))
    c("dot", c.real(8), c.real(8))
    c("addmm", c.real(4), c.real(4, 8), c.real(8, 4))
    c("addmm", c.real(4, 4), c.real(4, 8), c.real(8, 4), beta=0.5, alpha=2.0, name="scaled")
    c("baddbmm", c.real(4, 4, 4), c.real(4, 4, 8), c.real(4, 8, 4))
    c("linear", c.real(4, 4, 8), c.real(4, 8), c.real(4))
    c("matmul", c.real(4, 1, 4, 8), c.real(4, 8, 4))
    image, kernel = c.real(4, 4, 6, 6), c.real(8, 4, 3, 3)
    ones, none = [1, 1], [0, 0]
    c("convolution", image, kernel, c.real(8), ones, ones, ones, False, none, 1)
    c("convolution", image, kernel, None, [2, 2], ones, ones, False, none, 1, name="stride")
    c("convolution", image, c.real(4, 1, 3, 3), None, ones, ones, ones, False, none, 4, name="depthwise")
    c("convolution", image, c.real(4, 4, 3, 3), None, [2, 2], ones, ones, True, none, 1, name="transposed")
    c("convolution", c.real(4, 4, 8), c.real(8, 4, 3), None, [1], [1], [1], False, [0], 1, name="1d")
    mask = [True, True, True]
    grad = c.real(4, 8, 6, 6)
    c("convolution_backward", grad, image, kernel, [N(8)], ones, ones, ones, False, none, 1, mask)
    c("_cdist_forward", c.real(4, 8), c.real(8, 8), 2.0, None)
    c("linalg_qr", c.real(4, 8, 4))
    c("_linalg_eigh", _symmetric(c.real(4, 4, 4)))
    c("linalg_inv_ex", c.real(4, 4, 4))
    c("linalg_solve_triangular", c.real(4, 4).triu() + 4 * torch.eye(4), c.real(4, 8), upper=True)
    c("max_pool2d_with_indices", image, [2, 2])
    c("avg_pool2d", image, [2, 2])
    c("_adaptive_avg_pool2d", image, [2, 2])
    c("avg_pool2d_backward", c.real(4, 4, 3, 3), image, [2, 2], [2, 2], none, False, True, None)
    c("_adaptive_avg_pool2d_backward", c.real(4, 4, 2, 2), image)
    c("upsample_nearest2d", image, [12, 12])
    places = torch.ops.aten.max_pool2d_with_indices(image, [2, 2])[1]
    c(
        "max_pool2d_with_indices_backward",
        c.real(4, 4, 3, 3),
        image,
        [2, 2],
        [2, 2],
        none,
        ones,
        False,
        places,
    )


def _symmetric(x: Tensor) -> Tensor:
    return x + x.mT


def _indexing(c: _Make) -> None:
    table, ids = c.real(16, 8), c.below(16, 4, 4)
    x = c.real(4, 8)
    c("embedding", table, ids)
    c("embedding_dense_backward", c.real(4, 4, 8), ids, N(16), -1, False)
    c("embedding_dense_backward", c.real(4, 4, 8), ids, N(16), 3, False, name="padding")
    c("index_select", c.real(8, 8), 0, c.below(8, 4))
    c("gather", x, 1, c.below(8, 4, 4))
    c("scatter_add", x, 1, c.below(8, 4, 4), c.real(4, 4))
    c("scatter.src", x, 1, c.distinct(8, 4, 4), c.real(4, 4))
    c("scatter.value", x, 1, c.below(8, 4, 4), 1.0)
    c("scatter_reduce.two", x, 1, c.below(8, 4, 4), c.real(4, 4), "amax")
    c("index_add", x, 0, c.below(4, 8), c.real(8, 8))
    c("index_copy", x, 0, c.distinct(4, 1, 2)[0], c.real(2, 8))
    c("index_fill.int_Scalar", x, 1, c.below(8, 2), 0.5)
    c("index.Tensor", x, [c.below(4, 8)])
    c("index.Tensor", x, [None, c.below(8, 4)], name="second")
    c("index.Tensor", c.real(4, 8, 4), [c.below(4, 4), None, c.below(4, 4)], name="apart")
    c("index.Tensor", c.real(4, 8, 4), [c.below(4, 4, 1), c.below(8, 1, 2)], name="grid")
    c("index_put", x, [c.distinct(4, 1, 2)[0]], c.real(2, 8))
    c("index_put", x, [c.below(4, 8)], c.real(8, 8), True, name="accumulate")
    c("index_put", x, [c.truth(4, 8)], c.real(), name="mask")
    c("masked_scatter", x, c.truth(4, 8), c.real(4, 8))
    c("bucketize.Tensor", x, c.real(8).sort().values)
    c("isin.Tensor_Tensor", c.below(8, 4, 8), c.below(8, 4))
    c("take", c.real(8), c.below(8, 4))


def _norms(c: _Make) -> None:
    x, w, b, g = c.real(4, 4, 8), c.real(8), c.real(8), c.real(4, 4, 8)
    aten = torch.ops.aten
    c("native_layer_norm", x, [N(8)], w, b, 1e-5)
    _, m, r = aten.native_layer_norm(x, [8], w, b, 1e-5)
    c("native_layer_norm_backward", g, x, [N(8)], m, r, w, b, [True] * 3)
    c("_fused_rms_norm", x, [N(8)], w, 1e-5)
    image, grad, w4, b4 = c.real(4, 4, 4), c.real(4, 4, 4), c.real(4), c.real(4)
    rm, rv = c.real(4), c.positive(4)
    c("native_batch_norm", image, w4, b4, None, None, True, 0.1, 1e-5)
    c("native_batch_norm", image, w4, b4, rm, rv, False, 0.1, 1e-5, name="eval")
    c("_native_batch_norm_legit_functional", image, w4, b4, rm, rv, True, 0.1, 1e-5)
    _, m, r = aten.native_batch_norm(image, w4, b4, None, None, True, 0.1, 1e-5)
    c("native_batch_norm_backward", grad, image, w4, None, None, m, r, True, 1e-5, [True] * 3)
    c("native_batch_norm_backward", grad, image, w4, rm, rv, None, None, False, 1e-5, [True] * 3, name="eval")
    wide, w8, b8 = c.real(4, 8, 4), c.real(8), c.real(8)
    c("native_group_norm", wide, w8, b8, N(4), N(8), N(4), N(2), 1e-5)
    _, m, r = aten.native_group_norm(wide, w8, b8, 4, 8, 4, 2, 1e-5)
    c("native_group_norm_backward", c.real(4, 8, 4), wide, m, r, w8, N(4), N(8), N(4), N(2), [True] * 3)


def _losses(c: _Make) -> None:
    x, t, p, g = c.real(4, 8), c.real(4, 8), c.positive(4, 8), c.real()
    for r in (0, 1, 2):
        grad = c.real(4, 8) if r == 0 else g
        for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss"):
            c(name, x, t, r, name=str(r))
        c("mse_loss_backward", grad, x, t, r, name=str(r))
        c("smooth_l1_loss_backward", grad, x, t, r, 1.0, name=str(r))
        c("huber_loss", x, t, r, 1.0, name=str(r))
        c("huber_loss_backward", grad, x, t, r, 1.0, name=str(r))
        c("binary_cross_entropy", p, c.positive(4, 8), None, r, name=str(r))
        c("binary_cross_entropy_backward", grad, p, c.positive(4, 8), None, r, name=str(r))
        c("binary_cross_entropy_with_logits", x, p, None, None, r, name=str(r))
    rows = c.real(4, 8).log_softmax(1)
    full, some = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 0, 3, 0])
    for r in (0, 1, 2):
        grad = c.real(4) if r == 0 else g
        c("nll_loss_forward", rows, full, None, r, -100, name=str(r))
        c("nll_loss_forward", rows, some, c.positive(8), r, 0, name=f"{r} ignored")
        c("nll_loss_backward", grad, rows, full, None, r, -100, torch.tensor(4.0).double(), name=str(r))
        c("nll_loss_backward", grad, rows, some, None, r, 0, torch.tensor(2.0).double(), name=f"{r} ignored")
    c("nll_loss2d_forward", c.real(4, 4, 2, 4), c.below(4, 4, 2, 4), None, 1, -100)
    c(
        "nll_loss2d_backward",
        g,
        c.real(4, 4, 2, 4),
        c.below(4, 4, 2, 4),
        None,
        1,
        -100,
        torch.tensor(32.0).double(),
    )
    for op in ("_softmax", "_log_softmax"):
        c(op, x, 1, False)
    c("_safe_softmax", x, 1)
    c("_softmax_backward_data", t, x.softmax(1), 1, torch.float64)
    c("_log_softmax_backward_data", t, x.log_softmax(1), 1, torch.float64)
    for causal in (False, True):
        q, k, v = (c.real(4, 4, 4, 8) for _ in range(3))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, causal)
        tag = "causal" if causal else ""
        c("_scaled_dot_product_flash_attention_for_cpu", q, k, v, 0.0, causal, name=tag)
        c(
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            c.real(4, 4, 4, 8), q, k, v, out, lse, 0.0, causal, name=tag,
        )  # fmt: skip


def _rest(c: _Make) -> None:
    lists = [[c.real(4, 8), c.real(8)] for _ in range(4)]
    a, b, d, e = lists
    pos = [c.positive(4, 8), c.positive(8)]
    c("_foreach_add.List", a, b, alpha=0.5)
    c("_foreach_mul.List", a, b)
    c("_foreach_mul.Scalar", a, 0.5)
    c("_foreach_add.ScalarList", a, [1.0, 2.0])
    c("_foreach_mul.Tensor", a, c.real())
    c("_foreach_div.List", a, pos)
    c("_foreach_sqrt", pos)
    c("_foreach_neg", a)
    c("_foreach_addcmul.Scalar", a, b, d, 0.5)
    c("_foreach_addcdiv.ScalarList", a, b, pos, [0.5, 0.25])
    c("_foreach_lerp.Scalar", a, b, 0.1)
    c("_foreach_norm.Scalar", a, 2)
    c("_foreach_maximum.List", a, b)
    c("_foreach_pow.Scalar", pos, 2)
    steps = [torch.tensor(3.0).double(), torch.tensor(3.0).double()]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    c("_fused_adamw", a, b, d, pos, [], steps, **rates, amsgrad=False, maximize=False)
    c("_fused_adam", a, b, d, pos, [], steps, **rates, amsgrad=False, maximize=False)
    sgd = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    c("_fused_sgd", a, b, e, **sgd, nesterov=False, maximize=False, is_first_step=False)
    c("native_dropout", c.real(4, 8), 0.5, True)
    c("native_dropout_backward", c.real(4, 8), c.truth(4, 8), 2.0)


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Every tensor in a call's arguments, in order."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors_of(y)
    elif isinstance(x, dict):
        yield from tensors_of(list(x.values()))
