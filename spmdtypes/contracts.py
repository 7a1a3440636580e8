"""What to check: how a program is built, and what its borders must denote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmdtypes.notation import Type


@dataclass(frozen=True)
class Program:
    """A module (and optionally a training step) with its contract.

    `build(mesh)` returns the module holding this rank's LOCAL parameters; `mesh` is a
    `torch.distributed.device_mesh.DeviceMesh`. Without `step` the program is
    `module(**inputs).backward()`; with it, `step(module, mesh, **inputs) -> dict`.
    All types are written with GLOBAL sizes.

    `params` may name buffers. `output` says how the ranks' results make up the global one;
    None: checked only through gradients. As a mapping, the module returns a dict with these
    entries; those that require grad are back-propagated. `grads` maps a mesh axis to what an outer
    wrapper does to gradients afterwards ("sum" or "avg"); it leaves parameters sharded over that axis alone.
    `results` types entries of the dict `step` returns: a parameter's FQN defaults to its type in
    `params`, anything else to a replicated tensor.

    `input_grads` are entries of `params` that the user's forward takes as arguments: inputs whose
    gradients are checked too (messages call them by that). `assumptions` were made while the
    contract was read, in user terms.
    """

    name: str
    mesh: Mapping[str, int]
    build: Callable[[Any], Any]
    inputs: Mapping[str, Type] = field(default_factory=dict)
    params: Mapping[str, Type] = field(default_factory=dict)
    output: Type | Mapping[str, Type] | None = None
    grads: Mapping[str, str] = field(default_factory=dict)
    step: Callable[..., Any] | None = None
    results: Mapping[str, Type] = field(default_factory=dict)
    file: Path | None = None
    line: int = 1
    input_grads: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
