"""Annotations of a running program as contracts at the places where they are made.

`assert_type(x, ...)` says what `x` is there. While a recorder watches, each such call becomes a border,
`assert:{tp: R} at model.py:14`: the value at that moment, and the type it is declared to have. Whoever
infers the program confirms or refutes it. A claim about a tensor that nobody computed tells how it is
placed.

The letters say something of the gradient too: that of an I, P or S tensor is complete, complete, or cut
alike. This is a border of its own, `grad:what is asserted to be {tp: I} at model.py:14`. Nothing is
claimed along an axis that is V, or that is not mentioned; and nothing about a gradient along an axis where
the tensor is R. A claim is about placement, not about a common factor: `{dp: P}` is as true of a sum as of
a mean over dp.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.borders import mismatch
from spmdtypes.capture.patches import Patches, patched
from spmdtypes.capture.raw import Raw, Res, View
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.run import local
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.infer import Inference
from spmdtypes.dialects.spmd_types import moves as moves  # describes the operations a program may use
from spmdtypes.dialects.spmd_types.meaning import Annotation, Axes, read
from spmdtypes.graph import TensorMeta
from spmdtypes.notation import Type
from spmdtypes.verdict import UNDECIDED, Status, Verdict


@dataclass(frozen=True)
class Claim:
    """`border` denotes `type`, except over the axes `open`."""

    border: str
    type: Type
    open: frozenset[str]


@dataclass
class Claims:
    """What a program claimed while it ran, in order. `views`: the values, to be named as outputs of its
    graph; `placed`: what was claimed about memory that the program did not compute."""

    claims: list[Claim] = field(default_factory=list)
    views: dict[str, View | Res] = field(default_factory=dict)
    placed: dict[View, Type] = field(default_factory=dict)

    def placement(self, rec: Recorder, tensor: Tensor) -> Type | None:
        """The type first claimed for a parameter or an input, if any."""
        with rec.pause():
            return self.placed.get(rec.view(local(tensor)))


@contextmanager
def watching(rec: Recorder) -> Iterator[Claims]:
    """Inside, what the program claims by spmd_types is recorded by `rec`; nothing else changes.

    Does nothing when spmd_types is not installed. Enter it before the program is imported or after: its
    functions are replaced wherever they are known by name.
    """
    found = Claims()
    try:
        runtime = import_module("spmd_types.runtime")
    except ImportError:
        yield found
        return
    watch = _Watch(rec, found, runtime)
    with patched() as patches:
        watch.install(patches)
        yield found


class _Watch:
    def __init__(self, rec: Recorder, found: Claims, runtime: Any) -> None:
        self.rec, self.found, self.runtime = rec, found, runtime
        self.axes = Axes(rec.mesh)
        self.depth = 0
        self.times: Counter[str] = Counter()
        self.sources: set[int] = set()
        self.scanned = 0

    def install(self, patches: Patches) -> None:
        runtime = self.runtime
        patches.everywhere(runtime.assert_type, self._around(runtime.assert_type))
        patches.everywhere(runtime.mutate_type, self._around(runtime.mutate_type))
        patches.everywhere(runtime.local_map, self._boundary(runtime.local_map))
        _unrecorded(patches)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """An annotating function, with what it leaves on the tensor as a claim."""

        @functools.wraps(call)
        def annotate(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                result = call(tensor, *args, **kwargs)
            finally:
                self.depth -= 1
            if not self.depth and self._of_user(sys._getframe(1)):
                for t in tensor if isinstance(tensor, (list, tuple)) else (tensor,):
                    self._claim(t, self._said(call, t, args, kwargs))
            return result

        return annotate

    def _of_user(self, caller: FrameType) -> bool:
        """Not what its checker notes for itself; boundaries that a user declares are in its runtime."""
        name = str(caller.f_globals.get("__name__"))
        return name == self.runtime.__name__ or name.partition(".")[0] != "spmd_types"

    def _said(self, call: Any, tensor: Tensor, args: Any, kwargs: Any) -> Annotation | None:
        """What this call says, without what was said of the tensor before."""
        if getattr(call, "__name__", "") == "mutate_type":
            return read(tensor, self.axes)
        with self.rec.pause(), torch.no_grad(), self.runtime._no_typecheck_context():
            blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.depth += 1
            try:
                call(blank, *args, **kwargs)
            finally:
                self.depth -= 1
        return read(blank, self.axes)

    def _boundary(self, local_map: Callable[..., Any]) -> Callable[..., Any]:
        """`local_map` claims its results also when no checker of theirs is at work."""

        @functools.wraps(local_map)
        def decorator_of(*, out_types: Any, **more: Any) -> Any:
            made = local_map(out_types=out_types, **more)

            def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
                wrapped = made(fn)

                @functools.wraps(fn)
                def call(*args: Any, **kwargs: Any) -> Any:
                    result = wrapped(*args, **kwargs)
                    if not self.runtime.is_type_checking():
                        self._results(result, out_types)
                    return result

                return call

            return decorate

        return decorator_of

    def _results(self, result: Any, spec: Any) -> None:
        if not isinstance(result, Tensor):
            if isinstance(result, (list, tuple)) and isinstance(spec, (list, tuple)):
                for r, s in zip(result, spec):
                    self._results(r, s)
            return
        if isinstance(spec, self.runtime.PartitionSpec):
            types: tuple[Any, ...] = ({}, spec)
        else:
            types = spec if isinstance(spec, tuple) else (spec,)
        self._claim(result, self._said(self.runtime.assert_type, result, types, {}))

    # -- recording ------------------------------------------------------------------------------

    def _claim(self, tensor: Tensor, said: Annotation | None) -> None:
        if said is None or not said.letters:
            return
        mesh = self.rec.mesh
        view = self._view(tensor)
        shape = tuple(view.shape)
        given = said.type(shape, mesh)
        if view not in self.found.placed and self._foreign(view):
            self.found.placed[view] = given
        open_axes = frozenset(a for a in mesh if said.letters.get(a, "V") == "V") - said.cut_axes
        name = self._keep("assert:", Claim(written(said), given, open_axes), tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            dual = said.gradient()
            silent = open_axes | {a for a, x in said.letters.items() if x == "R"}
            if silent < set(mesh):
                hook = self._hook(f"grad:what is asserted to be {name.removeprefix('assert:')}", dual, silent)
                with self.runtime._no_typecheck_context():
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _hook(self, border: str, dual: Annotation, silent: frozenset[str]) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            given = dual.type(tuple(local(grad).shape), self.rec.mesh)
            self._keep("", Claim(border, given, silent), grad)

        return hook

    def _view(self, tensor: Tensor) -> View:
        with self.rec.pause(), self.runtime._no_typecheck_context():
            return self.rec.view(local(tensor))

    def _foreign(self, view: View) -> bool:
        """Did this memory come from outside?"""
        for raw in self.rec.trace[self.scanned :]:
            if raw.op in ("source", "bind"):
                self.sources.add(raw.outs[0].storage)
        self.scanned = len(self.rec.trace)
        return view.storage in self.sources

    def _keep(self, kind: str, claim: Claim, tensor: Tensor) -> str:
        """The value now, whatever becomes of its memory. The name of the border."""
        view = self._view(tensor)
        raw = Raw("aten.clone.default", (view,), outs=(TensorMeta(view.shape, view.dtype),))
        self.rec.situate(raw)
        index = self.rec.append(raw)
        with self.rec.pause(), self.runtime._no_typecheck_context():
            self.rec.keep(index, 0, local(tensor))
        name = claim.border
        own = str(Path(self.runtime.__file__).parent)
        frames = [f for f in self.rec.stacks.resolve(raw.stack) if kind and not f.file.startswith(own)]
        if frames:
            name = f"{kind}{name} at {Path(frames[0].file).name}:{frames[0].line}"
        self.times[name] += 1
        name = name if self.times[name] == 1 else f"{name} (time {self.times[name]})"
        self.found.claims.append(replace(claim, border=name))
        self.found.views[name] = Res(index)
        return name


def _unrecorded(patches: Patches) -> None:
    """Its checker asks DTensor, on meta tensors and meshes of its own, which are none of the program's."""
    propagator = import_module("spmd_types._checker")._ShardPropagator
    propagate = propagator.propagate

    @functools.wraps(propagate)
    def apart(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    patches.set(propagator, "propagate", apart)


def written(said: Annotation) -> str:
    """An annotation as its author would write it."""
    dims = {a: d for d, axes in enumerate(said.cuts or ()) for a in axes}
    parts = [f"{a}: S({dims[a]})" if a in dims else f"{a}: {x}" for a, x in said.letters.items()]
    return "{" + ", ".join(parts) + "}"


# -- judging ------------------------------------------------------------------------------------


def judged(claims: Claims, inference: Inference, mesh: Mapping[str, int]) -> list[Verdict]:
    """A verdict per claim: "right", "wrong", or "unknown" where the rules do not say."""
    return [_judged(c, inference, mesh) for c in claims.claims if c.border in inference.graph.outputs]


def _judged(claim: Claim, inference: Inference, mesh: Mapping[str, int]) -> Verdict:
    ref = inference.graph.outputs[claim.border]
    den, problem = inference.values.get(ref), inference.problems.get(ref)
    left = {a: n for a, n in mesh.items() if n > 1 and a not in claim.open}
    unknown = Verdict(claim.border, "unknown", "unknown", ref, claim.type, None, den, problem)
    evidence = inference.evidence.get(ref, "unknown")
    try:
        expected = _expected(claim, den, mesh)
    except RuleError:
        return unknown
    if den is None or expected is None or not left:
        return unknown
    seen = den.poisoned(claim.open | den.varying, den.reason)
    if den.varying & set(left):
        decided = problem is not None and problem.error.kind not in UNDECIDED
        if not decided:
            return unknown
        return replace(unknown, status="wrong", evidence="proved", expected=expected)
    wrong = mismatch(replace(seen, varying=frozenset(), scale=expected.scale), expected, left)
    if wrong is not None and claim.border.startswith("grad:") and wrong.kind == "double":
        wrong = None  # a factor, as far as placement goes
    if wrong is not None and wrong.kind == "layout" and claim.open and seen.layout.open_dims:
        # any cut of a dim along which nothing ties positions to ranks
        wrong = None if seen.local_shape == expected.local_shape else wrong
    status: Status = "wrong" if wrong else "right"
    return Verdict(
        claim.border, status, evidence, ref, claim.type, expected, den, problem if wrong else None, wrong
    )


def _expected(claim: Claim, den: Denotation | None, mesh: Mapping[str, int]) -> Denotation | None:
    """What the claim says over the axes it speaks of."""
    dims = claim.type.dims
    if dims is None or den is None:
        return None
    shape = tuple(int(d.size) for d in dims)
    partial = tuple(p for p in claim.type.partial if p[0] not in claim.open)
    return Denotation.from_type(replace(claim.type, partial=partial, text=""), shape, mesh)
