"""What each piece of memory holds: views of a storage and the values last written through them.

A storage has one or more roots (views no other view contains) with a value each, and entries for
the views taken of them. A write replaces the value of its own view, makes overlapping entries
stale, and is remembered by the root until somebody reads more than was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmdtypes.capture.raw import View
from spmdtypes.capture.views import Step, inverse, scatter
from spmdtypes.graph import Ref

Emit = Callable[[str, tuple[Any, ...], dict[str, Any], tuple[int, ...], str], Ref]


@dataclass(slots=True)
class Entry:
    """A view: its value when current, and the step that takes it from its parent (none: a root)."""

    ref: Ref | None
    parent: View | None = None
    step: Step | None = None


@dataclass(slots=True)
class Root:
    """`writes` came after `ref`, in order, each through a view of the root."""

    view: View
    ref: Ref
    writes: dict[View, Ref] = field(default_factory=dict)


@dataclass(slots=True)
class Storage:
    roots: list[Root] = field(default_factory=list)
    entries: dict[View, Entry] = field(default_factory=dict)


class Memory:
    """Reads and writes of views as reads and writes of values; `emit` adds a node to the graph."""

    def __init__(self, emit: Emit, note: Callable[[str], None]) -> None:
        self.emit = emit
        self.note = note
        self.storages: dict[int, Storage] = {}

    # ---- what the program does

    def define(self, view: View, ref: Ref) -> None:
        """`view` holds a value of its own: a fresh tensor, or memory that comes from outside."""
        storage = self.storages.get(view.storage)
        if storage is None:
            storage = self.storages[view.storage] = Storage()
        if storage.roots and self._root(storage, view) is not None:
            self.write(view, ref)
            return
        low, high = view.span
        overlapping = [r for r in storage.roots if r.view.span[0] < high and low < r.view.span[1]]
        for r in overlapping:  # the memory was resized: what it held is gone
            storage.roots.remove(r)
        if overlapping:
            for v in [v for v in storage.entries if _overlap(v, view)]:
                del storage.entries[v]
        storage.roots.append(Root(view, ref))
        storage.entries[view] = Entry(ref)

    def knows(self, view: View) -> bool:
        storage = self.storages.get(view.storage)
        return storage is not None and (view in storage.entries or self._root(storage, view) is not None)

    def alias(self, parent: View, view: View, step: Step | None, ref: Ref | None) -> None:
        """`view` was taken of `parent`; `ref` is its value now."""
        storage = self.storages[parent.storage]
        entry = storage.entries.get(view)
        if entry is not None:
            if ref is not None:
                entry.ref = ref
        elif step is None:
            storage.entries[view] = Entry(ref)
        else:
            storage.entries[view] = Entry(ref, parent, step)

    def renew(self, view: View, ref: Ref) -> None:
        """Another node has the value of `view`."""
        self.storages[view.storage].entries[view].ref = ref

    def above(self, view: View, other: View) -> bool:
        """Was `view` taken, step by step, from `other`?"""
        entries = self.storages[view.storage].entries
        entry = entries.get(view)
        while entry is not None and entry.parent is not None:
            if entry.parent == other:
                return True
            entry = entries.get(entry.parent)
        return False

    def current(self, view: View) -> Ref | None:
        storage = self.storages.get(view.storage)
        entry = storage.entries.get(view) if storage is not None else None
        return entry.ref if entry is not None else None

    def read(self, view: View) -> Ref:
        """The value seen through `view` now."""
        storage = self.storages[view.storage]
        entry = storage.entries.get(view)
        if entry is not None and entry.ref is not None:
            return entry.ref
        root = self._root(storage, view)
        if root is None:
            raise LookupError("a view of memory that holds nothing")
        if entry is None:
            entry = storage.entries[view] = Entry(None)
        entry.ref = self._recover(storage, root, view, entry)
        return entry.ref

    def write(self, view: View, ref: Ref) -> None:
        """`view` now holds `ref`."""
        storage = self.storages[view.storage]
        root = self._root(storage, view)
        if root is None:
            self.define(view, ref)
            return
        for v, e in storage.entries.items():
            if e.ref is not None and v is not view and _overlap(v, view) and not _siblings(storage, v, view):
                e.ref = None
        entry = storage.entries.get(view)
        if entry is None:
            entry = storage.entries[view] = Entry(None)
        entry.ref = ref
        if view == root.view:
            root.ref = ref
            root.writes.clear()
            return
        covered = [w for w in root.writes if w == view or (_overlap(w, view) and _inside(w, view))]
        for w in covered:
            del root.writes[w]
        root.writes[view] = ref

    # ---- recovering values

    def _root(self, storage: Storage, view: View) -> Root | None:
        low, high = view.span
        for r in storage.roots:
            a, b = r.view.span
            if a <= low and high <= b:
                return r
        return None

    def _recover(self, storage: Storage, root: Root, view: View, entry: Entry) -> Ref:
        if view == root.view:
            return self._settle(storage, root)
        inner = {w: r for w, r in root.writes.items() if _overlap(w, view)}
        if inner:
            latest = next(reversed(inner))
            below = self._chain(storage, latest, view)
            if below is not None and all(s.bijective for s in below):
                return self._undo(below, inner[latest])
            joined = self._joined(storage, view, inner)
            if joined is not None:
                return joined
        if entry.parent is not None and entry.step is not None and entry.parent != view:
            return self._apply(entry.step, self.read(entry.parent), view)
        return self._strided(root, self.read(root.view), view)

    def _settle(self, storage: Storage, root: Root) -> Ref:
        """Fold the pending writes into the root's value."""
        ref = self._joined(storage, root.view, root.writes)
        if ref is None:
            ref = root.ref
            for view, value in root.writes.items():
                chain = self._chain(storage, view, root.view)
                if chain is None:
                    ref = self._put_strided(root, ref, view, value)
                else:
                    ref = self._put(chain, ref, value, root.view)
        root.ref = ref
        root.writes.clear()
        return ref

    def _joined(self, storage: Storage, top: View, writes: dict[View, Ref]) -> Ref | None:
        """`top` as the concatenation of what was written, when that tiles one of its dims."""
        if not writes:
            return None
        pieces: list[tuple[int, int, int, str, Ref]] = []
        for view, value in writes.items():
            chain = self._chain(storage, view, top)
            if chain is None or not chain or not all(s.bijective for s in chain[1:]):
                return None
            first = chain[0]
            if first.window is not None:
                dim, start, end = first.window
                pieces.append((dim, start, end, "slice", self._undo(chain[1:], value)))
            elif first.op == "aten.select.int":
                dim, index = first.args
                pieces.append((dim, index, index + 1, "select", self._undo(chain[1:], value)))
            else:
                return None
        pieces.sort(key=lambda p: p[1])
        dim, kind = pieces[0][0], pieces[0][3]
        ends = [0, *(p[2] for p in pieces)]
        tiles = all(p[0] == dim and p[3] == kind and p[1] == e for p, e in zip(pieces, ends))
        if not tiles or ends[-1] != top.shape[dim]:
            return None
        if len(pieces) == 1 and kind == "slice":
            return pieces[0][4]
        op = "aten.cat.default" if kind == "slice" else "aten.stack.default"
        return self.emit(op, (tuple(p[4] for p in pieces), dim), {}, top.shape, top.dtype)

    def _chain(self, storage: Storage, view: View, top: View) -> list[Step] | None:
        """The steps from `top` down to `view`, outermost first; None when there is no such path."""
        steps: list[Step] = []
        seen = set()
        while view != top:
            entry = storage.entries.get(view)
            if entry is None or entry.parent is None or entry.step is None or view in seen:
                return None
            seen.add(view)
            steps.append(entry.step)
            view = entry.parent
        return steps[::-1]

    def _apply(self, s: Step, ref: Ref, target: View) -> Ref:
        return self.emit(s.op, (ref, *s.args), dict(s.kwargs), s.target, target.dtype)

    def _undo(self, steps: list[Step], ref: Ref) -> Ref:
        for s in reversed(steps):
            if s.op in (
                "aten.alias.default",
                "aten.detach.default",
                "aten.slice.Tensor",
                "aten.expand.default",
            ):
                continue
            if s.source == s.target and s.op in ("aten.view.default", "aten._unsafe_view.default"):
                continue
            op, args, kwargs = inverse(s)
            ref = self.emit(op, (ref, *args), dict(kwargs), s.source, s.source_dtype)
        return ref

    def _put(self, chain: list[Step], ref: Ref, value: Ref, view: View) -> Ref:
        """`ref` with `value` in place of what `chain` takes of it."""
        if not chain:
            return value
        s, rest = chain[0], chain[1:]
        if rest and not all(r.bijective for r in rest):
            part = self.emit(s.op, (ref, *s.args), dict(s.kwargs), s.target, rest[0].source_dtype)
            value = self._put(rest, part, value, view)
        else:
            value = self._undo(rest, value)
        if s.bijective:
            return self._undo([s], value)
        back = scatter(s)
        if back is None:
            self.note(f"a write through {s.op} could not be followed")
            return ref
        op, args = back
        return self.emit(op, (ref, value, *args), {}, s.source, s.source_dtype)

    # ---- views that were not taken step by step

    def _flat(self, root: Root, ref: Ref, like: View) -> Ref:
        """The root's elements in memory order, one-dimensional, read with the dtype of `like`."""
        base = root.view
        if not base.contiguous:
            order = _memory_order(base)
            shape = tuple(base.shape[d] for d in order)
            ref = self.emit("aten.permute.default", (ref, order), {}, shape, base.dtype)
        if len(base.shape) != 1:
            ref = self.emit("aten.view.default", (ref, (base.numel,)), {}, (base.numel,), base.dtype)
        if like.dtype != base.dtype:
            ref = self.emit("aten.view.dtype", (ref, like.dtype), {}, (_count(base, like),), like.dtype)
        return ref

    def _unflat(self, root: Root, ref: Ref, like: View) -> Ref:
        """The inverse of `_flat`."""
        base = root.view
        if like.dtype != base.dtype:
            ref = self.emit("aten.view.dtype", (ref, base.dtype), {}, (base.numel,), base.dtype)
        if base.contiguous:
            if len(base.shape) == 1:
                return ref
            return self.emit("aten.view.default", (ref, base.shape), {}, base.shape, base.dtype)
        order = _memory_order(base)
        shape = tuple(base.shape[d] for d in order)
        ref = self.emit("aten.view.default", (ref, shape), {}, shape, base.dtype)
        back = tuple(order.index(d) for d in range(len(order)))
        return self.emit("aten.permute.default", (ref, back), {}, base.shape, base.dtype)

    def _strided(self, root: Root, ref: Ref, view: View) -> Ref:
        """What `view` reads of the root's value `ref`."""
        ref, start, n = self._flat(root, ref, view), _start(root.view, view), view.numel
        if not view.contiguous:
            args = (ref, view.shape, view.stride, start)
            return self.emit("aten.as_strided.default", args, {}, view.shape, view.dtype)
        if n != _count(root.view, view):
            ref = self.emit("aten.slice.Tensor", (ref, 0, start, start + n, 1), {}, (n,), view.dtype)
        return self.emit("aten.view.default", (ref, view.shape), {}, view.shape, view.dtype)

    def _put_strided(self, root: Root, ref: Ref, view: View, value: Ref) -> Ref:
        """The root's value `ref` with `value` in the place of `view`."""
        flat, start, n = self._flat(root, ref, view), _start(root.view, view), view.numel
        total = _count(root.view, view)
        if view.contiguous:
            value = self.emit("aten.view.default", (value, (n,)), {}, (n,), view.dtype)
            args: tuple[Any, ...] = (flat, value, 0, start, start + n, 1)
            flat = self.emit("aten.slice_scatter.default", args, {}, (total,), view.dtype)
        else:
            args = (flat, value, view.shape, view.stride, start)
            flat = self.emit("aten.as_strided_scatter.default", args, {}, (total,), view.dtype)
        return self._unflat(root, flat, view)


