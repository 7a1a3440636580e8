"""When two steps of a graph are the same step: on operands no rule can tell apart, with equal arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmdtypes.core import ranks
from spmdtypes.core.denotation import Denotation
from spmdtypes.core.engine import Result
from spmdtypes.graph import Ref


@dataclass(frozen=True, slots=True)
class Fact:
    """What later steps ask of a value. `key`: equal for values that no rule can tell apart. `plain`: it
    has a reading, which speaks of no integer tensor in particular."""

    den: Denotation
    key: tuple[Any, ...]
    grad_free: bool
    plain: bool


def all_plain(row: Sequence[Fact | None]) -> bool:
    return all(f is None or f.plain for f in row)


def split(x: Any, refs: list[Ref]) -> Any:
    """An argument without the identities of its operands, hashable; these are added to `refs`."""
    kind = type(x)
    if kind is Ref:
        refs.append(x)
        return Ref
    if kind is int or kind is str or x is None:
        return x
    if kind is tuple or kind is list:
        return tuple([split(y, refs) for y in x])
    if kind is bool or kind is float:
        return (kind, repr(x))
    if isinstance(x, dict):
        return tuple([(k, split(v, refs)) for k, v in x.items()])
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return x


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
