"""Reshaping layouts: local and reference digits are regrouped independently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from spmdtypes.core.layout import Layout, LayoutError, _Work, axes_for_ratio

Shape = tuple[int, ...]


def reshape(x: Layout, local: Shape, ref: Shape | None, mesh: Mapping[str, int]) -> Layout:
    if prod(local) != prod(x.local_shape):
        raise LayoutError(f"shape {local} does not hold the {prod(x.local_shape)} local elements")
    if 0 in local:
        raise LayoutError("empty tensors", unsupported=True)
    if ref is not None and len(ref) != len(local):
        raise LayoutError(f"shape {local} here is {ref} in the reference: other dims")
    if local == x.local_shape and (ref is None or ref == x.ref_shape or prod(ref) != prod(x.ref_shape)):
        return x
    if ref is None or prod(ref) != prod(x.ref_shape):
        ref = infer_ref_shape(x, local, mesh)
    w = _Work.of(x)
    groups = _groups(x.local_shape, x.ref_shape, local, ref)
    opened: dict[int, tuple[int, int]] = {}
    uneven: dict[int, int] = {}
    digits: list[tuple[list[int], list[int]]] = []
    for ins, outs in groups:
        if len(ins) == len(outs) == 1 and ins[0] in w.uneven:
            uneven[outs[0]] = w.uneven[ins[0]]
        loose = [d for d in ins if d in w.open]
        if loose and all(d in w.open or x.local_shape[d] == x.ref_shape[d] == 1 for d in ins):
            opened |= {o: (local[o], ref[o]) for o in outs}
        else:
            for d in ins:
                _close(w, d, mesh)
            digits.append((ins, outs))
    rows: list[list[int]] = [[] for _ in local]
    for ins, outs in digits:
        for o, row in zip(outs, _regroup(w, w.local, ins, [local[o] for o in outs])):
            rows[o] = row
    w.local = rows  # from here on, splitting a reference digit splits it in these rows too
    homes: list[list[int]] = [[] for _ in local]
    for ins, outs in digits:
        whole = len(ins) == len(outs) == 1 and ins[0] in w.uneven
        found = [w.home[ins[0]]] if whole else _regroup(w, w.home, ins, [ref[o] for o in outs])
        for o, row in zip(outs, found):
            homes[o] = row
    w.home, w.open, w.uneven = homes, opened, uneven
    return w.freeze()


def _close(w: _Work, d: int, mesh: Mapping[str, int]) -> None:
    if d in w.open:
        a, b = w.open[d]
        axes = axes_for_ratio(a, b, mesh, set(w.axis))
        if axes is None:
            raise LayoutError(f"local size {a} against reference size {b}: no axes fit", unsupported=True)
        w.close_as(d, a, [(m, mesh[m]) for m in axes])


def _groups(la: Shape, ra: Shape, lb: Shape, rb: Shape) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims whose local and reference sizes both have equal products."""
    out: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(la) or j < len(lb):
        ins: list[int] = []
        outs: list[int] = []
        pl = pr = ql = qr = 1
        while not ins or not outs or (pl, pr) != (ql, qr):
            if i < len(la) and (j == len(lb) or pl < ql or (pl == ql and pr <= qr and (not ins or pr < qr))):
                ins.append(i)
                pl, pr, i = pl * la[i], pr * ra[i], i + 1
            elif j < len(lb):
                outs.append(j)
                ql, qr, j = ql * lb[j], qr * rb[j], j + 1
            elif i < len(la):
                ins.append(i)
                pl, pr, i = pl * la[i], pr * ra[i], i + 1
            else:
                break
        out.append((ins, outs))
    return out


def _regroup(w: _Work, where: list[list[int]], dims: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The digit stream of `dims`, cut into runs of these sizes; digits split where a cut falls inside."""
    out: list[list[int]] = []
    queue = [g for d in dims for g in where[d]]
    for n in sizes:
        row: list[int] = []
        while n > 1:
            queue = [g for g in queue if w.size[g] != 1]
            if not queue:
                raise LayoutError("shape does not fit")
            g = queue[0]
            m = w.size[g]
            if n % m and m % n:
                raise LayoutError(f"a cut falls inside a run of {m} (wanted {n})")
            if m > n:
                w.split(g, n)
                queue = [h for d in dims for h in where[d] if h not in row and not any(h in r for r in out)]
            row.append(queue.pop(0))
            n //= w.size[g]
        out.append(row)
    if any(w.size[g] != 1 for g in queue):
        raise LayoutError("shape does not fit")
    return out


def infer_ref_shape(x: Layout, local: Shape, mesh: Mapping[str, int]) -> Shape:
    """The reference shape of a reshape known only locally: rank digits keep their row-major place."""
    if any(not x.is_proper(d) for d in range(x.ndim) if d not in x.open_dims):
        return _shape_around(x, local)
    y = x.closed(mesh) if any(a != b for _, a, b in x.open) else x
    queue: list[tuple[int, bool, bool]] = []  # size, held by ranks, all of its dim is
    for d, h in enumerate(y.home_digits):
        held = [g not in y.local[d] for g in h]
        queue += [(y.sizes[g], r, all(held)) for g, r in zip(h, held)]
        if d in y.open_dims:
            queue.append((y.open_dims[d][0], False, False))
    out: list[int] = []
    for n in local:
        total = 1
        if n == 1:
            while queue and queue[0][1] and queue[0][2]:
                total *= queue.pop(0)[0]
        while n > 1:
            size, rank, _ = queue.pop(0) if queue else (0, False, False)
            if not size:
                raise LayoutError("shape does not fit")
            if rank:
                total *= size
            elif n % size == 0:
                total, n = total * size, n // size
            elif size % n == 0:
                queue.insert(0, (size // n, False, False))
                total, n = total * n, 1
            else:
                raise LayoutError(f"a cut falls inside a run of {size} (wanted {n})")
        out.append(total)
    for size, _, _ in queue:
        if size > 1 and not out:
            raise LayoutError("shape does not fit")
        if size > 1:
            out[-1] *= size
    return tuple(out)


def _shape_around(x: Layout, local: Shape) -> Shape:
    """Dims kept at either end keep their reference size; one dim between takes what is left."""
    head = 0
    while head < min(x.ndim, len(local)) and x.local_shape[head] == local[head]:
        head += 1
    tail = 0
    while tail < min(x.ndim, len(local)) - head and x.local_shape[-1 - tail] == local[-1 - tail]:
        tail += 1
    middle = local[head : len(local) - tail]
    want = prod(x.ref_shape[head : x.ndim - tail])
    if prod(middle) != want:
        extra, rest = divmod(prod(middle), want)
        if len(middle) == 1:
            middle = (want,)
        elif not rest and extra in middle:  # a dim that only counts ranks
            k = middle.index(extra)
            middle = (*middle[:k], 1, *middle[k + 1 :])
        else:
            raise LayoutError("reference shape unknown", unsupported=True)
    return (*x.ref_shape[:head], *middle, *x.ref_shape[x.ndim - tail :])
