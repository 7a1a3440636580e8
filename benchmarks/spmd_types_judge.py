"""Beside the checker of spmd_types: for each call it judges, what it says and what we say."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import _checker, _state, runtime, types
from spmd_types._mesh_axis import MeshAxis
from spmd_types._raw_dist import RAW_DIST_RULES
from spmd_types._scalar import Scalar
from spmd_types._scalar_sentinel import _Scalar

from spmdtypes.capture.patches import patched
from spmdtypes.dialects.spmd_types.calls import Judgement, judge, local_shape
from spmdtypes.dialects.spmd_types.meaning import Annotation, Axes, contradiction, ranks_of, read
from spmdtypes.dialects.spmd_types.transfers import Side, judge_transfer

# Messages of its checker about something else than what a program computes.
OUTSIDE = (
    (r"Cannot resolve axis name|No mesh axis named|requires an active mesh", "an axis has no such name"),
    (r"orthogonal", "axes that overlap are used together"),
    (
        r"out of bounds|doesn't match tensor ndim|empty tuple|Cannot use S\(i\)|multiple axes"
        r"|implying Varying|both S\(i\)|Cannot construct|PartitionSpec length|both dim|Conflicting",
        "an annotation that contradicts itself or does not fit its tensor",
    ),
    (r"pytree|leaf|non-tensor|is not a tensor|is a tensor but|invalid spec", "how local_map is declared"),
    (
        r"is not registered|decomposition|hook|must (?:return|be)|accounted|spmd_typecheck",
        "what an autograd Function or a hook of its checker declares",
    ),
    (r"src and dst axes to match|expected axis to be omitted", "the form of a call of mutate_type"),
    (
        r"reinterpret_mesh|auto-reinterpreted|[Cc]ross-mesh|different mesh|not compatible|mesh region",
        "the same ranks under another mesh",
    ),
    (r"not yet implemented", "its checker has no rule for the call"),
    (r"mixed typechecking|local/global typechecking", "axes of which one is local, one global"),
)
# Why a stated error is none for us, by what its checker says of it.
REASONS = (
    (r"cannot mix with other types", "I beside another type, where both gradients come out right"),
    (r"DTensor|local size 1|[Ss]plit|StridedShard", "DTensor has no placement for it; the layout exists"),
    (r"expected output tensor", "the buffer is said to be less than what is written into it"),
    (r"would change SPMD type", "the buffer is said to be less than what is written into it"),
    (
        r"all_reduce: expected input type",
        "a value per rank may be summed, as by its own all_reduce(src=V)",
    ),
)


@dataclass(frozen=True)
class Event:
    """One call. `theirs`: "right" or "error"; `ours`: "right", "wrong" or "unknown"."""

    place: int
    what: str
    theirs: str
    ours: str
    message: str
    own: str = ""
    reason: str = ""
    outside: str = ""
    same_type: bool | None = None
    types: str = ""


class Judge:
    """Judges the calls of tests in `folder` while `installed`; fills `events`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.depth = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with patched() as patches:
            mode = _checker._SpmdTypeMode
            patches.set(mode, "__torch_function__", self._dispatched(mode.__torch_function__))
            for fn, judged in (
                (runtime.assert_type, self._asserted),
                (runtime.mutate_type, self._mutated),
                (_checker.infer_local_type_for_axis, self._one_axis),
            ):
                patches.everywhere(fn, self._beside(fn, judged))
            yield

    # -- both sides -----------------------------------------------------------------------------

    def _beside(self, call: Callable[..., Any], judged: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return call(*args, **kwargs)
            return self._compared(call, call.__name__, lambda: judged(*args, **kwargs), args, kwargs)

        both.__name__, both.__wrapped__ = call.__name__, call  # type: ignore[attr-defined]
        return both

    def _dispatched(self, original: Any) -> Any:
        def both(mode: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            def call(*a: Any, **k: Any) -> Any:
                return original(mode, func, kinds, a, k)

            kwargs = kwargs or {}
            if not self.depth and _declared(func):  # its own statements are judged, one by one
                return call(*args, **kwargs)
            if self.depth or mode._disabled or _state._in_no_typecheck_frame() or _is_query(func):
                return call(*args, **kwargs)
            what = getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func))
            return self._compared(call, what, lambda: self._called(mode, func, args, kwargs), args, kwargs)

        return both

    def _compared(
        self, call: Any, what: str, judged: Callable[[], Judgement | None], args: Any, kwargs: Any
    ) -> Any:
        self.depth += 1
        try:
            try:
                ours = judged()
            except types.SpmdTypeError as e:  # the annotation itself cannot be read
                ours = Judgement((str(e).splitlines()[0],))
            except Exception as e:
                ours = Judgement(unknown=(f"{type(e).__name__}: {e}"[:160],))
            try:
                result = call(*args, **kwargs)
            except types.SpmdTypeError as e:
                if ours is not None:
                    self._note(what, ours, "error", str(e))
                raise
            if ours is not None:
                self._note(what, ours, "right", "", result)
            return result
        finally:
            self.depth -= 1

    def _note(self, what: str, ours: Judgement, theirs: str, message: str, result: Any = None) -> None:
        text = message.splitlines()[0] if message else ""
        outside = next((why for sign, why in OUTSIDE if re.search(sign, text)), "") if text else ""
        reason = ""
        if theirs == "error" and ours.verdict != "wrong":
            reason = next((why for sign, why in REASONS if re.search(sign, text)), text[:110])
            if ours.verdict == "unknown":
                reason = f"not decided by us: {ours.unknown[0][:100]}"
        own = "; ".join((*ours.wrong, *ours.unknown))
        same, shown = _same_types(ours, result) if theirs == "right" else (None, "")
        event = Event(self._line(), what, theirs, ours.verdict, text, own, reason, outside, same, shown)
        self.events.append(event)

    def _line(self) -> int:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(self.folder):
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else 0

    # -- our side -------------------------------------------------------------------------------

    def _called(self, mode: Any, func: Any, args: Any, kwargs: Any) -> Judgement | None:
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(type(t).__name__ == "DTensor" for t in tensors):
            return None
        known = _axes_of(args, kwargs)
        if known is None:
            return None
        mesh, names = known
        if func is torch.Tensor.backward:
            return _backward(args, kwargs, names)
        whole = not mode._local
        if func in _checker._SPMD_FUNCTION_DEFAULTS:
            return _transferred(mode, func, args, kwargs, names)
        if func in RAW_DIST_RULES:
            whole = False
        args, kwargs, scalars = _plain_scalars(args, kwargs)
        local = {a for axis in _state._current_local_axes() for a in names.names(axis)}

        def said(t: torch.Tensor) -> Annotation | None:
            if id(t) in scalars:
                return names.annotation(scalars[id(t)], None, 0)
            found = read(t, names)
            return found.without_cuts(local) if found is not None and local else found

        if whole:
            for t in tensors:
                note = said(t)
                lost = [a for a in (note.families if note else ()) if a not in local]
                if lost:
                    return Judgement((f"nothing says along which dim an operand is cut over {lost[0]}",))
        around = {a for axis in _state.current_mesh() or () for a in names.names(axis)}
        with _functions_as_they_are():
            return judge(
                func,
                args,
                kwargs,
                said,
                mesh,
                around=frozenset(around) if tensors else frozenset(),
                strict=mode._strict,
                whole=whole,
            )

    def _asserted(self, tensor: Any, *given: Any, partition_spec: Any = None) -> Judgement | None:
        if not isinstance(tensor, torch.Tensor) or type(tensor).__name__ == "DTensor":
            return None
        with spmd.no_typecheck():
            blank = torch.empty(local_shape(tensor), device="meta")
            runtime.assert_type(blank, *given, partition_spec=partition_spec)
        known = _axes_of((tensor, blank), {})
        if known is None:
            return None
        old, new = read(tensor, known[1]), read(blank, known[1])
        if old is None or new is None:
            return Judgement() if new is not None else None
        fault = contradiction(old, new, tensor.requires_grad)
        return Judgement((fault,) if fault else ())

    def _mutated(self, tensor: Any, axis: Any = None, *, src: Any, dst: Any) -> Judgement | None:
        known = _axes_of((tensor,), {})
        if known is None:
            return None
        old = read(tensor, known[1])
        if old is None:
            return Judgement(("nothing says how the tensor lies",))
        wanted = dict(src) if isinstance(src, dict) else {}
        if not wanted:
            on = (
                [axis]
                if axis is not None
                else list(dst)
                if isinstance(dst, dict)
                else list(runtime.get_local_type(tensor))
            )
            wanted = dict.fromkeys(on, src)
        for key, letter in wanted.items():
            normal = types.normalize_axis(key)
            names = known[1].names(normal) if normal.size() > 1 else ()
            if normal.size() > 1 and not names:
                return Judgement(("nothing says how the tensor lies over that axis",))
            for name in names:
                have, want = old.letters.get(name), types.to_local_type(letter).value
                if have != want:
                    return Judgement((f"over {name} it is said to be {have}, not {want}",))
        return Judgement()

    def _one_axis(self, axis: Any, kinds: Any, out_partial: bool = False, **more: Any) -> Judgement | None:
        """The rule of one axis, on an operation of the class asked for."""
        if not kinds:
            return None
        mesh = {"axis": 2}
        classes = _checker.OpLinearity
        linearity = more.get("linearity", classes.NONLINEAR)
        free = more.get("no_grad") or [False] * len(kinds)
        notes: dict[int, Annotation] = {}
        operands: list[Any] = []
        for kind, quiet in zip(kinds, free):
            if kind is _Scalar:
                operands.append(2.0)
                continue
            t = torch.empty(4, requires_grad=not quiet)
            notes[id(t)] = Annotation({"axis": kind.value})
            operands.append(t)

        def operation(*xs: Any) -> Any:
            if linearity is classes.LINEAR:
                return sum(xs[1:], start=xs[0])
            if linearity is classes.MULTILINEAR:
                return math.prod(xs[1:], start=xs[0])
            return math.prod((x.exp() for x in xs if isinstance(x, torch.Tensor)), start=1.0)

        with _functions_as_they_are(), spmd.no_typecheck():
            found = judge(operation, operands, {}, lambda t: notes.get(id(t)), mesh)
        result = found.results[0] if found.results else None
        if out_partial and not found.wrong and result is not None and result.letters["axis"] == "=":
            return Judgement(("the same on every rank, and would be summed",))
        return found


