"""Values a program reads back (`.item()`, `nonzero`, `bool(tensor)`) when its tensors are fake.

Small integer tensors have a real twin for as long as everything they come from has one. Integer
inputs get a twin with assumed values, and collectives of twins assume that every rank holds the
same. Where no twin is left a value is assumed. Every assumption that a read depends on is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.raw import DTYPES, Raw, View

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import OpInfo, Recorder
    from spmdtypes.graph import Comm

_SMALL = 4096  # elements of a twin
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
_NAMES = {name for name, dtype in DTYPES.items() if dtype in _INTEGERS}


class Shadows:
    """The memory of twins, by storage of the fake tensor; `assumed` are those that rest on an
    assumption."""

    def __init__(self) -> None:
        self.memory: dict[int, Tensor] = {}
        self.assumed: set[int] = set()

    def learn(self, view: View, value: Tensor, assumed: bool = False) -> None:
        """`value` is the twin of the fresh tensor `view`, laid out like it."""
        if view.dtype in _NAMES and view.numel <= _SMALL:
            n = value.untyped_storage().nbytes() // value.element_size()
            with _disable_current_modes():
                self.memory[view.storage] = value.detach().as_strided((n,), (1,), 0)
            if assumed:
                self.assumed.add(view.storage)

    def forget(self, view: View) -> None:
        self.memory.pop(view.storage, None)

    def twin(self, view: View) -> Tensor | None:
        memory = self.memory.get(view.storage)
        if memory is None or DTYPES.get(view.dtype) != memory.dtype:
            return None
        with _disable_current_modes():
            return memory.as_strided(view.shape, view.stride, view.offset)

    def rests_on_assumption(self, views: Sequence[View]) -> bool:
        return any(v.storage in self.assumed for v in views)


def assume_input(rec: Recorder, t: Tensor, limit: int | None) -> None:
    """Give an integer input the values 0, 1, 2, ... (below `limit`)."""
    view = rec.view(t)
    if view.dtype not in _NAMES or view.numel > _SMALL:
        return
    with rec.quiet():
        values = (torch.arange(view.numel) % (limit or 2)).to(t.dtype).reshape(view.shape)
        rec.shadows.learn(view, values.contiguous(), assumed=True)


def follow(rec: Recorder, raw: Raw, func: Any, args: Any, kwargs: Any) -> None:
    """Do on twins what was just done on fake tensors, where all operands have twins."""
    shadows = rec.shadows
    views = list(views_in((raw.args, *raw.kwargs.values())))
    if views and views[0].storage not in shadows.memory:
        for v in raw.mutated:
            shadows.forget(v)
        if not raw.mutated and views[0].dtype not in _NAMES:
            _assume_positions(rec, raw, views[0])
        return
    outs = [o for o in raw.outs if type(o) is View]
    fresh = [o for o in outs if o.storage not in shadows.memory]
    if not raw.mutated and (not fresh or any(o.dtype not in _NAMES or o.numel > _SMALL for o in fresh)):
        return
    with rec.quiet():
        real_args = _real(rec, args)
        real_kwargs = _real(rec, kwargs)
        if real_args is None or real_kwargs is None:
            for v in raw.mutated:
                shadows.forget(v)
            return
        result = func(*real_args, **real_kwargs)
    assumed = shadows.rests_on_assumption(views)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    for o, r in zip(raw.outs, results):
        if type(o) is View and o.storage not in shadows.memory and isinstance(r, Tensor):
            shadows.learn(o, r, assumed)
    if assumed:
        shadows.assumed.update(v.storage for v in raw.mutated)


def _assume_positions(rec: Recorder, raw: Raw, source: View) -> None:
    """Integers computed from floats are positions in them (topk, argmax, sort): 0, 1, 2, ... again
    and again, which routes tokens evenly."""
    for o in raw.outs:
        if type(o) is View and o.dtype == "i64" and o.numel <= _SMALL and o.contiguous and not o.offset:
            with rec.quiet():
                limit = source.shape[-1] if source.shape else 1
                values = (torch.arange(o.numel) % max(limit, 1)).reshape(o.shape)
                rec.shadows.learn(o, values, assumed=True)


def views_in(x: Any) -> Iterator[View]:
    if type(x) is View:
        yield x
    elif type(x) is tuple:
        for y in x:
            yield from views_in(y)


def _real(rec: Recorder, x: Any) -> Any:
    """`x` with twins for tensors; None when one has no twin."""
    if isinstance(x, Tensor):
        return rec.shadows.twin(rec._view(x)[0]) if isinstance(x, FakeTensor) else x
    if isinstance(x, dict):
        found = {k: _real(rec, v) for k, v in x.items()}
        return None if any(v is None and x[k] is not None for k, v in found.items()) else found
    if isinstance(x, (list, tuple)):
        items = [_real(rec, y) for y in x]
        return None if any(r is None and y is not None for r, y in zip(items, x)) else type(x)(items)
    return x


def exchanged(rec: Recorder, comm: Comm, source: View | None, target: View) -> None:
    """The twin of a collective's result, assuming that all ranks hold what this one holds."""
    twin = rec.shadows.twin(source) if source is not None else None
    n = len(comm.ranks)
    with rec.quiet():
        result = _symmetric(comm, twin, n) if twin is not None else None
        if result is None or result.numel() != target.numel:
            rec.shadows.forget(target)
            return
        result = result.reshape(target.shape).to(DTYPES[target.dtype]).contiguous()
        into = rec.shadows.twin(target)
        if into is not None:
            into.copy_(result)
            rec.shadows.assumed.add(target.storage)
        elif target.contiguous and target.offset == 0:
            rec.shadows.learn(target, result, assumed=True)


