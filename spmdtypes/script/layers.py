"""Layers of a deep model that do the same: enough of them are recorded to have each kind twice.

The first rank is run with all its layers. What each of them did, step by step, tells which are alike; the
other ranks and the reference are run with the layers in between taken out of their list.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from spmdtypes.capture.raw import Raw, Res, View
from spmdtypes.capture.run import local
from spmdtypes.capture.shadow import views_in

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
    surveyor = _Surveyor(rec)
    for raw in rec.trace:
        surveyor.see(raw)
    return surveyor.result()


Layer = tuple[str, int]


class _Surveyor:
    """A step belongs to the layer whose module it runs in; one outside of modules (of an optimizer, a
    gradient's reduction) to the layers whose tensors it takes, to each with how many it takes."""

    def __init__(self, rec: ScriptRecorder) -> None:
        self.rec = rec
        self.steps: dict[Layer, list[int]] = defaultdict(list)
        self.outside: set[int] = set()
        self.made: dict[int, int] = {}  # storage -> what wrote to it last
        self.modules: dict[str, Layer | None] = {}
        self.owner: dict[int, Layer] = {}  # storage -> the layer it belongs to
        for name, t in rec.tensors.items():
            layer = _layer(name)
            if layer is not None:
                self.owner[rec.view(local(t)).storage] = layer

    def see(self, raw: Raw) -> None:
        if raw.op in ("source", "bind"):
            return
        comm = raw.comm and (raw.comm.kind, raw.comm.axes, raw.comm.reduce_op, raw.comm.factor)
        token = hash((raw.op, self.rec._places(raw.stack), raw.phase, comm))
        if raw.module not in self.modules:
            self.modules[raw.module] = _layer(raw.module)
        layer = self.modules[raw.module]
        if layer is not None:
            told = _told(raw.args, self.made), _told(tuple(raw.kwargs.items()), self.made)
            self.steps[layer].append(hash((token, told)))
        else:
            layer = self._outside(raw, token)
        for view in (v for v in (*raw.outs, *raw.mutated) if type(v) is View):
            self.made[view.storage] = token
            if layer is not None:
                self.owner.setdefault(view.storage, layer)

    def _outside(self, raw: Raw, token: int) -> Layer | None:
        """The one layer the step's tensors belong to."""
        views = (raw.args, tuple(raw.kwargs.values()))
        taken = Counter(self.owner[v.storage] for v in views_in(views) if v.storage in self.owner)
        if not taken:
            self.outside.add(token)
        scalars = (
            _told(raw.args, {}) if len(taken) == 1 else tuple(x for x in raw.args if type(x) is not tuple)
        )
        for layer, times in taken.items():
            self.steps[layer].append(hash((token, times, _numbers(scalars))))
        return next(iter(taken)) if len(taken) == 1 else None

    def result(self) -> Survey:
        layers: dict[str, dict[int, int]] = defaultdict(dict)
        for (name, index), done in self.steps.items():
            layers[name][index] = hash(tuple(done))
        return Survey(dict(layers), frozenset(self.outside))


def _numbers(x: Any) -> tuple[Any, ...]:
    return tuple(y for y in x if isinstance(y, (int, float, str)))


def _layer(module: str) -> Layer | None:
    """The outermost list a module belongs to, and its index there."""
    from spmdtypes.script.recorder import canonical

    m = _LAYER.match(canonical(module))
    return (m.group(1) or "", int(m.group(2))) if m else None


def _told(x: Any, made: Mapping[int, int]) -> Any:
    """An argument: a tensor by its shape and by what made it."""
    if type(x) is View:
        return (x.shape, x.stride, x.dtype, made.get(x.storage))
    if type(x) is Res:
        return x.out  # of a collective, whose number is no matter
    return tuple([_told(y, made) for y in x]) if type(x) is tuple else x


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
