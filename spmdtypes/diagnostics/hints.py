"""The mend, worded in the dialect of the user's own file.

`hint(mend, ...)` is what the checker calls: it knows what has to happen (sum over tp after line 13);
this module knows how the file would write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spmdtypes.diagnostics.finding import Finding, Span
from spmdtypes.diagnostics.source import line_at, source_lines

Dialect = Literal["spmd_types", "megatron", "dtensor", "functional", "nn_functional", "autograd", "raw"]
Kind = Literal[
    "all_reduce",
    "copy",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce_grad",
    "drop",
    "drop_backward",
    "move_axis",
    "scale",
    "sum_then_divide",
    "add_after",
    "reduce_one",
    "reorder",
    "offset",
    "same_seed",
    "own_seed",
    "same_calls",
    "through_autograd",
    "same_layout",
    "global_norm",
    "precision",
    "batch_statistics",
]

_SIGNS: tuple[tuple[Dialect, str], ...] = (
    ("spmd_types", r"\bspmd_types\b"),
    ("megatron", r"\bmegatron\b|(reduce_from|copy_to|gather_from|scatter_to)_\w*(model_parallel|region)\w*"),
    ("dtensor", r"\bDTensor\b|\bdistribute_tensor\b|\bparallelize_module\b|\.redistribute\("),
    ("functional", r"_functional_collectives|\bfuncol\."),
    ("nn_functional", r"torch\.distributed\.nn\b|\bdist\.nn\."),
    ("autograd", r"autograd\.Function\b"),
)


@dataclass(frozen=True, slots=True)
class Mend:
    """What has to happen. `tensor` in the user's words ("y", "the result of line 13"); `after` and
    `before` are places; `factor` a text such as "dp"; `wrong` the axis that was used."""

    kind: Kind
    axis: str
    tensor: str = "it"
    after: Span | None = None
    before: Span | None = None
    factor: str | None = None
    wrong: str | None = None
    dim: int | None = None
    op: str = "sum"


_SUMS_AGAIN = (
    "; its backward sums too, so where all ranks use the result alike take an autograd.Function with "
    "an identity backward"
)


def dialect_of(source: str) -> Dialect:
    """How a file speaks of collectives; raw `dist` calls are the default."""
    for dialect, sign in _SIGNS:
        if re.search(sign, source):
            return dialect
    return "raw"


def autograd_functions(source: str) -> list[tuple[str, str, str]]:
    """(name, forward body, backward body) of the file's autograd Functions."""
    found = []
    pattern = r"^class (\w+)\([^)]*\bFunction\):\n((?:[ \t]+.*\n|\s*\n)*)"
    for m in re.finditer(pattern, source + "\n", re.MULTILINE):
        forward, _, backward = m[2].partition("def backward")
        found.append((m[1], forward, backward))
    return found


def _communicates(body: str) -> bool:
    return re.search(r"all_reduce|reduce_scatter|all_gather|all_to_all|broadcast|reduce\(", body) is not None


def own_function(source: str, forward: str, backward: str) -> str | None:
    """The file's own Function with that behaviour: "all_reduce" or "" (identity) each way."""
    for name, f, b in autograd_functions(source):
        if all(
            want in body and _communicates(body) == bool(want) for want, body in ((forward, f), (backward, b))
        ):
            return name
    return None


def hint(mend: Mend, file: str | None = None) -> str:
    """One or two lines that say what to write, and where."""
    at = mend.after or mend.before
    name = file or (at.file if at else None)
    source = "\n".join(source_lines(name)) if name else ""
    return _WORDS[mend.kind](mend, dialect_of(source), source)


def _where(m: Mend) -> str:
    span = m.after or m.before
    if span is None or m.tensor.endswith(f"line {span.line}"):
        return ""
    return f" {'after' if m.after is not None else 'before'} line {span.line}"


