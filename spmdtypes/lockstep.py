"""Runs a captured graph on all ranks at once, in one process: collectives are sums over a list.

Every rank executes the same nodes on its own real tensors; literals that grow with a rank
coordinate (`graph.Lit`) take each rank's value. What the program holds in float32 is computed in
float64, so that equal programs give equal numbers. Used to learn whether a change of a graph changes
its results, without starting processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spmdtypes.core.simulate import coordinates
from spmdtypes.graph import Comm, Graph, Lit, Node, Ref

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}

Coords = dict[str, int]
Ranks = list[torch.Tensor]


def simulate(
    graph: Graph,
    feed: Callable[[Node, Coords], torch.Tensor],
    known: Mapping[Ref, Ranks] | None = None,
) -> dict[Ref, Ranks]:
    """Value of every output of every node on every rank of `graph.mesh`, in row-major rank order.

    `feed(node, coords)` gives the local tensor of an "input" or "const" node. Nodes whose first output is
    `known` are not run. Raises NotImplementedError
    for a node that cannot be run (an unknown namespace, a collective without known axes).
    """
    coords = coordinates(graph.mesh)
    values: dict[Ref, Ranks] = dict(known or {})
    for node in graph.nodes:
        if Ref(node.id, 0) in values:
            continue
        if node.op in ("input", "const"):
            results: list[Any] = [feed(node, c) for c in coords]
        elif node.comm is not None:
            results = collective(node.comm, [values[r] for r in node.refs()], graph.mesh)
        else:
            call = _overload(node.op)
            results = [
                call(
                    *(_local(a, i, c, values) for a in node.args),
                    **{k: _local(a, i, c, values) for k, a in node.kwargs.items()},
                )
                for i, c in enumerate(coords)
            ]
        for out in range(len(node.outs)):
            per_rank = [r[out] if isinstance(r, (tuple, list)) else r for r in results]
            if isinstance(per_rank[0], torch.Tensor):
                values[Ref(node.id, out)] = per_rank
    return values


def _overload(op: str) -> Any:
    namespace, *rest = op.split(".")
    target: Any = getattr(torch.ops, namespace)
    for part in rest:
        target = getattr(target, part)
    return target


def _local(arg: Any, rank: int, coords: Coords, values: Mapping[Ref, Ranks]) -> Any:
    if isinstance(arg, Ref):
        return values[arg][rank]
    if isinstance(arg, Lit):
        return arg.local + sum(step * coords[axis] for axis, step in arg.rank) if arg.rank else arg.local
    if isinstance(arg, (tuple, list)):
        return [_local(a, rank, coords, values) for a in arg]
    if isinstance(arg, str):
        return _named(arg)
    return arg


def _named(text: str) -> Any:
    """Dtypes, devices and layouts are recorded by name."""
    if text in _DTYPES:
        return _DTYPES[text]
    if text == "cpu":
        return torch.device("cpu")
    name = text.removeprefix("torch.")
    found = getattr(torch, name, None)
    if found is torch.float32:
        return torch.float64
    return found if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) else text


def groups(axes: Sequence[str], mesh: Mapping[str, int]) -> list[list[int]]:
    """Row-major rank numbers of every group that spans `axes`, members with the first axis outermost."""
    coords = coordinates(mesh)
    number = {tuple(c.values()): i for i, c in enumerate(coords)}
    rest = [a for a in mesh if a not in axes]
    found = []
    for fixed in itertools.product(*(range(mesh[a]) for a in rest)):
        members = []
        for moving in itertools.product(*(range(mesh[a]) for a in axes)):
            at = dict(zip(rest, fixed, strict=True)) | dict(zip(axes, moving, strict=True))
            members.append(number[tuple(at[a] for a in mesh)])
        found.append(members)
    return found


_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "prod": lambda t: t.prod(0),
}


def collective(comm: Comm, operands: list[Ranks], mesh: Mapping[str, int]) -> list[Any]:
    """The collective's result on every rank (None where a rank receives nothing)."""
    if comm.kind == "barrier":
        return [None] * len(coordinates(mesh))
    if not comm.axes and len(comm.ranks) > 1:
        raise NotImplementedError(f"{comm.kind} over ranks {comm.ranks}, which are no mesh axes")
    local = operands[0]
    out: list[Any] = [None] * len(local)
    for members in groups(comm.axes, mesh):
        parts = [local[m] for m in members]
        for m, result in zip(members, _exchange(comm, parts), strict=True):
            out[m] = result
    return out


def _exchange(comm: Comm, parts: Ranks) -> list[Any]:
    n = len(parts)
    if comm.kind in ("all_reduce", "reduce_scatter", "reduce"):
        if comm.reduce_op == "premul_sum":
            whole = torch.stack(parts).sum(0) * (comm.factor or 1.0)
        elif comm.reduce_op in _REDUCE:
            whole = _REDUCE[comm.reduce_op](torch.stack(parts)).to(parts[0].dtype)
        else:
            raise NotImplementedError(f"reduce op {comm.reduce_op}")
        if comm.kind == "all_reduce":
            return [whole.clone() for _ in parts]
        if comm.kind == "reduce_scatter":
            return [c.clone() for c in whole.chunk(n)]
        return [whole if i == comm.root else p for i, p in enumerate(parts)]
    if comm.kind == "all_gather":
        whole = torch.cat([p.reshape(1) if p.dim() == 0 else p for p in parts])
        return [whole.clone() for _ in parts]
    if comm.kind == "broadcast":
        return [parts[comm.root or 0].clone() for _ in parts]
    if comm.kind == "all_to_all" and comm.splits is None:
        cut = [p.chunk(n) for p in parts]
        return [torch.cat([cut[j][i] for j in range(n)]) for i in range(n)]
    raise NotImplementedError(comm.kind)
