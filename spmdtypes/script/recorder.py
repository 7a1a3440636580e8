"""Records a script: names its parameters, counts what it computes, and puts data of the ranks in."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from spmdtypes.capture.groups import resolve
from spmdtypes.capture.patches import Patches, patched
from spmdtypes.capture.raw import Raw, Res, View
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.run import Outputs, local
from spmdtypes.capture.stacks import CLIP, LIBRARY, MODULE
from spmdtypes.differential.widen import WIDE, WideRecorder
from spmdtypes.script import lineage
from spmdtypes.script.facts import Facts, Held, Key, Replacement

# parts of names that wrappers add
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_CUT_ATTRIBUTES = ("partition_dim",)
_SCALED = {
    torch.ops.aten.div.Tensor,
    torch.ops.aten.div.Scalar,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.mul.Scalar,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.mul_.Tensor,
}
_READS = ("aten._local_scalar_dense.default",)


class EndOfSteps(BaseException):
    """Raised in the script when it has done the steps that were asked for."""


def canonical(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    return ".".join(p for p in name.split(".") if p not in _WRAPPERS)


class GroupsBySite(dict[str, tuple[str, ...]]):
    """The axes of a group of one rank, by where it was made; the group of all stands for all axes."""

    def __init__(
        self, sites: Mapping[str, str], axes: Mapping[str, tuple[str, ...]], whole: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.sites, self.axes_of, self.whole = sites, axes, whole

    def get(self, name: str, default: Any = None) -> Any:
        site = self.sites.get(name) or described(resolve(name))
        return self.axes_of.get(site) if site else self.whole


def described(group: Any) -> str:
    """What a group says of itself, if anything."""
    desc = str(getattr(group, "group_desc", "") or "")
    return desc if desc not in ("", "undefined", "default_pg") else ""


class ScriptRecorder(WideRecorder):  # type: ignore[no-untyped-call]
    """A recorder of a whole script. The program proper begins when a module with parameters is called
    for the first time: what its parameters and buffers hold then are the graph's inputs.

    With `replacement` this is the reference: parameters get the given values, and data of given keys is
    replaced where it comes into being. `own` says of a file whether it belongs to the script.
    """

    def __init__(
        self,
        mesh: Mapping[str, int],
        coords: Mapping[str, int],
        *,
        wide: bool,
        steps: int,
        own: Callable[[str], bool],
        replacement: Replacement | None = None,
        keep_values: bool = True,
    ) -> None:
        super().__init__(mesh, coords, keep_values=keep_values)
        self.wide, self.wanted, self.own = wide, steps, own
        self.replacement = replacement
        self.facts = Facts()
        self.outputs = Outputs()
        self.values_of: dict[str, Tensor] = {}  # of borders that the graph has in another layout
        self.loaded = False
        self.building = True
        self.names_of: dict[int, str] = {}  # id of a parameter or buffer
        self.tensors: dict[str, Tensor] = {}
        self.counts: list[int] = []  # of every raw node: the how manyth of its op and stack
        self.depths: list[bool] = []  # of every raw node: inside a module's forward?
        self.batch_keys: dict[int, Key] = {}  # of raw nodes that stand for tensors of a batch
        self.sites: dict[str, str] = {}  # name of a process group -> where it was made
        self._seen: Counter[tuple[str, tuple[tuple[str, int, int], ...]]] = Counter()
        self._known_places: dict[int, tuple[tuple[str, int, int], ...]] = {}
        self._tied: set[View] = set()
        self._optimizers: list[Optimizer] = []
        self._steps: Counter[int] = Counter()
        self._norms = 0
        self._first: nn.Module | None = None
        self._reads: Counter[tuple[str, int]] = Counter()
        self._ops = {k.op for k in replacement.data} if replacement else set()
        if replacement is not None:
            self.groups.names = GroupsBySite(self.sites, replacement.axes, tuple(mesh))

    # ---- what surrounds the script

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """As of any recorder, and optimizers, clipping and reads are watched."""
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        try:
            with patched() as patches, super().recording():
                self._watch_optimizers(patches)
                self._watch_clipping(patches)
                yield self
        finally:
            before.remove()
            after.remove()

    def _watch_optimizers(self, patches: Patches) -> None:
        init = Optimizer.__init__

        def observed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        patches.set(Optimizer, "__init__", observed)

    def _watch_clipping(self, patches: Patches) -> None:
        clip = nn.utils.clip_grad_norm_

        def observed(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._gradients(clipped)
            norm = clip(clipped, *args, **kwargs)
            if self.loaded:
                self._norms += 1
                self.snapshot(f"norm:clip_grad_norm_ {self._norms}", norm)
            return norm

        observed.__name__ = clip.__name__
        patches.everywhere(clip, observed)

    # ---- every op

    def append(self, raw: Raw) -> int:
        key = (raw.op, self._places(raw.stack))
        self.counts.append(self._seen[key])
        self.depths.append(self.loaded and bool(self.module_stack))
        self._seen[key] += 1
        return super().append(raw)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.trace)
        if self.replacement is not None and self.replacement.counts and not self.paused:
            args = self._counted(func, args)
        record = super().__torch_dispatch__ if self.wide else super(WideRecorder, self).__torch_dispatch__
        out = record(func, types, args, kwargs)
        if self.paused or out is NotImplemented or len(self.trace) == before:
            return out
        raw = self.trace[-1]
        if raw.op in self._ops:
            return self._with_data(raw, len(self.trace) - 1, out)
        if raw.op in _READS and self.loaded and args[0].is_floating_point():
            self._read(raw, args[0])
        return out

    def _counted(self, func: Any, args: Any) -> Any:
        """A factor or divisor that is one rank's count of samples becomes that of all."""
        if func not in _SCALED or len(args) < 2 or not isinstance(args[1], (int, float)) or not self.loaded:
            return args
        assert self.replacement is not None
        old, counts = args[1], self.replacement.counts
        if old in counts:
            return (args[0], counts[int(old)], *args[2:])
        inverse = round(1 / old) if 0 < old < 1 else 0
        if inverse in counts and abs(old * inverse - 1) < 1e-12:
            return (args[0], 1 / counts[inverse], *args[2:])
        return args

    def key(self, index: int, out: int = 0) -> Key:
        """How the result of a raw node is told on every rank."""
        if index in self.batch_keys:
            return self.batch_keys[index]
        raw = self.trace[index]
        return Key(raw.op, self._places(raw.stack), self.counts[index], out)

    def _places(self, stack: int) -> tuple[tuple[str, int, int], ...]:
        """Where a stack is; several stacks are at one place."""
        found = self._known_places.get(stack)
        if found is None:
            frames = self.stacks.resolve(stack)[:4]
            found = self._known_places[stack] = tuple((f.file, f.line, f.col) for f in frames)
        return found

    def batch(self, number: int, batch: Any) -> Any:
        """A data loader gives its `number`-th batch; the reference gets the ranks' in its stead."""
        leaves = itertools.count()

        def arrive(t: Tensor) -> Tensor:
            key = Key("batch", (), number, next(leaves))
            if self.wide and t.dtype in WIDE:
                t = t.to(WIDE[t.dtype])
            new = self.replacement.data.get(key) if self.replacement is not None else None
            with self.pause():
                if new is not None:
                    name, value = new
                    t = value.to(t.dtype).clone()
                    self.bind(t, name)
                else:
                    t = t.clone()  # memory of its own, never seen before
                    self.view(t)
                    self.batch_keys[len(self.trace) - 1] = key
            return t

        return map_tensors(arrive, batch)

    def is_data(self, index: int) -> bool:
        """What the script itself computes, outside of modules and before backward, may be a batch."""
        return not self.depths[index] and self.trace[index].phase in ("forward", "other")

    def _with_data(self, raw: Raw, index: int, out: Any) -> Any:
        """The result with those of its tensors replaced that the ranks have as parts."""
        assert self.replacement is not None
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        changed = False
        for i, o in enumerate(outs):
            new = self.replacement.data.get(self.key(index, i))
            if new is not None and isinstance(o, Tensor):
                name, value = new
                outs[i] = value.clone() if value.dtype == o.dtype else value.to(o.dtype)
                with self.pause():
                    self.bind(outs[i], name)
                changed = True
        if not changed:
            return out
        return outs[0] if isinstance(out, Tensor) else type(out)(outs)

    def _read(self, raw: Raw, t: Tensor) -> None:
        """The script takes a number out of a tensor."""
        frames = self.stacks.resolve(raw.stack)
        if (
            not frames
            or raw.phase in ("backward", "optimizer", "clip", "hook")
            or not self.own(frames[0].file)
        ):
            return
        place = (frames[0].file, frames[0].line)
        self._reads[place] += 1
        border = f"metric:{place[0].rpartition('/')[2]}:{place[1]}"
        if self._reads[place] > 1:
            border += f" ({self._reads[place]})"
        with self.pause():
            self.snapshot(border, t)

    # ---- the beginning

    def entering(self, module: nn.Module) -> None:
        if not self.module_stack and not self.paused:
            self._root_call(module)
        super().entering(module)

    def _root_call(self, module: nn.Module) -> None:
        if torch.is_grad_enabled() and (self.finished or self._changed(module)):
            raise EndOfSteps
        if next(module.parameters(), None) is None:
            return
        if not self.loaded:
            self._first = module
            self.load()
        elif id(module) not in self.module_names:
            self._adopt([(type(module).__name__.lower(), module)])

    def load(self) -> None:
        """The program begins: parameters and buffers become inputs."""
        self.start(roots_of(sys._getframe(1)))

    def start(self, roots: list[tuple[str, nn.Module]]) -> None:
        """The program begins with these modules."""
        self._adopt(roots)
        self.loaded, self.building = True, False

    def _adopt(self, roots: list[tuple[str, nn.Module]]) -> None:
        fresh: dict[str, Tensor] = {}
        for prefix, root in roots:
            self.register(root)
            for name, t, is_buffer in _tensors(root, prefix):
                self.names_of.setdefault(id(t), name)
                if self.names_of[id(t)] == name and name not in self.tensors:
                    fresh[name] = t
                    self.facts.held[name] = self._held(t, is_buffer)
        self.tensors |= fresh
        with self.pause(), torch.no_grad():
            if self.replacement is not None:
                self._overwrite(fresh)
            for name, t in fresh.items():
                part = local(t)
                view = self.view(part)
                if view in self._tied or not part.numel():
                    continue
                self._tied.add(view)
                self.bind(part, name, t.requires_grad, self.declared_at.get(id(t), 0))
                self.trace[-1].kwargs = {"from the start": True}

    def _held(self, t: Tensor, is_buffer: bool) -> Held:
        placements = _placements(t) if hasattr(t, "placements") else None
        cut = next((d for n in _CUT_ATTRIBUTES if isinstance(d := getattr(t, n, None), int) and d >= 0), None)
        frames = self.stacks.resolve(self.declared_at.get(id(t), 0))
        with self.pause():
            value = local(t).detach().clone()
        return Held(value, t.requires_grad, placements, tuple(t.shape), cut, is_buffer, frames[:1])

    def _overwrite(self, fresh: Mapping[str, Tensor]) -> None:
        """Give parameters the ranks' values, and everything computed from them by then."""
        assert self.replacement is not None
        new = {}
        for name, t in fresh.items():
            value = self.replacement.held.get(name)
            if value is not None and value.shape == local(t).shape:
                new[name] = (local(t), value)
        with self.quiet():
            lineage.follow(self, {n: (t, v) for n, (t, v) in new.items()})
            for t, value in new.values():
                t.copy_(value)

    # ---- the end

    def _changed(self, module: nn.Module) -> bool:
        """Without an optimizer of torch a step is over when parameters have changed and the first module
        is called again."""
        if self._optimizers or module is not self._first or self.wanted > 1:
            return False
        with self.quiet():
            changed = any(
                held.requires_grad and not self.unchanged(self.tensors[name], held)
                for name, held in self.facts.held.items()
            )
        self.facts.steps += changed
        return changed

    def unchanged(self, t: Tensor, held: Held) -> bool:
        """Does a parameter or buffer hold what it held when the program began?"""
        return torch.equal(local(t), held.value)

    @property
    def finished(self) -> bool:
        """Has every optimizer done its steps?"""
        done = [o for o in self._optimizers if self._steps[id(o)] >= self.wanted]
        return bool(done) and len(done) == len([o for o in self._optimizers if o.param_groups])

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.loaded or self.paused:
            return
        if self._steps[id(optimizer)] >= self.wanted:
            raise EndOfSteps
        if self._steps[id(optimizer)] == 0:
            self._gradients([p for g in optimizer.param_groups for p in g["params"]])

    def _gradients(self, parameters: Sequence[Any]) -> None:
        """Gradients as they are first used: by clipping, or by the optimizer."""
        if not self.loaded or self.paused:
            return
        with self.pause():
            for p in parameters:
                name = self.names_of.get(id(p))
                if name is not None and p.grad is not None and f"grad:{name}" not in self.outputs.views:
                    self.gradient(f"grad:{name}", p)

    def gradient(self, border: str, p: Any) -> None:
        """Note the gradient of a parameter, and its value as an optimizer reads it."""
        self.snapshot(border, p.grad)
        self.values_of[border] = _as_placed(p.grad, p)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.loaded and not self.paused:
            self._steps[id(optimizer)] += 1
            self.facts.steps = max(self._steps.values())

    def close(self) -> None:
        """The script has ended: note what it leaves."""
        with self.pause(), torch.no_grad():
            for name, t in self.tensors.items():
                held = self.facts.held[name]
                if held.buffer and self.unchanged(t, held):
                    continue
                self.snapshot(f"param:{name}", t)
            for optimizer in self._optimizers:
                self._states(optimizer)

    def _states(self, optimizer: Any) -> None:
        for p, state in optimizer.state.items():
            name = self.names_of.get(id(p))
            if name is None or not isinstance(state, dict):
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    border = f"state:{name}.{key}"
                    self.facts.owners[border] = name
                    self.snapshot(border, value)

    def snapshot(self, border: str, t: Any) -> None:
        """What `t` holds now is the border's value."""
        if hasattr(t, "placements"):
            self.outputs.placements[border] = dict(_placements(t))
        with self.pause():
            plain = local(t)
            view = self.view(plain)
            raw = Raw("aten.clone.default", (view,), outs=(self.meta(plain),), phase="other")
            self.situate_plainly(raw)
            index = self.append(raw)
            self.keep(index, 0, plain)
        self.outputs.views[border] = Res(index)

    def situate_plainly(self, raw: Raw) -> None:
        walk = self.stacks.walk(sys._getframe(2))
        raw.stack = self.stacks.intern(walk.key)
        raw.phase = "optimizer" if walk.marker not in (LIBRARY, MODULE, CLIP) else "other"


