"""The torch side of `spmdtypes.rule`: makes dispatcher ops of plain callables, and checks claims."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdtypes.core.spec import Load, Operand, OpSpec, Out, Var
from spmdtypes.ops.text import Text, with_leading
from spmdtypes.rulecheck import check_spec, encode, walk

LIBRARY = "spmdtypes_rules"


def check_claim(
    target: Any,
    builder: Callable[..., OpSpec | None],
    text: Text | None,
    check: bool | Sequence[tuple[Any, ...]],
) -> None:
    """Compares a claim with the op; raises ValueError when they differ or nothing can be run."""
    call = resolve(target)
    examples = list(_random_arguments(call, text)) if check is True and text is not None else check
    if not isinstance(examples, (list, tuple)) or not examples:
        raise ValueError(
            "no arguments to check the claim with: pass check=[(arguments...), ...] or check=False"
        )
    for args in examples:
        _, operands, tensors = encode("rule", args, {})
        given = iter(operands)
        spec = builder(*(_bind(a, given) for a in args))
        if spec is None:
            continue
        where = [k for k, a in enumerate(args) if isinstance(a, Tensor)]

        def run(ts: Sequence[Tensor], args: tuple[Any, ...] = tuple(args), where: list[int] = where) -> Any:
            filled = list(args)
            for k, t in zip(where, ts):
                filled[k] = t
            return call(*filled)

        verdict, detail = check_spec(spec, tensors, run)
        if verdict == "wrong":
            shapes = [tuple(t.shape) for t in tensors]
            raise ValueError(
                f"the rule does not describe {target}: {detail}, for arguments of shapes {shapes}"
            )


def _bind(x: Any, given: Iterator[Operand]) -> Any:
    if isinstance(x, Tensor):
        return next(given)
    return [_bind(y, given) for y in x] if isinstance(x, (list, tuple)) else x


def resolve(target: Any) -> Callable[..., Any]:
    """The callable behind a name or a custom op."""
    if isinstance(target, str):
        space, _, rest = target.replace("::", ".").partition(".")
        found: Any = getattr(torch.ops, space)
        for part in rest.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]
    return target  # type: ignore[no-any-return]


def _random_arguments(call: Callable[..., Any], text: Text | None) -> Iterator[tuple[Any, ...]]:
    """Arguments for an index text: distinct extents per variable, numbers for the rest."""
    from spmdtypes.ops.user import parameters_of

    assert text is not None
    parameters = parameters_of(call) or text.operands
    named = parameters if set(text.operands) <= set(parameters) else text.operands
    ranks = _ranks(text)
    generator = torch.Generator().manual_seed(0)
    for first in (2, 3):
        extents: dict[str, int] = {}
        values: dict[str, Any] = {}
        for name, dims in ranks.items():
            for d in dims:
                extents.setdefault(d, first + len(extents))
            shape = [extents[d] for d in dims]
            values[name] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        yield tuple(values.get(p, 0.75) for p in named)


def _ranks(text: Text) -> dict[str, list[str]]:
    """Index variables of each operand's dims; `...` is taken as two dims."""
    import ast

    ranks: dict[str, list[str]] = {}
    for _, value in text.outputs:
        for node in ast.walk(value):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                dims: list[str] = []
                for e in elements:
                    if isinstance(e, ast.Name):
                        dims.append(e.id)
                    elif isinstance(e, ast.Constant) and e.value is ...:
                        dims += ["...0", "...1"]
                    else:
                        raise ValueError(f"give arguments to check {ast.unparse(node)} with: check=[(...)]")
                ranks.setdefault(node.value.id, dims)
    return ranks


def make_op(target: Any, text: Text | None) -> Any:
    """A dispatcher op that runs a plain callable; differentiated by differentiating the callable."""
    function = getattr(target, "apply", target)
    label = (
        getattr(target, "__qualname__", type(target).__name__)
        .replace(".", "_")
        .replace("<", "")
        .replace(">", "")
    )
    schema = _schema(target, text)
    made = torch.library.custom_op(f"{LIBRARY}::{label}", _detached(function), mutates_args=(), schema=schema)
    made.register_fake(_detached(function) if text is None else _shapes(text, made))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.inputs = inputs

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if _is_real(x) else x for x in ctx.inputs]
            outs = function(*leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            wanted = [x for x in leaves if _is_real(x)]
            found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
        return tuple(next(found) if _is_real(x) else None for x in leaves)

    made.register_autograd(backward, setup_context=keep)
    return made


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _detached(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        out = function(*args)
        fresh = [
            o.clone() if any(o is a for a in args) else o for o in (out if isinstance(out, tuple) else (out,))
        ]
        return tuple(fresh) if isinstance(out, tuple) else fresh[0]

    return run


def _schema(target: Any, text: Text | None) -> str:
    """From annotations where there are any, else tensors named as in the text."""
    function = getattr(target, "forward", target) if isinstance(target, type) else target
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "ctx"]
    kinds = {
        Tensor: "Tensor",
        "Tensor": "Tensor",
        "torch.Tensor": "Tensor",
        float: "float",
        int: "SymInt",
        bool: "bool",
    }
    kinds |= {"float": "float", "int": "SymInt", "bool": "bool", inspect.Parameter.empty: "Tensor"}
    if text is None and any(p.annotation is inspect.Parameter.empty for p in parameters):
        raise ValueError(f"annotate the arguments of {target}, or register it with torch.library.custom_op")
    args = ", ".join(f"{kinds[p.annotation]} {p.name}" for p in parameters)
    outs = 1 if text is None else len(text.outputs)
    return f"({args}) -> " + ("Tensor" if outs == 1 else f"({', '.join(['Tensor'] * outs)})")


def _shapes(text: Text, made: Any) -> Callable[..., Any]:
    """Fake outputs, by the extents of the text's variables."""
    from spmdtypes.ops.user import parameters_of

    def fake(*args: Any) -> Any:
        _, operands, tensors = encode("rule", args, {})
        given = iter(operands)
        named = dict(zip(parameters_of(made), (_bind(a, given) for a in args)))
        spec = text.build(with_leading(text, named))
        extents = {
            v: tensors[e.operand].shape[d]
            for out in spec.outs
            if isinstance(out, Out)
            for e in walk(out.value)
            if isinstance(e, Load)
            for d, v in enumerate(e.index)
            if isinstance(v, Var)
        }
        outs = tuple(
            tensors[0].new_empty([extents[v] if isinstance(v, Var) else 1 for v in o.vars])
            for o in spec.outs
            if isinstance(o, Out)
        )
        return outs if len(outs) > 1 else outs[0]

    return fake
