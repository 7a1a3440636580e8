"""Dense linear algebra and pooling: unknown functions of whole matrices or windows.

Batch dims pass through; along the matrix dims nothing but whole tensors is understood.
"""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import Expr, Iota, Operand, OpSpec, Out, Var, fn, total
from spmdtypes.ops.parts import Ints, both, mixed, names, shaped_like, size_of, whole_of
from spmdtypes.ops.registry import op


def _matrix(x: Operand) -> tuple[list[Var], Expr]:
    batch = names(x.ndim - 2)
    return batch, whole_of(x, [*batch, Var("r"), Var("c")], [x.ndim - 2, x.ndim - 1])


def _unknown(batch: list[Var], dims: list[tuple[Var, Any]], *inputs: Expr) -> tuple[Out, dict[Var, Any]]:
    return Out((*batch, *[v for v, _ in dims]), fn("opaque", *[Iota(v) for v, _ in dims], *inputs)), dict(
        dims
    )


def _factors(x: Operand, shapes: list[list[Any]]) -> OpSpec:
    batch, value = _matrix(x)
    parts = [
        _unknown(batch, [(Var(f"o{j}_{d}"), s) for d, s in enumerate(shape)], value)
        for j, shape in enumerate(shapes)
    ]
    return OpSpec(tuple(o for o, _ in parts), {v: s for _, sizes in parts for v, s in sizes.items()})


def _sides(x: Operand) -> tuple[Any, Any, Any]:
    m, n = size_of(x, x.ndim - 2), size_of(x, x.ndim - 1)
    return m, n, both(min, m, n)


@op("linalg_qr")
def qr(x: Operand, mode: str = "reduced") -> OpSpec | None:
    m, n, k = _sides(x)
    if mode == "r":
        return None
    return _factors(x, [[m, m], [m, n]] if mode == "complete" else [[m, k], [k, n]])