def _name(m: Mend) -> str:
    """A tensor as code: descriptions become "it"."""
    return m.tensor if m.tensor.isidentifier() else "it"


def _group(m: Mend) -> str:
    return f'mesh.get_group("{m.axis}")'


def _call(m: Mend, dialect: Dialect, table: dict[Dialect, str]) -> str:
    """The call in this dialect; raw is spoken in all of them."""
    words = table.get(dialect, table["raw"])
    return words.format(t=_name(m), axis=m.axis, group=_group(m), dim=m.dim or 0, op=m.op)


def _all_reduce(m: Mend, dialect: Dialect, source: str) -> str:
    own = own_function(source, "all_reduce", "") if m.op == "sum" else None
    what = f"{m.op} {m.tensor} over {m.axis}{_where(m)}"
    if own and dialect in ("autograd", "raw"):
        return f"{what}: {own}.apply({_name(m)}, {_group(m)})"
    table: dict[Dialect, str] = {
        "spmd_types": 'all_reduce({t}, "{axis}", src=P, dst=I)',
        "megatron": "reduce_from_tensor_model_parallel_region({t})",
        "dtensor": "{t}.redistribute(placements=[Replicate()]) on {axis}",
        "functional": 'all_reduce({t}, "{op}", {group})' + _SUMS_AGAIN,
        "nn_functional": "torch.distributed.nn.functional.all_reduce({t}, group={group})" + _SUMS_AGAIN,
        "autograd": "an autograd.Function: dist.all_reduce in forward, identity in backward",
        "raw": "dist.all_reduce({t}, group={group}), between parameters and the loss inside an "
        "autograd.Function (all-reduce in forward, identity in backward)",
    }
    return f"{what}: {_call(m, dialect, table)}"


def _copy(m: Mend, dialect: Dialect, source: str) -> str:
    own = own_function(source, "", "all_reduce")
    what = f"sum the gradient of {m.tensor} over {m.axis}"
    where = _where(m)
    if own and dialect in ("autograd", "raw"):
        return f"{what}: {own}.apply({_name(m)}, {_group(m)}){where}"
    table: dict[Dialect, str] = {
        "spmd_types": 'reinterpret({t}, "{axis}", src=I, dst=R)',
        "megatron": "copy_to_tensor_model_parallel_region({t})",
        "dtensor": "DTensor.from_local({t}, mesh, [Replicate()]).to_local(grad_placements=[Partial()])",
        "raw": "pass {t} through an autograd.Function with identity forward and "
        "dist.all_reduce(grad, group={group}) in backward (copy to the {axis} region)",
    }
    return f"{what}: {_call(m, dialect, table)}{where}"


def _reduce_scatter(m: Mend, dialect: Dialect, source: str) -> str:
    table: dict[Dialect, str] = {
        "spmd_types": 'reduce_scatter({t}, "{axis}", src=P, dst=S({dim}))',
        "megatron": "reduce_scatter_to_sequence_parallel_region({t})",
        "dtensor": "{t}.redistribute(placements=[Shard({dim})]) on {axis}",
        "functional": 'reduce_scatter_tensor({t}, "{op}", {dim}, {group})',
        "raw": "dist.reduce_scatter_tensor in forward, dist.all_gather_into_tensor in backward, "
        "along dim {dim}",
    }
    return f"{m.op} {m.tensor} over {m.axis} and keep the own block{_where(m)}: {_call(m, dialect, table)}"


def _all_gather(m: Mend, dialect: Dialect, source: str) -> str:
    table: dict[Dialect, str] = {
        "spmd_types": 'all_gather({t}, "{axis}", src=S({dim}), dst=R)',
        "megatron": "gather_from_sequence_parallel_region({t})",
        "dtensor": "{t}.redistribute(placements=[Replicate()]) on {axis}",
        "functional": "all_gather_tensor({t}, {dim}, {group})",
        "raw": "dist.all_gather_into_tensor in forward; in backward reduce-scatter where ranks use the "
        "result differently, the own block where they use it alike",
    }
    return f"gather dim {m.dim or 0} of {m.tensor} over {m.axis}{_where(m)}: {_call(m, dialect, table)}"


