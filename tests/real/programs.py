"""The real programs, by name, with what can be taken out of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from spmdtypes.contracts import Program

_ROW = "sum after a row-parallel layer or the embedding"
_COLUMN = "sum of a column-parallel layer's input gradient"
_LOSS = ("maximum of the logits", "sum of the predicted logits", "sum of the exponentials")
_BLOCK = ("sum in forward", "sum in backward")


@dataclass(frozen=True)
class Real:
    """`factory` of `tests.real.<module>`, which needs `package`; `removals` name its REMOVALS."""

    package: str
    module: str
    factory: str
    removals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.factory}"

    def program(self) -> Program:
        """The program; the calling test is skipped when the package is absent."""
        return getattr(self._loaded(), self.factory)()

    def removal(self, name: str) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context in which the collective `name` is not there."""
        return self._loaded().REMOVALS[name]

    def _loaded(self) -> Any:
        pytest.importorskip(self.package)
        return importlib.import_module(f"tests.real.{self.module}")


REAL = (
    Real("megatron.core", "megatron", "mlp", (_ROW, _COLUMN)),
    Real("megatron.core", "megatron", "vocabulary", (_ROW, _COLUMN, *_LOSS)),
    Real("megatron.core", "megatron", "gpt", (_ROW, _COLUMN, *_LOSS)),
    Real("megatron.core", "megatron", "sequence_parallel", ("sum in a reduce-scatter", *_LOSS)),
    Real(
        "transformers",
        "huggingface",
        "llama",
        ("sum after row-parallel layers", "sum of column-parallel layers' input gradients"),
    ),
    Real("torch", "recompute", "checkpointed", _BLOCK),
    Real("torch", "recompute", "checkpointed_reentrant", _BLOCK),
    Real("torch_remat", "recompute", "rematerialised", _BLOCK),
)


# every program with every collective that can be taken out of it
REMOVED = [(real, name) for real in REAL for name in real.removals]
