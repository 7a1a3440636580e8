"""One call on annotated operands: does its result have a reading, and do the operands' gradients?

The call is recorded on fake tensors of the operands' shapes, with the backward of its results. The rules
then say what the results denote. A result that is the same on all ranks may be meant as R or as I; the
call is sound if one of the two gives every operand the gradient its own annotation asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from spmdtypes.capture import align
from spmdtypes.capture.functionalise import functionalise
from spmdtypes.capture.raw import View
from spmdtypes.capture.recorder import Recorder
from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.infer import Inference, infer
from spmdtypes.dialects.spmd_types import families as fam
from spmdtypes.dialects.spmd_types.meaning import Annotation
from spmdtypes.graph import Graph, Ref
from spmdtypes.notation import Dim, Type
from spmdtypes.verdict import UNDECIDED

GRAD, OUT, AFTER, COTANGENT, OPERAND = "grad:", "out:", "after:", "cotangent:", "operand:"


@dataclass(frozen=True)
class Judgement:
    """`wrong`: why the call is unsound. `unknown`: what the rules cannot tell. `results`: the annotation
    of each tensor it returns, as far as known ("=" is R or I, "?" is unknown)."""

    wrong: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    results: tuple[Annotation | None, ...] = ()

    @property
    def verdict(self) -> str:
        return "wrong" if self.wrong else "unknown" if self.unknown else "right"


@dataclass(frozen=True)
class Operands:
    """The tensors of a call: what is said of each (None: nothing), and the axes they must all speak of."""

    said: Sequence[Annotation | None]
    axes: frozenset[str]
    overwritten: frozenset[int] = frozenset()

    @property
    def silent(self) -> list[tuple[int, frozenset[str]]]:
        """Operands of which something is not said."""
        missing = [(k, self.axes - set(a.letters if a else ())) for k, a in enumerate(self.said)]
        return [(k, axes) for k, axes in missing if axes and k not in self.overwritten]


@dataclass
class _Run:
    """One recorded run. `twins`: the operands' stand-ins."""

    graph: Graph
    returned: int
    grads: dict[int, bool] = field(default_factory=dict)


def judge(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    said: Callable[[Any], Annotation | None],
    mesh: Mapping[str, int],
    *,
    around: frozenset[str] = frozenset(),
    strict: bool = True,
    whole: bool = False,
) -> Judgement:
    """What the rules say of `call(*args, **kwargs)`.

    `around`: further axes of which every operand must be annotated. `strict`: an operand without
    annotation is a fault, else unknown. `whole`: annotations with dims are read as parts of a whole tensor,
    for which the call must be right too; otherwise as one value per rank.
    """
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors:
        return Judgement()
    notes = [said(t) for t in tensors]
    written = {id(x) for x in tree_flatten(kwargs.get("out"))[0]}  # its old value is not read
    notes = [Annotation({}) if id(t) in written and a is None else a for t, a in zip(tensors, notes)]
    axes = around.union(*(a.letters for a in notes if a is not None)) if any(notes) else frozenset()
    blank = frozenset(k for k, t in enumerate(tensors) if id(t) in written)
    operands = Operands(notes, frozenset(axes), blank)
    if operands.silent and strict:
        k, missing = operands.silent[0]
        return Judgement((f"nothing says how operand {k} lies over {', '.join(sorted(missing))}",))
    if not whole:
        notes = [a and a.without_cuts(a.cut_axes) for a in notes]
    case = _Case(call, leaves, tree, tensors, [a or Annotation({}) for a in notes], dict(mesh), operands)
    tries = [case.judged(x) for x in case.variants(whole)]
    return min(tries, key=lambda j: ("right", "wrong", "unknown").index(j.verdict)) if tries else Judgement()


