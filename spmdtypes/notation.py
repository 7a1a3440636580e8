"""The one grammar of types: annotations, command line, messages and the corpus.

    b@dp s h                  dims by name; b is cut over dp, everything else replicated
    f32[8@dp@cp, 16]          a dtype and numbers; 8 is cut over dp (outermost), then cp
    i64[b s] < 50             integers below 50; `< v` where v is a dim's name
    b@dp s h | tp:P           a pending sum over tp; also tp:P(avg), tp:I, tp:V, tp:R, avg@tp
    [] or f32[]               a scalar
    ... | tp:P                dims unknown

`parse` and `format_type` are inverse to each other. `resolve` gives names their sizes.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from math import lcm, prod
from typing import NoReturn

DTYPES = (
    "f64",
    "f32",
    "f16",
    "bf16",
    "f8e4m3",
    "f8e5m2",
    "i64",
    "i32",
    "i16",
    "i8",
    "u8",
    "bool",
    "c64",
    "c128",
)
REDUCTIONS = ("sum", "avg", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a GLOBAL shape: a number or a name, cut by `axes` (outermost first)."""

    size: int | str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "@".join((str(self.size), *self.axes))


@dataclass(frozen=True, slots=True)
class Type:
    """A parsed type. `partial` maps an axis to "sum", "avg", "max", "min", "prod", "I" or "V".
    `dims` is None when only the partial part was given (dims unknown). `limit`: integers in [0, limit);
    until `bind`, `limit_dim` may name the dim that is the limit."""

    dims: tuple[Dim, ...] | None
    dtype: str | None = None
    partial: tuple[tuple[str, str], ...] = ()
    limit: int | None = None
    text: str = field(default="", compare=False)
    limit_dim: str | None = None

    def __str__(self) -> str:
        return format_type(self)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis the type mentions."""
        return tuple(a for d in self.dims or () for a in d.axes) + tuple(a for a, _ in self.partial)

    @property
    def is_scalar(self) -> bool:
        return self.dims == ()


class NotationError(ValueError):
    """A type that cannot be read, or does not fit its mesh. `column` is 0-based in `text`."""

    def __init__(self, message: str, text: str = "", column: int | None = None) -> None:
        self.message, self.text, self.column = message, text, column
        super().__init__(message)

    @property
    def excerpt(self) -> str:
        """The text with a caret under the place."""
        if self.column is None:
            return ""
        return f"    {self.text}\n    {' ' * self.column}^"

    def __str__(self) -> str:
        return self.message + ("\n" + self.excerpt if self.excerpt else "")


_TOKEN = re.compile(r"\s*(?:(?P<word>\w+)|(?P<dots>\.\.\.)|(?P<sign>[@:|;,<()\[\]])|(?P<bad>\S))")
_END = "the end"


class _Parser:
    """Recursive descent over (kind, value, column) tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        for m in _TOKEN.finditer(text):
            kind = m.lastgroup or "bad"
            self.tokens.append((kind, m[kind], m.start(kind)))
            if kind == "bad":
                self.fail(f"unexpected {m[kind]!r} in {text!r}", m.start(kind))
        self.tokens.append(("end", _END, len(text.rstrip())))
        self.at = 0
        self.seen: set[str] = set()

    @property
    def value(self) -> str:
        return self.tokens[self.at][1]

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def column(self) -> int:
        return self.tokens[self.at][2]

    def fail(self, message: str, column: int | None = None) -> NoReturn:
        raise NotationError(message, self.text, self.column if column is None else column)

    def shown(self) -> str:
        return _END if self.kind == "end" else repr(self.value)

    def accept(self, *values: str) -> bool:
        if self.kind != "end" and self.value in values:
            self.at += 1
            return True
        return False

    def expect(self, value: str, after: str) -> None:
        if not self.accept(value):
            self.fail(f"expected {value!r} after {after}, found {self.shown()}")

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][1]

    def name(self, what: str) -> str:
        if self.kind != "word" or not self.value.isidentifier() or keyword.iskeyword(self.value):
            self.fail(f"expected {what}, found {self.shown()}")
        return self.take()

    def axis(self, after: str) -> str:
        column = self.column
        axis = self.name(f"the name of a mesh axis after {after}")
        if axis in self.seen:
            self.fail(f"axis {axis} used twice in {self.text!r}", column)
        self.seen.add(axis)
        return axis

    def type(self) -> Type:
        dtype = self.dtype()
        bracket = self.accept("[")
        if not self.text.strip():
            dims: tuple[Dim, ...] | None = ()
        else:
            dims = self.dims(bracket)
        partial = list(self.partials()) if bracket else []
        if bracket:
            self.expect("]", "the dims")
        limit, limit_dim = self.limit() if self.accept("<") else (None, None)
        partial += self.partials()
        if self.kind != "end":
            self.fail(f"expected a dim, '|' or the end, found {self.shown()}")
        pending = tuple(p for p in partial if p[1] != "R")
        return Type(dims, dtype, pending, limit, self.text, limit_dim)

    def limit(self) -> tuple[int | None, str | None]:
        if self.kind == "word" and self.value.isdecimal():
            return int(self.take()), None
        return None, self.name("a number or the name of a dim after '<'")

    def dtype(self) -> str | None:
        kind, value, column = self.tokens[self.at]
        if kind != "word" or self.tokens[self.at + 1][1] != "[":
            return None
        if value not in DTYPES:
            self.fail(f"unknown dtype {value!r}: expected one of {', '.join(DTYPES)}", column)
        return self.take()

    def dims(self, bracket: bool) -> tuple[Dim, ...] | None:
        if self.accept("..."):
            return None
        dims: list[Dim] = []
        while self.kind == "word" and self.tokens[self.at + 1][1] != ":":
            dims.append(self.dim())
            self.accept(",")
        if self.value == "@":
            self.fail("expected a dim (a name or a number) before '@'")
        if not dims and not bracket and (self.value in "|;" or self.kind == "word"):
            return None
        return tuple(dims)

    def dim(self) -> Dim:
        column, text = self.column, self.take()
        size: int | str = text
        if text.isdecimal():
            size = int(text)
            if size == 0:
                self.fail(f"dim of size 0 in {self.text!r}", column)
        elif not text.isidentifier() or keyword.iskeyword(text):
            self.fail(f"expected a dim (a name or a number), found {text!r}", column)
        axes: list[str] = []
        if text in REDUCTIONS and self.value == "@":
            self.fail(
                f"{text!r} is a reduction, not a dim: write it after '|', as in '[] | {text}@axis'", column
            )
        while self.accept("@"):
            axes.append(self.axis(f"'{'@'.join([text, *axes])}@'"))
        return Dim(size, tuple(axes))

    def partials(self) -> Iterator[tuple[str, str]]:
        if not self.accept("|", ";") and not (self.kind == "word" and self.tokens[self.at + 1][1] == ":"):
            return
        while self.kind == "word":
            yield from self.partial()
            while self.accept(",", ";"):
                pass

    def partial(self) -> Iterator[tuple[str, str]]:
        """`tp:P(avg)`, `tp:I`, or `avg@dp@cp`."""
        following = self.tokens[self.at + 1][1]
        if following == "@":
            yield from self.reduction()
            return
        if following != ":":
            self.fail(f"expected 'axis:P' or 'sum@axis' after '|', found {self.shown()}")
        axis = self.axis("'|'")
        self.at += 1
        column, letter = self.column, self.name(f"R, I, V or P after '{axis}:'")
        if letter in ("R", "I", "V"):
            yield axis, letter
        elif letter == "S":
            self.fail(f"a shard is written at its dim, as in 'dim@{axis}'", column)
        elif letter != "P":
            self.fail(f"expected R, I, V or P after '{axis}:', found {letter!r}", column)
        elif self.accept("("):
            op = self.reduction_name()
            self.expect(")", f"'P({op}'")
            yield axis, op
        else:
            yield axis, "sum"

    def reduction(self) -> Iterator[tuple[str, str]]:
        op = self.reduction_name()
        while self.accept("@"):
            yield self.axis(f"'{op}@'"), op

    def reduction_name(self) -> str:
        column = self.column
        op = self.name("a reduction")
        if op not in REDUCTIONS:
            self.fail(f"expected a reduction ({', '.join(REDUCTIONS)}), found {op!r}", column)
        return op


