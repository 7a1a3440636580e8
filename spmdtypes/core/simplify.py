"""Identities that show what an expression says before it is evaluated.

sum_k [k == i] * f(k)           = f(i)
where(c, c * x, y)              = where(c, x, y)
where(max_k h, sum_k h * x, 0)  = sum_k h * x
where(a, where(b, x, 0), 0)     = where(a and b, x, 0)
where(c, y + d, y)              = y + c * d
where(f == i, x[f], y)          = where(f == i, x[i], y)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmdtypes.core.bind import as_variable
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.spec import Const, Expr, Fn, Iota, Load, Rand, Red, Size, Var, Window


def collapsed(e: Expr, operands: Sequence[Denotation]) -> Expr:
    """`e` with every reduction over an index that is just a position carried out."""
    memo: dict[int, Expr] = {}

    def walk(x: Expr) -> Expr:
        if id(x) not in memo:
            new = _collapse(_rebuilt(x, walk), operands)
            memo[id(x)] = _chosen(new, operands) if isinstance(new, Fn) and new.name == "where" else new
        return memo[id(x)]

    return walk(e)


def _collapse(e: Expr, operands: Sequence[Denotation]) -> Expr:
    if isinstance(e, Load):
        at = tuple(as_variable(s, operands) or s for s in e.index)
        return e if all(a is b for a, b in zip(at, e.index)) else Load(e.operand, at)
    if not isinstance(e, Red) or e.op not in ("sum", "max"):
        return e
    factors = _factors(e.body)
    for n, f in enumerate(factors):
        pair = _delta(f, e.vars, operands)
        if pair is None or len(factors) == 1:
            continue
        k, i = pair
        rest = [_substitute(g, k, i) for m, g in enumerate(factors) if m != n]
        body = rest[0]
        for g in rest[1:]:
            body = Fn("mul", (body, g))
        left = tuple(v for v in e.vars if v != k)
        return _collapse(Red(e.op, left, body), operands) if left else body
    return e


def _chosen(e: Fn, operands: Sequence[Denotation]) -> Expr:
    """The identities of `where`."""
    c, x, y = e.args
    if not _is_zero(y, operands):
        inside = _without_factor(x, c)
        if inside is not None:
            return _chosen(Fn("where", (c, inside, y)), operands)
        change = _change(_at_hit(x, c), y)
        return e if change is None else Fn(change[0], (y, Fn("mul", (c, change[1]))))
    if isinstance(c, Red) and isinstance(x, Red) and (c.op, x.op) == ("max", "sum") and c.vars == x.vars:
        return x if _has_factors(x.body, c.body) else e
    if _has_factors(x, c):
        return x
    if isinstance(x, Fn) and x.name == "where" and _is_zero(x.args[2], operands):
        return Fn("where", (Fn("and", (c, x.args[0])), x.args[1], y))
    return e


def _has_factors(e: Expr, c: Expr) -> bool:
    """`e` is a product that has every factor of the truth value `c`."""
    have = _factors(e)
    return len(have) > 1 and all(any(same(f, g) for f in have) for g in _factors(c))


def _at_hit(x: Expr, c: Expr) -> Expr:
    """`x` where `c` holds: a subscript that `c` says to be a position is that position."""
    known = [
        (f.args[k], f.args[1 - k])
        for f in _factors(c)
        if isinstance(f, Fn) and f.name == "eq" and len(f.args) == 2
        for k in (0, 1)
        if isinstance(f.args[1 - k], Iota)
    ]

    def walk(e: Expr) -> Expr:
        e = _rebuilt(e, walk)
        if not isinstance(e, Load):
            return e
        at = tuple(next((i.var for f, i in known if isinstance(i, Iota) and same(f, s)), s) for s in e.index)
        return e if all(a is b for a, b in zip(at, e.index)) else Load(e.operand, at)

    return walk(x) if known else x


def _change(x: Expr, y: Expr) -> tuple[str, Expr] | None:
    """("add" or "sub", d) where x is y + d or y - d."""
    if isinstance(x, Fn) and x.name in ("add", "sub") and len(x.args) == 2:
        if same(x.args[0], y):
            return x.name, x.args[1]
        if x.name == "add" and same(x.args[1], y):
            return "add", x.args[0]
    return None


def _without_factor(x: Expr, c: Expr) -> Expr | None:
    """y where x is c * y."""
    if isinstance(x, Fn) and x.name == "mul":
        for a, b in (x.args, x.args[::-1]):
            if same(a, c):
                return b
    return None


def _is_zero(e: Expr, operands: Sequence[Denotation]) -> bool:
    if isinstance(e, Const):
        return isinstance(e.value, (int, float)) and e.value == 0
    return isinstance(e, Load) and e.operand < len(operands) and operands[e.operand].is_zero


def same(a: object, b: object) -> bool:
    """Equal in writing."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    match a, b:
        case Load(), Load():
            return a.operand == b.operand and _all_same(a.index, b.index)
        case Fn(), Fn():
            return a.name == b.name and _all_same(a.args, b.args)
        case Red(), Red():
            return (a.op, a.vars) == (b.op, b.vars) and same(a.body, b.body)
        case Iota(var), Iota(other):
            return var == other
        case Size(var), Size(other):
            return var == other
        case Const(), Const():
            return type(a.value) is type(b.value) and a.value == b.value
        case Rand(), Rand():
            return False
    return a == b


def _all_same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def _factors(e: Expr) -> list[Expr]:
    if isinstance(e, Fn) and e.name in ("mul", "and") and len(e.args) == 2:
        return _factors(e.args[0]) + _factors(e.args[1])
    return [e]


def _delta(f: Expr, vars: Sequence[Var], operands: Sequence[Denotation]) -> tuple[Var, Var] | None:
    """(reduced variable, variable it must equal) of a factor [position along k == i]."""
    if not (isinstance(f, Fn) and f.name == "eq" and len(f.args) == 2):
        return None
    for a, b in (f.args, f.args[::-1]):
        k = as_variable(a, operands)
        if k in vars and isinstance(b, Iota) and b.var not in vars and k is not None:
            return k, b.var
    return None


def _substitute(e: Expr, old: Var, new: Var) -> Expr:
    memo: dict[int, Expr] = {}

    def walk(x: Expr) -> Expr:
        if id(x) not in memo:
            memo[id(x)] = _renamed(_rebuilt(x, walk), old, new)
        return memo[id(x)]

    return walk(e)


def _renamed(e: Expr, old: Var, new: Var) -> Expr:
    def sub(s: object) -> object:
        if s == old:
            return new
        return Window(new, s.start, s.length, s.step) if isinstance(s, Window) and s.var == old else s

    match e:
        case Load(operand, index) if any(sub(s) is not s for s in index):
            return Load(operand, tuple(map(sub, index)))
        case Iota(var) if var == old:
            return Iota(new)
        case Size(var) if var == old:
            return Size(new)
        case Rand(vars) if old in vars:
            return Rand(tuple(new if v == old else v for v in vars))
    return e


def _rebuilt(e: Expr, walk: Callable[[Expr], Expr]) -> Expr:
    """The same node over walked children; the node itself when they did not change."""
    match e:
        case Fn(name, args):
            new = tuple(map(walk, args))
            return e if all(a is b for a, b in zip(new, args)) else Fn(name, new)
        case Red(op, vars, body):
            inner = walk(body)
            return e if inner is body else Red(op, vars, inner)
        case Load(operand, index):
            subs: tuple[object, ...] = tuple(walk(s) if isinstance(s, Expr) else s for s in index)
            return e if all(a is b for a, b in zip(subs, index)) else Load(operand, subs)
    return e
