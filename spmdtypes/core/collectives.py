"""Collectives as moves on denotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.graph import Comm


def collective(
    comm: Comm, operands: Sequence[Denotation], mesh: Mapping[str, int], outs: int = 1
) -> tuple[Denotation | RuleError | None, ...]:
    """What a collective's outputs denote; in dim 0, rank-major, as torch.distributed does it."""
    raise NotImplementedError