@op("_linalg_svd")
def svd(x: Operand, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> OpSpec | None:
    m, n, k = _sides(x)
    return (
        _factors(x, [[m, m if full_matrices else k], [k], [n if full_matrices else k, n]])
        if compute_uv
        else None
    )


@op("linalg_svdvals")
def svdvals(x: Operand, **_: Any) -> OpSpec:
    return _factors(x, [[_sides(x)[2]]])


@op("_linalg_eigh")
def eigh(x: Operand, UPLO: str = "L", compute_v: bool = True) -> OpSpec | None:
    n = size_of(x, x.ndim - 1)
    return _factors(x, [[n], [n, n]]) if compute_v else None


@op("linalg_inv_ex linalg_cholesky_ex")
def inverse(x: Operand, *_: Any, **__: Any) -> OpSpec:
    n = size_of(x, x.ndim - 1)
    return _factors(x, [[n, n], []])


@op("cholesky linalg_matrix_exp linalg_pinv.atol_rtol_float")
def square_function(x: Operand, *_: Any, **__: Any) -> OpSpec:
    n = size_of(x, x.ndim - 1)
    return _factors(x, [[n, n]])


@op("linalg_lu_factor_ex")
def lu_factor(x: Operand, *_: Any, **__: Any) -> OpSpec:
    m, n, k = _sides(x)
    return _factors(x, [[m, n], [k], []])


@op("_linalg_det")
def det(x: Operand) -> OpSpec:
    n = size_of(x, x.ndim - 1)
    return _factors(x, [[], [n, n], [n]])


@op("_linalg_slogdet")
def slogdet(x: Operand) -> OpSpec:
    n = size_of(x, x.ndim - 1)
    return _factors(x, [[], [], [n, n], [n]])


@op("linalg_solve_triangular")
def solve_triangular(a: Operand, b: Operand, *, left: bool = True, **_: Any) -> OpSpec | None:
    """Linear in `b`; every column (row, from the right) is solved for itself."""
    if a.ndim != b.ndim:
        return None
    batch, value = _matrix(a)
    vars = [*batch, Var("r"), Var("c")]
    dim = b.ndim - (2 if left else 1)
    return OpSpec.of(Out(tuple(vars), mixed(b, vars, [dim], [value])), uses=(shaped_like(b, vars),))


def _pool_size(x: Operand, out_dims: int) -> tuple[list[Var], list[int]]:
    vars = names(x.ndim)
    return vars, list(range(x.ndim - out_dims, x.ndim))


def _pooled_extent(n: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    span = n + 2 * p - d * (k - 1) - 1
    count = -(-span // s) + 1 if ceil else span // s + 1
    return count - 1 if ceil and (count - 1) * s >= n + p else count


def _at(seq: Any, d: int, default: Any = None) -> Any:
    if not isinstance(seq, (list, tuple)):
        return seq if seq is not None else default
    return default if not seq else seq[d] if len(seq) > d else seq[0]


def _windows(x: Operand, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    vars, dims = _pool_size(x, n)
    sizes = {}
    for j, d in enumerate(dims):
        k = _at(kernel, j)
        args = (k, _at(stride, j, k), _at(padding, j, 0), _at(dilation, j, 1), ceil)
        sizes[vars[d]] = both(lambda m, a=args: _pooled_extent(m, *a), size_of(x, d))
    return vars, dims, sizes


@op("max_pool2d_with_indices max_pool3d_with_indices")
def max_pool(
    x: Operand, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> OpSpec:
    n = len(kernel) if len(kernel) > 1 else 2
    vars, dims, sizes = _windows(x, n, kernel, stride, padding, dilation, ceil_mode)
    value = fn("opaque", *[Iota(vars[d]) for d in dims], whole_of(x, vars, dims))
    return OpSpec.of(*[Out(tuple(vars), value)] * 2, sizes=sizes)


@op("avg_pool1d avg_pool2d avg_pool3d")
def avg_pool(
    x: Operand, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, *_: Any
) -> OpSpec:
    vars, dims, sizes = _windows(x, len(kernel), kernel, stride, padding, 1, ceil_mode)
    return OpSpec.of(Out(tuple(vars), mixed(x, vars, dims)), sizes=sizes)


@op("_adaptive_avg_pool2d _adaptive_avg_pool3d")
def adaptive_avg_pool(x: Operand, output_size: Ints) -> OpSpec:
    vars, dims = _pool_size(x, len(output_size))
    sizes = {vars[d]: s for d, s in zip(dims, output_size)}
    return OpSpec.of(Out(tuple(vars), mixed(x, vars, dims)), sizes=sizes)


@op("upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_linear1d upsample_bicubic2d")
def upsample(x: Operand, output_size: Ints, *_: Any) -> OpSpec:
    return adaptive_avg_pool(x, output_size)


def _backward_of_pool(n: int) -> None:
    @op(f"avg_pool{n}d_backward _adaptive_avg_pool{n}d_backward")
    def average(grad: Operand, x: Operand, *_: Any) -> OpSpec:
        vars, dims = _pool_size(x, n)
        return OpSpec.of(Out(tuple(vars), mixed(grad, vars, dims)), uses=(shaped_like(x, vars),))

    @op(f"max_pool{n}d_with_indices_backward")
    def maximum(grad: Operand, x: Operand, *args: Any) -> OpSpec:
        """A scatter of the gradient to the positions kept in the last argument."""
        vars, dims = _pool_size(x, n)
        inner = [Var(f"k{d}") for d in dims]
        read = (*vars[: dims[0]], *inner)
        hit = fn("opaque", *[Iota(vars[d]) for d in dims], args[-1][read])
        return OpSpec.of(
            Out(tuple(vars), total("sum", inner, hit * grad[read])), uses=(shaped_like(x, vars),)
        )


_backward_of_pool(2)
_backward_of_pool(3)


@op("upsample_nearest1d_backward upsample_nearest2d_backward upsample_bilinear2d_backward")
def upsample_backward(grad: Operand, output_size: Any, input_size: Ints, *_: Any) -> OpSpec:
    vars, dims = _pool_size(grad, grad.ndim - 2)
    return OpSpec.of(Out(tuple(vars), mixed(grad, vars, dims)), sizes={vars[d]: input_size[d] for d in dims})


@op("_fft_c2c")
def fft(x: Operand, dim: Ints, *_: Any) -> OpSpec:
    vars, dims = names(x.ndim), [d % x.ndim for d in dim]
    return OpSpec.of(Out(tuple(vars), mixed(x, vars, dims)), uses=(shaped_like(x, vars),))
