"""What a script computed from its parameters before its first step (fp32 copies, flat buffers), when
the parameters get other values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmdtypes.capture.functionalise import functionalise
from spmdtypes.capture.raw import DTYPES, Raw, View
from spmdtypes.capture.replay import ReplayError, execute
from spmdtypes.graph import Graph, Ref

if TYPE_CHECKING:
    from spmdtypes.script.recorder import ScriptRecorder


def follow(rec: ScriptRecorder, new: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Recompute memory that was computed from the parameters `new` (name -> (tensor, new value)).

    Memory whose content cannot be computed again stays as it is.
    """
    own = {rec.view(t).storage for t, _ in new.values()}
    whole = {f"{v.storage}": v for v in _largest_views(rec) if v.storage not in own}
    if not whole:
        return
    kept = len(rec.trace)
    for name, (t, _) in new.items():
        rec.bind(t, name)
        rec.trace[-1].kwargs = {"from the start": True}
    graph = functionalise(rec, whole).graph
    del rec.trace[kept:], rec.counts[kept:], rec.depths[kept:]
    storages = {i: s for s, i in rec._storages.items()}
    for border, value in _values(graph, {n: v for n, (_, v) in new.items()}).items():
        view = whole[border]
        if view.storage in storages and value.numel() == view.numel:
            memory = torch.empty(0, dtype=DTYPES[view.dtype])
            memory.set_(storages[view.storage], view.offset, view.shape, view.stride)
            memory.copy_(value.reshape(view.shape))


def _largest_views(rec: ScriptRecorder) -> list[View]:
    """Of every storage written so far, its largest floating view."""
    best: dict[int, View] = {}
    for raw in rec.trace:
        for v in _views(raw):
            old = best.get(v.storage)
            if v.dtype.startswith(("f", "bf")) and v.contiguous and (old is None or v.numel > old.numel):
                best[v.storage] = v
    return [v for v in best.values() if v.numel > 0]


def _views(raw: Raw) -> list[View]:
    return [v for v in (*raw.outs, *raw.mutated) if type(v) is View]


def _values(graph: Graph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs that depend on inputs."""
    env: dict[Ref, Tensor] = {}
    moved: set[int] = set()
    for node in graph.nodes:
        if node.op == "input" and node.name in inputs:
            env[Ref(node.id)] = inputs[node.name]
            moved.add(node.id)
        elif any(r.node in moved for r in node.refs()) and node.comm is None:
            moved.add(node.id)
            _compute(graph, node.id, env)
    found = {}
    for border, ref in graph.outputs.items():
        if ref.node in moved and ref in env:
            found[border] = env[ref]
    return found


def _compute(graph: Graph, index: int, env: dict[Ref, Tensor]) -> None:
    """Put a node's outputs into `env`, and first those of operands that depend on no input."""
    todo = [index]
    while todo:
        node = graph.nodes[todo[-1]]
        missing = [r.node for r in node.refs() if r not in env and r.node not in todo]
        if missing and len(todo) < 1000:
            todo += missing
            continue
        todo.pop()
        try:
            outs = execute(node, env)
        except (ReplayError, RuntimeError, TypeError, KeyError):
            continue
        env.update({Ref(node.id, i): o for i, o in enumerate(outs) if isinstance(o, Tensor)})
