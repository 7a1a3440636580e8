"""Calls that say what they take and give over an axis: `all_reduce(x, axis, src=P, dst=R)` and its kin.

`src` is a contract on the operand. What the call then does is fixed by `src` and `dst`, forward and
backward, so an operand that keeps the contract has a right result, and a right gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdtypes.dialects.spmd_types.calls import Judgement
from spmdtypes.dialects.spmd_types.meaning import Annotation

Side = str | int  # "R", "I", "V", "P", or the dim of an S


def judge_transfer(
    x: Annotation,
    axes: Sequence[str],
    src: Side,
    dst: Side,
    *,
    needs_grad: bool,
    whole: bool = False,
    strict: bool = True,
) -> Judgement:
    """Does `x` keep the contract `src` over `axes`? `needs_grad`: a gradient flows back to it. `whole`:
    dims are parts of a whole tensor, so that a cut is moved with its dim."""
    for axis in axes:
        if axis not in x.letters:
            text = f"nothing says how the operand lies over {axis}"
            return Judgement((text,)) if strict else Judgement(unknown=(text,))
        fault = _fault(x, axis, src, needs_grad, whole)
        if fault:
            return Judgement((f"over {axis}, {fault}",))
    return Judgement(results=(_moved(x, axes, dst),))


def _fault(x: Annotation, axis: str, src: Side, needs_grad: bool, whole: bool) -> str | None:
    letter = x.letters[axis]
    held = next((d for d, axes in enumerate(x.cuts or ()) if axis in axes), None) if whole else None
    if letter == src and held is None and not (whole and letter == "V" and isinstance(src, int)):
        return None
    same = letter in ("R", "I")
    match src:
        case "P" if same:
            return "every rank has the whole value, and it would be summed"
        case "P" if held is not None:
            return f"parts of dim {held} would be summed"
        case "R" | "I":
            if letter == "P":
                return "a pending sum is taken for the value"
            if letter == "V":
                return "values that differ are taken for one"
            return "its gradient is of the other kind (R: a pending sum, I: complete)" if needs_grad else None
        case "V" | int() if same:
            return "ranks that hold the same are taken to hold different values"
        case "V" | int() if letter == "P":
            return "a pending sum is taken apart"
        case "V" if held is not None:
            return f"parts of dim {held} are stacked"
        case int() if whole:
            return _not_innermost(x, axis, src, held)
    return None


def _not_innermost(x: Annotation, axis: str, dim: int, held: int | None) -> str | None:
    if held is None:
        return "nothing says along which dim the ranks' values lie"
    if held != dim:
        return f"it is cut along dim {held}, not {dim}"
    cuts = (x.cuts or ())[dim]
    return None if cuts[-1] == axis else f"dim {dim} is cut by {cuts[-1]} within the parts of {axis}"


def _moved(x: Annotation, axes: Sequence[str], dst: Side) -> Annotation:
    letters: Mapping[str, str] = {**x.letters, **dict.fromkeys(axes, "V" if isinstance(dst, int) else dst)}
    cuts = [tuple(a for a in c if a not in axes) for c in x.cuts or ()]
    if isinstance(dst, int) and dst < len(cuts):
        cuts[dst] += tuple(axes)
    return replace(x, letters=letters, cuts=tuple(cuts) if any(cuts) else None)
