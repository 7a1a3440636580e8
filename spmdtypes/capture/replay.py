"""Run a `Graph` on real tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdtypes.capture.raw import DTYPES
from spmdtypes.capture.variants import overload
from spmdtypes.graph import Graph, Lit, Node, Ref, TensorMeta

Communicate = Callable[[Node, Sequence[Tensor]], Sequence[Any]]

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_RESTRIDED = ("aten.as_strided.default", "aten.as_strided_scatter.default")


class ReplayError(Exception):
    """A node could not be executed."""


def replay(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    communicate: Communicate,
    constants: Mapping[int, Tensor] | None = None,
    draw: Callable[[Node], Sequence[Any]] | None = None,
) -> dict[Ref, Any]:
    """Every node's value, by ref. `inputs` are by name, `constants` by node id; `communicate`
    answers collectives and `draw` random nodes (drawn anew without it)."""
    env: dict[Ref, Any] = {}
    for node in graph.nodes:
        outs = _value(node, env, inputs, communicate, constants or {}, draw)
        for i, o in enumerate(outs):
            env[Ref(node.id, i)] = o
    return env


def _value(
    node: Node,
    env: Mapping[Ref, Any],
    inputs: Mapping[str, Tensor],
    communicate: Communicate,
    constants: Mapping[int, Tensor],
    draw: Callable[[Node], Sequence[Any]] | None,
) -> Sequence[Any]:
    if node.op == "input":
        return (inputs[node.name],)
    if node.op == "const":
        return (constant(node) if node.args else constants[node.id],)
    if node.comm is not None:
        return communicate(node, [env[r] for r in node.refs()])
    if node.rng is not None and draw is not None:
        return draw(node)
    return execute(node, env)


def complete(graph: Graph, values: dict[Ref, Tensor]) -> None:
    """Compute the values that were not recorded but follow from recorded ones (nodes that the
    functionaliser made up). Values that cannot be computed stay away."""
    for node in graph.nodes:
        missing = [Ref(node.id, k) for k, m in enumerate(node.outs) if m and Ref(node.id, k) not in values]
        if not missing or node.comm is not None or node.rng is not None or node.op in ("input", "const"):
            continue
        if any(r not in values for r in node.refs()):
            continue
        try:
            outs = execute(node, values)
        except (ReplayError, RuntimeError, TypeError):
            continue
        values.update({r: outs[r.out] for r in missing if isinstance(outs[r.out], Tensor)})


def constant(node: Node) -> Tensor:
    """The value of a small "const" node."""
    (meta,) = node.outs
    assert meta is not None
    return torch.tensor(_plain(node.args[0]), dtype=DTYPES[meta.dtype]).reshape(meta.shape)


def execute(node: Node, env: Mapping[Ref, Any]) -> tuple[Any, ...]:
    """The outputs of one op on the values in `env`."""
    func = overload(node.op)
    if func is None:
        raise ReplayError(f"no op {node.op}")
    types = argument_types(func)
    args = [_decode(a, env, t) for a, t in zip(node.args, types.values())]
    kwargs = {k: _decode(v, env, types.get(k, "")) for k, v in node.kwargs.items()}
    if node.op in _RESTRIDED:
        args[0] = args[0].contiguous()
    elif node.op == "aten.view.default":
        func = torch.ops.aten.reshape.default
    with torch.no_grad():
        out = func(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


@functools.cache
def argument_types(func: Any) -> dict[str, str]:
    return {
        a.name: str(a.type) + (" dtype" if a.name.endswith("dtype") else "") for a in func._schema.arguments
    }


def _decode(x: Any, env: Mapping[Ref, Any], kind: str) -> Any:
    if isinstance(x, Ref):
        return env[x]
    if isinstance(x, Lit):
        return x.local
    if isinstance(x, tuple):
        return [_decode(y, env, kind) for y in x]
    if isinstance(x, str):
        if kind.endswith(" dtype"):
            return DTYPES[x]
        return _MEMORY_FORMATS.get(x, x)
    return x


def _plain(x: Any) -> Any:
    if isinstance(x, Lit):
        return x.local
    return [_plain(y) for y in x] if isinstance(x, tuple) else x


def meta_outputs(
    func: Any, args: Any, kwargs: Any, meta: Callable[[Ref], TensorMeta | None]
) -> tuple[TensorMeta | None, ...] | None:
    """Metas of an op's results, by running it on meta tensors; None when it has no meta kernel."""
    from spmdtypes.capture.raw import dtype_name

    class Env(dict[Ref, Any]):
        def __missing__(self, ref: Ref) -> Any:
            m = meta(ref)
            assert m is not None
            return torch.empty(m.shape, dtype=DTYPES[m.dtype], device="meta")

    types = argument_types(func)
    env = Env()
    try:
        a = [_decode(x, env, t) for x, t in zip(args, types.values())]
        k = {n: _decode(x, env, types.get(n, "")) for n, x in kwargs.items()}
        out = func(*a, **k)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return tuple(
        TensorMeta(tuple(o.shape), dtype_name(o.dtype)) if isinstance(o, Tensor) else None for o in outs
    )
