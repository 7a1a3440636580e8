"""`Spmd[Tensor, "b@dp s d"]`, `@program(mesh=...)`, and how annotations of a class or function are read.

At run time `Spmd[T, text]` is `Annotated[T, Type]`, so nothing changes for the program; type checkers
that know no plugin see a plain `T`. This module imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from spmdtypes.errors import CannotCheck
from spmdtypes.mesh import Mesh, Placement, from_placements
from spmdtypes.notation import NotationError, Type, parse

if TYPE_CHECKING:
    from typing import Annotated as Spmd
else:
    from typing import Annotated

    class Spmd:
        """`Spmd[T, "b@dp s d"]`: a `T` of that placement."""

        def __class_getitem__(cls, item):
            if not isinstance(item, tuple) or len(item) != 2:
                raise NotationError('Spmd takes a type and a text, as in Spmd[Tensor, "b@dp s d"]')
            return Annotated[item[0], as_type(item[1])]


Typed = str | Type | tuple[Any, Mapping[str, Placement]]
T = TypeVar("T", bound=Callable[..., Any])
_MARK = "__spmd_program__"


def as_type(t: Typed) -> Type:
    """Read `"b@dp s"`, a `Type`, or `((8, 16), {"dp": S(0)})`."""
    if isinstance(t, Type):
        return t
    if isinstance(t, str):
        return parse(t)
    if isinstance(t, tuple):
        shape, placements = t
        return from_placements(shape, placements)
    raise NotationError(f"{t!r} is no type: expected a text such as 'b@dp s d'")


def as_types(types: Mapping[str, Typed] | None) -> dict[str, Type]:
    return {name: as_type(t) for name, t in (types or {}).items()}


def as_output(t: Typed | Mapping[str, Typed] | None) -> Type | Mapping[str, Type] | None:
    if t is None:
        return None
    return as_types(t) if isinstance(t, Mapping) else as_type(t)


@dataclass(frozen=True)
class Declaration:
    """What `@program(...)` said. None: not said."""

    mesh: Mapping[str, int] | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Type] = field(default_factory=dict)
    params: Mapping[str, Type] = field(default_factory=dict)
    output: Type | Mapping[str, Type] | None = None
    grads: Mapping[str, str] | None = None
    results: Mapping[str, Type] = field(default_factory=dict)
    input_grads: bool | tuple[str, ...] | None = None
    model: Callable[..., Any] | None = None
    init: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None


def program(
    *,
    mesh: Mapping[str, int] | None = None,
    dims: Mapping[str, int] | None = None,
    inputs: Mapping[str, Typed] | None = None,
    params: Mapping[str, Typed] | None = None,
    output: Typed | Mapping[str, Typed] | None = None,
    grads: Mapping[str, str] | None = None,
    results: Mapping[str, Typed] | None = None,
    input_grads: bool | tuple[str, ...] | None = None,
    model: Callable[..., Any] | None = None,
    init: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[[T], T]:
    """Mark an `nn.Module` class or a function as a program to check; returns it unchanged.

    `mesh`: axes and sizes. `dims`: sizes of dim names; the others get one by themselves. `inputs`,
    `params`, `output`: types, in addition to annotations. `grads`: what an outer wrapper does to
    gradients over an axis, "sum" or "avg"; `{}` says that they are final. `input_grads`: which
    arguments' gradients are checked (default: all floating ones, when the result is no scalar).
    `init`: arguments of the constructor that are no dims. On a function that takes `model`, a
    training step: `model` is the class, `results` types entries of the dict it returns.
    """
    declaration = Declaration(
        mesh=None if mesh is None else Mesh(mesh),
        dims=dict(dims or {}),
        inputs=as_types(inputs),
        params=as_types(params),
        output=as_output(output),
        grads=None if grads is None else _as_grads(grads),
        results=as_types(results),
        input_grads=input_grads,
        model=model,
        init=dict(init or {}),
        name=name,
    )

    def mark(target: T) -> T:
        if not isinstance(target, type) and not hasattr(target, "__code__"):
            raise NotationError(f"@program marks a class or a function, not {target!r:.60}")
        setattr(target, _MARK, declaration)
        return target

    return mark


def _as_grads(grads: Mapping[str, str]) -> dict[str, str]:
    for axis, op in grads.items():
        if op not in ("sum", "avg"):
            raise NotationError(f'grads={{"{axis}": {op!r}}}: expected "sum" or "avg"')
    return dict(grads)


def declaration_of(target: object) -> Declaration | None:
    """What `@program` said of this very object (a subclass does not inherit it)."""
    found = vars(target).get(_MARK) if hasattr(target, "__dict__") else None
    return found if isinstance(found, Declaration) else None


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of a signature. `kind` is the annotated Python type's name ("Tensor", "Parameter")."""

    name: str
    type: Type | None
    kind: str
    default: Any
    line: int

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Signature:
    arguments: tuple[Argument, ...]
    output: Type | Mapping[str, Type] | None
    line: int


