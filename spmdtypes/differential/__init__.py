"""Runs a program for real on every rank and on the mesh of ones, and compares. See README.md."""

from __future__ import annotations

from spmdtypes.differential.experiment import (
    Border,
    Call,
    Divergence,
    Draw,
    Experiment,
    Failure,
    RankRun,
)
from spmdtypes.differential.run import run

__all__ = ["Border", "Call", "Divergence", "Draw", "Experiment", "Failure", "RankRun", "run"]
