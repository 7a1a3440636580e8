"""Views as functions: how to repeat one on another value, and how to write back through it."""

from __future__ import annotations

from typing import Any, NamedTuple

# the result holds the same elements as the operand, once each
_BIJECTIVE = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten._reshape_alias.default",
    "aten.reshape.default",
    "aten.t.default",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.view.dtype",
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    "aten._conj.default",
    "aten.alias.default",
    "aten.detach.default",
}


_OUT_OF_PLACE = {
    "aten.t_.default": "aten.t.default",
    "aten.transpose_.default": "aten.transpose.int",
    "aten.swapaxes_.default": "aten.transpose.int",
    "aten.swapdims_.default": "aten.transpose.int",
    "aten.unsqueeze_.default": "aten.unsqueeze.default",
    "aten.squeeze_.default": "aten.squeeze.default",
    "aten.squeeze_.dim": "aten.squeeze.dim",
    "aten.squeeze_.dims": "aten.squeeze.dims",
}


class Step(NamedTuple):
    """One view: `op` with the arguments after its tensor, from one shape to another.

    Slices and selections are normalised to "aten.slice.Tensor" (dim, start, end, step) and
    "aten.select.int" (dim, index).
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    source_dtype: str

    @property
    def bijective(self) -> bool:
        if self.op == "aten.expand.default":
            return self.source == self.target
        if self.op == "aten.slice.Tensor":
            return self.source == self.target
        return self.op in _BIJECTIVE

    @property
    def window(self) -> tuple[int, int, int] | None:
        """(dim, start, end) of a slice with step 1."""
        if self.op == "aten.slice.Tensor" and self.args[3] == 1:
            return self.args[0], self.args[1], self.args[2]
        return None


def step(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: int, source: Any, target: Any
) -> Step | None:
    """The step of output `out` of a recorded view op on views `source` -> `target`; None when
    the op is no view we can repeat. `args` leaves the tensor out."""
    shape = source.shape

    def make(op: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Step:
        return Step(op, args, tuple((kwargs or {}).items()), shape, target.shape, source.dtype)

    def dim_of(d: int) -> int:
        return d + len(shape) if d < 0 else d

    op = _OUT_OF_PLACE.get(op, op)
    name = op.removeprefix("aten.")
    match name:
        case "slice.Tensor":
            dim = dim_of(args[0] if args else 0)
            start, end = (list(args[1:3]) + [None, None])[:2]
            by = args[3] if len(args) > 3 else 1
            n = shape[dim]
            start = 0 if start is None else max(start + n if start < 0 else start, 0)
            end = n if end is None else min(max(end + n if end < 0 else end, 0), n)
            return make("aten.slice.Tensor", (dim, min(start, n), max(end, min(start, n)), by))
        case "select.int":
            dim = dim_of(args[0])
            return make("aten.select.int", (dim, args[1] + shape[dim] if args[1] < 0 else args[1]))
        case "split.Tensor" | "split_with_sizes.default" | "chunk.default" | "unbind.int":
            dim = dim_of(_dim_argument(name, args, kwargs))
            if name == "unbind.int":
                return make("aten.select.int", (dim, out))
            start = _split_start(name, args, out, shape[dim])
            return make("aten.slice.Tensor", (dim, start, start + target.shape[dim], 1))
        case "expand.default" | "diagonal.default" | "unfold.default":
            return make(op, args, kwargs)
    return make(op, args, kwargs) if op in _BIJECTIVE else None


def _dim_argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    position = 0 if name == "unbind.int" else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", 0)
    return int(dim)


def _split_start(name: str, args: tuple[Any, ...], out: int, n: int) -> int:
    if name == "split_with_sizes.default":
        return int(sum(args[0][:out]))
    size = -(-n // args[0]) if name == "chunk.default" else args[0]
    return int(size * out)


def inverse(s: Step) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """(op, arguments after the tensor, kwargs) that undoes a bijective step."""
    match s.op.removeprefix("aten."):
        case "t.default":
            return "aten.t.default", (), ()
        case "transpose.int":
            return "aten.transpose.int", s.args, ()
        case "permute.default":
            order = [d % len(s.source) for d in s.args[0]]
            return "aten.permute.default", (tuple(order.index(i) for i in range(len(order))),), ()
        case "view.dtype":
            return "aten.view.dtype", (s.source_dtype,), ()
        case "view_as_real.default":
            return "aten.view_as_complex.default", (), ()
        case "view_as_complex.default":
            return "aten.view_as_real.default", (), ()
        case "_conj.default":
            return "aten._conj.default", (), ()
    return "aten.view.default", (s.source,), ()


def scatter(s: Step) -> tuple[str, tuple[Any, ...]] | None:
    """(op, arguments after operand and value) that writes a value back through a step that keeps
    a part of its operand; None when there is no such op."""
    match s.op:
        case "aten.slice.Tensor":
            return "aten.slice_scatter.default", s.args
        case "aten.select.int":
            return "aten.select_scatter.default", s.args
        case "aten.diagonal.default":
            return "aten.diagonal_scatter.default", s.args
    return None