# -- reading calls ------------------------------------------------------------------------------


def _is_query(func: Any) -> bool:
    if func in _checker._PASSTHROUGH:
        return True
    return getattr(func, "__name__", None) == "__get__" and func not in _checker._OP_REGISTRY


def _declared(func: Any) -> bool:
    """Is it a Function of autograd that says itself what its checker shall take it for?"""
    cls = _checker._get_autograd_function_class(func)
    if cls is None:
        return False
    return (
        cls in runtime._TYPECHECK_AUTOGRAD_FUNCTIONS or runtime._get_autograd_spmd_typecheck(cls) is not None
    )


def _axes_of(args: Any, kwargs: Any) -> tuple[dict[str, int], Axes] | None:
    """A mesh that has the axes of the operands and of the current mesh; None when they are of no mesh."""
    found: set[MeshAxis] = set(_state.current_mesh() or ())
    for x in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(x, (torch.Tensor, Scalar)):
            found |= set(runtime.get_local_type(x))
        if isinstance(x, torch.distributed.ProcessGroup):
            found.add(MeshAxis.of(x))
    atoms = sorted((a for a in found if a.size() > 1), key=lambda a: -max(1, ranks_of(a)[1]))
    flat = [a for a in atoms if any(b != a and b <= a for b in atoms)]  # products of the others
    atoms = [a for a in atoms if a not in flat]
    mesh: dict[str, int] = {}
    inner = 1
    for axis in reversed(atoms):  # row-major, with what lies between
        ranks = ranks_of(axis)
        step = ranks[1]
        if step % inner or any(b - a != step for a, b in pairwise(ranks)):
            return None
        if step > inner:
            mesh[f"rest{len(mesh)}"] = step // inner
        mesh[f"a{len(mesh)}"] = len(ranks)
        inner = step * len(ranks)
    ordered = dict(reversed(mesh.items()))
    return (ordered, Axes(ordered)) if mesh else ({}, Axes({"none": 1}))


