"""Sees every op of a rank: reports collectives before they are issued, notes and replaces random draws."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdtypes.differential import frames
from spmdtypes.differential.experiment import Call
from spmdtypes.differential.rendezvous import PAIRED, group_axes
from spmdtypes.differential.widen import widened
from spmdtypes.graph import Frame

# longest matching beginning of the op's name decides
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "irecv": "recv",
}
_EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@functools.cache
def kind_of(func: Any) -> str | None:
    """The kind of collective an op issues, None for any other op."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.split("::")[1]
    best = max((k for k in _KINDS if name.startswith(k)), key=len, default=None)
    return _KINDS[best] if best else None


@functools.cache
def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def is_wrapper(type_: type) -> bool:
    """Tensor subclasses (DTensor, pending collectives) whose own ops come back as plain ones."""
    return (
        type_ not in (torch.Tensor, torch.nn.Parameter)
        and hasattr(type_, "__torch_dispatch__")
        and (hasattr(type_, "__tensor_flatten__") or type_.__name__ == "AsyncCollectiveTensor")
    )


def named_args(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    return {a.name: v for a, v in zip(schema, args)} | dict(kwargs)


@dataclass(frozen=True)
class Noted:
    """A random draw of one rank: the op, the state of its stream before, the shape and what came out."""

    op: str
    stream: str
    shape: tuple[int, ...]
    value: torch.Tensor | None
    frames: tuple[Frame, ...]
    storage: int = 0  # address of the memory the numbers were written to
    initial: bool = False  # of a parameter's initial value that a loaded value has replaced
    building: bool = False  # while the module was made: for no rank's samples


class OwnMail:
    """Messages of a rank to itself: a ring exchange on an axis of size 1. The backend has no such thing."""

    def __init__(self) -> None:
        self.sent: dict[int, list[list[torch.Tensor]]] = defaultdict(list)
        self.awaited: dict[int, list[list[torch.Tensor]]] = defaultdict(list)

    def pass_on(self, kind: str, named: Mapping[str, Any]) -> Any:
        tag, tensors = named["tag"], named["tensors"]
        if kind == "send":
            self.sent[tag].append([t.clone() for t in tensors])
        else:
            self.awaited[tag].append(list(tensors))
        while self.sent[tag] and self.awaited[tag]:
            for to, what in zip(self.awaited[tag].pop(0), self.sent[tag].pop(0)):
                to.copy_(what)
        return _finished_work(named["process_group"])


def _finished_work(process_group: Any) -> Any:
    nothing = [torch.zeros(1)]
    alone = dist.ProcessGroup.unbox(process_group)
    if alone.size() > 1:
        raise RuntimeError("a rank sends to itself in a group of several")
    return torch.ops.c10d.broadcast_.default(nothing, process_group, 0, 0, True, -1)[1]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`report` is called with each `Call`, and the places passed since the one before, before the
    collective is issued. `draws[k]` replaces the
    k-th random draw (None: keep the rank's own); every draw is noted in `noted`. With `wide`, nothing
    is computed in low precision."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        report: Callable[[Call, frames.Places], None],
        draws: Mapping[int, torch.Tensor] | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mesh, self.report, self.draws, self.wide = mesh, report, draws or {}, wide
        self.noted: list[Noted] = []
        self.eps = 0.0
        self.trail = frames.Trail()
        self.paused = False
        self.own_mail = OwnMail()
        self._made_by: dict[int, tuple[frames.Spot, ...]] = {}

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ops in here are not the program's."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_wrapper(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if self.wide and isinstance(func, torch._ops.OpOverload):
            return widened(func, args, kwargs, self._see)
        return self._see(func, args, kwargs)

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is not None:
            named = named_args(func, args, kwargs)
            call = self._call(kind, named)
            if kind in PAIRED and call.group[0] == call.group[1]:
                return self.own_mail.pass_on(kind, named)
            self.report(call, self.trail.take())
        elif is_random(func):
            return self._draw(func, args, kwargs)
        out = func(*args, **kwargs)
        self._remember(out)
        return out

    def _remember(self, out: Any) -> None:
        """The lowest precision met, and where each forward op was written (its backward has no frames)."""
        first = out if isinstance(out, torch.Tensor) else None
        if first is None and isinstance(out, (tuple, list)):
            first = next((t for t in out if isinstance(t, torch.Tensor)), None)
        if first is not None and first.dtype in _EPS and first.numel() > 0:
            self.eps = max(self.eps, _EPS[first.dtype])
        spots = frames.here()
        if spots:
            self.trail.step(spots[0])
        if torch._C._current_autograd_node() is None:
            newest = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if torch.is_grad_enabled():
                self._made_by[newest] = spots
            else:  # perhaps inside an autograd Function written in C++, whose node comes before or after
                self._made_by.setdefault(newest, spots)
                self._made_by[newest + 1] = spots

    def spots(self) -> tuple[frames.Spot, ...]:
        """The user's frames now; for an op of a backward written in C++, those of its forward."""
        node: Any = torch._C._current_autograd_node()
        if node is not None and frames.from_engine():
            return self._made_by.get(node._sequence_nr(), frames.here())
        return frames.here()

    def _call(self, kind: str, named: Mapping[str, Any]) -> Call:
        group = _group(named)
        spots = frames.resolve_all(self.spots())
        root = named.get("root_rank", named.get("src") if kind == "broadcast" else None)
        op = named.get("reduce_op")
        peer = None
        if kind in PAIRED:
            me = dist.get_rank()
            other = group[named.get("dst" if kind == "send" else "src", 0)]
            peer, group, root = other, ((me, other) if kind == "send" else (other, me)), None
        tensors = _signature(kind, named)
        return Call(
            kind=kind,
            group=group,
            axes=group_axes(group, self.mesh),
            shapes=tuple(tuple(t.shape) for t in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            reduce_op=op if isinstance(op, str) else "",
            root=root,
            peer=peer,
            splits=_splits(named, len(group)) if kind == "all_to_all" else None,
            blocking=not named.get("async_op", True) or (kind == "recv" and frames.called_from("recv")),
            frames=spots,
        )

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = len(self.noted)
        generator = named_args(func, args, kwargs).get("generator") or torch.default_generator
        stream = hashlib.sha1(generator.get_state().numpy().tobytes()).hexdigest()
        out = func(*args, **kwargs)
        self._remember(out)
        target = _noise(func, out)
        if target is not None and index in self.draws:
            target.copy_(self.draws[index])
            _rescale(func, args, kwargs, out)
        shape = tuple(target.shape) if target is not None else ()
        value = target.detach().clone() if target is not None else None
        where = target.untyped_storage().data_ptr() if target is not None else 0
        spots = frames.resolve_all(frames.here())
        self.noted.append(Noted(str(func), stream, shape, value, spots, where))
        return out


def _noise(func: Any, out: Any) -> torch.Tensor | None:
    """The output that holds the random numbers: the mask of a dropout, else the result itself."""
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, (tuple, list)) and func._schema.name == "aten::native_dropout":
        mask = out[1]
        return mask if isinstance(mask, torch.Tensor) else None
    return None


def _rescale(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    """A fused dropout's result, after its mask was replaced."""
    if func._schema.name == "aten::native_dropout":
        named = named_args(func, args, kwargs)
        keep = 1.0 - named["p"]
        out[0].copy_(named["input"] * out[1] * (1.0 / keep if keep > 0 else 0.0))


def _group(named: Mapping[str, Any]) -> tuple[int, ...]:
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def _signature(kind: str, named: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors whose shapes must agree between the members of the group."""
    if kind == "barrier":
        return []
    names = {
        "all_gather": ("output_tensors", "output_tensor", "outputs", "output_lists", "input", "inputs"),
        "reduce_scatter": ("input_tensors", "input_tensor", "inputs", "input"),
        "gather": ("input_tensors",),
        "scatter": ("output_tensors",),
        "all_to_all": ("input_tensors", "input"),
    }.get(kind, ("tensors", "tensor", "inputs", "input"))
    found = next((named[n] for n in names if n in named), None)
    tensors = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
    return tensors[:1] if kind == "all_to_all" else tensors


def _splits(named: Mapping[str, Any], size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if "output_tensors" in named:
        return (
            tuple(t.numel() for t in named["output_tensors"]),
            tuple(t.numel() for t in named["input_tensors"]),
        )
    out, in_ = named.get("output_split_sizes"), named.get("input_split_sizes")
    x = named["input"]
    rows = x.shape[0] if x.ndim else 0
    in_ = tuple(in_) if in_ else (rows // size,) * size
    if not out:
        y = named.get("output")
        out = (y.shape[0] // size,) * size if y is not None else in_
    return tuple(out), in_
