"""Denotations: how the ranks' local values of a tensor make up its reference value.

    reference[index] = scale * OP over the partial axes of local, placed by the layout

The reference is the same program on the mesh whose every axis has size 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.ranks import Truth, Value

if TYPE_CHECKING:
    from spmdtypes.notation import Type

Scale = tuple[tuple[str, "int | Fraction"], ...]
NONE: frozenset[str] = frozenset()

KINDS = (
    "nonlinear",  # a nonlinear function of a pending reduction
    "mix",  # a pending reduction combined with a complete value
    "product",  # two pending reductions multiplied
    "layout",  # dims cut differently, or elements in another order
    "axis",  # one axis used twice
    "scale",  # a factor that does not survive
    "rank",  # depends on the rank in a way the reference does not
    "random",  # random streams equal or different where they must not be
    "observed",  # running the ranks contradicts what the rules say
    "unsupported",  # the engine cannot tell; no proof of a mistake
    "missing",  # no value here
)


@dataclass(eq=False)
class RuleError(Exception):
    """Why a value has no reading. `axes`: over which; `operands`: positions of the operands at fault.

    `poisoned` is what is still known: the same value, varying over `axes`.
    """

    kind: str
    message: str
    axes: frozenset[str] = NONE
    operands: tuple[int, ...] = ()
    poisoned: Denotation | None = None

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Denotation:
    """See the module. `varying`: axes over which no reading is known, because of `reason`.

    `value`: every element in closed form (`core.ranks`). `guard`: elements where the local value is
    the reference value; outside they are 0 when `zero` (then the value is a pending sum over the axes
    whose ranks share out the elements) and arbitrary otherwise.
    """

    layout: Layout
    partial: frozenset[str] = NONE
    op: str = ""
    scale: Scale = ()
    varying: frozenset[str] = NONE
    reason: str = ""
    value: Value | None = None
    guard: Truth | None = None
    zero: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.partial, self.op, self.scale, self.varying, self.value, self.guard))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def replicate(cls, shape: Sequence[int]) -> Denotation:
        return cls(Layout.replicated(shape))

    @classmethod
    def from_type(cls, type: Type, shape: Sequence[int], mesh: Mapping[str, int]) -> Denotation:
        """The denotation a written type stands for. `shape`: the reference shape.

        Raises RuleError: "axis" for an unknown or twice used axis, "layout" for sizes that do not divide.
        """
        dims = type.dims if type.dims is not None else ()
        if type.dims is not None and len(dims) != len(shape):
            raise RuleError("layout", f"type has {len(dims)} dims, the tensor has {len(shape)}")
        named = [a for d in dims for a in d.axes] + [a for a, _ in type.partial]
        for a in named:
            if a not in mesh:
                raise RuleError("axis", f"unknown mesh axis {a}", frozenset([a]))
            if named.count(a) > 1:
                raise RuleError("axis", f"axis {a} is used twice", frozenset([a]))
        try:
            layout = Layout.sharded(shape, {d: x.axes for d, x in enumerate(dims)}, mesh)
        except LayoutError as e:
            raise RuleError("layout", str(e)) from None
        ops = {a: op for a, op in type.partial if op not in ("I", "V", "R") and mesh[a] > 1}
        kinds = {"sum" if op == "avg" else op for op in ops.values()}
        if len(kinds) > 1:
            raise RuleError(
                "unsupported", f"one value with different pending reductions: {', '.join(sorted(kinds))}"
            )
        varying = frozenset(a for a, op in type.partial if op == "V" and mesh[a] > 1)
        return cls(
            layout,
            frozenset(ops),
            kinds.pop() if kinds else "",
            tuple(sorted((a, -1) for a, op in ops.items() if op == "avg")),
            varying,
            "declared varying" if varying else "",
        )

    # -- reading --------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape

    @property
    def ref_shape(self) -> tuple[int, ...]:
        return self.layout.ref_shape

    @property
    def constant(self) -> frozenset[int]:
        """Dims along which nothing ties positions to ranks: any layout of these sizes is right."""
        return frozenset(self.layout.open_dims)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        return self.layout.axes_of(dim)

    @property
    def axes(self) -> frozenset[str]:
        """Every axis over which this is not simply replicated."""
        return self.layout.axes | self.partial | self.varying | frozenset(a for a, _ in self.scale)

    @property
    def is_replicated(self) -> bool:
        x = self.layout
        return not (self.axes or x.fixed or x.uneven or self.guard) and all(a == b for _, a, b in x.open)

    @property
    def is_zero(self) -> bool:
        return self.value is not None and self.value.number == 0 and not isinstance(self.value.number, bool)

    def scale_in(self, mesh: Mapping[str, int]) -> float:
        return scale_number(self.scale, mesh)

    def same(self, other: Denotation, mesh: Mapping[str, int]) -> bool:
        """Both say the same of the local values (open dims agree with anything of their sizes)."""
        return (
            self.partial == other.partial
            and self.op == other.op
            and self.varying == other.varying
            and abs(self.scale_in(mesh) - other.scale_in(mesh)) < 1e-9
            and _layouts_agree(self.layout, other.layout)
        )

    def poisoned(self, axes: frozenset[str], reason: str) -> Denotation:
        """The same over the other axes, nothing known over these."""
        kept = self.partial - axes
        return Denotation(
            self.layout.drop_axes(axes),
            kept,
            self.op if kept else "",
            tuple(t for t in self.scale if t[0] not in axes),
            self.varying | axes,
            reason or self.reason,
        )

    def bare(self) -> Denotation:
        """Without closed forms and guards."""
        return replace(self, value=None, guard=None, zero=False) if self.value or self.guard else self

    @cached_property
    def text(self) -> str:
        return _show(self)

    def __str__(self) -> str:
        return self.text


def _layouts_agree(a: Layout, b: Layout) -> bool:
    if a == b:
        return True
    if a.ndim != b.ndim or a.local_shape != b.local_shape or a.ref_shape != b.ref_shape:
        return False
    loose = set(a.open_dims) | set(b.open_dims)
    for x in (a, b):
        for block in x.blocks:
            if len(block) > 1 and loose & set(block):
                return False
    rest = [d for d in range(a.ndim) if d not in loose]
    return bool(loose) and a.restrict(rest) == b.restrict(rest)


# -- scales -------------------------------------------------------------------------------------


def scale_mul(a: Scale, b: Scale, power: int | Fraction = 1) -> Scale:
    """a * b**power"""
    if not b or not power:
        return a
    d = dict(a)
    for axis, k in b:
        d[axis] = d.get(axis, 0) + k * power
    return tuple(sorted((x, int(k) if k == int(k) else k) for x, k in d.items() if k))


def scale_number(s: Scale, mesh: Mapping[str, int]) -> float:
    out = 1.0
    for a, k in s:
        out *= mesh[a] ** float(k)
    return out


def scale_of_ratio(ratio: Fraction, mesh: Mapping[str, int], prefer: frozenset[str] = NONE) -> Scale | None:
    """`ratio` as a product of axis sizes to the powers +-1, few and preferred axes first."""
    if ratio == 1:
        return ()
    found = _products(tuple([(a, n) for a, n in mesh.items() if n > 1])).get(ratio, ())
    return min(found, key=lambda used: (len(used), -sum(a in prefer for a, _ in used)), default=None)


@lru_cache(maxsize=256)
def _products(sizes: tuple[tuple[str, int], ...]) -> dict[Fraction, list[Scale]]:
    """Every product of axis sizes to the powers +-1, and the ways to have it."""
    powers: list[tuple[int, int, Scale]] = [(1, 1, ())]
    for a, n in reversed(sizes):
        powers = [
            (p * up, q * down, ((a, k), *used) if k else used)
            for p, q, used in powers
            for up, down, k in ((1, 1, 0), (n, 1, 1), (1, n, -1))
        ]
    found: dict[Fraction, list[Scale]] = {}
    for p, q, used in powers[1:]:
        found.setdefault(Fraction(p, q), []).append(tuple(sorted(used)))
    return found


def show_scale(s: Scale) -> str:
    return "*".join(a if k == 1 else f"{a}^{k}" for a, k in s)


def _show(d: Denotation) -> str:
    scale = dict(d.scale)
    average = d.op == "sum" and bool(d.partial) and all(scale.get(a, 0) <= -1 for a in d.partial)
    parts = []
    for a in sorted(d.partial):
        if average:
            scale[a] += 1
            parts.append(f"{a}:P(avg)")
        else:
            parts.append(f"{a}:P" if d.op == "sum" else f"{a}:P({d.op})")
    parts += [f"{a}:V" for a in sorted(d.varying)]
    text = d.layout.show()
    if parts:
        text = f"{text} | {' '.join(parts)}".strip()
    rest = tuple((a, k) for a, k in sorted(scale.items()) if k)
    return f"{text} x {show_scale(rest)}".strip() if rest else text
