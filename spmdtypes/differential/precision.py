"""One judgement from two runs of a program in low precision: as it is, and without its roundings."""

from __future__ import annotations

from dataclasses import replace

from spmdtypes.differential.experiment import Border, Experiment
from spmdtypes.graph import Comm, Ref

FINE = 64 * 2.0**-24  # tolerance up to which nothing that matters is hidden: that of f32
COARSE = "the program rounds to a low precision: differences below {:.1%} do not show"


def is_coarse(found: Experiment) -> bool:
    """Was it compared with a tolerance in which errors can hide?"""
    return found.tolerance > FINE and not found.failures and found.divergence is None


def settle(as_is: Experiment, wide: Experiment) -> Experiment:
    """A border is wrong if either run shows it. The rest of the result is that of the wide run, which
    tells values apart, unless only the roundings bring something wrong to light."""
    if wide.failures or wide.divergence is not None or not wide.seeds or is_coarse(wide):
        return unsettled(as_is, wide)
    borders = {n: _worse(b, wide.borders.get(n)) for n, b in as_is.borders.items()}
    by_rounding = any(not b.ok and n in wide.borders and wide.borders[n].ok for n, b in as_is.borders.items())
    found = as_is if by_rounding else wide
    found.borders = borders
    found.notes = tuple(dict.fromkeys((*as_is.notes, *wide.notes)))
    found.crossed = as_is.crossed or wide.crossed
    found.rounded = as_is
    return found


def unsettled(as_is: Experiment, wide: Experiment) -> Experiment:
    """The run as it is, whose right borders may be wrong by little."""
    why = next((f" ({f.error}: {f.message.splitlines()[0][:200]})" for f in wide.failures if f.message), "")
    as_is.borders = {n: replace(b, coarse=b.kind == "") for n, b in as_is.borders.items()}
    as_is.notes += (COARSE.format(as_is.tolerance) + why,)
    return as_is


def _worse(as_is: Border, wide: Border | None) -> Border:
    if wide is None:
        return replace(as_is, coarse=as_is.kind == "")
    return wide if as_is.ok or not wide.ok else as_is


def same_rounding(found: Experiment, wide: Ref, low: Ref, comm: Comm) -> bool:
    """Is, in all that was seen, the sum of the rounded summands the rounding of the sum?"""
    from torch import Tensor

    tables = found.oracle().tables
    for seed in found.seeds:
        pairs: list[tuple[Tensor, Tensor]] = []
        for rank in comm.ranks:
            table, values = tables[rank], found.ranks[rank].values.get(seed, {})
            at = [Ref(table[r.node] or 0, r.out) for r in (wide, low) if r.node < len(table)]
            if len(at) < 2 or any(a not in values for a in at) or values[at[0]].shape != values[at[1]].shape:
                return False
            pairs.append((values[at[0]].double(), values[at[1]]))
        if len({p[0].shape for p in pairs}) > 1:
            return False
        exact = sum((w for w, _ in pairs), pairs[0][0] * 0).to(pairs[0][1].dtype)
        rounded = sum((n.double() for _, n in pairs), pairs[0][0] * 0).to(pairs[0][1].dtype)
        if not exact.equal(rounded):
            return False
    return bool(found.seeds)