def _broadcast(m: Mend, dialect: Dialect, source: str) -> str:
    return (
        f"make {m.tensor} the same on every rank of {m.axis}{_where(m)}: dist.broadcast or dist.all_reduce it"
    )


def _reduce_grad(m: Mend, dialect: Dialect, source: str) -> str:
    return (
        f"reduce the gradient of {m.tensor} over {m.axis} before the optimizer reads it: "
        f"dist.all_reduce({m.tensor}.grad, group={_group(m)}), a hook that does, or a wrapper over {m.axis}"
    )


def _drop(m: Mend, dialect: Dialect, source: str) -> str:
    return f"{m.tensor} is complete over {m.axis} already: leave out the reduction{_at(m)}"


def _drop_backward(m: Mend, dialect: Dialect, source: str) -> str:
    own = own_function(source, "all_reduce", "")
    use = (
        f"{own}.apply" if own else "an autograd.Function with all-reduce in forward and identity in backward"
    )
    return f"the gradient is complete over {m.axis} already: use {use}{_at(m)}"


def _move_axis(m: Mend, dialect: Dialect, source: str) -> str:
    wrong = f", not {m.wrong}" if m.wrong else ""
    return f"the collective{_at(m)} should run over {m.axis}{wrong}: pass {_group(m)}"


def _scale(m: Mend, dialect: Dialect, source: str) -> str:
    return f"multiply {m.tensor} by {m.factor or f'1/{m.axis}'}{_at(m)}"


def _sum_then_divide(m: Mend, dialect: Dialect, source: str) -> str:
    return f"sum numerator and count over {m.axis} first, then divide once{_at(m)}"


def _add_after(m: Mend, dialect: Dialect, source: str) -> str:
    return f"add {m.tensor} after the sum over {m.axis}, or on one rank of {m.axis} only"


def _reduce_one(m: Mend, dialect: Dialect, source: str) -> str:
    return f"sum {m.tensor} over {m.axis} before it is used{_at(m)}"


def _reorder(m: Mend, dialect: Dialect, source: str) -> str:
    return f"gather the inner axis first and the outer axis last, along the dim that is cut{_at(m)}"


def _offset(m: Mend, dialect: Dialect, source: str) -> str:
    return f'add the offset of this rank\'s block: mesh.get_local_rank("{m.axis}") * the local size{_at(m)}'


def _same_seed(m: Mend, dialect: Dialect, source: str) -> str:
    return f"draw from a generator that is seeded alike on every rank of {m.axis}{_at(m)}"


def _own_seed(m: Mend, dialect: Dialect, source: str) -> str:
    return f'fold the coordinate mesh.get_local_rank("{m.axis}") into the seed{_at(m)}'


def _same_calls(m: Mend, dialect: Dialect, source: str) -> str:
    return f"let every rank of {m.axis} issue the same collectives in the same order{_at(m)}"


def _through_autograd(m: Mend, dialect: Dialect, source: str) -> str:
    return (
        f"let autograd see the collective over {m.axis}{_at(m)}: a differentiable form "
        "(an autograd.Function, torch.distributed.nn.functional, a functional collective)"
    )


def _same_layout(m: Mend, dialect: Dialect, source: str) -> str:
    return f"bring both to one layout over {m.axis}{_at(m)}: gather the one that is cut, or cut the other"


def _global_norm(m: Mend, dialect: Dialect, source: str) -> str:
    return f"sum squares over {m.axis} before the root, counting replicated parameters once{_at(m)}"


def _batch_statistics(m: Mend, dialect: Dialect, source: str) -> str:
    return f"torch.nn.SyncBatchNorm if statistics of the whole batch over {m.axis} are meant{_at(m)}"


