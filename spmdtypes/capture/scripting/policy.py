"""Which ops an accelerator's autocast runs in which precision, on the CPU.

The CPU's own autocast leaves softmax, norms, sums and exponentials in low precision; a GPU's widens
them. A script is checked as it runs on a GPU, so while an autocast for one is on, its lists hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

_KEY = "AutocastCPU"
_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)

_WIDE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp rms_norm"
).split()
_WIDE_RESULT = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split()
_WIDE_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_NARROW = "mv addmv addr prelu chain_matmul linalg_multi_dot".split()
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add".split()
_ORDER = (torch.float16, torch.bfloat16, torch.float32)


class Policy:
    """Kernels that cast, for ops that the CPU's autocast passes by. They act while `on` is positive."""

    def __init__(self) -> None:
        self.on = 0
        self._library: Any = None

    def start(self) -> None:
        """Register everything; the first autocast does it."""
        if self._library is not None:
            return
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for names, make in (
            (_WIDE, self._casting(lambda args: torch.float32)),
            (_NARROW, self._casting(lambda args: torch.get_autocast_dtype("cpu"))),
            (_WIDEST, self._casting(_widest)),
            (_WIDE_RESULT, self._asking),
        ):
            for name in names:
                for op in _overloads(name):
                    self._register(op, make(op))
        for name, other in _WIDE_NORM.items():
            self._register(_op(name), self._norm(_op(name), _op(other)))

    def stop(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _register(self, op: Any, kernel: Callable[..., Any]) -> None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name + _suffix(op), _KEY):
            self._library.impl(op.name(), kernel, _KEY)

    def _casting(self, target: Callable[[Any], torch.dtype]) -> Callable[[Any], Callable[..., Any]]:
        """Casts every argument that is of low precision or float32 to one type."""

        def make(op: Any) -> Callable[..., Any]:
            def kernel(*args: Any, **kwargs: Any) -> Any:
                with _ExcludeDispatchKeyGuard(_KEYS):
                    if self.on > 0:
                        dtype = target((*args, *kwargs.values()))
                        args = tuple(_cast(a, dtype) for a in args)
                        kwargs = {k: _cast(v, dtype) for k, v in kwargs.items()}
                    return op(*args, **kwargs)

            return kernel

        return make

    def _asking(self, op: Any) -> Callable[..., Any]:
        """Asks the op for a float32 result, unless the caller asks for another."""
        position = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _ExcludeDispatchKeyGuard(_KEYS):
                given = args[position] if len(args) > position else kwargs.get("dtype")
                if self.on > 0 and given is None and _is_low(args[0]):
                    args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
                return op(*args, **kwargs)

        return kernel

    def _norm(self, op: Any, with_dtype: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _ExcludeDispatchKeyGuard(_KEYS):
                if self.on <= 0 or not _is_low(args[0]):
                    return op(*args, **kwargs)
                given = dict(zip((a.name for a in op._schema.arguments), args)) | kwargs
                return with_dtype(**{"p": 2, **given}, dtype=torch.float32)

        return kernel


def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _suffix(op: Any) -> str:
    return "" if op._overloadname == "default" else "." + op._overloadname


def _overloads(name: str) -> list[Any]:
    """The forms of an op that take tensors, write to none, and name no dims."""
    packet = getattr(torch.ops.aten, name)
    ops = [getattr(packet, o) for o in packet.overloads()]
    return [o for o in ops if not o._schema.is_mutable and "Tensor" in str(o._schema) and _known(o)]


def _known(op: Any) -> bool:
    """Is it an op of the dispatcher, and not of TorchScript only?"""
    return "Dimname" not in str(op._schema) and torch._C._dispatch_has_kernel(op.name())


def _is_low(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        return x.to(dtype) if x.dtype in _ORDER and x.dtype is not dtype else x
    if isinstance(x, (list, tuple)):
        return type(x)(_cast(y, dtype) for y in x)
    return x


def _widest(args: Any) -> torch.dtype:
    found = [a.dtype for a in args if isinstance(a, Tensor) and a.dtype in _ORDER]
    if torch.float32 in found or len(set(found)) > 1:
        return torch.float32
    return found[0] if found else torch.float32