@lru_cache(maxsize=4096)
def parse(text: str) -> Type:
    """Read one type; `NotationError` says what was expected and where."""
    return _Parser(text).type()


def format_type(t: Type) -> str:
    """The canonical text of a type: `parse(format_type(t)) == t`."""
    dims = "..." if t.dims is None else " ".join(map(str, t.dims))
    if t.dtype or not dims:
        dims = f"{t.dtype or ''}[{dims}]"
    bound = t.limit_dim if t.limit is None else t.limit
    limit = "" if bound is None else f" < {bound}"
    partial = ", ".join(format_partial(axis, op) for axis, op in t.partial)
    return dims + limit + (f" | {partial}" if partial else "")


def format_partial(axis: str, op: str) -> str:
    """`tp:P`, `tp:P(avg)`, `tp:I`."""
    if op in ("I", "V", "R"):
        return f"{axis}:{op}"
    return f"{axis}:P" if op == "sum" else f"{axis}:P({op})"


def as_type(t: str | Type) -> Type:
    return parse(t) if isinstance(t, str) else t


def column_of(text: str, word: str) -> int | None:
    """Where `word` stands in a type's text, for a caret."""
    m = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    return m.start() if m else None


def check_axes(t: Type, mesh: Mapping[str, int]) -> None:
    """Raise when `t` names an axis the mesh does not have."""
    for axis in t.axes:
        if axis not in mesh:
            text = t.text or format_type(t)
            near = get_close_matches(axis, mesh, 1)
            have = f"the mesh has {', '.join(mesh)}" + (f" (did you mean {near[0]}?)" if near else "")
            raise NotationError(f"unknown axis {axis!r} in {text!r}: {have}", text, column_of(text, axis))


