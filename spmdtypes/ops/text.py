"""Descriptions written as text: "out[i,j] = sum_k a[i,k] * b[k,j]".

`sum_k`, `mean_k`, `max_k`, `min_k`, `prod_k` (several: `sum_k_l`) reach to the end of their term.
`...` stands for leading dims. A bare index is its position, `size(k)` its extent, `exp(x)` and so
on a scalar function; a function nobody knows is taken as opaque. Outputs are separated by ";".
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdtypes.core.spec import ONE, Const, Expr, Iota, Operand, OpSpec, Out, Size, Var, fn, mean, total
from spmdtypes.ops.parts import names

_REDUCTIONS = ("sum", "mean", "max", "min", "prod")
_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_POWERS = {2: "sq", 3: "cube", 0.5: "sqrt", -1: "recip", -0.5: "rsqrt"}


@dataclass(frozen=True)
class Text:
    """Parsed outputs and the operands' names in order of appearance."""

    outputs: tuple[tuple[ast.Subscript | ast.Name, ast.expr], ...]
    operands: tuple[str, ...]

    def build(self, arguments: dict[str, Any]) -> OpSpec:
        """The description for these arguments: operands and numbers by name."""
        return OpSpec.of(*(_Reader(arguments).output(target, value) for target, value in self.outputs))


def parse(text: str) -> Text:
    """Raises ValueError, naming the place, for text that is no description."""
    outputs = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        try:
            tree = ast.parse(_bracketed(part)).body
        except (SyntaxError, tokenize.TokenError) as error:
            raise ValueError(f"cannot read {part!r}: {error}") from None
        if len(tree) != 1 or not isinstance(tree[0], ast.Assign) or len(tree[0].targets) != 1:
            raise ValueError(f"{part!r} is not of the form out[i,j] = ...")
        target = tree[0].targets[0]
        if not isinstance(target, (ast.Subscript, ast.Name)):
            raise ValueError(f"{part!r}: the left side must be out[...] or out")
        outputs.append((target, tree[0].value))
    if not outputs:
        raise ValueError("empty description")
    read = [n for _, v in outputs for n in ast.walk(v) if isinstance(n, ast.Subscript)]
    order = [n.value.id for n in read if isinstance(n.value, ast.Name)]
    return Text(tuple(outputs), tuple(dict.fromkeys(order)))


def _bracketed(text: str) -> str:
    """`sum_k term` -> `sum_k(term)`."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.string.strip()]
    out: list[str] = []
    open_at: list[int] = []  # bracket depths at which a reduction waits for the end of its term
    depth = 0
    for k, t in enumerate(tokens):
        term_ends = t.string in (")", "]", ",") or (
            t.string in ("+", "-")
            and k
            and tokens[k - 1].string not in "=+-*/,(["
            and not _is_reduction(tokens[k - 1].string)
        )
        while open_at and open_at[-1] == depth and term_ends:
            out.append(")")
            open_at.pop()
        depth += (t.string in ("(", "[")) - (t.string in (")", "]"))
        out.append(t.string)
        if _is_reduction(t.string):
            out.append("(")
            open_at.append(depth)
    return " ".join(out + [")"] * len(open_at))


def _is_reduction(name: str) -> bool:
    head, _, rest = name.partition("_")
    return head in _REDUCTIONS and bool(rest)


class _Reader:
    """Turns one parsed text into expressions, for the ranks of given operands."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def output(self, target: ast.Subscript | ast.Name, value: ast.expr) -> Out:
        subscripts = _subscripts(target) if isinstance(target, ast.Subscript) else []
        return Out(tuple(self.dims(subscripts, None)), self.expr(value))

    def dims(self, subscripts: Sequence[ast.expr], ndim: int | None) -> list[Any]:
        dims: list[Any] = []
        for s in subscripts:
            if isinstance(s, ast.Constant) and s.value is ...:
                width = self.leading if ndim is None else ndim - (len(subscripts) - 1)
                dims += names(self.leading, "lead")[self.leading - width :] if width else []
            elif isinstance(s, ast.Constant) and s.value == 1:
                dims.append(ONE)
            elif isinstance(s, ast.Name):
                dims.append(Var(s.id))
            else:
                dims.append(self.expr(s))
        if ndim is not None and len(dims) != ndim:
            raise ValueError(f"{len(dims)} subscripts for a tensor with {ndim} dims")
        return dims

    @property
    def leading(self) -> int:
        """How many dims `...` stands for: what the operand with most dims has left."""
        return max((n for n in self.arguments.get("...", ())), default=0)

    def expr(self, e: ast.expr) -> Expr:
        match e:
            case ast.Constant(value=bool() | int() | float()):
                return Const(e.value)
            case ast.Name(id=name):
                given = self.arguments.get(name)
                if isinstance(given, Operand):
                    return given[()]
                return Iota(Var(name)) if given is None else Const(given)
            case ast.Subscript(value=ast.Name(id=name)):
                x = self.arguments.get(name)
                if not isinstance(x, Operand):
                    raise ValueError(f"{name} is not a tensor argument")
                return x[tuple(self.dims(_subscripts(e), x.ndim))]
            case ast.UnaryOp(op=ast.USub(), operand=body):
                return -self.expr(body)
            case ast.BinOp(op=ast.Pow(), left=base, right=ast.Constant(value=int() | float() as power)) if (
                power in _POWERS
            ):
                return fn(_POWERS[power], self.expr(base))
            case ast.BinOp(op=ast.Pow(), left=base, right=power_):
                return fn("pow", self.expr(base), self.expr(power_))
            case ast.BinOp(op=operator, left=a, right=b) if type(operator) in _BINARY:
                return fn(_BINARY[type(operator)], self.expr(a), self.expr(b))
            case ast.Compare(left=a, ops=[operator], comparators=[b]) if type(operator) in _COMPARE:
                return fn(_COMPARE[type(operator)], self.expr(a), self.expr(b))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(name, args)
        raise ValueError(f"cannot read {ast.unparse(e)!r}")

    def call(self, name: str, args: list[ast.expr]) -> Expr:
        if name == "size" and len(args) == 1 and isinstance(args[0], ast.Name):
            return Size(Var(args[0].id))
        values = [self.expr(a) for a in args]
        if _is_reduction(name):
            how, *over = name.split("_")
            vars = [Var(v) for v in over if v]
            return mean(vars, values[0]) if how == "mean" else total(how, vars, values[0])
        return fn(name, *values)


def _subscripts(e: ast.Subscript) -> list[ast.expr]:
    return list(e.slice.elts) if isinstance(e.slice, ast.Tuple) else [e.slice]


def with_leading(text: Text, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with the number of dims each `...` stands for under the key "..."."""
    found = []
    for _, value in text.outputs:
        for node in ast.walk(value):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                x, subs = arguments.get(node.value.id), _subscripts(node)
                if isinstance(x, Operand) and any(
                    isinstance(s, ast.Constant) and s.value is ... for s in subs
                ):
                    found.append(x.ndim - len(subs) + 1)
    return arguments | {"...": found}
