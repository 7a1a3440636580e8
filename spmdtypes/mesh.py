"""A mesh as the user names it: ordered axes with sizes, ranks row-major. And the letters R I V P S."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from spmdtypes.notation import Dim, NotationError, Type, is_size


class Mesh(dict[str, int]):
    """`Mesh(dp=2, tp=4)`, the same as `{"dp": 2, "tp": 4}`."""

    def __init__(self, sizes: Mapping[str, int] | None = None, /, **axes: int) -> None:
        if not isinstance(sizes, Mapping | None):
            raise NotationError(f"mesh {sizes!r}: expected names and sizes, as in {{'dp': 2, 'tp': 4}}")
        super().__init__({**(sizes or {}), **axes})
        for axis, n in self.items():
            if not str(axis).isidentifier():
                raise NotationError(f"mesh axis {axis!r} is no name")
            if not is_size(n):
                raise NotationError(f"mesh axis {axis} has size {n!r}: expected a positive number")

    @property
    def world(self) -> int:
        return prod(self.values())

    def ones(self) -> Mesh:
        return Mesh(dict.fromkeys(self, 1))

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.items())


def shrunk(mesh: Mapping[str, int], most: int) -> dict[str, int] | None:
    """Long axes at their smallest prime factor, as many as `most` ranks take. None: too many still."""
    sizes = dict(mesh)
    for axis in sorted(sizes, key=lambda a: -sizes[a]):
        if prod(sizes.values()) <= most:
            break
        sizes[axis] = next((p for p in (2, 3, 5, 7) if sizes[axis] % p == 0), sizes[axis])
    return sizes if prod(sizes.values()) <= most else None


def parse_sizes(text: str) -> dict[str, int]:
    """Read `dp=2,tp=4`, as the command line takes a mesh and dims."""
    sizes = {}
    for part in re.split(r"[,\s]+", text.strip()):
        m = re.fullmatch(r"([A-Za-z_]\w*)=(\d+)", part)
        if not m:
            raise NotationError(f"expected name=number, found {part!r}", text, max(text.find(part), 0))
        if m[1] in sizes:
            raise NotationError(f"{m[1]} given twice in {text!r}", text, text.rfind(m[1]))
        sizes[m[1]] = int(m[2])
    return sizes


@dataclass(frozen=True, slots=True)
class Placement:
    """What a tensor is on one mesh axis: R, I, V, P (or `P("avg")`), `S(dim)`."""

    letter: str
    op: str = "sum"
    dim: int | None = None

    def __call__(self, which: str | int) -> Placement:
        if self.letter == "S" and isinstance(which, int):
            return Placement("S", dim=which)
        if self.letter == "P" and isinstance(which, str):
            return Placement("P", op=which)
        raise TypeError(f"{self.letter}({which!r}) is no placement")

    def __repr__(self) -> str:
        if self.letter == "S":
            return f"S({'' if self.dim is None else self.dim})"
        return self.letter if self.op == "sum" else f"P({self.op!r})"


R, I, V, P, S = (Placement(x) for x in "RIVPS")  # noqa: E741


def from_placements(
    shape: Sequence[int | str] | None, placements: Mapping[str, Placement], dtype: str | None = None
) -> Type:
    """The type of a tensor of GLOBAL `shape`: `from_placements((8, 16), {"dp": S(0), "tp": P})`.

    Several axes that shard one dim cut it in the order given, the first outermost.
    """
    dims = None if shape is None else [Dim(n) for n in shape]
    partial = []
    for axis, p in placements.items():
        if p.letter == "S":
            if dims is None or p.dim is None or not -len(dims) <= p.dim < len(dims):
                raise NotationError(f"{axis}: {p!r} names no dim of shape {shape}")
            d = dims[p.dim]
            dims[p.dim] = Dim(d.size, (*d.axes, axis))
        elif p.letter != "R":
            partial.append((axis, p.op if p.letter == "P" else p.letter))
    return Type(None if dims is None else tuple(dims), dtype, tuple(partial))
