"""One run on the mesh of ones in this process, before anything is recorded: a program that does not
run on one device is refused with the user's own line."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from spmdtypes.contracts import Program
from spmdtypes.drive import is_float, torch_dtype
from spmdtypes.errors import blame
from spmdtypes.mesh import Mesh
from spmdtypes.notation import Type, global_shape
from spmdtypes.scratch import scratch_mesh

MAX_ELEMENTS = 2_000_000


def rehearse(program: Program) -> None:
    """Construct and run `program` on the mesh of ones; programs that are too large are let through.

    Raises `CannotCheck`.
    """
    types = (*program.inputs.values(), *program.params.values())
    if any(t.dims is None for t in types) or sum(prod(global_shape(t)) for t in types) > MAX_ELEMENTS:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with scratch_mesh(Mesh(program.mesh).ones()) as mesh:
            _run(program, program.build(mesh), mesh)
    except Exception as e:
        raise blame(e, f"running {program.name} on one device", program.file, program.line) from e
    finally:
        torch.set_num_threads(threads)


def _run(program: Program, module: nn.Module, mesh: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.normal_(std=0.1)
    inputs = {name: _value(t) for name, t in program.inputs.items()}
    if program.step is not None:
        program.step(module, mesh, **inputs)
    else:
        module(**inputs)


def _value(t: Type) -> Tensor:
    shape, dtype = global_shape(t), torch_dtype(t)
    if is_float(t):
        return torch.randn(shape).to(dtype)
    return torch.randint(2 if t.dtype == "bool" else t.limit or 10, shape).to(dtype)
