"""One run on the mesh of ones, before anything is recorded: a program that does not run on one device
is refused with the user's own line. It runs in a process of its own, so that nothing it does (seeds,
caches, process groups) is seen later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from math import prod
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from spmdtypes.contracts import Program
from spmdtypes.drive import is_float, torch_dtype
from spmdtypes.errors import CannotCheck, blame, user_place
from spmdtypes.exits import exits_refused
from spmdtypes.forking import garbage_left_alone
from spmdtypes.mesh import Mesh
from spmdtypes.notation import Type, global_shape
from spmdtypes.scratch import scratch_mesh

MAX_ELEMENTS = 2_000_000
PATIENCE = 240.0  # seconds; a program that takes longer is let through,
MAX_WORK = 60.0  # unless it has been computing for as long as this


def rehearse(program: Program) -> None:
    """Construct and run `program` on the mesh of ones; programs that are too large are let through.

    Raises `CannotCheck`.
    """
    types = (*program.inputs.values(), *program.params.values())
    if any(t.dims is None for t in types) or sum(prod(global_shape(t)) for t in types) > MAX_ELEMENTS:
        return
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_rehearse, args=(program, theirs))
    sys.stdout.flush()
    with garbage_left_alone():
        child.start()
    theirs.close()
    try:
        failure = ours.recv() if ours.poll(PATIENCE) else None
    except EOFError:
        failure = ("the process ended by itself", program.file, program.line, "", "")
    finally:
        child.kill()
        child.join()
        ours.close()
    if failure is not None:
        message, file, line, excerpt, trace = failure
        raise CannotCheck(message, file, line, excerpt) from RuntimeError(trace)


def _rehearse(program: Program, answer: Connection) -> None:
    """Send None, or what to raise."""
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        torch.set_num_threads(1)
        try:
            signal.signal(signal.SIGPROF, _refuse_endless_loop)
            signal.setitimer(signal.ITIMER_PROF, MAX_WORK)
            with exits_refused(), scratch_mesh(Mesh(program.mesh).ones(), real=True) as mesh:
                _run(program, program.build(mesh), mesh)
        except BaseException as e:
            found = blame(e, f"running {program.name} on one device", program.file, program.line)
            trace = "".join(traceback.format_exception(e))
            answer.send((found.message, found.file, found.line, found.excerpt, trace))
        else:
            answer.send(None)


def _refuse_endless_loop(_: int, frame: FrameType | None) -> None:
    place = user_place(frame) or (None, None)
    raise CannotCheck(
        f"still computing on one device after {MAX_WORK:.0f} s: is this an endless loop?", *place
    )


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
