"""List ops (`_foreach_*`, bucket copies) as one node per tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmdtypes.capture.raw import Raw, View
from spmdtypes.capture.variants import foreach_base
from spmdtypes.graph import Ref

if TYPE_CHECKING:
    from spmdtypes.capture.functionalise import _Functionaliser

# (base, kind of second operand) -> per-tensor overload, where it is not base.Tensor/Scalar/default
_OVERLOADS = {
    ("lerp", "scalar"): "lerp.Scalar",
    ("lerp", "list"): "lerp.Tensor",
    ("pow", "list"): "pow.Tensor_Tensor",
    ("pow", "scalar"): "pow.Tensor_Scalar",
    ("maximum", "list"): "maximum.default",
    ("minimum", "list"): "minimum.default",
    ("maximum", "scalar"): "clamp_min.default",
    ("minimum", "scalar"): "clamp_max.default",
    ("clamp_min", "list"): "clamp_min.Tensor",
    ("clamp_max", "list"): "clamp_max.Tensor",
    ("clamp_min", "scalar"): "clamp_min.default",
    ("clamp_max", "scalar"): "clamp_max.default",
    ("norm", "scalar"): "linalg_vector_norm.default",
}


def foreach(f: _Functionaliser, raw: Raw) -> None:
    """Emit a `_foreach_` op tensor by tensor."""
    base, in_place = foreach_base(raw.func) or ("", False)
    names = [a.name for a in raw.func._schema.arguments]
    given = dict(zip(names, raw.args)) | raw.kwargs
    lists = {k: v for k, v in given.items() if type(v) is tuple}
    n = max(len(v) for v in lists.values())
    targets = raw.mutated if in_place else raw.outs
    for i in range(n):
        row = {k: v[i] if k in lists and len(v) == n else v for k, v in given.items()}
        ref = _one(f, base, row, targets[i])
        if in_place:
            f._store(targets[i], ref)
            value = f.rec.values.get((f.index, -1 - i))
            if value is not None:
                f.values.setdefault(ref, value)
        else:
            f.memory.define(targets[i], ref)
            f.produced(i, ref)


def _one(f: _Functionaliser, base: str, row: dict[str, Any], target: View) -> Ref:
    values = [f.resolve(v) for v in row.values()]
    if base == "copy":
        return f._cast(values[1], target)
    if base == "zero":
        return f.emit_plain("aten.zeros_like.default", (values[0],), {}, target.shape, target.dtype)
    kwargs: dict[str, Any] = {}
    names = list(row)
    if base in ("addcmul", "addcdiv"):
        kwargs = {"value": values[3]} if len(values) > 3 else {}
        args, op = tuple(values[:3]), f"{base}.default"
    else:
        kwargs = {k: v for k, v in zip(names, values) if k in ("alpha", "rounding_mode")}
        args = tuple(v for k, v in zip(names, values) if k not in ("alpha", "dtype", "rounding_mode"))
        op = _overload(base, args)
        dtype = row.get("dtype")
        if dtype is not None:
            kwargs["dtype"] = dtype
    if base == "norm" and len(args) == 1:
        args = (*args, 2)
    return f.emit_plain(f"aten.{op}", args, kwargs, target.shape, target.dtype)


def _overload(base: str, args: tuple[Any, ...]) -> str:
    if len(args) < 2:
        return _OVERLOADS.get((base, "scalar"), f"{base}.default") if base == "norm" else f"{base}.default"
    if not isinstance(args[0], Ref):
        return f"{base}.Scalar"
    decisive = args[2] if base == "lerp" else args[1]
    kind = "list" if isinstance(decisive, Ref) else "scalar"
    return _OVERLOADS.get((base, kind)) or (f"{base}.Tensor" if kind == "list" else f"{base}.Scalar")


def _split_copy(f: _Functionaliser, raw: Raw) -> None:
    """`split_with_sizes_copy(x, sizes, dim, out=...)`: slices of x stored into the outputs."""
    source, sizes = f.resolve(raw.args[0]), raw.args[1]
    dim = raw.args[2] if len(raw.args) > 2 else raw.kwargs.get("dim", 0)
    shape = raw.args[0].shape
    start = 0
    for size, view in zip(sizes, raw.mutated):
        cut = (*shape[:dim], size, *shape[dim + 1 :])
        args = (source, dim, start, start + size, 1)
        ref = f.emit_plain("aten.slice.Tensor", args, {}, cut, raw.args[0].dtype)
        f._store(view, f._cast(_shaped(f, ref, cut, view), view))
        start += size


def _shaped(f: _Functionaliser, ref: Ref, shape: tuple[int, ...], view: View) -> Ref:
    if shape == view.shape:
        return ref
    meta = f.nodes[ref.node].outs[ref.out]
    assert meta is not None
    return f.emit_plain("aten.view.default", (ref, view.shape), {}, view.shape, meta.dtype)


def _chunk_cat(f: _Functionaliser, raw: Raw) -> None:
    """`_chunk_cat(tensors, dim, n, out=...)`: each tensor cut into n rows, rows laid side by side."""
    tensors, dim, n = raw.args[:3]
    (view,) = raw.mutated
    rows = []
    for t in tensors:
        ref, shape = f.resolve(t), list(t.shape)
        size = -(-shape[dim] // n)
        if size * n != shape[dim]:
            pad = (0, 0) * (len(shape) - dim - 1) + (0, size * n - shape[dim])
            shape[dim] = size * n
            ref = f.emit_plain("aten.constant_pad_nd.default", (ref, pad, 0), {}, tuple(shape), t.dtype)
        lead = tuple(shape[:dim])
        width = 1
        for s in (size, *shape[dim + 1 :]):
            width *= s
        flat = (*lead, n, width)
        rows.append((f.emit_plain("aten.view.default", (ref, flat), {}, flat, t.dtype), flat))
    total = (*rows[0][1][:-1], sum(r[1][-1] for r in rows))
    dtype = tensors[0].dtype
    ref = f.emit_plain("aten.cat.default", (tuple(r[0] for r in rows), len(total) - 1), {}, total, dtype)
    f._store(view, f._cast(_shaped(f, ref, total, view), view))


MUTATIONS: dict[str, Callable[[_Functionaliser, Raw], None]] = {
    "aten.split_with_sizes_copy.out": _split_copy,
    "aten._chunk_cat.out": _chunk_cat,
}