def ways(axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    """Into how many blocks `axes` cut a dim."""
    return prod(mesh[a] for a in axes)


def check_divisible(t: Type, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raise when a dim does not split evenly over the axes that cut it."""
    for d in t.dims or ():
        n = sizes.get(d.size, 0) if isinstance(d.size, str) else d.size
        if not d.axes or not n:
            continue
        k = 1
        for axis in d.axes:
            k *= mesh[axis]
            if n % k == 0:
                continue
            text = t.text or format_type(t)
            name = f"dim {d.size} = {n}" if isinstance(d.size, str) else f"dim {n}"
            outer = k // mesh[axis]
            valid = [v for v in range(1, n + 1) if n % (v * outer) == 0]
            raise NotationError(
                f"{name} is not divisible by axis {axis} = {mesh[axis]}"
                + (f" (after {outer} blocks over the axes before it)" if outer > 1 else "")
                + f" in {text!r}: valid sizes of {axis} are {', '.join(map(str, valid)) or 'none'}",
                text,
                column_of(text, str(d.size)),
            )


# Attempt k makes every free dim a multiple of this too: programs ask for even sizes, for a whole
# number of heads, for powers of two.
_GRAINS = (1, 4, 16, 64)
ATTEMPTS = len(_GRAINS)


def resolve(
    types: Mapping[str, Type],
    dims: Mapping[str, int] | None = None,
    mesh: Mapping[str, int] | None = None,
    *,
    names: tuple[str, ...] = (),
    attempt: int = 0,
) -> dict[str, int]:
    """Sizes of all dim names in `types` and `names`: those in `dims` as given, the others by themselves.

    A free dim gets a size of its own, different from every other one, at least two per block, and a
    multiple of the blocks every type cuts it into; later attempts (up to `ATTEMPTS`) use coarser
    multiples, for programs that ask for more divisibility than their types say. `names` are further
    sizes the program wants (a number of heads): later attempts make every free dim a multiple of them.
    """
    mesh, sizes = mesh or {}, dict(dims or {})
    for name, n in sizes.items():
        if not is_size(n):
            raise NotationError(f"dim {name} has size {n!r}: expected a positive number")
    blocks = _blocks(types.values(), mesh)
    extra = tuple(n for n in names if n not in blocks)
    numbers = {d.size for t in types.values() for d in t.dims or () if isinstance(d.size, int)}
    taken = {*sizes.values(), *numbers, *mesh.values(), 1}
    for name in extra:
        if name not in sizes:
            sizes[name] = _fresh(lcm(*mesh.values()), 1, taken)
    wanted = (_GRAINS[attempt], *(sizes[n] for n in extra)) if attempt else (1,)
    for name, k in blocks.items():
        if name not in sizes:
            sizes[name] = _fresh(lcm(k, *wanted), k, taken)
    for t in types.values():
        check_divisible(t, mesh, sizes)
    return sizes


def is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def _blocks(types: Iterable[Type], mesh: Mapping[str, int]) -> dict[str, int]:
    """Into how many blocks each named dim is cut, over all types."""
    blocks: dict[str, int] = {}
    for t in types:
        check_axes(t, mesh)
        for d in t.dims or ():
            if isinstance(d.size, str):
                blocks[d.size] = lcm(blocks.get(d.size, 1), ways(d.axes, mesh))
        if t.limit_dim:
            blocks.setdefault(t.limit_dim, 1)
    return blocks


def _fresh(base: int, blocks: int, taken: set[int]) -> int:
    """A multiple of `base` such that neither it nor its block is taken."""
    size = 2 * base
    while size in taken or size // blocks in taken:
        size += base
    taken |= {size, size // blocks}
    return size


def bind(t: Type, sizes: Mapping[str, int]) -> Type:
    """`t` with numbers for names."""
    limit = sizes[t.limit_dim] if t.limit_dim else t.limit
    dims = t.dims
    if dims is not None:
        dims = tuple(Dim(sizes[d.size] if isinstance(d.size, str) else d.size, d.axes) for d in dims)
    return replace(t, dims=dims, limit=limit, limit_dim=None)


def global_shape(t: Type) -> tuple[int, ...]:
    """The shape on the mesh of ones; `t` must be bound and its dims known."""
    if t.dims is None:
        raise NotationError(f"the dims of {format_type(t)!r} are not known")
    return tuple(_number(t, d) for d in t.dims)


def local_shape(t: Type, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The shape one rank holds."""
    if t.dims is None:
        raise NotationError(f"the dims of {format_type(t)!r} are not known")
    return tuple(_number(t, d) // ways(d.axes, mesh) for d in t.dims)


def _number(t: Type, d: Dim) -> int:
    if isinstance(d.size, str):
        raise NotationError(f"dim {d.size} of {format_type(t)!r} has no size yet")
    return d.size
