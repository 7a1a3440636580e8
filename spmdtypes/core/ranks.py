"""Numbers known in closed form: how an integer or boolean depends on the rank and on the position.

A number is a linear form over *atoms*: `("r", axis)` the rank's coordinate, `("i", d)` the position
along dim (or index variable) `d` of the value, `("u", key, dims)` the element of an integer tensor
that all ranks agree on, read along `dims`. A truth value is a conjunction of `form >= 0`, or the
negation of one. A `Value` pairs the local form with the form of the reference program; the value is
right under a layout when the two agree once reference positions are written in rank and local
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Atom = tuple[Any, ...]
Number = Any  # int, float or Fraction


@dataclass(frozen=True, slots=True)
class Lin:
    """const + sum(coefficient * atom)"""

    const: Number = 0
    terms: tuple[tuple[Atom, Number], ...] = ()

    @classmethod
    def of(cls, const: Number, terms: Mapping[Atom, Number]) -> Lin:
        return cls(const, tuple(sorted(((a, c) for a, c in terms.items() if c != 0), key=_order)))

    def plus(self, other: Lin, times: Number = 1) -> Lin:
        d = dict(self.terms)
        for a, c in other.terms:
            d[a] = d.get(a, 0) + times * c
        return Lin.of(self.const + times * other.const, d)

    def shift(self, by: Number) -> Lin:
        return Lin(self.const + by, self.terms)

    def times(self, k: Number) -> Lin:
        return Lin.of(self.const * k, {a: c * k for a, c in self.terms})

    def coefficient(self, atom: Atom) -> Number:
        return next((c for a, c in self.terms if a == atom), 0)

    def substitute(self, atom: Atom, form: Lin) -> Lin:
        c = self.coefficient(atom)
        return self if c == 0 else Lin(self.const, tuple(t for t in self.terms if t[0] != atom)).plus(form, c)

    def mapped(self, rename: Callable[[Atom], Atom | None]) -> Lin | None:
        """Atoms renamed; None when an atom has no new name."""
        out: dict[Atom, Number] = {}
        for a, c in self.terms:
            b = rename(a)
            if b is None:
                return None
            out[b] = out.get(b, 0) + c
        return Lin.of(self.const, out)

    @property
    def is_const(self) -> bool:
        return not self.terms

    @property
    def ranks(self) -> dict[str, Number]:
        return {a[1]: c for a, c in self.terms if a[0] == "r"}


def _order(term: tuple[Atom, Number]) -> tuple[str, str]:
    return term[0][0], repr(term[0])


@dataclass(frozen=True, slots=True)
class Truth:
    """All of `conj` are >= 0; with `neg`: not all of them."""

    conj: frozenset[Lin]
    neg: bool = False

    def mapped(self, rename: Callable[[Atom], Atom | None]) -> Truth | None:
        out = [x.mapped(rename) for x in self.conj]
        return (
            None
            if any(x is None for x in out)
            else Truth(frozenset(x for x in out if x is not None), self.neg)
        )

    def substitute(self, atom: Atom, form: Lin) -> Truth:
        return Truth(frozenset(x.substitute(atom, form) for x in self.conj), self.neg)

    @property
    def ranks(self) -> dict[str, Number]:
        return {a: c for x in self.conj for a, c in x.ranks.items()}


Form = Lin | Truth


@dataclass(frozen=True, slots=True)
class Value:
    """What every element is, on the rank and in the reference program."""

    local: Form
    ref: Form

    def mapped(self, rename: Callable[[Atom], Atom | None]) -> Value | None:
        a, b = self.local.mapped(rename), self.ref.mapped(rename)
        return None if a is None or b is None else Value(a, b)

    @property
    def number(self) -> Number | None:
        """The constant both sides equal, if that is what this is."""
        if isinstance(self.local, Lin) and self.local.is_const and self.local == self.ref:
            return self.local.const
        return None

    @property
    def keys(self) -> tuple[Any, ...]:
        """Identities of the integer tensors it speaks of."""
        return tuple(dict.fromkeys(a[1] for f in (self.local, self.ref) for a in atoms(f) if a[0] == "u"))


def constant(local: Number, ref: Number | None = None) -> Value:
    return Value(Lin(local), Lin(local if ref is None else ref))


def tensor_atom(key: Any, ndim: int) -> Value:
    """An integer tensor the ranks agree on."""
    x = Lin(0, ((("u", key, tuple(range(ndim))), 1),))
    return Value(x, x)


def atoms(f: Form) -> list[Atom]:
    parts = [f] if isinstance(f, Lin) else sorted(f.conj, key=repr)
    return list(dict.fromkeys(a for x in parts for a, _ in x.terms))


def dims_of(f: Form) -> frozenset[Any]:
    """Dims (or variables) the form depends on."""
    out: set[Any] = set()
    for a in atoms(f):
        if a[0] == "i":
            out.add(a[1])
        elif a[0] == "u":
            out.update(a[2])
    return frozenset(out)


def renamer(names: Mapping[Any, Any]) -> Callable[[Atom], Atom | None]:
    """Renames the dims inside atoms; an atom over an unnamed dim has no name."""

    def rename(a: Atom) -> Atom | None:
        if a[0] == "i":
            return ("i", names[a[1]]) if a[1] in names else None
        if a[0] == "u":
            return ("u", a[1], tuple(names[d] for d in a[2])) if all(d in names for d in a[2]) else None
        return a

    return rename


def rekeyed(names: Mapping[Any, Any]) -> Callable[[Atom], Atom | None]:
    """Renames the identities of integer tensors."""

    def key(k: Any) -> Any:
        if k in names:
            return names[k]
        if isinstance(k, tuple) and k and k[0] in ("reshaped", "squeezed"):
            return (k[0], key(k[1]), *k[2:])
        return k

    return lambda a: ("u", key(a[1]), a[2]) if a[0] == "u" else a


# -- functions of forms -------------------------------------------------------------------------


def negate(b: Truth) -> Truth:
    if len(b.conj) == 1 and not b.neg:
        (x,) = b.conj
        return Truth(frozenset([x.times(-1).shift(-1)]))
    return Truth(b.conj, not b.neg)


def both(a: Truth, b: Truth) -> Truth | None:
    return None if a.neg or b.neg else Truth(a.conj | b.conj)


def _compare(name: str, x: Lin, y: Lin) -> Truth | None:
    """Of integers: strict bounds are written as closed ones."""
    d = x.plus(y, -1)
    match name:
        case "ge":
            return Truth(frozenset([d]))
        case "le":
            return Truth(frozenset([d.times(-1)]))
        case "gt":
            return Truth(frozenset([d.shift(-1)]))
        case "lt":
            return Truth(frozenset([d.times(-1).shift(-1)]))
        case "eq":
            return Truth(frozenset([d, d.times(-1)]))
        case "ne":
            return negate(Truth(frozenset([d, d.times(-1)])))
    return None


def apply(name: str, args: Sequence[Form]) -> Form | None:
    """The form of a scalar function of forms; None when it has none."""
    if name in ("id", "trunc", "floor", "round", "float", "int") and len(args) == 1:
        return args[0]
    if len(args) == 1 and name == "neg" and isinstance(args[0], Lin):
        return args[0].times(-1)
    if (
        len(args) == 1
        and name in ("not", "logical_not", "bitwise_not", "bitnot")
        and isinstance(args[0], Truth)
    ):
        return negate(args[0])
    if len(args) != 2:
        return None
    x, y = args
    if isinstance(x, Lin) and isinstance(y, Lin):
        return _arithmetic(name, x, y)
    return _logic(_PLAIN.get(name, name), x, y)


_PLAIN = {"bitand": "and", "bitor": "or", "bitwise_and": "and", "bitwise_or": "or"} | {
    f"logical_{n}": n for n in ("and", "or")
}


def _arithmetic(name: str, x: Lin, y: Lin) -> Form | None:
    match name:
        case "add":
            return x.plus(y)
        case "sub":
            return x.plus(y, -1)
        case "mul" if x.is_const or y.is_const:
            return y.times(x.const) if x.is_const else x.times(y.const)
        case "div" if y.is_const and y.const != 0 and (x.is_const or y.const == 1):
            return x if y.const == 1 else Lin(x.const / y.const)
    return _compare(name, x, y)


def _logic(name: str, x: Form, y: Form) -> Form | None:
    zero, one = Lin(0), Lin(1)
    if isinstance(x, Truth) and isinstance(y, Truth):
        if name in ("and", "mul"):
            return both(x, y)
        if name == "or" and (c := both(negate(x), negate(y))) is not None:
            return negate(c)
    elif isinstance(y, Truth):
        if name == "mul" and x == one:
            return y
        if name == "sub" and x == one:
            return negate(y)
    elif isinstance(x, Truth):
        if (name in ("ne", "gt") and y == zero) or (name in ("mul", "eq") and y == one):
            return x
        if name == "eq" and y == zero:
            return negate(x)
    return None


def clamp_guard(name: str, args: Sequence[Form]) -> tuple[Form, Truth] | None:
    """max/min/clamp/mod of a form: (the form it equals, where it equals it)."""
    match name, args:
        case (("max" | "clamp_min"), [Lin() as x, Lin() as lo]) if lo.is_const:
            return x, Truth(frozenset([x.plus(lo, -1)]))
        case (("min" | "clamp_max"), [Lin() as x, Lin() as hi]) if hi.is_const:
            return x, Truth(frozenset([hi.plus(x, -1)]))
        case "mod", [Lin() as x, Lin() as n] if n.is_const and n.const > 0:
            return x, Truth(frozenset([x, x.times(-1).shift(n.const - 1)]))
        case "clamp", [Lin() as x, Lin() as lo, Lin() as hi] if lo.is_const and hi.is_const:
            return x, Truth(frozenset([x.plus(lo, -1), hi.plus(x, -1)]))
    return None


def implies(a: Truth, b: Truth, extents: Mapping[Any, int]) -> bool:
    """Every element where `a` holds has `b`. `extents`: local size of each dim (bounds of positions), and
    of each axis, as ("r", axis)."""
    if a == b:
        return True
    if a.neg or b.neg:
        return False
    zeros = [x for x in a.conj if x.times(-1) in a.conj]
    return all(_follows(x, a, zeros, extents) for x in b.conj)


def _follows(x: Lin, a: Truth, zeros: Sequence[Lin], extents: Mapping[Any, int]) -> bool:
    candidates = [x.plus(y, -1) for y in a.conj] + [x] + [x.plus(z, k) for z in zeros for k in (1, -1)]
    return any(_lowest(c, extents) >= 0 for c in candidates)


def _lowest(x: Lin, extents: Mapping[Any, int]) -> float:
    low: float = x.const
    for a, c in x.terms:
        key = a if a[0] == "r" else a[1]
        if a[0] not in "ir" or key not in extents:
            return float("-inf")
        if c < 0:
            low += c * (extents[key] - 1)
    return low


@dataclass(frozen=True, slots=True)
class Block:
    """`offset + u` lies in [r*size, (r+1)*size) where r counts the ranks of `axes`, outermost first."""

    axes: tuple[str, ...]
    size: int
    count: int


def steps_of_blocks(steps: Mapping[str, Number], size: Number, mesh: Mapping[str, int]) -> Block | None:
    """Steps per coordinate that tile consecutive blocks of `size`."""
    order, step = [], size
    left = dict(steps)
    while left:
        a = next((a for a, s in left.items() if s == step), None)
        if a is None:
            return None
        order.append(a)
        step = step * mesh[a]
        del left[a]
    return Block(tuple(reversed(order)), int(size), int(step // size)) if order and size > 0 else None


def partition(local: Truth, ref: Truth, mesh: Mapping[str, int]) -> Block | None:
    """Axes over which exactly one rank has `local` wherever the reference has `ref`, and none elsewhere."""
    if local.neg or len(local.conj) != 2:
        return None
    a, b = sorted(local.conj, key=repr)
    for lo, hi in ((a, b), (b, a)):
        width = lo.plus(hi)
        if not width.is_const or width.const < 0:
            continue
        block = steps_of_blocks({x: -c for x, c in lo.ranks.items()}, width.const + 1, mesh)
        if block is None:
            continue
        base = Lin(lo.const, tuple(t for t in lo.terms if t[0][0] != "r"))
        whole = Truth(frozenset([base, base.times(-1).shift(block.size * block.count - 1)]))
        if ref == whole or (not ref.neg and all(x.is_const and x.const >= 0 for x in ref.conj)):
            return block
    return None
