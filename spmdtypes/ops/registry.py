"""From a recorded node to its description: the table of op builders.

A builder has the signature of the ATen schema it describes; a long one is written as text, and
the builder takes the bound `Call`:

    @op("native_layer_norm", "x shape w b eps=1e-5")
    def layer_norm(a: Call) -> OpSpec: ...  # a.x, a.shape, ...

Tensor arguments arrive as `Operand`, lists of tensors as lists, literals as recorded (possibly
`Lit`). It returns an `OpSpec`, or None when these arguments have no description (a data-dependent
output shape, say).
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from spmdtypes.core.spec import Operand, OpSpec
from spmdtypes.graph import Node, Ref

Builder = Callable[..., OpSpec | None]
B = TypeVar("B", bound=Builder)
_BUILDERS: dict[str, Builder] = {}


class Call:
    """The arguments of one call, by the names its signature gives them."""

    def __init__(self, signature: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = dict(kwargs)
        fields = [field.partition("=") for field in signature.split()]
        for (name, *_), value in zip(fields, args):
            given[name] = value
        for name, has_default, default in fields[len(args) :]:
            if name not in given and not has_default:
                raise ValueError(f"argument {name} is missing")
            given.setdefault(name, literal_eval(default) if has_default else None)
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return self._given[name]


def op(names: str, signature: str = "") -> Callable[[B], B]:
    """Register a builder for space-separated names; "mm" stands for "aten.mm.default"."""

    def register(builder: B) -> B:
        def call(*args: Any, **kwargs: Any) -> OpSpec | None:
            return builder(Call(signature, args, kwargs))

        for name in names.split():
            _BUILDERS[full_name(name)] = call if signature else builder
        return builder

    return register


def full_name(name: str) -> str:
    """ "mm" -> "aten.mm.default", "add.Tensor" -> "aten.add.Tensor"; longer names are left alone."""
    dots = name.count(".")
    return name if dots >= 2 else f"aten.{name}" if dots else f"aten.{name}.default"


def coverage() -> list[str]:
    """Every op name that has a builder (in-place and `out=` forms of these are understood too)."""
    return sorted(_BUILDERS)


def builder_of(name: str) -> Builder | None:
    """The builder for an op; in-place (`add_.Tensor`) and `.out` forms use the functional one's."""
    for candidate in _spellings(name):
        if candidate in _BUILDERS:
            return _BUILDERS[candidate]
    return None


def _spellings(name: str) -> Iterator[str]:
    yield name
    space, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    bases = [base] if base.startswith("__") or not base.endswith("_") else [base, base[:-1]]
    for b in bases:
        yield f"{space}.{b}.{overload}"
        if overload.endswith("out"):
            for o in (overload[:-3].rstrip("_"), "default", "Tensor", "self"):
                yield f"{space}.{b}.{o or 'default'}"


def build(node: Node, operands: Sequence[Operand]) -> OpSpec | None:
    """The description of `node`; `operands` are in the order of `node.refs()`.

    None when the op has no description. Raises ValueError when the arguments do not fit the op.
    """
    builder = builder_of(node.op)
    if builder is None:
        return None
    given = iter(operands)
    args = [_bind(a, given) for a in node.args]
    kwargs = {k: _bind(v, given) for k, v in node.kwargs.items() if not _only_placement(k)}
    try:
        return builder(*args, **kwargs)
    except ValueError:
        raise
    except (TypeError, IndexError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{node.op}: {error}") from error


def _only_placement(keyword: str) -> bool:
    """Keywords that do not change the value: where and how the result is stored."""
    return keyword in ("layout", "device", "pin_memory", "memory_format", "non_blocking", "out", "generator")


def _bind(x: Any, given: Iterator[Operand]) -> Any:
    if isinstance(x, Ref):
        return next(given)
    if isinstance(x, (tuple, list)):
        return [_bind(y, given) for y in x]
    return x