def _plain_scalars(args: Any, kwargs: Any) -> tuple[Any, Any, dict[int, Mapping[Any, Any]]]:
    """Its annotated numbers as tensors without dims."""
    found: dict[int, Mapping[Any, Any]] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, Scalar):
            t = torch.empty(())
            found[id(t)] = runtime.get_local_type(x)
            return t
        return x

    with spmd.no_typecheck():
        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs))
    return args, kwargs, found


def _side(x: Any, ndim: int) -> Side:
    return types._canonicalize_shard(x, ndim).dim if isinstance(x, types.Shard) else x.value


def _transferred(mode: Any, func: Any, args: Any, kwargs: Any, names: Axes) -> Judgement | None:
    defaults = _checker._SPMD_FUNCTION_DEFAULTS[func]
    x = args[0]
    axis = types.normalize_axis(args[1] if len(args) > 1 else kwargs["axis"])
    src, dst = kwargs.get("src", defaults["src"]), kwargs.get("dst", defaults["dst"])
    if src is None or dst is None or axis.size() == 1:
        return None
    said = read(x, names)
    on = names.names(axis)
    if not on:
        return None
    needs = x.requires_grad and torch.is_grad_enabled()
    whole = all(mode._is_global_axis(axis) for axis in [axis] if not mode._local) and not mode._local
    return judge_transfer(
        said or Annotation({}),
        on,
        _side(src, x.ndim),
        _side(dst, x.ndim),
        needs_grad=needs,
        whole=whole,
        strict=mode._strict,
    )


