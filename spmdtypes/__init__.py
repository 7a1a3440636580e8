"""Says whether a PyTorch SPMD program computes what it would compute on one device.

The names below are the public interface; each is imported when first used, so that
`import spmdtypes` is cheap and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from typing import Annotated as Spmd

    from spmdtypes.annotations import program
    from spmdtypes.api import check
    from spmdtypes.contracts import Program
    from spmdtypes.errors import CannotCheck
    from spmdtypes.mesh import I, Mesh, P, R, S, V
    from spmdtypes.notation import NotationError, Type, parse
    from spmdtypes.ops import rule
    from spmdtypes.report import Report

_HOME = {
    "Spmd": "annotations",
    "program": "annotations",
    "check": "api",
    "rule": "ops",
    "Program": "contracts",
    "CannotCheck": "errors",
    "NotationError": "notation",
    "Type": "notation",
    "parse": "notation",
    "Report": "report",
    **dict.fromkeys(("Mesh", "R", "I", "V", "P", "S"), "mesh"),
}

__all__ = [
    "CannotCheck",
    "I",
    "Mesh",
    "NotationError",
    "P",
    "Program",
    "R",
    "Report",
    "S",
    "Spmd",
    "Type",
    "V",
    "check",
    "parse",
    "program",
    "rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