@dataclass
class _Case:
    call: Callable[..., Any]
    leaves: Sequence[Any]
    tree: Any
    tensors: Sequence[Tensor]
    said: Sequence[Annotation]
    mesh: dict[str, int]
    operands: Operands

    # -- recording ------------------------------------------------------------------------------

    def variants(self, whole: bool) -> Iterator[Sequence[Any] | None]:
        """The numbers of the call as the whole tensor's program would write them: as they are, or one of
        them larger by the size of an axis. None: the program of the ranks alone."""
        cut = {a for s in self.said for a in s.cut_axes}
        if not whole or not cut:
            yield None
            return
        yield self.leaves
        if not self.judged(self.leaves).unknown:
            return
        for k, x in enumerate(self.leaves):
            if isinstance(x, int) and not isinstance(x, bool) and x > 0:
                for a in sorted(cut):
                    yield [*self.leaves[:k], x * self.mesh[a], *self.leaves[k + 1 :]]

    def run(self, leaves: Sequence[Any], whole: bool) -> _Run:
        """Record the call and the backward of what it returns."""
        mesh = dict.fromkeys(self.mesh, 1) if whole else self.mesh
        rec = Recorder(mesh, dict.fromkeys(mesh, 0))
        with _alone(), FakeTensorMode(allow_non_fake_inputs=True), rec.recording():
            with rec.pause():
                bases = [self._base(k, whole) for k in range(len(self.tensors))]
            for k, b in enumerate(bases):
                rec.bind(b, f"{OPERAND}{k}", b.requires_grad)
            # a leaf that needs a gradient cannot be written to
            twins = [b.clone() if b.requires_grad and torch.is_grad_enabled() else b for b in bases]
            result = self.call(*self._called_with(leaves, twins)[0], **self._called_with(leaves, twins)[1])
            outs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
            views = {f"{OUT}{k}": self._view(rec, x) for k, x in enumerate(outs)}
            views |= {f"{AFTER}{k}": self._view(rec, t) for k, t in enumerate(twins)}
            views |= self._backward(rec, bases, outs)
        return _Run(functionalise(rec, views).graph, len(outs))

    def _base(self, k: int, whole: bool) -> Tensor:
        t, said = self.tensors[k], self.said[k]
        shape = list(local_shape(t))
        if whole and said.cuts:
            shape = [n * prod(self.mesh[a] for a in axes) for n, axes in zip(shape, said.cuts)]
        return torch.empty(shape, dtype=t.dtype, requires_grad=t.requires_grad)

    def _called_with(self, leaves: Sequence[Any], twins: Sequence[Tensor]) -> Any:
        given = {id(t): w for t, w in zip(self.tensors, twins)}
        return tree_unflatten([given.get(id(x), x) for x in leaves], self.tree)

    def _view(self, rec: Recorder, t: Tensor) -> View:
        with rec.pause():
            return rec.view(t.detach())

    def _backward(self, rec: Recorder, bases: Sequence[Tensor], outs: Sequence[Tensor]) -> dict[str, View]:
        wanted = [(k, b) for k, b in enumerate(bases) if b.requires_grad]
        driven = [(k, o) for k, o in enumerate(outs) if o.requires_grad]
        if not wanted or not driven or not torch.is_grad_enabled():
            return {}
        with rec.pause():
            cotangents = [torch.empty_like(o, requires_grad=False) for _, o in driven]
        for (k, _), c in zip(driven, cotangents):
            rec.bind(c, f"{COTANGENT}{k}")
        grads: Sequence[Any] = torch.autograd.grad(
            [o for _, o in driven], [b for _, b in wanted], cotangents, allow_unused=True
        )
        return {f"{GRAD}{k}": self._view(rec, g) for (k, _), g in zip(wanted, grads) if g is not None}

    # -- judging --------------------------------------------------------------------------------

    def judged(self, reference: Sequence[Any] | None) -> Judgement:
        try:
            run = self.run(self.leaves, whole=False)
        except Exception as e:
            return Judgement(unknown=(f"the call could not be recorded: {_first_line(e)}",))
        try:
            other = run if reference is None else self.run(reference, whole=True)
        except Exception as e:
            text = f"one device would not accept this call: {_first_line(e)}"
            return Judgement((text,), ("",)) if reference is self.leaves else Judgement(unknown=(text,))
        graph = align.align(run.graph, other.graph).graph
        given = {f"{OPERAND}{k}": s.families for k, s in enumerate(self.said)}
        forward = self._inferred(graph, given, {})
        wrong, unknown = self._faults(forward, run.returned)
        results = [forward.annotation(f"{OUT}{k}") for k in range(run.returned)]
        if not wrong and not unknown:
            fault = self._gradients(graph, given, results)
            wrong = [fault] if fault else []
        return Judgement(tuple(wrong), tuple(unknown), tuple(results))

    def _inferred(
        self, graph: Graph, given: Mapping[str, tuple[str, ...]], more: Mapping[str, Annotation]
    ) -> _Read:
        """`more`: annotations of the cotangents."""
        families = {**given, **{k: a.families for k, a in more.items()}}
        lifted = fam.lifted(graph, families, self.mesh)
        known = {f"{OPERAND}{k}": s for k, s in enumerate(self.said)} | dict(more)
        silent = {f"{OPERAND}{k}": axes for k, axes in self.operands.silent}
        inputs = {}
        for node in graph.inputs():
            said, meta = known.get(node.name), node.outs[0]
            if said is not None and meta is not None:
                den = denotation(said, meta.shape, self.mesh)
                gone = silent.get(node.name)
                inputs[node.name] = den.poisoned(gone, "nothing says how it lies") if gone else den
        found = infer(lifted.graph, inputs, fam.build)
        return _Read(found, lifted, self.mesh)

    def _faults(self, read: _Read, returned: int) -> tuple[list[str], list[str]]:
        """What is wrong, and what is unknown, of the values after the call."""
        wrong: list[str] = []
        unknown: list[str] = []
        for border, ref in read.graph.outputs.items():
            if border.startswith(GRAD):
                continue
            problem, den = read.inference.problems.get(ref), read.inference.values[ref]
            if problem is not None:
                e = problem.error
                (unknown if e.kind in (*UNDECIDED, "missing") else wrong).append(e.message)
                continue
            if den.varying:
                unknown.append(den.reason)
                continue
            if den.op not in ("", "sum"):
                wrong.append(f"the result is a pending {den.op}, which no annotation can say")
            left = [a for a, k in den.scale if k and a not in den.partial]
            if left:
                wrong.append(f"the result is off by a factor of {', '.join(left)}")
            if border.startswith(AFTER):
                text = self._changed(read, ref, int(border.removeprefix(AFTER)))
                if text:
                    wrong.append(f"an operand that is changed no longer is what it is said to be: {text}")
        return wrong, unknown

    def _changed(self, read: _Read, ref: Ref, k: int) -> str | None:
        """How an operand that was written to differs from its annotation. One may come to say less: ranks
        that were equal differ now, where no gradient is asked of it. Collectives are meant to change it."""
        if any(n.comm is not None for n in read.graph.nodes):
            return None
        said = self.said[k]
        if not self.tensors[k].requires_grad:
            less = [a for a, x in said.letters.items() if x in "RI" and read.letter(ref, a) not in "=P"]
            said = replace(said, letters={a: x for a, x in said.letters.items() if a not in less})
        return read.differs(ref, said)

    def _gradients(
        self, graph: Graph, given: Mapping[str, tuple[str, ...]], results: Sequence[Annotation | None]
    ) -> str | None:
        """Why no reading of the results gives every operand its gradient; None when one does."""
        driven = [n.name for n in graph.inputs() if n.name.startswith(COTANGENT)]
        if not driven:
            return None
        outs = {n: results[int(n.removeprefix(COTANGENT))] for n in driven}
        free = sorted({a for r in outs.values() if r for a, x in r.letters.items() if x == "="})
        faults = []
        for choice in itertools.product("RI", repeat=len(free)):
            flavour = dict(zip(free, choice))
            duals = {n: _flavoured(r, flavour).gradient() for n, r in outs.items() if r is not None}
            read = self._inferred(graph, given, duals)
            text = self._gradient_fault(read)
            if text is None:
                return None
            faults.append(text)
        return faults[0]

    def _gradient_fault(self, read: _Read) -> str | None:
        for border, ref in read.graph.outputs.items():
            if not border.startswith(GRAD) or ref in read.inference.problems:
                continue
            k = int(border.removeprefix(GRAD))
            text = read.differs(ref, self.said[k].gradient())
            if text:
                return f"gradient of operand {k}: {text}"
        return None