def _backward(args: Any, kwargs: Any, names: Axes) -> Judgement:
    """Without a gradient every rank starts from 1: right for a loss that is I, or a term of a sum."""
    if kwargs.get("gradient", args[1] if len(args) > 1 else None) is not None:
        return Judgement()
    said = read(args[0], names)
    if said is None:
        return Judgement(("nothing says how the loss lies",) if _state.is_strict() else ())
    for axis, letter in said.letters.items():
        if letter == "R":
            return Judgement((f"over {axis}, each rank starts from the whole gradient, as a term of a sum",))
        if letter == "V":
            return Judgement((f"over {axis}, the ranks' losses have no reading as one loss",))
    return Judgement()


def _same_types(ours: Judgement, result: Any) -> tuple[bool | None, str]:
    """Do the results carry the letters we derive? None when either side does not know."""
    outs = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    if not ours.results or len(outs) != len(ours.results) or ours.verdict != "right":
        return None, ""
    known = _axes_of(tuple(outs), {})
    if known is None:
        return None, ""
    for mine, t in zip(ours.results, outs):
        theirs = read(t, known[1])
        if mine is None or theirs is None:
            return None, ""
        if set(mine.letters) - set(theirs.letters) or "?" in mine.letters.values():
            return None, ""
        for axis, letter in mine.letters.items():
            other = theirs.letters[axis]
            if letter != other and not (letter == "=" and other in "RI"):
                return False, f"ours {mine.letters}, theirs {dict(theirs.letters)}"
    return True, ""


@contextmanager
def _functions_as_they_are() -> Iterator[None]:
    """Functions of autograd without its checker's wrapper."""
    with patched() as patches:
        original = _checker._orig_autograd_apply
        if original is not None:
            patches.set(torch.autograd.Function, "apply", original)
        yield
