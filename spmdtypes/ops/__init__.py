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

__all__ = ["build", "coverage", "op"]
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