def _tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    for name, p in root.named_parameters(remove_duplicate=False):
        yield _joined(prefix, canonical(name)), p, False
    for name, b in root.named_buffers(remove_duplicate=False):
        if isinstance(b, Tensor):
            yield _joined(prefix, canonical(name)), b, True


def map_tensors(f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`x` with `f` of every tensor in its containers; mappings of other types are changed in place."""
    if isinstance(x, Tensor):
        return f(x)
    if type(x) is dict:
        return {k: map_tensors(f, v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        parts = [map_tensors(f, v) for v in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, MutableMapping):
        for k, v in list(x.items()):
            x[k] = map_tensors(f, v)
    return x


def _placements(t: Any) -> tuple[tuple[str, str], ...]:
    """What a DTensor says of each dim of its mesh, by name or, without one, by the ranks along it."""
    mesh = t.device_mesh
    names = mesh.mesh_dim_names
    if names is None:
        groups = [dist.get_process_group_ranks(mesh.get_group(i)) for i in range(mesh.ndim)]
        names = ["ranks:" + ",".join(map(str, ranks)) for ranks in groups]
    return tuple((a, str(p)) for a, p in zip(names, t.placements))


def _as_placed(grad: Any, p: Any) -> Tensor:
    """A gradient as the optimizer reads it: a DTensor is laid out as its parameter."""
    placements = getattr(p, "placements", None)
    if placements is not None and getattr(grad, "placements", placements) != placements:
        grad = grad.redistribute(placements=placements)
    return local(grad).detach().clone()


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def roots_of(frame: FrameType | None) -> list[tuple[str, nn.Module]]:
    """The modules alive that are no part of others and hold tensors, with a name for each: the script's
    variable. A single one needs none."""
    gc.collect()
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    parts = {id(c) for m in modules for c in m.__dict__.get("_modules", {}).values() if c is not None}
    found = [m for m in modules if id(m) not in parts and "_modules" in m.__dict__ and _holds_tensors(m)]
    if len(found) == 1:
        return [("", found[0])]
    names = _variables(frame)
    out: list[tuple[str, nn.Module]] = []
    for m in found:
        name = next((names[id(x)] for x in _unwrapped(m) if id(x) in names), type(m).__name__.lower())
        taken = sum(n.partition("#")[0] == name for n, _ in out)
        out.append((f"{name}#{taken}" if taken else name, m))
    return sorted(out, key=lambda x: x[0])


def _holds_tensors(m: nn.Module) -> bool:
    return next(m.parameters(), None) is not None or next(m.buffers(), None) is not None


def _unwrapped(m: nn.Module) -> Iterator[nn.Module]:
    """A module and what it wraps."""
    while isinstance(m, nn.Module):
        yield m
        m = m.__dict__.get("_modules", {}).get("module")


def _variables(frame: FrameType | None) -> dict[int, str]:
    """Names of modules in the frames of the stack and in their globals."""
    names: dict[int, str] = {}
    while frame is not None:
        for space in (frame.f_locals, frame.f_globals):
            for name, value in list(space.items()):
                if isinstance(value, nn.Module) and name != "self":
                    names.setdefault(id(value), name)
                elif isinstance(value, (list, tuple)) and len(value) < 100:
                    for i, x in enumerate(value):
                        if isinstance(x, nn.Module):
                            names.setdefault(id(x), f"{name}.{i}")
        owner = frame.f_locals.get("self")
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, nn.Module):
                names.setdefault(id(value), name)
        frame = frame.f_back
    return names
