"""The one grammar of types: annotations, command line, messages and the corpus."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a GLOBAL shape: a number or a name, cut by `axes` (outermost first)."""

    size: int | str
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Type:
    """A parsed type. `partial` maps an axis to "sum", "avg", "max", "min", "prod", "I" or "V".
    `dims` is None when only the partial part was given (dims unknown). `limit`: integers in [0, limit)."""

    dims: tuple[Dim, ...] | None
    dtype: str | None = None
    partial: tuple[tuple[str, str], ...] = ()
    limit: int | None = None
    text: str = field(default="", compare=False)
