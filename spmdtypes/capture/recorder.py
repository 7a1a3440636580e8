"""A dispatch mode that writes down every op below autograd, in program order."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from spmdtypes.capture import comms, draws, environment, shadow
from spmdtypes.capture.pending import Pending
from spmdtypes.capture.raw import DTYPE_NAMES, Raw, View, dtype_name
from spmdtypes.capture.stacks import CLIP, ENGINE, MODULE, OPTIMIZER, Stacks
from spmdtypes.graph import TensorMeta

_sequence_number = torch._C._autograd._get_sequence_nr
_LARGE = 1_000_000  # elements; larger values are not kept
_CONST = 256  # elements; smaller constants are written into the graph
_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor, torch.nn.Buffer}
_DROPPED_KWARGS = ("device", "layout", "pin_memory", "non_blocking", "generator")

OnRandom = Callable[[int, tuple[int, ...], torch.dtype, Callable[[], Tensor]], Tensor]


class OpInfo(NamedTuple):
    """What recording one overload needs to know, read from its schema once."""

    name: str
    skip: bool
    mutates: tuple[tuple[int, str], ...]  # (position, name) of arguments written in place
    special: Callable[..., Any] | None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside `recording()`; `trace` holds the raw nodes.

    `mesh` and `coords` place this rank; `group_axes` names groups that cannot be told by their
    ranks (axes of size 1). With `keep_values`, `values[(raw index, output)]` is a copy of each
    output as it was then. `on_random(index, shape, dtype, draw)` may replace any drawn tensor.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around every dispatch, needed under torch.compile only

    def __init__(
        self,
        mesh: Mapping[str, int],
        coords: Mapping[str, int],
        group_axes: Mapping[str, tuple[str, ...]] | None = None,
        keep_values: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mesh = dict(mesh)
        self.coords = dict(coords)
        self.groups = comms.Groups(self.mesh, dict(group_axes or {}))
        self.keep_values = keep_values
        self.trace: list[Raw] = []
        self.values: dict[tuple[int, int], Tensor] = {}
        self.constants: dict[int, Tensor] = {}  # raw index of a source -> its value when the trace began
        self.notes: list[str] = []
        self.stacks = Stacks()
        self.on_random: OnRandom | None = None
        self.draw: draws.Draw | None = None  # the random op being drawn, while `on_random` runs
        self.pending = Pending()
        self.shadows = shadow.Shadows()
        self.declared_at: dict[int, int] = {}  # id of a parameter or buffer -> stack
        self.module_stack: list[str] = []
        self.module_names: dict[int, str] = {}
        self.names: dict[View, str] = {}
        self.building = False
        self.after_backward = False
        self.paused = 0
        self._storages: dict[torch.UntypedStorage, int] = {}
        self._sparse: list[Tensor] = []
        self._views: dict[Any, View] = {}
        self._metas: dict[Any, TensorMeta] = {}
        self._infos: dict[Any, OpInfo] = {}
        self._wrappers: dict[type, bool] = dict.fromkeys(_PLAIN, False)
        self._claimed = _sequence_number() - 1
        self._forward_of: dict[int, int] = {}
        self._applied: dict[int, tuple[int, str]] = {}

    # ---- what surrounds the program

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Patches in place and the mode on."""
        with environment.observed(self), torch.autograd.set_multithreading_enabled(False), self:
            yield self

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ops in here are not part of the program."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def register(self, module: torch.nn.Module) -> None:
        """Learn the names of submodules, parameters, buffers and plain tensor attributes."""
        for name, child in module.named_modules():
            self.module_names[id(child)] = name
            for key, value in vars(child).items():
                if isinstance(value, Tensor) and not self.wraps(type(value)):
                    self.names.setdefault(self.view(value), f"{name}.{key}".lstrip("."))

    def bind(self, tensor: Tensor, name: str, requires_grad: bool = False, stack: int = 0) -> None:
        """From here on `tensor` holds the graph input `name`, made at `stack`."""
        view = self.view(tensor)
        meta = TensorMeta(view.shape, view.dtype, requires_grad)
        index = self.append(Raw("bind", outs=(view,), name=name, meta=meta, phase="other", stack=stack))
        self.keep(index, 0, tensor)
        self.shadows.forget(view)

    # ---- tensors

    def wraps(self, kind: type) -> bool:
        """Is `kind` a tensor subclass that turns into plain tensors further down?"""
        known = self._wrappers.get(kind)
        if known is None:
            known = is_traceable_wrapper_subclass_type(kind) or kind.__name__ == "AsyncCollectiveTensor"
            self._wrappers[kind] = known
        return known

    def view(self, t: Tensor) -> View:
        """The memory `t` reads; a storage never seen before becomes a source."""
        view, new = self._view(t)
        if new:
            self._source(view, t)
        return view

    def _view(self, t: Tensor) -> tuple[View, bool]:
        try:
            storage = t.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return self._sparse_view(t)
        index = self._storages.get(storage)
        new = index is None
        if index is None:
            index = self._storages[storage] = len(self._storages) + len(self._sparse)
        key = (index, t.storage_offset(), t.shape, t.stride(), t.dtype)
        view = self._views.get(key)
        if view is None or t.dtype.is_complex:
            conj = t.dtype.is_complex and t.is_conj()
            name = DTYPE_NAMES.get(t.dtype) or dtype_name(t.dtype)
            offset, shape, stride = int(key[1]), tuple(map(int, t.shape)), tuple(map(int, key[3]))
            view = View(index, offset, shape, stride, name, t.element_size(), conj)
            self._views[key] = view
        return view, new

    def _sparse_view(self, t: Tensor) -> tuple[View, bool]:
        for i, other in enumerate(self._sparse):
            if other is t:
                return self._views[("sparse", i)], False
        index = len(self._storages) + len(self._sparse)
        self._views[("sparse", len(self._sparse))] = view = View(
            index, 0, tuple(t.shape), (), dtype_name(t.dtype), 1
        )
        self._sparse.append(t)
        return view, True

    def _source(self, view: View, t: Tensor) -> None:
        raw = Raw("source", outs=(view,), name=self.names.get(view, ""), phase="other")
        if not isinstance(t, FakeTensor) and view.numel <= _CONST and t.layout is torch.strided:
            with self.quiet():
                raw.args = (tuple(t.detach().flatten().tolist()),)
                self.shadows.learn(view, t)
        self.keep(self.append(raw), 0, t)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Plain torch, without this mode or the fake one."""
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), torch.no_grad():
            yield

    def meta(self, t: Tensor) -> TensorMeta:
        key = (t.shape, t.dtype)
        meta = self._metas.get(key)
        if meta is None:
            meta = self._metas[key] = TensorMeta(tuple(map(int, t.shape)), dtype_name(t.dtype))
        return meta

    def encode(self, x: Any) -> Any:
        """An argument as data: tensors become views, dtypes names, lists tuples."""
        if isinstance(x, Tensor):
            return self.view(x)
        kind = type(x)
        if kind is int or kind is float or kind is bool or x is None or kind is str:
            return x
        if kind is list or kind is tuple or isinstance(x, (list, tuple)):
            return tuple([self.encode(y) for y in x])
        if kind is torch.dtype:
            return dtype_name(x)
        if kind in (torch.device, torch.layout, torch.memory_format):
            return str(x).removeprefix("torch.")
        if isinstance(x, torch.SymInt):
            return int(x)
        return x if isinstance(x, complex) else None

    def keep(self, index: int, out: int, t: Any) -> None:
        """Remember the value of an output, when values are wanted."""
        if not self.keep_values or not isinstance(t, Tensor) or isinstance(t, FakeTensor):
            return
        if t.layout is not torch.strided or t.numel() > _LARGE:
            return
        with self.quiet():
            self.values[(index, out)] = t.detach().clone(memory_format=torch.contiguous_format)

    # ---- recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in types:
            if self._wrappers.get(t, True) and self.wraps(t):
                return NotImplemented
        kwargs = kwargs or {}
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = _describe(func)
        if info.skip or self.paused:
            return func(*args, **kwargs)
        if info.special is not None:
            return info.special(self, info, func, args, kwargs)
        return self.plain(info, func, args, kwargs)

    def plain(self, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op and record it."""
        raw = self.begin(info.name, func, args, kwargs)
        out = func(*args, **kwargs)
        self.finish(raw, info, args, kwargs, out)
        if type(out) is FakeTensor or raw.mutated:
            shadow.follow(self, raw, func, args, kwargs)
        return out

    def begin(self, name: str, func: Any, args: Any, kwargs: Any) -> Raw:
        encode = self.encode
        raw = Raw(name, tuple([encode(a) for a in args]), func=func)
        if kwargs:
            raw.kwargs = {
                k: encode(v) for k, v in kwargs.items() if k not in _DROPPED_KWARGS and v is not None
            }
        self.situate(raw)
        return raw

    def finish(self, raw: Raw, info: OpInfo, args: Any, kwargs: Any, out: Any) -> int:
        """Add `raw` with its results to the trace."""
        outs = list(_flat(out)) if isinstance(out, (tuple, list)) else [out]
        raw.outs = tuple([self._view(o)[0] if isinstance(o, Tensor) else None for o in outs])
        if info.mutates:
            written = [args[i] if i < len(args) else kwargs.get(n) for i, n in info.mutates]
            tensors = [t for w in written for t in _flat(w) if isinstance(t, Tensor)]
            raw.mutated = tuple([self._view(t)[0] for t in tensors])
        index = self.append(raw)
        if self.pending.works:
            self.pending.used(raw)
        if self.keep_values:
            for i, o in enumerate(outs):
                self.keep(index, i, o)
            if info.mutates:
                for i, t in enumerate(tensors):
                    self.keep(index, -1 - i, t)
        return index

    def append(self, raw: Raw) -> int:
        index = len(self.trace)
        self.trace.append(raw)
        if raw.phase in ("forward", "recompute", "other") and raw.op not in ("source", "bind"):
            newest = _sequence_number() - 1
            if newest > self._claimed:
                self._claimed = newest
                self._forward_of[newest] = index
        return index

    def situate(self, raw: Raw) -> None:
        """Stack, phase, module and the forward node this op belongs to."""
        walk = self.stacks.walk(sys._getframe(2))
        raw.stack = self.stacks.intern(walk.key)
        if self.module_stack:
            raw.module = self.module_stack[-1]
        marker = walk.marker
        if walk.engine:
            self.after_backward = True
            raw.phase = self._backward(raw, walk.inner, marker, walk.create_graph)
        elif marker == OPTIMIZER:
            raw.phase = "optimizer"
        elif marker == CLIP:
            raw.phase = "clip"
        elif self.building or (self.after_backward and marker != MODULE and not torch.is_grad_enabled()):
            raw.phase = "other"

    def _backward(self, raw: Raw, inner: int, marker: int, create_graph: bool) -> str:
        node = torch._C._current_autograd_node()
        own = None
        if node is not None:
            sequence = node._sequence_nr()
            raw.forward = self._forward_of.get(sequence)
            if sequence in self._applied:
                raw.forward_stack, module = self._applied[sequence]
            elif raw.forward is not None:
                forward = self.trace[raw.forward]
                raw.forward_stack, module = forward.stack, forward.module
            else:
                module = ""
            raw.module = raw.module or module
            own = getattr(node, "_forward_cls", None)
        if marker == MODULE or (torch.is_grad_enabled() and not create_graph):
            raw.forward = None
            raw.forward_stack = 0
            return "recompute"
        if marker in (OPTIMIZER, CLIP):
            return "optimizer" if marker == OPTIMIZER else "clip"
        if not inner:
            return "backward"
        if own is not None:
            code = getattr(getattr(own, "backward", None), "__code__", None)
            if code is None or id(code) in self.stacks.keys[raw.stack][: 2 * inner : 2]:
                return "backward"
        return "hook" if marker == ENGINE else "backward"

    # ---- called by the patches

    def declared(self, value: Any) -> None:
        """A module takes a parameter or buffer."""
        if isinstance(value, Tensor):
            self.declared_at[id(value)] = self.stacks.intern(self.stacks.walk(sys._getframe(2)).key)

    def entering(self, module: torch.nn.Module) -> None:
        name = self.module_names.get(id(module))
        if name is None:
            name = self.module_stack[-1] if self.module_stack else ""
        self.module_stack.append(name)

    def applying(self) -> int:
        """An autograd.Function starts: its node may be the only trace it leaves."""
        sequence = _sequence_number()
        walk = self.stacks.walk(sys._getframe(2))
        module = self.module_stack[-1] if self.module_stack else ""
        self._applied[sequence] = (self.stacks.intern(walk.key), module)
        return sequence

    def applied(self, sequence: int) -> None:
        newest = _sequence_number()
        if newest == sequence:
            del self._applied[sequence]
        else:
            self._claimed = max(self._claimed, newest - 1)

    def is_data(self, index: int) -> bool:
        """Is it wanted where the result of this raw node went, although it may be a view nobody reads?"""
        return False

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _flat(y)
    else:
        yield x


_UNRECORDED = (
    "prim.device",
    "aten.size",
    "aten.stride",
    "aten.sym_",
    "aten.is_contiguous",
    "aten.storage_offset",
    "aten.dim",
    "aten.numel",
    "aten.is_pinned",
    "aten.is_strides_like_format",
    "aten.is_non_overlapping_and_dense",
    "aten.is_same_size",
    "aten.set_.",
    "aten._has_compatible_shallow_copy_type",
    "profiler.",
    "c10d.check_for_nan",
)


def _describe(func: Any) -> OpInfo:
    """Read what matters from an op's schema."""
    if not isinstance(func, torch._ops.OpOverload):
        return OpInfo(str(func), False, (), comms.higher_order)
    name = str(func)
    mutates = tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    if any(name.startswith(p) and (p[-1] in "._" or name[len(p)] == ".") for p in _UNRECORDED):
        return OpInfo(name, True, mutates, None)
    special = comms.special(func) or shadow.special(func) or draws.special(func)
    return OpInfo(name, False, mutates, special)
