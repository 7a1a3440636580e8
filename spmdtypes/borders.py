"""What each border of a program must denote, and whether a denotation says so.

A border is a value the contract speaks of: "output", "grad:<fqn>", "param:<fqn>", "result:<key>", and of
scripts "state:<fqn>.<key>" (of an optimizer), "norm:<what>", "metric:<place>".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from spmdtypes.contracts import Program
from spmdtypes.core.denotation import Denotation, Scale, scale_mul
from spmdtypes.notation import Dim, Type

KEEP = ("I", "V", "R")


@dataclass(frozen=True)
class Mismatch:
    """How a denotation differs from the expected one.

    `kind`: "partial" (a pending reduction is left over `axes`), "double" (complete, where the contract
    still reduces over `axes`), "layout", "scale" (`factor` = local value / right value, as axis powers),
    "varying". Ordered by what has to be mended first.
    """

    kind: str
    axes: tuple[str, ...]
    factor: Scale = ()


def without_axes(t: Type, axes: Iterable[str], mesh: Mapping[str, int]) -> Type:
    """The same type on a mesh that lacks `axes`: what one coordinate of them holds."""
    gone = set(axes)
    if t.dims is None:
        return replace(t, partial=tuple(p for p in t.partial if p[0] not in gone), text="")
    dims = []
    for d in t.dims:
        size = d.size
        for a in d.axes:
            if a in gone and isinstance(size, int):
                size //= mesh[a]
        dims.append(Dim(size, tuple(a for a in d.axes if a not in gone)))
    return replace(t, dims=tuple(dims), partial=tuple(p for p in t.partial if p[0] not in gone), text="")


def sharding_axes(t: Type) -> set[str]:
    return {a for d in t.dims or () for a in d.axes}


def expected_types(program: Program, borders: Iterable[str]) -> dict[str, Type]:
    """The type each border is declared to have; borders the contract does not speak of are left out."""
    found: dict[str, Type] = {}
    for name in borders:
        kind, _, key = name.partition(":")
        if kind == "grad" and key in program.params:
            found[name] = gradient_type(program, key)
        elif kind == "result":
            found[name] = program.results.get(key) or program.params.get(key) or Type(())
        elif kind == "param" and key in program.params:
            found[name] = program.params[key]
        elif name in program.results:
            found[name] = program.results[name]
        elif kind.startswith("output"):
            t = output_type(program, kind)
            if t is not None:
                found[name] = t
    return found


def output_type(program: Program, border: str) -> Type | None:
    if isinstance(program.output, Mapping):
        return program.output.get(border.removeprefix("output").lstrip("."))
    return program.output if border == "output" else None


def gradient_type(program: Program, parameter: str) -> Type:
    """The parameter's type, pending over the axes an outer wrapper will still reduce."""
    t = program.params[parameter]
    held = sharding_axes(t)
    declared = {a for a, _ in t.partial}
    pending = tuple((a, op) for a, op in program.grads.items() if a not in held and a not in declared)
    kept = tuple(p for p in t.partial if p[1] not in KEEP)
    return replace(t, partial=kept + pending, limit=None, text="")


def batch_axes(program: Program) -> set[str]:
    """Axes that cut the leading dim of inputs and nothing else: each rank along them has its own samples."""
    # arguments whose gradients are checked stand among the parameters
    fed = {**program.inputs, **{k: program.params[k] for k in program.input_grads}}
    own = [t for k, t in program.params.items() if k not in program.input_grads]
    found = set()
    for axis in program.mesh:
        cuts = {d for t in fed.values() for d, x in enumerate(t.dims or ()) if axis in x.axes}
        if cuts == {0} and not any(axis in sharding_axes(t) for t in own):
            found.add(axis)
    return found


def averaged_axes(program: Program) -> frozenset[str]:
    """Pure data axes: gradients (and the loss, if declared) are averaged over them, and they cut
    nothing but the leading dim of inputs, so that each rank along them trains on its own samples."""
    outputs = program.output.values() if isinstance(program.output, Mapping) else [program.output]
    scalars = [dict(t.partial) for t in outputs if t is not None and t.dims == ()]
    return frozenset(
        axis
        for axis in batch_axes(program)
        if program.grads.get(axis) == "avg" and all(t.get(axis) == "avg" for t in scalars)
    )


def as_pending(den: Denotation, expected: Denotation) -> Denotation:
    """Read a complete value as the pending reduction the contract expects: a value equal on n ranks is
    1/n of their sum, and the maximum of itself."""
    missing = expected.partial - den.partial - den.layout.axes - den.varying
    if not missing or (den.partial and den.op != expected.op):
        return den
    scale = den.scale
    if expected.op == "sum":
        scale = scale_mul(scale, tuple((a, -1) for a in sorted(missing)))
    elif expected.op == "prod":
        return den
    return replace(den.bare(), partial=den.partial | missing, op=expected.op, scale=scale)


def mismatch(den: Denotation, expected: Denotation, mesh: Mapping[str, int]) -> Mismatch | None:
    """None when `den` says what the contract says."""
    if den.is_zero or den.same(expected, mesh):
        return None
    if den.varying:
        return Mismatch("varying", tuple(sorted(den.varying)))
    left = den.partial - expected.partial
    if left:
        return Mismatch("partial", tuple(sorted(left)))
    read = as_pending(den, expected)
    if read.same(expected, mesh):
        return None
    if replace(read.bare(), scale=expected.scale).same(expected, mesh):
        # reference = scale * local, so the local value is too large by the inverse
        factor = scale_mul(expected.scale, read.scale, -1)
        unread = sorted(expected.partial - den.partial)
        tight = tuple((a, k) for a, k in factor if k)
        if unread and {a for a, _ in tight} <= set(unread):
            return Mismatch("double", tuple(unread), tight)
        return Mismatch("scale", tuple(a for a, _ in tight), tight)
    axes = (den.layout.axes ^ expected.layout.axes) or (den.layout.axes | expected.layout.axes)
    return Mismatch("layout", tuple(sorted(axes)))


def factor_number(factor: Scale, mesh: Mapping[str, int]) -> Fraction | float:
    out: Fraction | float = Fraction(1)
    for axis, k in factor:
        out = out * Fraction(mesh[axis]) ** int(k) if k == int(k) else float(out) * mesh[axis] ** float(k)
    return out
