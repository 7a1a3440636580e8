"""Derive the laws of the scalar functions with sympy and store them in `spmdtypes/core/laws.json`.

    python tools/derive_laws.py [--check]

For every function, every subset of its arguments and every pair of reductions: a search for a
numeric counterexample first (which ends nearly all candidates), then a proof. A law that survives
sampling but that sympy cannot prove is stored as "sampled".
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import sympy as sp

from spmdtypes.core.scalar import OPS, SCALARS, TRUTH

TABLE = Path(__file__).resolve().parent.parent / "spmdtypes" / "core" / "laws.json"
DEGREES = [sp.Rational(k, 2) for k in (-4, -2, -1, 0, 1, 2, 4, 6)]
COMBINE = {"sum": lambda a, b: a + b, "prod": lambda a, b: a * b, "max": max, "min": min}
SYMBOLIC = {"sum": lambda a, b: a + b, "prod": lambda a, b: a * b, "max": sp.Max, "min": sp.Min}
NUMERIC = {
    "KroneckerDelta": lambda a, b: float(a == b),
    "Heaviside": lambda x, h: h if x == 0 else float(x > 0),
    "sign": lambda x: float((x > 0) - (x < 0)),
    "ceiling": math.ceil,
    "Max": max,
    "Min": min,
    "Abs": abs,
}


class Function:
    """One scalar function, symbolic and numeric."""

    def __init__(self, name: str) -> None:
        names, text = SCALARS[name]
        self.args = names.split()
        self.symbols = [sp.Symbol(a, real=True) for a in self.args]
        self.expr = sp.sympify(text, locals=dict(zip(self.args, self.symbols)))
        self._numeric = sp.lambdify(self.symbols, self.expr, modules=[NUMERIC, "math"])
        self.random = random.Random(name)
        self.whole = name in ("eq", "ne", "ge", "gt", "le", "lt", "floordiv", "mod", "pow")

    def draw(self) -> list[float]:
        return [self._draw(a) for a in self.args]

    def _draw(self, arg: str) -> float:
        r = self.random
        if arg in TRUTH:
            return float(r.random() < 0.5)
        x = r.uniform(-3, 3)
        return float(round(x)) if self.whole and r.random() < 0.5 else x

    def __call__(self, values: list[float]) -> float | None:
        """None outside the domain."""
        try:
            y = self._numeric(*values)
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
        return None if isinstance(y, complex) or math.isnan(y) else float(y)

    def subsets(self) -> list[tuple[int, ...]]:
        every = range(len(self.args))
        return [s for n in range(1, len(self.args) + 1) for s in itertools.combinations(every, n)]

    def truth(self, subset: tuple[int, ...]) -> bool:
        """Some of these arguments are truth values: they have no sums and no scale."""
        return any(self.args[k] in TRUTH for k in subset)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-7 * (1 + abs(a) + abs(b))


def scales(f: Function, subset: tuple[int, ...], degree: Any) -> bool:
    """No counterexample to f(s*x) = s**degree * f(x)."""
    hits = 0
    for _ in range(200):
        v, s = f.draw(), f.random.uniform(0.3, 3)
        a, b = f(v), f([x * s if k in subset else x for k, x in enumerate(v)])
        if a is None or b is None:
            if (a is None) != (b is None):
                return False
            continue
        hits += a != 0
        if not close(b, s ** float(degree) * a):
            return False
    return hits >= 10


def scaling_proof(f: Function, subset: tuple[int, ...], degree: Any) -> str:
    s = sp.Symbol("s", positive=True)
    scaled = f.expr.subs({f.symbols[k]: s * f.symbols[k] for k in subset}, simultaneous=True)
    return "proved" if sp.simplify(sp.expand(scaled - s**degree * f.expr)) == 0 else "sampled"


def commutes(f: Function, subset: tuple[int, ...], inside: str, outside: str) -> bool:
    """No counterexample to f(inside(x, x')) = outside(f(x), f(x')), the domain included."""
    hits = 0
    for _ in range(400):
        v, w = f.draw(), f.draw()
        w = [w[k] if k in subset else x for k, x in enumerate(v)]
        m = [COMBINE[inside](a, b) if k in subset else a for k, (a, b) in enumerate(zip(v, w))]
        a, b, c = f(v), f(w), f(m)
        if a is None or b is None or c is None:
            if c is not None or (a is not None and b is not None):
                return False
            continue
        hits += 1
        if not close(c, COMBINE[outside](a, b)):
            return False
    return hits >= 20


def homomorphism_proof(f: Function, subset: tuple[int, ...], inside: str, outside: str) -> str:
    other = [sp.Symbol(f.args[k] + "_", real=True) if k in subset else s for k, s in enumerate(f.symbols)]
    if inside in ("sum", "prod") and outside in ("sum", "prod"):
        merged = f.expr.subs(
            {f.symbols[k]: SYMBOLIC[inside](f.symbols[k], other[k]) for k in subset}, simultaneous=True
        )
        twin = f.expr.subs({f.symbols[k]: other[k] for k in subset}, simultaneous=True)
        return (
            "proved" if sp.simplify(sp.expand(merged - SYMBOLIC[outside](f.expr, twin))) == 0 else "sampled"
        )
    if len(subset) == 1:
        slope = sp.diff(f.expr, f.symbols[subset[0]])
        slope = sp.simplify(slope.rewrite(sp.exp) if slope.has(sp.tanh) else slope)
        if (slope.is_nonnegative and inside == outside) or (slope.is_nonpositive and inside != outside):
            return "proved"
    return "sampled"


def vanishes(f: Function, k: int) -> bool:
    values = [f([0.0 if j == k else x for j, x in enumerate(f.draw())]) for _ in range(60)]
    known = [v for v in values if v is not None]
    return bool(known) and all(v == 0 for v in known) and any(f(f.draw()) for _ in range(60))


def never_negative(f: Function) -> bool:
    values = [f(f.draw()) for _ in range(400)]
    return all(v is None or v >= 0 for v in values)


def derive(name: str) -> dict[str, Any]:
    f = Function(name)
    degree, hom = [], []
    for s in f.subsets():
        found = None if f.truth(s) else next((d for d in DEGREES if scales(f, s, d)), None)
        if found is not None:
            degree.append([list(s), str(found), scaling_proof(f, s, found)])
        for inside in OPS:
            if inside in ("sum", "prod") and f.truth(s):
                continue
            order = (inside, "sum", "max", "min", "prod")
            outside = next((o for o in order if commutes(f, s, inside, o)), None)
            if outside is not None:
                hom.append([list(s), inside, outside, homomorphism_proof(f, s, inside, outside)])
    zero = [[k] for k in range(len(f.args)) if f.args[k] not in TRUTH and vanishes(f, k)]
    return {"degree": degree, "hom": hom, "zero": zero, "nonneg": int(never_negative(f))}


def table() -> str:
    rows = [f"{json.dumps(name)}: {json.dumps(derive(name))}" for name in SCALARS]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main(argv: list[str]) -> int:
    text = table()
    if "--check" in argv:
        same = TABLE.read_text() == text
        print("laws.json is up to date" if same else "laws.json differs from what sympy derives")
        return 0 if same else 1
    TABLE.write_text(text)
    print(f"{len(SCALARS)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
