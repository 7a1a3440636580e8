"""Where each rank's local elements come from, by brute force on indices."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from spmdtypes.core.denotation import Denotation
from spmdtypes.core.layout import Layout


def coordinates(mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """Every rank's coordinates, row-major."""
    return [dict(zip(mesh, c)) for c in product(*(range(n) for n in mesh.values()))]


def rank_of(coords: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    """The row-major number of the rank at some coordinates."""
    rank = 0
    for axis, n in mesh.items():
        rank = rank * n + coords[axis]
    return rank


def local_shape(layout: Layout, coords: Mapping[str, int]) -> tuple[int, ...]:
    """This rank's shape (it differs from `layout.local_shape` on uneven shards)."""
    cut = dict(layout.uneven)
    out = []
    for d, n in enumerate(layout.local_shape):
        if d in cut:
            chunk = n
            r = coords[layout.axes_of(d)[0]]
            n = max(0, min(chunk, cut[d] - r * chunk))
        out.append(n)
    return tuple(out)


def local_indices(den: Denotation | Layout, coords: Mapping[str, int]) -> list[int]:
    """Flat reference index of every local element, in local row-major order.

    Open dims are read as plain when their sizes agree; otherwise ValueError (choose a layout first).
    """
    x = den.layout if isinstance(den, Denotation) else den
    if any(a != b for _, a, b in x.open):
        raise ValueError("an open dim has no positions")
    value = dict(x.fixed)
    for axis, digits in x.axis:
        rest = coords[axis]
        for g in reversed(digits):
            rest, value[g] = divmod(rest, x.sizes[g])
    opened = dict(x.open_dims)
    shape = x.ref_shape
    strides = [prod(shape[d + 1 :]) for d in range(x.ndim)]
    out = []
    for pos in product(*(range(n) for n in local_shape(x, coords))):
        for d, p in enumerate(pos):
            for g in reversed(x.local[d]):
                p, value[g] = divmod(p, x.sizes[g])
        flat = 0
        for d, home in enumerate(x.home_digits):
            index = pos[d] if d in opened else 0
            for g in home:
                index = index * x.sizes[g] + value[g]
            flat += index * strides[d]
        out.append(flat)
    return out
