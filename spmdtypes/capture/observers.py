"""Lets a recorder see what the dispatcher does not show."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from spmdtypes.capture.patches import Patches, patched

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import Recorder


@contextlib.contextmanager
def observed(rec: Recorder) -> Iterator[None]:
    """Module calls, autograd Functions, reduce operators and waits are reported to `rec`."""
    with patched() as patches:
        _observe_modules(patches, rec)
        _observe_functions(patches, rec)
        _observe_groups(patches, rec)
        _observe_works(patches, rec)
        yield


def _observe_modules(patches: Patches, rec: Recorder) -> None:
    call = torch.nn.Module.__call__

    @functools.wraps(call)
    def observed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        rec.entering(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            rec.module_stack.pop()

    patches.set(torch.nn.Module, "__call__", observed_call)
    for name in ("register_parameter", "register_buffer"):
        patches.set(torch.nn.Module, name, _observed_register(getattr(torch.nn.Module, name), rec))


def _observed_register(register: Any, rec: Recorder) -> Any:
    @functools.wraps(register)
    def observed_register(self: Any, name: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        rec.declared(value)
        register(self, name, value, *args, **kwargs)

    return observed_register


def _observe_functions(patches: Patches, rec: Recorder) -> None:
    apply = torch.autograd.Function.__dict__["apply"].__func__

    @functools.wraps(apply)
    def observed_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return apply(cls, *args, **kwargs)
        sequence = rec.applying()
        try:
            return apply(cls, *args, **kwargs)
        finally:
            rec.applied(sequence)

    patches.set(torch.autograd.Function, "apply", classmethod(observed_apply))


def _observe_groups(patches: Patches, rec: Recorder) -> None:
    collectives = [n for n in vars(ProcessGroup) if _issues(n)]
    for name in collectives:
        patches.set(ProcessGroup, name, _observed_collective(getattr(ProcessGroup, name), rec))
    if "_end_coalescing" in vars(ProcessGroup):
        end = ProcessGroup._end_coalescing

        def end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = end(self, *args, **kwargs)
            loose, rec.pending.loose = rec.pending.loose, []
            rec.pending.attach(work, loose)
            return work

        patches.set(ProcessGroup, "_end_coalescing", end_coalescing)
    make = vars(dist)["_make_nccl_premul_sum"]

    @functools.wraps(make)
    def premul_sum(factor: Any) -> Any:
        rec.pending.premul = float(factor) if not isinstance(factor, torch.Tensor) else None
        return make(factor)

    patches.everywhere(make, premul_sum)


def _issues(name: str) -> bool:
    stems = ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "send", "recv", "barrier")
    return any(s in name for s in stems) and callable(getattr(ProcessGroup, name))


def _observed_collective(method: Any, rec: Recorder) -> Any:
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rec.pending.call(_reduction(rec, (*args, *kwargs.values()))) as issued:
            work = method(self, *args, **kwargs)
        rec.pending.attach(work, issued)
        return work

    return collective


def _reduction(rec: Recorder, args: tuple[Any, ...]) -> tuple[str, float | None]:
    from spmdtypes.capture.groups import reduce_name

    for a in args:
        op = getattr(a, "reduceOp", a)
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            name = reduce_name(op)
            return name, _factor(rec, op) if name == "premul_sum" else None
    return "unknown", None


def _factor(rec: Recorder, op: Any) -> float | None:
    """What operands are multiplied by before they are summed: newer operators say it themselves."""
    own = getattr(op, "factor", None)
    return float(own) if isinstance(own, (int, float)) else rec.pending.premul


def _observe_works(patches: Patches, rec: Recorder) -> None:
    kinds = [Work, *(k for k in Work.__subclasses__() if k.__module__.startswith("torch._C"))]
    for kind in kinds:
        for name in ("wait", "synchronize", "get_future", "result", "block_current_stream"):
            if name in vars(kind):
                patches.set(kind, name, _observed_wait(getattr(kind, name), rec))
        if "is_completed" in vars(kind):
            patches.set(kind, "is_completed", _observed_question(vars(kind)["is_completed"], rec))
    for owner in (torch.cuda, torch.accelerator):
        patches.set(owner, "synchronize", _observed_synchronize(rec))


def _observed_question(method: Any, rec: Recorder) -> Any:
    def is_completed(self: Any) -> bool:
        done = dist.get_backend() == "fake" or bool(method(self))  # that one is never done by itself
        if done:
            rec.pending.wait(id(self))
        return done

    return is_completed


def _observed_synchronize(rec: Recorder) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> None:
        """The device has nothing left to do: every collective issued is done."""
        for key, (work, _) in list(rec.pending.works.items()):
            if key >= 0:
                work.wait()

    return synchronize


def _observed_wait(method: Any, rec: Recorder) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rec.pause():  # some backends finish a collective with ops of their own
            out = method(self, *args, **kwargs)
        rec.pending.wait(id(self))
        return out

    return wait
