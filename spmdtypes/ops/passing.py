"""Ops that pass on the numbers they get: to another place, or times a number."""

from __future__ import annotations

_PASSING = frozenset(
    "view _unsafe_view reshape slice select narrow cat stack split split_with_sizes unsqueeze squeeze "
    "permute transpose t expand clone alias detach contiguous flatten as_strided slice_scatter "
    "select_scatter unbind mul div neg".split()
)


def passes_on(op: str) -> bool:
    return op.startswith("aten.") and op.split(".")[1] in _PASSING
