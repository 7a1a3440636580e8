"""Are two ranks' tensors equal? Without values: when they were made by the same steps of the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdtypes.graph import Graph, Node, Ref

# what every rank of the group has afterwards, whatever each of them put in
_SHARED = ("all_reduce", "all_gather", "broadcast")


def of_value(t: Tensor) -> str:
    """The fingerprint of a real tensor."""
    plain = t.detach().contiguous().cpu()
    text = f"{tuple(plain.shape)} {plain.dtype} ".encode()
    return _digest(text + plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else text)


def fingerprints(graph: Graph, wanted: Sequence[Ref], known: Mapping[Ref, str]) -> list[str]:
    """One for each wanted value, from the ops that made it, their literals, and the random streams they
    drew from. `known` are those of real tensors."""
    needed = {r.node for r in wanted}
    for node in reversed(graph.nodes):
        if node.id in needed:
            needed |= {r.node for r in node.refs()}
    found: dict[int, str] = {}
    exchanged = 0
    for node in graph.nodes:
        exchanged += node.comm is not None
        if node.id in needed:
            found[node.id] = known.get(Ref(node.id)) or _of_node(node, found, exchanged)
    return [f"{found[r.node]}.{r.out}" for r in wanted]


def _of_node(node: Node, found: Mapping[int, str], exchanged: int) -> str:
    comm = node.comm
    if comm is not None and comm.kind in _SHARED:
        return _digest(repr((node.op, comm.ranks, exchanged)).encode())
    own = (comm.kind, comm.ranks, comm.root, exchanged) if comm is not None else None
    shapes = tuple(m and (m.shape, m.dtype) for m in node.outs)
    kwargs = tuple(sorted(node.kwargs.items()))
    told = (node.op, node.name, node.rng, _plain(node.args, found), _plain(kwargs, found), shapes, own)
    return _digest(repr(told).encode())


def _plain(x: Any, found: Mapping[int, str]) -> Any:
    if isinstance(x, Ref):
        return f"{found[x.node]}.{x.out}"
    return tuple(_plain(y, found) for y in x) if isinstance(x, tuple) else x


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
