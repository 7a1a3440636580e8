"""Layouts: how the ranks' local index spaces tile the reference index space.

Every reference dim is a list of mixed-radix digits, outermost first. Each digit is held in exactly
one place: by a local dim, by a mesh axis (the rank's coordinate is the digit's value), or fixed
(every rank holds only the part where the digit has one value: a *piece*). A shard is
`[tp, L]`, a strided shard `[k, tp, L]`, a fused projection `[3, tp, L]`. Reshaping regroups local
and reference digits independently; collectives move digits between axes and local dims.

An *open* dim has a local and a reference size but no digits: nothing in the value ties its
positions to the ranks (a fill, an expanded dim), so it agrees with any layout of these sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

Dims = tuple[tuple[int, ...], ...]


class LayoutError(Exception):
    """A layout move that has no result. `unsupported`: the algebra cannot say, no proof of a mistake."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


@dataclass(frozen=True)
class Layout:
    """Digits are numbered in reference order, over all dims.

    `home`: digit sizes per reference dim. `local`: digit numbers per local dim. `axis`: mesh axis ->
    digits its coordinate is made of. `open`: (dim, local size, reference size). `fixed`: digit ->
    value. `uneven`: (dim, reference size) of a dim cut by the `torch.chunk` convention, whose home
    is (ranks, chunk).
    """

    home: Dims
    local: Dims
    axis: tuple[tuple[str, tuple[int, ...]], ...] = ()
    open: tuple[tuple[int, int, int], ...] = ()
    fixed: tuple[tuple[int, int], ...] = ()
    uneven: tuple[tuple[int, int], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.home, self.local, self.axis, self.open, self.fixed, self.uneven))

    def __hash__(self) -> int:
        return self._hash

    # -- construction ---------------------------------------------------------------------------

    @classmethod
    def replicated(cls, shape: Sequence[int]) -> Layout:
        return _Work.plain(shape).freeze()

    @classmethod
    def opened(cls, local: int, ref: int) -> Layout:
        """One dim that agrees with anything of these sizes."""
        return cls(((),), ((),), open=((0, local, ref),))

    @classmethod
    def sharded(
        cls, shape: Sequence[int], cuts: Mapping[int, Sequence[str]], mesh: Mapping[str, int]
    ) -> Layout:
        """`shape` cut along `cuts[dim]` (axes outermost first)."""
        w = _Work([], [], {}, {}, {}, {}, {})
        for d, n in enumerate(shape):
            axes = [a for a in cuts.get(d, ()) if mesh[a] > 1]
            k = prod(mesh[a] for a in axes)
            if n % k and len(axes) > 1:
                raise LayoutError(f"size {n} is not divisible by {'*'.join(axes)} = {k}")
            if n % k:
                w.uneven[d] = n
            home = []
            for a in axes:
                if a in w.axis:
                    raise LayoutError(f"axis {a} cuts two dims")
                home.append(w.digit(mesh[a]))
                w.axis[a] = [home[-1]]
            rest = w.digit(-(-n // k))
            w.home.append([*home, rest])
            w.local.append([rest])
        return w.freeze()

    @classmethod
    def join(cls, parts: Sequence[tuple[Layout, Sequence[int]]], ndim: int) -> Layout:
        """Layouts side by side: part dims go to the named dims of the result; the rest have size 1."""
        return _joined(tuple([(part, tuple(dims)) for part, dims in parts]), ndim)

    # -- reading --------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.home)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of every digit, by number."""
        return tuple(n for h in self.home for n in h)

    @cached_property
    def open_dims(self) -> dict[int, tuple[int, int]]:
        return {d: (a, b) for d, a, b in self.open}

    @cached_property
    def ref_shape(self) -> tuple[int, ...]:
        cut = dict(self.uneven)
        return tuple(
            self.open_dims[d][1] if d in self.open_dims else cut[d] if d in cut else prod(h)
            for d, h in enumerate(self.home)
        )

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Of an uneven dim: the largest shard."""
        return tuple(
            self.open_dims[d][0] if d in self.open_dims else prod(self.sizes[g] for g in t)
            for d, t in enumerate(self.local)
        )

    @cached_property
    def axes(self) -> frozenset[str]:
        return frozenset(a for a, _ in self.axis)

    @cached_property
    def _holder(self) -> dict[int, str]:
        return {g: a for a, gs in self.axis for g in gs}

    @cached_property
    def home_digits(self) -> Dims:
        """Digit numbers per reference dim."""
        out, k = [], 0
        for h in self.home:
            out.append(tuple(range(k, k + len(h))))
            k += len(h)
        return tuple(out)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Mesh axes that cut reference dim `dim`, outermost first."""
        return tuple(dict.fromkeys(self._holder[g] for g in self.home_digits[dim] if g in self._holder))

    def is_plain(self, dim: int) -> bool:
        """Every rank holds the whole dim, in order."""
        return (
            dim not in self.open_dims
            and self.local[dim] == self.home_digits[dim]
            and not any(d == dim for d, _ in self.uneven)
        )

    def is_proper(self, dim: int) -> bool:
        """Local dim `dim` holds exactly the local digits of reference dim `dim`, in order."""
        fixed = dict(self.fixed)
        home = self.home_digits[dim]
        return self.local[dim] == tuple(g for g in home if g not in self._holder) and not any(
            g in fixed for g in home
        )

    def block_axes(self, dim: int) -> tuple[str, ...] | None:
        """Axes outermost first when the dim is cut into contiguous blocks in rank order; else None."""
        home = self.home_digits[dim]
        k = len(home) - len(self.local[dim])
        if dim in self.open_dims or not self.is_proper(dim) or any(g in self._holder for g in home[k:]):
            return None
        axes = [self._holder[g] for g in home[:k]]
        whole = all(gs in [(g,) for g in home] for a, gs in self.axis if a in axes)
        return tuple(axes) if whole and len(set(axes)) == len(axes) else None

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Dims grouped by shared digits: singletons unless dims are entangled."""
        boss = list(range(self.ndim))

        def find(d: int) -> int:
            while boss[d] != d:
                d = boss[d]
            return d

        home_of = {g: d for d, t in enumerate(self.home_digits) for g in t}
        for d, t in enumerate(self.local):
            for g in t:
                boss[find(home_of[g])] = find(d)
        for _, gs in self.axis:
            for g in gs[1:]:
                boss[find(home_of[g])] = find(home_of[gs[0]])
        groups: dict[int, list[int]] = {}
        for d in range(self.ndim):
            groups.setdefault(find(d), []).append(d)
        return tuple(tuple(g) for g in groups.values())

    def restrict(self, dims: Sequence[int]) -> Layout:
        """The layout of these dims alone (a union of blocks), in the given order."""
        return _restricted(self, tuple(dims))

    @cached_property
    def parts(self) -> tuple[tuple[tuple[int, ...], Layout], ...]:
        """The layout of every block alone."""
        return tuple([(dims, _restricted(self, dims)) for dims in self.blocks])

    # -- moves ----------------------------------------------------------------------------------

    def permute(self, order: Sequence[int]) -> Layout:
        return self.restrict(order)

    def drop_axes(self, axes: Iterable[str]) -> Layout:
        """Forget these axes: what a rank sees as the whole is then the local part (used for poison)."""
        w = _Work.of(self)
        for a in set(axes) & set(w.axis):
            gone = w.axis.pop(a)
            w.home = [[g for g in h if g not in gone] for h in w.home]
        w.uneven = {d: n for d, n in w.uneven.items() if any(g in w.holders() for g in w.home[d])}
        return w.freeze()

    def reshape(
        self, local_shape: Sequence[int], ref_shape: Sequence[int] | None, mesh: Mapping[str, int]
    ) -> Layout:
        """Same elements in the same order, other shape; an unknown `ref_shape` is inferred."""
        from spmdtypes.core.reshape import reshape

        return reshape(self, tuple(local_shape), None if ref_shape is None else tuple(ref_shape), mesh)

    def gather(self, axes: Sequence[str], dim: int = 0) -> Layout:
        """Concatenate the ranks' values along local dim `dim`, rank-major."""
        w = _Work.of(self)
        for a in reversed(axes):
            if a not in w.axis:
                raise LayoutError(f"not sharded over {a}")
            w.need_even(w.axis[a])
            w.close(dim)
            w.local[dim] = [*w.axis.pop(a), *w.local[dim]]
        return w.freeze()

    def scatter(self, axes: Sequence[str], mesh: Mapping[str, int], dim: int = 0) -> Layout:
        """Rank r keeps the r-th of equal consecutive parts of local dim `dim`."""
        w = _Work.of(self)
        for a in axes:
            if a in w.axis:
                raise LayoutError(f"already sharded over {a}")
            w.axis[a] = w.take_lead(dim, mesh[a])
        return w.freeze()

    def all_to_all(self, axes: Sequence[str], mesh: Mapping[str, int], dim: int = 0) -> Layout:
        """Part k of local dim `dim` goes to rank k; what arrives is stacked rank-major."""
        w = _Work.of(self)
        arriving = [w.axis.pop(a, []) for a in axes]
        if not all(arriving):
            raise LayoutError(f"not sharded over {', '.join(a for a, g in zip(axes, arriving) if not g)}")
        w.need_even([g for gs in arriving for g in gs])
        for a in axes:
            w.axis[a] = w.take_lead(dim, mesh[a])
        w.local[dim] = [g for gs in arriving for g in gs] + w.local[dim]
        return w.freeze()

    def shard_open(self, dim: int, axes: Sequence[str], mesh: Mapping[str, int]) -> Layout:
        """Choose contiguous blocks over `axes` for an open dim."""
        local, ref = self.open_dims[dim]
        if local * prod(mesh[a] for a in axes) != ref:
            raise LayoutError(f"{ref} is not {local} on each rank of {', '.join(axes)}")
        w = _Work.of(self)
        w.close_as(dim, local, [(a, mesh[a]) for a in axes])
        return w.freeze()

    def closed(self, mesh: Mapping[str, int]) -> Layout:
        """Give every open dim digits: plain when the sizes agree, else the first unused axes that fit."""
        w = _Work.of(self)
        for d in list(w.open):
            local, ref = w.open[d]
            axes = axes_for_ratio(local, ref, mesh, set(w.axis))
            if axes is None:
                raise LayoutError(
                    f"local size {local} against reference size {ref}: no axes fit", unsupported=True
                )
            w.close_as(d, local, [(a, mesh[a]) for a in axes])
        return w.freeze()

    # -- printing -------------------------------------------------------------------------------

    def show(self) -> str:
        return " ".join(self._show_dim(d) for d in range(self.ndim))

    def _show_dim(self, d: int) -> str:
        if d in self.open_dims:
            local, ref = self.open_dims[d]
            return str(ref) if local == ref else f"{ref}~{local}"
        axes = self.block_axes(d)
        if axes is not None:
            return "@".join([str(self.ref_shape[d]), *axes])
        fixed = dict(self.fixed)
        parts = [
            self._holder.get(g) or (f"{self.sizes[g]}={fixed[g]}" if g in fixed else str(self.sizes[g]))
            for g in self.home_digits[d]
        ]
        text = "[" + "*".join(parts) + "]"
        return text if self.is_proper(d) else text + "?"


@lru_cache(maxsize=1 << 14)
def _restricted(x: Layout, dims: tuple[int, ...]) -> Layout:
    w, keep = _Work.of(x), [g for d in dims for g in x.home_digits[d]]
    out = _Work(
        [w.home[d] for d in dims],
        [w.local[d] for d in dims],
        {a: gs for a, gs in w.axis.items() if gs[0] in keep},
        {g: w.size[g] for g in keep},
        {k: w.open[d] for k, d in enumerate(dims) if d in w.open},
        {g: v for g, v in w.fixed.items() if g in keep},
        {k: w.uneven[d] for k, d in enumerate(dims) if d in w.uneven},
    )
    return out.freeze()


@lru_cache(maxsize=1 << 14)
def _joined(parts: tuple[tuple[Layout, tuple[int, ...]], ...], ndim: int) -> Layout:
    w = _Work([[] for _ in range(ndim)], [[] for _ in range(ndim)], {}, {}, {}, {}, {})
    for part, dims in parts:
        p, base = _Work.of(part), len(w.size)
        w.size.update({g + base: n for g, n in p.size.items()})
        for k, d in enumerate(dims):
            w.home[d] = [g + base for g in p.home[k]]
            w.local[d] = [g + base for g in p.local[k]]
            if k in p.open:
                w.open[d] = p.open[k]
            if k in p.uneven:
                w.uneven[d] = p.uneven[k]
        for a, gs in p.axis.items():
            if a in w.axis:
                raise LayoutError(f"two dims of one value are sharded over {a}: only diagonal blocks exist")
            w.axis[a] = [g + base for g in gs]
        w.fixed.update({g + base: v for g, v in p.fixed.items()})
    return w.freeze()


def axes_for_ratio(local: int, ref: int, mesh: Mapping[str, int], used: set[str]) -> tuple[str, ...] | None:
    """Unused axes, in mesh order, the product of whose sizes is ref / local."""
    if local == ref:
        return ()
    if local == 0 or ref % local:
        return None
    free = [a for a, n in mesh.items() if n > 1 and a not in used]
    best: tuple[str, ...] | None = None
    for mask in range(1, 1 << len(free)):
        pick = tuple(a for k, a in enumerate(free) if mask >> k & 1)
        if prod(mesh[a] for a in pick) == ref // local and (best is None or len(pick) < len(best)):
            best = pick
    return best


@dataclass(slots=True)
class _Work:
    """A layout while it is being changed: digits are keys of `size`."""

    home: list[list[int]]
    local: list[list[int]]
    axis: dict[str, list[int]]
    size: dict[int, int]
    open: dict[int, tuple[int, int]]
    fixed: dict[int, int]
    uneven: dict[int, int]

    @classmethod
    def of(cls, x: Layout) -> _Work:
        return cls(
            [list(t) for t in x.home_digits],
            [list(t) for t in x.local],
            {a: list(g) for a, g in x.axis},
            dict(enumerate(x.sizes)),
            dict(x.open_dims),
            dict(x.fixed),
            dict(x.uneven),
        )

    @classmethod
    def plain(cls, shape: Sequence[int]) -> _Work:
        n = range(len(shape))
        return cls([[d] for d in n], [[d] for d in n], {}, dict(enumerate(shape)), {}, {}, {})

    def digit(self, size: int) -> int:
        g = max(self.size, default=-1) + 1
        self.size[g] = size
        return g

    def holders(self) -> dict[int, str]:
        return {g: a for a, gs in self.axis.items() for g in gs}

    def need_even(self, digits: Iterable[int]) -> None:
        for d in self.uneven:
            if set(digits) & set(self.home[d]):
                raise LayoutError(f"dim {d} is cut unevenly", unsupported=True)

    def close(self, dim: int) -> None:
        """An open dim whose sizes agree becomes plain."""
        if dim in self.open:
            local, ref = self.open[dim]
            if local != ref:
                raise LayoutError(f"dim {dim} has local size {local}, reference size {ref}", unsupported=True)
            self.close_as(dim, local, [])

    def close_as(self, dim: int, local: int, axes: Sequence[tuple[str, int]]) -> None:
        del self.open[dim]
        rest = self.digit(local)
        self.local[dim] = [rest]
        self.home[dim] = []
        for a, n in axes:
            if a in self.axis:
                raise LayoutError(f"already sharded over {a}")
            g = self.digit(n)
            self.axis[a] = [g]
            self.home[dim].append(g)
        self.home[dim].append(rest)

    def split(self, g: int, outer: int) -> tuple[int, int]:
        """Digit -> (outer, inner), wherever it is held."""
        n = self.size[g]
        if n % outer:
            raise LayoutError(f"{outer} does not divide {n}")
        self.need_even([g])
        inner = self.digit(n // outer)
        self.size[g] = outer
        for t in (*self.home, *self.local, *self.axis.values()):
            if g in t:
                t.insert(t.index(g) + 1, inner)
        if g in self.fixed:
            self.fixed[g], self.fixed[inner] = divmod(self.fixed[g], n // outer)
        return g, inner

    def take_lead(self, dim: int, n: int) -> list[int]:
        """Remove leading digits of local dim `dim` whose sizes multiply to `n`."""
        if n == 1:
            return []
        self.close(dim)
        out: list[int] = []
        while n > 1:
            t = self.local[dim] = [g for g in self.local[dim] if self.size[g] != 1]
            if not t:
                raise LayoutError(f"local dim {dim} is too small to be cut in {n}")
            g = t[0]
            if self.size[g] > n:
                g, _ = self.split(g, n)
            if n % self.size[g]:
                raise LayoutError(f"{n} parts do not fit the leading {self.size[g]} of dim {dim}")
            n //= self.size[g]
            out.append(self.local[dim].pop(0))
        self.need_even(out)
        return out

    def freeze(self) -> Layout:
        """The canonical form: no size-1 digits, neighbours merged, numbered in reference order."""
        keep = {g for g, n in self.size.items() if n != 1}
        home = [[g for g in t if g in keep] for t in self.home]
        local = [[g for g in t if g in keep] for t in self.local]
        axis = {a: [g for g in t if g in keep] for a, t in self.axis.items()}
        fixed = {g: v for g, v in self.fixed.items() if g in keep}
        size = dict(self.size)
        follows = {t[k]: t[k + 1] for t in (*local, *axis.values()) for k in range(len(t) - 1)}
        rigid = {g for d in self.uneven for g in home[d]}
        number: dict[int, int] = {}
        merged: dict[int, int] = {}
        sizes: list[list[int]] = []
        last = -1
        for t in home:
            row: list[int] = []
            for k, g in enumerate(t):
                prev = t[k - 1] if k else None
                together = prev is not None and (follows.get(prev) == g or (prev in fixed and g in fixed))
                if together and g not in rigid:
                    row[-1] *= size[g]
                    merged[g] = last
                    if g in fixed:
                        fixed_first = next(h for h, i in number.items() if i == last)
                        fixed[fixed_first] = fixed[fixed_first] * size[g] + fixed.pop(g)
                else:
                    last += 1
                    number[g] = last
                    row.append(size[g])
            sizes.append(row)
        return Layout(
            tuple(tuple(r) for r in sizes),
            tuple(tuple(number[g] for g in t if g in number) for t in local),
            tuple(sorted((a, tuple(number[g] for g in t if g in number)) for a, t in axis.items() if t)),
            tuple(sorted((d, *n) for d, n in self.open.items())),
            tuple(sorted((number[g], v) for g, v in fixed.items())),
            tuple(sorted((d, n) for d, n in self.uneven.items())),
        )