def _symmetric(comm: Comm, x: Tensor, n: int) -> Tensor | None:
    if comm.kind == "all_reduce":
        return x * n if comm.reduce_op == "sum" else x
    if comm.kind in ("broadcast", "reduce"):
        return x
    if comm.kind in ("all_gather", "gather"):
        return torch.cat([x.reshape(1) if x.dim() == 0 else x] * n)
    if comm.kind == "all_to_all" and x.dim() and x.shape[0] % n == 0:
        return x
    return None


# ---- reading values back


def special(func: Any) -> Callable[..., Any] | None:
    if func is torch.ops.aten._local_scalar_dense.default:
        return _item
    if func is torch.ops.aten.equal.default:
        return _equal
    if func is torch.ops.aten.index.Tensor:
        return _index
    return _dynamic if torch.Tag.dynamic_output_shape in func.tags else None


def _assume(rec: Recorder, raw: Raw, value: Any, what: str) -> None:
    raw.assumed = repr(value)
    frames = rec.stacks.resolve(raw.stack)
    place = f" (line {frames[0].line} of {frames[0].file.rpartition('/')[2]})" if frames else ""
    rec.note(f"assumed {value!r} for {what}{place}")


def _item(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor becomes a Python number."""
    (t,) = args
    raw = rec.begin(info.name, func, args, kwargs)
    if not isinstance(t, FakeTensor):
        value = func(*args, **kwargs)
    else:
        known = rec.shadows.twin(raw.args[0])
        if known is None:
            known = t.constant
        if known is not None:
            with rec.quiet():
                value = known.item()
        else:
            value = False if t.dtype is torch.bool else 1.0 if t.dtype.is_floating_point else 1
        if known is None or rec.shadows.rests_on_assumption([raw.args[0]]):
            _assume(rec, raw, value, "a number read from a tensor")
    rec.finish(raw, info, args, kwargs, value)
    return value


def _equal(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    raw = rec.begin(info.name, func, args, kwargs)
    if not any(isinstance(a, FakeTensor) for a in args):
        value = func(*args, **kwargs)
    else:
        with rec.quiet():
            real = _real(rec, args)
            value = func(*real) if real is not None else True
        if real is None:
            _assume(rec, raw, value, "a comparison of two tensors")
    rec.finish(raw, info, args, kwargs, value)
    return value


def _index(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing; with a mask the size of the result depends on its values."""
    masked = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if masked:
        return _dynamic(rec, info, func, args, kwargs)
    return rec.plain(info, func, args, kwargs)


def _dynamic(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """An op whose output shape depends on values."""
    if not any(isinstance(t, FakeTensor) for t in _tensors((args, tuple(kwargs.values())))):
        return rec.plain(info, func, args, kwargs)
    raw = rec.begin(info.name, func, args, kwargs)
    with rec.quiet():
        real = _real(rec, args), _real(rec, kwargs)
        standing = real if None not in real else _stand_in(rec, (args, kwargs))
        result = func(*standing[0], **standing[1])
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    # made under the fake mode, which is on below this one
    fakes = [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype) for r in results]
    out = tuple(fakes) if isinstance(result, tuple) else fakes if isinstance(result, list) else fakes[0]
    views = list(views_in((raw.args, *raw.kwargs.values())))
    deciding = [v for v in views if v.dtype in _NAMES] or views
    guessed = any(rec.shadows.twin(v) is None for v in deciding)
    if guessed or rec.shadows.rests_on_assumption(deciding):
        _assume(rec, raw, tuple(results[0].shape), f"the size of the result of {info.name.split('.')[1]}")
    rec.finish(raw, info, args, kwargs, out)
    for view, r in zip(raw.outs, results):
        rec.shadows.learn(view, r, guessed or rec.shadows.rests_on_assumption(views))
    return out


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)


def _stand_in(rec: Recorder, x: Any) -> Any:
    """Arguments with twins where known and, elsewhere, masks that are true and numbers that are 0
    (1 for floats)."""
    if isinstance(x, FakeTensor):
        twin = rec.shadows.twin(rec._view(x)[0])
        if twin is not None:
            return twin
        full = 0 if x.dtype in _INTEGERS and x.dtype is not torch.bool else 1
        return torch.full(tuple(x.shape), full, dtype=x.dtype)
    if isinstance(x, dict):
        return {k: _stand_in(rec, v) for k, v in x.items()}
    return type(x)(_stand_in(rec, y) for y in x) if isinstance(x, (list, tuple)) else x
