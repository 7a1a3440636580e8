"""When two steps of a graph are the same step: on operands no rule can tell apart, with equal arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from spmdtypes.core import ranks
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.engine import Derivation, Result
from spmdtypes.graph import Comm, Lit, Ref, TensorMeta

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a value. `token`: one object for all values that no rule can tell apart. `plain`:
    it has a reading, which speaks of no integer tensor in particular."""

    den: Denotation
    evidence: str
    token: object
    grad_free: bool
    plain: bool


Row = tuple[Fact | None, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs of a step that may occur again. `known`: its op has a rule."""

    row: Row
    known: bool


def all_plain(row: Row) -> bool:
    return all(f is None or f.plain for f in row)


class Column(Mapping[Ref, T]):
    """One field of the facts: of every value, in program order."""

    def __init__(self, rows: Sequence[Row], read: Callable[[Fact], T]) -> None:
        self.rows, self.read = rows, read

    def __getitem__(self, ref: Ref) -> T:
        fact = self.rows[ref.node][ref.out] if 0 <= ref.node < len(self.rows) else None
        if fact is None:
            raise KeyError(ref)
        return self.read(fact)

    def __iter__(self) -> Iterator[Ref]:
        return (Ref(n, k) for n, row in enumerate(self.rows) for k, f in enumerate(row) if f is not None)

    def __len__(self) -> int:
        return sum(f is not None for row in self.rows for f in row)


@dataclass(slots=True)
class Memo:
    """What passes over graphs of one mesh may share. Denotations are interned, so that an identity
    stands for one; `tokens` are numbered by denotation, shape, dtype, and freedom of gradients."""

    derived: dict[Any, Derivation] = field(default_factory=dict)
    interned: dict[Denotation, Denotation] = field(default_factory=dict)
    tokens: dict[Any, object] = field(default_factory=dict)
    metas: dict[TensorMeta | None, int] = field(default_factory=dict)
    comms: dict[Any, int] = field(default_factory=dict)

    def token(self, den: Denotation, meta: TensorMeta, free: bool | None) -> object:
        """`den` is interned. `free` is None when no rule asks."""
        key = (id(den), meta.shape, meta.dtype, free)
        found = self.tokens.get(key)
        if found is None:
            found = self.tokens[key] = object()
        return found


class Patterns:
    """What the result of a step depends on, apart from its operands, as small hashable keys.

    Metas and collectives are known by identity after their first use: the graph outlives this.
    """

    def __init__(self, memo: Memo) -> None:
        self.memo = memo
        self.metas: dict[int, int] = {}

    def outs(self, metas: Sequence[TensorMeta | None]) -> tuple[int, ...]:
        found = self.metas
        try:
            return (found[id(metas[0])],) if len(metas) == 1 else tuple([found[id(m)] for m in metas])
        except KeyError:
            known = self.memo.metas
            found.update([(id(m), known.setdefault(m, len(known))) for m in metas])
            return tuple([found[id(m)] for m in metas])

    def comm(self, c: Comm) -> int:
        """Ranks count only where they are no product of axes: a group may have thousands."""
        ranks = len(c.ranks) if c.axes else c.ranks
        key = (c.kind, c.axes, ranks, c.reduce_op, c.factor, c.splits, c.root, c.in_place)
        known = self.memo.comms
        return known.setdefault(key, len(known))


def pattern(args: Iterable[Any], rows: Any) -> tuple[Any, ...]:
    """Arguments, hashable, with the token of `rows[node][out]` in place of each operand."""
    out: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is Ref:
            fact = rows[x.node][x.out]
            out.append(Ref if fact is None else fact.token)
        elif kind is int or kind is str or x is None:
            out.append(x)
        elif kind is tuple or kind is list:
            out.append(pattern(x, rows))
        else:
            out.append(_literal(x, rows))
    return tuple(out)


def _literal(x: Any, rows: Any) -> Any:
    kind = type(x)
    if kind is Lit:
        return (Lit, _number(x.local), _number(x.ref), x.rank, x.affine)
    if kind is bool or kind is float:
        return _number(x)
    if isinstance(x, dict):
        return tuple([(k, *pattern((v,), rows)) for k, v in x.items()])
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return x


def _number(x: Any) -> Any:
    """Equal only for equal numbers of one kind: 1, 1.0, True and 0.0, -0.0 differ."""
    return x if type(x) is int else (type(x), repr(x))


def atom_names(dens: Sequence[Denotation]) -> dict[Any, Any]:
    """Integer tensors spoken of, numbered in order of appearance: names that repeat between layers."""
    names: dict[Any, Any] = {}
    for d in dens:
        for key in _keys(d) if d.value is not None or d.guard is not None else ():
            names.setdefault(key, ("#", len(names)))
    return names


def _keys(d: Denotation) -> Iterator[Any]:
    if d.value is not None:
        yield from d.value.keys
    if d.guard is not None:
        yield from (a[1] for a in ranks.atoms(d.guard) if a[0] == "u")


def renamed(d: Denotation, names: Mapping[Any, Any]) -> Denotation:
    rename = ranks.rekeyed(names)
    value = d.value.mapped(rename) if d.value else None
    guard = d.guard.mapped(rename) if d.guard else None
    return replace(d, value=value, guard=guard)


def result_renamed(x: Result, names: Mapping[Any, Any]) -> Result:
    if isinstance(x, Denotation) and (x.value is not None or x.guard is not None):
        return renamed(x, names)
    return x
