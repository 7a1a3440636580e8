"""Reads a twin of the corpus format as a `Program`.

A twin is a Python file with `MESH`, `INPUTS`, `PARAMS`, `OUTPUT`, `GRADS`, a class `Model(mesh)` and
perhaps `train_step(model, mesh, **inputs)` with `STEP_OUTPUTS`. Types have GLOBAL sizes.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from spmdtypes.contracts import Program
from spmdtypes.notation import Type, parse


def load_twin(path: str | Path) -> Program:
    """Raises what the file raises when run, and ValueError for a file that is no twin."""
    path = Path(path).resolve()
    module = _run(path)
    for name in ("MESH", "PARAMS", "Model"):
        if not hasattr(module, name):
            raise ValueError(f"{path}: no {name}")
    mesh = dict(module.MESH)
    grads = getattr(module, "GRADS", {})
    output = getattr(module, "OUTPUT", None)
    return Program(
        name=f"{path.parent.name}/{path.stem}",
        mesh=mesh,
        build=module.Model,
        inputs=_types(getattr(module, "INPUTS", {})),
        params=_types(module.PARAMS),
        output=parse(output) if output is not None else None,
        grads=dict.fromkeys(mesh, grads) if isinstance(grads, str) else dict(grads),
        step=getattr(module, "train_step", None),
        results=_types(getattr(module, "STEP_OUTPUTS", {})),
        file=path,
        line=_line_of_model(path),
    )


def _types(texts: Mapping[str, str]) -> dict[str, Type]:
    return {name: parse(text) for name, text in texts.items()}


def _run(path: Path) -> ModuleType:
    """The file as a module of its own; the name is registered because dataclasses look it up."""
    name = f"twin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _line_of_model(path: Path) -> int:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return node.lineno
    return 1
