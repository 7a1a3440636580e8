"""Scalar functions and the algebraic laws the engine may use.

`SCALARS` defines each function once, as text for sympy. `tools/derive_laws.py` derives from it the
stored table `laws.json`; at run time only the table is read. A function that is not in the table is
opaque: it has no laws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.resources import files

# name: (arguments, expression). An argument named c or d is a truth value (0 or 1).
SCALARS: dict[str, tuple[str, str]] = {
    "id": ("x", "x"),
    "neg": ("x", "-x"),
    "abs": ("x", "Abs(x)"),
    "add": ("x y", "x + y"),
    "sub": ("x y", "x - y"),
    "mul": ("x y", "x * y"),
    "div": ("x y", "x / y"),
    "floordiv": ("x y", "floor(x / y)"),
    "mod": ("x y", "x - y*floor(x / y)"),
    "recip": ("x", "1 / x"),
    "sq": ("x", "x**2"),
    "cube": ("x", "x**3"),
    "sqrt": ("x", "sqrt(x)"),
    "rsqrt": ("x", "1 / sqrt(x)"),
    "exp": ("x", "exp(x)"),
    "exp2": ("x", "2**x"),
    "expm1": ("x", "exp(x) - 1"),
    "log": ("x", "log(x)"),
    "log2": ("x", "log(x) / log(2)"),
    "log10": ("x", "log(x) / log(10)"),
    "log1p": ("x", "log(1 + x)"),
    "sigmoid": ("x", "1 / (1 + exp(-x))"),
    "tanh": ("x", "tanh(x)"),
    "relu": ("x", "Max(x, 0)"),
    "relu6": ("x", "Min(Max(x, 0), 6)"),
    "silu": ("x", "x / (1 + exp(-x))"),
    "gelu": ("x", "x*(1 + erf(x / sqrt(2))) / 2"),
    "gelu_tanh": ("x", "x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x**3))) / 2"),
    "softplus": ("x", "log(1 + exp(x))"),
    "sin": ("x", "sin(x)"),
    "cos": ("x", "cos(x)"),
    "tan": ("x", "tan(x)"),
    "atan": ("x", "atan(x)"),
    "atan2": ("x y", "atan2(x, y)"),
    "sinh": ("x", "sinh(x)"),
    "cosh": ("x", "cosh(x)"),
    "asinh": ("x", "asinh(x)"),
    "logaddexp": ("x y", "log(exp(x) + exp(y))"),
    "logaddexp2": ("x y", "log(2**x + 2**y) / log(2)"),
    "erf": ("x", "erf(x)"),
    "erfc": ("x", "1 - erf(x)"),
    "sign": ("x", "sign(x)"),
    "sgn": ("x", "sign(x)"),
    "floor": ("x", "floor(x)"),
    "ceil": ("x", "ceiling(x)"),
    "trunc": ("x", "sign(x)*floor(Abs(x))"),
    "round": ("x", "floor(x + 1/2)"),
    "frac": ("x", "x - sign(x)*floor(Abs(x))"),
    "step": ("x", "Heaviside(x, 0)"),
    "max": ("x y", "Max(x, y)"),
    "min": ("x y", "Min(x, y)"),
    "clamp": ("x y z", "Min(Max(x, y), z)"),
    "hypot": ("x y", "sqrt(x**2 + y**2)"),
    "where": ("c x y", "c*x + (1 - c)*y"),
    "eq": ("x y", "KroneckerDelta(x, y)"),
    "ne": ("x y", "1 - KroneckerDelta(x, y)"),
    "ge": ("x y", "Heaviside(x - y, 1)"),
    "gt": ("x y", "Heaviside(x - y, 0)"),
    "le": ("x y", "Heaviside(y - x, 1)"),
    "lt": ("x y", "Heaviside(y - x, 0)"),
    "not": ("c", "1 - c"),
    "and": ("c d", "c*d"),
    "or": ("c d", "c + d - c*d"),
    "xor": ("c d", "c + d - 2*c*d"),
    "pow": ("x s", "x**s"),
    # real-linear maps of complex numbers, written on reals
    "conj": ("x", "x"),
    "real": ("x", "2*x"),
    "imag": ("x", "2*x"),
    "complex": ("x y", "x + 2*y"),
}
TRUTH = {"c", "d"}
OPS = ("sum", "prod", "max", "min")

Args = frozenset[int]
Power = int | Fraction


@dataclass(frozen=True)
class Laws:
    """What holds of a function when all other arguments are the same on every rank.

    `degree[S]`: f scales by s**degree when the arguments S all scale by s > 0.
    `hom[S, op]`: f of op-reductions in the arguments S is the given reduction of f.
    `zero[k]`: f is 0 where argument k is. `nonneg`: f is never negative.
    """

    degree: Mapping[Args, Power] = field(default_factory=dict)
    hom: Mapping[tuple[Args, str], str] = field(default_factory=dict)
    zero: Args = frozenset()
    nonneg: bool = False


OPAQUE = Laws()


@cache
def _table() -> dict[str, Laws]:
    data = json.loads(files("spmdtypes.core").joinpath("laws.json").read_text())
    return {name: _load(row) for name, row in data.items()}


def _load(row: dict[str, list[list[object]]]) -> Laws:
    degree, hom = {}, {}
    for args, power, _ in row["degree"]:
        assert isinstance(args, list)
        p = Fraction(str(power))
        degree[frozenset(args)] = int(p) if p.denominator == 1 else p
    for args, op, result, _ in row["hom"]:
        assert isinstance(args, list)
        hom[frozenset(args), str(op)] = str(result)
    zero = frozenset(k for (k,) in row["zero"] if isinstance(k, int))
    return Laws(degree, hom, zero, bool(row["nonneg"]))


def laws(name: str) -> Laws:
    return _table().get(name, OPAQUE)


def choice(n: int) -> Laws:
    """The function that takes each element from one of `n` arguments, the same way on every rank."""
    every = frozenset(range(n))
    return Laws({every: 1}, {(every, op): op for op in OPS})


def power_laws(exponent: float) -> Laws:
    """x ** exponent for a known exponent."""
    names = {1: "id", 2: "sq", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "recip"}
    if exponent in names:
        one = laws(names[exponent])
        return Laws(one.degree, one.hom, one.zero, one.nonneg)
    degree = Fraction(exponent).limit_denominator(64)
    even = exponent % 2 == 0
    return Laws({frozenset([0]): degree}, {}, frozenset([0]) if exponent > 0 else frozenset(), even)