def _precision(m: Mend, dialect: Dialect, source: str) -> str:
    return (
        f"reduce over {m.axis} in float32 and round afterwards; share scales by a max over {m.axis}{_at(m)}"
    )


def _at(m: Mend) -> str:
    span = m.before or m.after
    return f" (line {span.line})" if span is not None else ""


_WORDS: dict[Kind, Callable[[Mend, Dialect, str], str]] = {
    "all_reduce": _all_reduce,
    "copy": _copy,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce_grad": _reduce_grad,
    "drop": _drop,
    "drop_backward": _drop_backward,
    "move_axis": _move_axis,
    "scale": _scale,
    "sum_then_divide": _sum_then_divide,
    "add_after": _add_after,
    "reduce_one": _reduce_one,
    "reorder": _reorder,
    "offset": _offset,
    "same_seed": _same_seed,
    "own_seed": _own_seed,
    "same_calls": _same_calls,
    "through_autograd": _through_autograd,
    "same_layout": _same_layout,
    "global_norm": _global_norm,
    "precision": _precision,
    "batch_statistics": _batch_statistics,
}

_BEFORE: dict[str, Kind] = {
    "SPMD102": "reduce_one",
    "SPMD103": "add_after",
    "SPMD104": "reduce_one",
    "SPMD105": "broadcast",
    "SPMD203": "through_autograd",
    "SPMD301": "scale",
    "SPMD302": "scale",
    "SPMD303": "sum_then_divide",
    "SPMD304": "batch_statistics",
    "SPMD401": "same_layout",
    "SPMD402": "move_axis",
    "SPMD403": "reorder",
    "SPMD404": "offset",
    "SPMD501": "same_seed",
    "SPMD502": "own_seed",
    "SPMD601": "same_calls",
    "SPMD602": "same_calls",
    "SPMD703": "global_norm",
    "SPMD801": "precision",
}


def hint_for(finding: Finding, factor: str | None = None) -> str | None:
    """The mend of a finding, by its code: over its axes, at the place where the trouble began.

    `factor`: what the wrong value must be multiplied by ("1/tp"), for codes of scale. None where the
    code names no mend, or an axis is needed and not known.
    """
    began = next((n.span for n in finding.notes if n.span is not None), finding.span)
    if not finding.axes:
        return None
    axis = " and ".join(finding.axes)
    _, _, border = (finding.border or "").partition(":")
    at_line = f"the result of line {began.line}" if began else "it"
    code = finding.code
    if code in ("SPMD101", "SPMD701", "SPMD702"):
        return hint(
            Mend("all_reduce", axis, at_line if code == "SPMD101" else border or at_line, after=began)
        )
    if code == "SPMD201":
        return _gradient_hint(finding, axis, border, began)
    if code == "SPMD202":
        file = began.file if began else None
        source = "\n".join(source_lines(file)) if file else ""
        sums = dialect_of(source) in ("nn_functional", "functional")
        return hint(
            Mend("drop_backward" if sums else "drop", axis, f"the gradient of {border}", before=began)
        )
    kind = _BEFORE.get(code)
    if kind is None or (kind == "scale" and factor is None):
        return None
    return hint(
        Mend(kind, axis, "it" if kind != "add_after" else "the complete operand", before=began, factor=factor)
    )


def _gradient_hint(finding: Finding, axis: str, parameter: str, began: Span | None) -> str:
    """A parameter that is used on the line itself has its own gradient reduced; what reaches the line
    from elsewhere enters the sharded region there."""
    text = (line_at(began.file, began.line) or "") if began else ""
    leaf = parameter.rpartition(".")[2]
    used = re.search(rf"\b{re.escape(leaf)}\b", text) is not None
    if began is None or (used and not finding.also):
        return hint(Mend("reduce_grad", axis, parameter, before=began))
    return hint(Mend("copy", axis, f"what enters line {began.line}", before=began))
