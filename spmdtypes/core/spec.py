"""Index notation: what one ATen op computes, as an expression over index variables.

    a, b = two operands;  i, j, k = axes("i j k")
    OpSpec.of(Out((i, j), total("sum", [k], a[i, k] * b[k, j])))          # mm

From this one description the engine derives how shards and partial sums pass through the op.
Expressions are immutable and shared. Operand subscripts are a `Var`, `ONE` (a dim of global
size 1, broadcast), `At(number)` (one position), `Window(var, start, length, step)` (a slice), or
another expression (an indirect read, as in `embedding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Var:
    name: str


def axes(names: str) -> list[Var]:
    return [Var(n) for n in names.split()]


class _One:
    def __repr__(self) -> str:
        return "ONE"


ONE = _One()


@dataclass(frozen=True, slots=True)
class At:
    """One position along a dim; `where` is an int or a `graph.Lit`."""

    where: Any


@dataclass(frozen=True, slots=True)
class Window:
    """Positions start, start+step, ... of a dim, `length` of them, walked by `var`."""

    var: Var
    start: Any
    length: Any
    step: int = 1


class Expr:
    __slots__ = ()

    def __add__(self, o: Any) -> Expr:
        return fn("add", self, o)

    def __radd__(self, o: Any) -> Expr:
        return fn("add", o, self)

    def __sub__(self, o: Any) -> Expr:
        return fn("sub", self, o)

    def __rsub__(self, o: Any) -> Expr:
        return fn("sub", o, self)

    def __mul__(self, o: Any) -> Expr:
        return fn("mul", self, o)

    def __rmul__(self, o: Any) -> Expr:
        return fn("mul", o, self)

    def __truediv__(self, o: Any) -> Expr:
        return fn("div", self, o)

    def __rtruediv__(self, o: Any) -> Expr:
        return fn("div", o, self)

    def __neg__(self) -> Expr:
        return fn("neg", self)


@dataclass(frozen=True, eq=False, slots=True)
class Load(Expr):
    """operand[index...]"""

    operand: int
    index: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Fn(Expr):
    """A scalar function from `core.scalar`, applied elementwise."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Red(Expr):
    """Reduction "sum", "prod", "max", "min" of `body` over `vars`."""

    op: str
    vars: tuple[Var, ...]
    body: Expr


@dataclass(frozen=True, eq=False, slots=True)
class Size(Expr):
    """The extent of a variable, as a number in the value (a mean's denominator)."""

    var: Var


@dataclass(frozen=True, eq=False, slots=True)
class Iota(Expr):
    """The position along a variable."""

    var: Var


@dataclass(frozen=True, eq=False, slots=True)
class Rand(Expr):
    """A fresh random number per position of `vars`."""

    vars: tuple[Var, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Const(Expr):
    """A literal; may be a `graph.Lit` (then local and reference values differ)."""

    value: Any


def expr(x: Any) -> Expr:
    return x if isinstance(x, Expr) else Const(x)


def fn(name: str, *args: Any) -> Expr:
    return Fn(name, tuple(expr(a) for a in args))


def total(op: str, over: Sequence[Var], body: Any) -> Expr:
    return Red(op, tuple(over), expr(body)) if over else expr(body)


def mean(over: Sequence[Var], body: Any) -> Expr:
    e = total("sum", over, body)
    for v in over:
        e = e / Size(v)
    return e


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument as an op builder sees it. `shape` is local, `ref_shape` in the reference
    program (equal to `shape` when nothing is aligned); `one[d]`: dim d has size 1 in both."""

    position: int
    shape: tuple[int, ...]
    ref_shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def one(self) -> tuple[bool, ...]:
        return tuple(n == m == 1 for n, m in zip(self.shape, self.ref_shape))

    def __getitem__(self, index: Any) -> Expr:
        return Load(self.position, index if isinstance(index, tuple) else (index,))


@dataclass(frozen=True, slots=True)
class Out:
    """One output: its index variables (or `ONE`, or a tuple of variables that together make one dim,
    outermost first) and the value at them."""

    vars: tuple[Any, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Reshape:
    """out = operand with its elements in the same order and another shape (local, reference)."""

    operand: int
    shape: tuple[int, ...]
    ref_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """out = operands joined along `dim`."""

    operands: tuple[int, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class OpSpec:
    """`outs`: per output an `Out`, a layout move (`Reshape`, `Concat`), or None (no tensor).
    `sizes`: local extent (int or Lit) of variables that no operand dim determines.
    `same`: pairs of variables of equal extent. `uses`: operands read for their shape only.
    `assumes`: what must hold of the data for the description to be true, in user terms."""

    outs: tuple[Out | Reshape | Concat | None, ...]
    sizes: dict[Var, Any] = field(default_factory=dict)
    same: tuple[tuple[Var, Var], ...] = ()
    uses: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    assumes: tuple[str, ...] = ()

    @classmethod
    def of(cls, *outs: Out | Reshape | Concat | None, **kw: Any) -> OpSpec:
        return cls(tuple(outs), **kw)
