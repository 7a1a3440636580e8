"""What a program really computes: every rank in a forked process, gloo between them, in float64.

An independent yardstick for the tests of this folder: whether removing a collective changes a
result is measured here, without any part of the checker.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from spmdtypes.contracts import Program
from spmdtypes.forking import garbage_left_alone
from spmdtypes.notation import Type

Change = Callable[[], AbstractContextManager[Any]]
FORK = multiprocessing.get_context("fork")
TIMEOUT = 120  # seconds


def largest_error(program: Program, change: Change = nullcontext, seed: int = 0) -> float:
    """The largest relative difference, over ranks, loss and gradients, from the mesh of ones.

    `change` is in force on the real mesh only. Infinite when a value is not finite.
    """
    ones = replace(program, mesh=dict.fromkeys(program.mesh, 1))
    (reference,) = _run(ones, nullcontext, seed)
    ranks = _run(program, change, seed)
    coords = [dict(zip(program.mesh, c)) for c in itertools.product(*map(range, program.mesh.values()))]
    worst = 0.0
    for name, want in reference.items():
        for rank, coord in zip(ranks, coords):
            kind = program.params.get(name.removeprefix("grad:"))
            expected = want[_block(kind, coord, program.mesh)] if kind else want
            scale = want.abs().max().item() + 1e-12
            error = (rank[name] - expected).abs().max().item() / scale
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def _run(program: Program, change: Change, seed: int) -> list[dict[str, Tensor]]:
    world = math.prod(program.mesh.values())
    with tempfile.TemporaryDirectory() as folder:
        out = [Path(folder, f"rank{rank}") for rank in range(world)]
        jobs = [
            FORK.Process(
                target=_rank, args=(rank, world, program, change, seed, f"{folder}/store", out[rank])
            )
            for rank in range(world)
        ]
        with garbage_left_alone():
            for job in jobs:
                job.start()
        for job in jobs:
            job.join(TIMEOUT)
            if job.is_alive():
                job.kill()
        results = [torch.load(path) if path.exists() else {"error": "no result"} for path in out]
    for result in results:
        if "error" in result:
            raise RuntimeError(result["error"])
    return results


def _rank(rank: int, world: int, program: Program, change: Change, seed: int, store: str, out: Path) -> None:
    try:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        warnings.simplefilter("ignore")
        where, limit = f"file://{store}", timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=limit)
        result = _loss_and_gradients(program, change, seed)
    except BaseException:
        result = {"error": traceback.format_exc()}
    torch.save(result, out)
    os._exit(0)


def _loss_and_gradients(program: Program, change: Change, seed: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh))
    coord = dict(zip(program.mesh, mesh.get_coordinate()))
    module = program.build(mesh)
    named = dict(module.named_parameters())
    assert set(named) == set(program.params), set(named) ^ set(program.params)
    generator = torch.Generator().manual_seed(seed)

    def draw(kind: Type) -> Tensor:
        return _draw(kind, generator)[_block(kind, coord, program.mesh)].clone()

    with torch.no_grad():
        for name, kind in program.params.items():
            _local(named[name]).copy_(draw(kind) * 0.3)
    inputs = {name: draw(kind) for name, kind in program.inputs.items()}
    with change():
        loss = module(**inputs)
        loss.backward()
    gradients = {f"grad:{name}": _gradient(parameter) for name, parameter in named.items()}
    for axis, op in program.grads.items():
        for name, gradient in gradients.items():
            if axis not in program.params[name.removeprefix("grad:")].axes:
                dist.all_reduce(gradient, group=mesh.get_group(axis))
                gradient /= mesh[axis].size() if op == "avg" else 1
    return {"loss": _local(loss).detach().clone(), **gradients}


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient, laid out as its parameter: DTensor may leave it in another placement."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(_local(parameter))
    if isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient).detach().clone()


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _draw(kind: Type, generator: torch.Generator) -> Tensor:
    shape = [dim.size for dim in kind.dims or ()]
    if kind.dtype == "i64":
        return torch.randint(kind.limit or 2, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def _block(kind: Type, coord: dict[str, int], mesh: Any) -> tuple[slice, ...]:
    """The part of the global tensor held at `coord`."""
    block = []
    for dim in kind.dims or ():
        index, count = 0, 1
        for axis in dim.axes:
            index, count = index * mesh[axis] + coord[axis], count * mesh[axis]
        size = int(dim.size) // count
        block.append(slice(index * size, (index + 1) * size))
    return tuple(block)