def signature_of(function: Callable[..., Any]) -> Signature:
    """The arguments and the result of a function, with their types; `self` left out."""
    function = inspect.unwrap(function)
    file, first = source_of(function)
    lines = argument_lines(file, first)
    arguments = []
    for p in inspect.signature(function).parameters.values():
        if p.name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        hint = _evaluate(p.annotation, function, file, lines.get(p.name, first))
        arguments.append(Argument(p.name, type_in(hint), _kind(hint), p.default, lines.get(p.name, first)))
    result = function.__annotations__.get("return")
    output = _output(_evaluate(result, function, file, lines.get("return", first)))
    return Signature(tuple(arguments), output, lines.get("return", first))


def class_types(cls: type) -> Iterator[tuple[str, Type, str, int]]:
    """(attribute, type, file, line) of every `Spmd` attribute of a class and its bases."""
    for klass in reversed(cls.__mro__):
        hints = inspect.get_annotations(klass)
        if not any("Spmd" in str(h) or type_in(h) is not None for h in hints.values()):
            continue
        file, first = source_of(klass)
        lines = attribute_lines(file, klass.__qualname__)
        for name, hint in hints.items():
            line = lines.get(name, first)
            t = type_in(_evaluate(hint, klass, file, line))
            if t is not None:
                yield name, t, file, line


def type_in(hint: object) -> Type | None:
    """The type in `Spmd[T, text]`, also inside a union."""
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, Type):
            return meta
    for arg in get_args(hint):
        if not isinstance(arg, (str, tuple)) and (t := type_in(arg)) is not None:
            return t
    return None


def _output(hint: object) -> Type | Mapping[str, Type] | None:
    """A tuple of types is a mapping by position."""
    if get_origin(hint) is tuple:
        types = [type_in(a) for a in get_args(hint)]
        return {str(i): t for i, t in enumerate(types) if t is not None} or None
    return type_in(hint)


def _kind(hint: object) -> str:
    inner = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    return str(getattr(inner, "__name__", inner))


def _evaluate(hint: Any, owner: Any, file: str, line: int) -> Any:
    """An annotation's value; strings (postponed evaluation) are evaluated where the owner lives."""
    if not isinstance(hint, str):
        return hint
    scope = getattr(owner, "__globals__", None) or vars(sys.modules.get(owner.__module__, sys))
    try:
        return eval(hint, dict(scope), dict(vars(owner)) if isinstance(owner, type) else {})
    except NotationError as e:
        raise CannotCheck(e.message, file, line, e.excerpt) from e
    except Exception as e:
        if "Spmd" not in hint:
            return None
        raise CannotCheck(f"annotation {hint}: {type(e).__name__}: {e}", file, line) from e


def source_of(target: Any) -> tuple[str, int]:
    """(file, line of the `class` or `def`)."""
    try:
        file = inspect.getsourcefile(target) or inspect.getfile(target)
    except TypeError:
        return "<unknown>", 1
    if inspect.isfunction(target):
        return file, _def_line(file, target.__code__.co_firstlineno)
    return file, _class_lines(file).get(target.__qualname__, 1)


@lru_cache(maxsize=64)
def _parsed(file: str, stamp: float) -> ast.Module:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _tree(file: str) -> ast.Module:
    try:
        return _parsed(file, Path(file).stat().st_mtime)
    except OSError:
        return ast.Module([], [])


def _def_line(file: str, first: int) -> int:
    """A code object starts at its decorators; the `def` may be lines below."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([d.lineno for d in node.decorator_list], default=node.lineno)
            if start == first:
                return node.lineno
    return first


def _classes(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from _classes(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _classes(node.body, f"{prefix}{node.name}.<locals>.")


def _class_lines(file: str) -> dict[str, int]:
    return {name: node.lineno for name, node in _classes(_tree(file).body)}


def attribute_lines(file: str, qualname: str) -> dict[str, int]:
    """Line of each annotated attribute of a class."""
    for name, node in _classes(_tree(file).body):
        if name == qualname:
            return {
                s.target.id: s.lineno
                for s in node.body
                if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            }
    return {}


def argument_lines(file: str, line: int) -> dict[str, int]:
    """Line of each argument of the function whose `def` is at `line`, and of its "return"."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno == line:
            a = node.args
            lines = {x.arg: x.lineno for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
            return lines | {"return": node.returns.lineno if node.returns else line}
    return {}
