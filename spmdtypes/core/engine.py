"""Derive what an op's outputs denote from its index-notation spec and what its operands denote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.spec import OpSpec


def derive(
    spec: OpSpec,
    operands: Sequence[Denotation],
    mesh: Mapping[str, int],
    *,
    averaged: frozenset[str] = frozenset(),
    grad_free: Sequence[bool] = (),
    streams: frozenset[str] = frozenset(),
) -> tuple[Denotation | RuleError | None, ...]:
    """One result per output of `spec` (None where the spec has None).

    `averaged`: pure data axes whose loss and gradients the contract averages. `grad_free[k]`: operand k
    does not depend on a parameter. `streams`: axes over which the random streams differ.
    """
    raise NotImplementedError
