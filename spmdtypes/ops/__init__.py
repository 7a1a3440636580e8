"""What every ATen op computes, in index notation, by family. Torch-free; read through `registry`."""

from spmdtypes.ops import (
    activation,
    attention,
    cast,
    create,
    index,
    linalg,
    loss,
    matmul,
    norm,
    optim,
    pointwise,
    random,
    reduce,
    view,
)
from spmdtypes.ops.registry import build, coverage, op
from spmdtypes.ops.user import rule

__all__ = ["build", "coverage", "op", "rule"]
FAMILIES = (
    activation,
    attention,
    cast,
    create,
    index,
    linalg,
    loss,
    matmul,
    norm,
    optim,
    pointwise,
    random,
    reduce,
    view,
)
