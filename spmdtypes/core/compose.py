"""Specs read through their operands: an operand's read is replaced by what made the operand.

Some values have a reading only together: `x[i] - d` written back at `i` changes `x` by `-d` there,
though `x[i]` alone is arbitrary on the ranks that do not own position `i`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from spmdtypes.core.spec import ONE, Expr, Fn, Iota, Load, OpSpec, Out, Rand, Red, Size, Var, Window
from spmdtypes.graph import Ref

Made = Callable[[Ref], "tuple[Out, Sequence[Ref]] | None"]
LIMIT = 4


class _Opaque(Exception):
    """This read cannot be replaced."""


def composed(out: Out, refs: Sequence[Ref], made: Made) -> tuple[Out, list[Ref]] | None:
    """`out` over the operands of its operands, and these; None when nothing could be replaced.

    `made(ref)`: the description of an operand worth replacing, over its own operands.
    """
    state = _State(made)
    value = state.over(out.value, dict(enumerate(refs)), {}, LIMIT)
    return (Out(out.vars, value), state.refs) if state.replaced else None


def plain(spec: OpSpec, k: int) -> Out | None:
    """Output `k` when it can be read at subscripts."""
    out = spec.outs[k] if k < len(spec.outs) else None
    simple = isinstance(out, Out) and all(v is ONE or isinstance(v, Var) for v in out.vars)
    return out if simple and not spec.same and not spec.assumes and isinstance(out, Out) else None


class _State:
    def __init__(self, made: Made) -> None:
        self.made = made
        self.refs: list[Ref] = []
        self.fresh = count()
        self.replaced = False

    def operand(self, ref: Ref) -> int:
        if ref not in self.refs:
            self.refs.append(ref)
        return self.refs.index(ref)

    def over(self, e: Expr, refs: dict[int, Ref], at: dict[Var, object], depth: int) -> Expr:
        """`e` with its operands renumbered and its variables put at subscripts `at`."""
        match e:
            case Load(operand, index):
                subs = tuple(self._subscript(s, refs, at, depth) for s in index)
                return self._read(refs[operand], subs, depth)
            case Fn(name, args):
                return Fn(name, tuple(self.over(a, refs, at, depth) for a in args))
            case Red(op, vars, body):
                new = {v: v if depth == LIMIT else Var(f"{v.name}~{next(self.fresh)}") for v in vars}
                return Red(op, tuple(new.values()), self.over(body, refs, at | new, depth))
            case Iota(var):
                s = at.get(var, var)
                return s if isinstance(s, Expr) else Iota(self._var(s))
            case Size(var):
                return Size(self._var(at.get(var, var)))
            case Rand():
                raise _Opaque
        return e

    def _var(self, s: object) -> Var:
        if not isinstance(s, Var):
            raise _Opaque
        return s

    def _subscript(self, s: object, refs: dict[int, Ref], at: dict[Var, object], depth: int) -> object:
        if isinstance(s, Expr):
            return self.over(s, refs, at, depth)
        if isinstance(s, Window):
            return Window(self._var(at.get(s.var, s.var)), s.start, s.length, s.step)
        return at.get(s, s) if isinstance(s, Var) else s

    def _read(self, ref: Ref, subs: tuple[object, ...], depth: int) -> Expr:
        found = self.made(ref) if depth else None
        if found is not None:
            out, operands = found
            try:
                at = {v: s for v, s in zip(out.vars, subs, strict=True) if isinstance(v, Var)}
                if all(s is ONE for v, s in zip(out.vars, subs) if v is ONE):
                    value = self.over(out.value, dict(enumerate(operands)), at, depth - 1)
                    self.replaced = True
                    return value
            except (_Opaque, ValueError):
                pass
        return Load(self.operand(ref), subs)