@dataclass(frozen=True)
class _Read:
    inference: Inference
    lifted: fam.Lifted
    mesh: Mapping[str, int]

    @property
    def graph(self) -> Graph:
        return self.lifted.graph

    def letter(self, ref: Ref, axis: str) -> str:
        """R or I as "=", P, V, a cut dim as its number, "?" when nothing is known."""
        den, families = self.inference.values[ref], self.lifted.of(ref)
        if axis in families:
            return "V"
        if axis in den.varying:
            return "?"
        if axis in den.partial:
            return "P"
        dims = [d for d in range(den.ndim) if axis in den.axes_of(d)]
        if dims:
            return str(dims[0] - len(families))
        return "V" if axis in den.layout.axes else "="

    def annotation(self, border: str) -> Annotation | None:
        ref = self.graph.outputs.get(border)
        if ref is None:
            return None
        den, families = self.inference.values[ref], self.lifted.of(ref)
        letters = {a: self.letter(ref, a) for a in self.mesh}
        cuts = tuple(
            tuple(a for a in den.axes_of(d) if letters[a].isdecimal()) for d in range(len(families), den.ndim)
        )
        plain = {a: "V" if x.isdecimal() else x for a, x in letters.items()}
        return Annotation(plain, cuts if any(cuts) else None)

    def differs(self, ref: Ref, said: Annotation) -> str | None:
        """How a value differs from what is said of it; None when it does not."""
        den, families = self.inference.values[ref], self.lifted.of(ref)
        if den.is_zero:
            return None
        cut = {a: d for d, axes in enumerate(said.cuts or ()) for a in axes}
        loose = den.layout.open_dims
        for axis, x in said.letters.items():
            seen = self.letter(ref, axis)
            if seen == "?":
                continue
            if x == "P":
                fits = seen in ("P", "V") and den.op in ("", "sum")
                text = "it is complete on every rank, and would be summed again"
            elif x in ("R", "I"):
                fits = seen == "="
                text = f"each rank has its own {'term of a sum' if seen == 'P' else 'value'}"
            elif axis in cut:
                fits = seen == str(cut[axis]) or (seen == "=" and cut[axis] + len(families) in loose)
                text = f"it is {_words(seen)}, not cut along dim {cut[axis]}"
            else:
                fits = seen != "P"
                text = "it is a pending sum"
            if not fits:
                return f"over {axis}, {text}"
        return None


