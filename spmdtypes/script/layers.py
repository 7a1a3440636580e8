"""Layers of a deep model that do the same: enough of them are recorded to have each kind twice.

The first rank is run with all its layers. What each of them did, step by step, tells which are alike; the
other ranks and the reference are run with the layers in between taken out of their list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from spmdtypes.capture.raw import Raw, View

if TYPE_CHECKING:
    from spmdtypes.script.recorder import ScriptRecorder

_LAYER = re.compile(r"^(?:(.*?)\.)?(\d+)(?:\.|$)")
_FEW = 8  # layers that are all run

Kept = Mapping[str, tuple[int, ...]]  # name of a list of modules -> indices


@dataclass(frozen=True)
class Survey:
    """For every list of modules and index in it, what that layer did (equal numbers: the same); and what
    happened outside of lists."""

    layers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()

    def kept(self) -> dict[str, tuple[int, ...]]:
        """Of long lists, the layers that stand for all: two and the last of each kind, and both ends."""
        found = {}
        for name, layers in self.layers.items():
            kinds: dict[int, list[int]] = defaultdict(list)
            for i in sorted(layers):
                kinds[layers[i]].append(i)
            chosen = {min(layers), max(layers)} | {i for k in kinds.values() for i in (*k[:2], k[-1])}
            if len(layers) > _FEW and 2 * len(chosen) <= len(layers):
                found[name] = tuple(sorted(chosen))
        return found

    def covers(self, other: Survey) -> bool:
        """Does this run do everything that the other did?"""
        lists = all(
            set(layers.values()) <= set(self.layers.get(name, {}).values())
            for name, layers in other.layers.items()
        )
        return lists and other.outside <= self.outside


def survey(rec: ScriptRecorder) -> Survey:
    """What a recorded run did, from the beginning of its program."""
    steps: dict[tuple[str, int], list[int]] = defaultdict(list)
    outside: set[int] = set()
    made: dict[int, int] = {}  # storage -> what wrote to it last
    known: dict[str, tuple[str, int] | None] = {}
    for raw in rec.trace:
        place = (raw.op, rec._places(raw.stack), raw.phase)
        token = hash((place, raw.comm and (raw.comm.kind, raw.comm.axes, raw.comm.reduce_op)))
        if raw.module not in known:
            known[raw.module] = _layer(raw.module)
        layer = known[raw.module]
        if layer is not None:
            steps[layer].append(hash((token, _told(raw.args, made), _told(tuple(raw.kwargs.items()), made))))
        elif raw.op not in ("source", "bind"):
            outside.add(token)
        for view in _written(raw):
            made[view.storage] = token
    layers: dict[str, dict[int, int]] = defaultdict(dict)
    for (name, index), done in steps.items():
        layers[name][index] = hash(tuple(done))
    return Survey(dict(layers), frozenset(outside))


def _layer(module: str) -> tuple[str, int] | None:
    """The outermost list a module belongs to, and its index there."""
    from spmdtypes.script.recorder import canonical

    m = _LAYER.match(canonical(module))
    return (m.group(1) or "", int(m.group(2))) if m else None


def _told(x: Any, made: Mapping[int, int]) -> Any:
    """An argument: a tensor by its shape and by what made it."""
    if type(x) is View:
        return (x.shape, x.stride, x.dtype, made.get(x.storage))
    return tuple([_told(y, made) for y in x]) if type(x) is tuple else x


def _written(raw: Raw) -> Iterable[View]:
    return [v for v in (*raw.outs, *raw.mutated) if type(v) is View]


def shorten(roots: Iterable[tuple[str, nn.Module]], kept: Kept) -> None:
    """Take layers that are not kept out of their lists."""
    from spmdtypes.script.recorder import canonical

    for prefix, root in roots:
        for name, module in list(root.named_modules()):
            wanted = kept.get(canonical(f"{prefix}.{name}".strip(".")))
            if wanted is not None and isinstance(module, (nn.ModuleList, nn.Sequential)):
                for key in [k for k in module._modules if k.isdecimal() and int(k) not in wanted]:
                    del module._modules[key]


def can_be_shortened(roots: Iterable[tuple[str, nn.Module]]) -> bool:
    """A wrapper that waits for the gradients of all its parameters needs all layers."""
    waits = nn.parallel.DistributedDataParallel
    return not any(isinstance(m, waits) for _, root in roots for m in root.modules())