def _memory_order(v: View) -> tuple[int, ...]:
    return tuple(sorted(range(len(v.shape)), key=lambda d: -v.stride[d]))


def _count(base: View, like: View) -> int:
    """Elements of the dtype of `like` that the memory of `base` holds."""
    return base.numel * base.itemsize // like.itemsize


def _start(base: View, view: View) -> int:
    """Where `view` begins, in its own elements from the beginning of `base`."""
    return view.offset - base.offset * base.itemsize // view.itemsize


def _overlap(a: View, b: View) -> bool:
    (p, q), (r, s) = a.span, b.span
    return p < s and r < q


def _inside(a: View, b: View) -> bool:
    """Does `b` certainly cover all of `a`? Only dense views are known to cover their span."""
    (p, q), (r, s) = a.span, b.span
    return r <= p and q <= s and b.numel * b.itemsize == s - r


def _siblings(storage: Storage, a: View, b: View) -> bool:
    """Are the two disjoint parts of one parent, cut along the same dim?"""
    e, f = storage.entries.get(a), storage.entries.get(b)
    if e is None or f is None or e.parent is None or e.parent != f.parent or e.step is None or f.step is None:
        return False
    if e.step.window is not None and f.step.window is not None:
        (d, p, q), (g, r, s) = e.step.window, f.step.window
        return d == g and (q <= r or s <= p)
    if e.step.op == f.step.op == "aten.select.int":
        (d, p), (g, r) = e.step.args, f.step.args
        return bool(d == g and p != r)
    return False