# -- parts --------------------------------------------------------------------------------------


def denotation(said: Annotation, shape: Sequence[int], mesh: Mapping[str, int]) -> Denotation:
    """What an annotation says of a tensor of this local shape; families as leading dims."""
    families = tuple(a for a in mesh if a in said.families)
    plain = replace(said, letters={a: x for a, x in said.letters.items() if a not in families})
    t = plain.type(shape, mesh)
    dims = (*(Dim(mesh[a], (a,)) for a in families), *(t.dims or ()))
    try:
        return Denotation.from_type(Type(dims, None, t.partial), [int(d.size) for d in dims], mesh)
    except RuleError as e:
        return Denotation.replicate(shape).poisoned(frozenset(mesh), e.message)


def local_shape(t: Tensor) -> tuple[int, ...]:
    """The shape on the first rank, also of a tensor that stands for all ranks."""
    parts = getattr(t, "_local_tensors", None)
    return tuple(map(int, (next(iter(parts.values())) if parts else t).shape))


def _flavoured(result: Annotation, flavour: Mapping[str, str]) -> Annotation:
    return replace(result, letters={a: flavour[a] if x == "=" else x for a, x in result.letters.items()})


def _words(letter: str) -> str:
    return {"=": "the same on every rank", "P": "a pending sum", "V": "one value per rank"}.get(
        letter, f"cut along dim {letter}"
    )


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]


@contextmanager
def _alone() -> Iterator[None]:
    """Without the modes that are active around the program."""
    with _disable_current_modes():
        yield
