"""Abstract capture: one rank of any mesh, in one process, without data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from spmdtypes.capture import comms
from spmdtypes.capture.collector import no_collection
from spmdtypes.capture.environment import environment
from spmdtypes.capture.functionalise import functionalise
from spmdtypes.capture.raw import DTYPES, Raw
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.run import CaptureError, Outputs, execute
from spmdtypes.contracts import Program
from spmdtypes.graph import Graph
from spmdtypes.notation import Type


def coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Row-major mesh coordinates of a rank."""
    out = {}
    for axis, n in reversed(list(mesh.items())):
        out[axis] = rank % n
        rank //= n
    return dict(reversed(list(out.items())))


def local_shape(name: str, declared: Type, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The shape a rank holds of a tensor of this type. Raises CaptureError when a dim does not divide."""
    if declared.dims is None:
        raise CaptureError(f"{name}: the type gives no dims")
    shape = []
    for dim in declared.dims:
        if not isinstance(dim.size, int):
            raise CaptureError(f"{name}: dim {dim.size!r} has no size")
        n = math.prod(mesh[a] for a in dim.axes)
        if dim.size % n:
            raise CaptureError(f"{name}: {dim.size} does not divide by {'*'.join(dim.axes)} = {n}")
        shape.append(dim.size // n)
    return tuple(shape)


@dataclass
class Recorded:
    """A raw trace that `graph()` turns into a graph; the recorder and its tensors live until then."""

    recorder: Recorder
    outputs: Outputs

    @property
    def trace(self) -> list[Raw]:
        return self.recorder.trace

    def graph(self) -> Graph:
        result = functionalise(self.recorder, self.outputs.views)
        result.graph.dtensors = self.outputs.placements
        return result.graph


def record(program: Program, mesh: Mapping[str, int], rank: int = 0) -> Recorded:
    """Run `program` as rank `rank` of `mesh` on fake tensors, recording it."""
    coords = coordinates(mesh, rank)
    with environment(math.prod(mesh.values()), rank):
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        rec = Recorder(mesh, coords, comms.group_axes(device_mesh))
        with FakeTensorMode(allow_non_fake_inputs=True), no_collection():
            params = {k: _empty(k, t, mesh) for k, t in program.params.items()}
            inputs = {k: _empty(k, t, mesh) for k, t in program.inputs.items()}
            return Recorded(rec, execute(program, device_mesh, params, inputs, rec))


def capture(program: Program, mesh: Mapping[str, int], rank: int = 0) -> Graph:
    """The pure graph of `program` as rank `rank` of `mesh` runs it, on fake tensors."""
    return record(program, mesh, rank).graph()


def _empty(name: str, declared: Type, mesh: Mapping[str, int]) -> Tensor:
    return torch.empty(local_shape(name, declared, mesh), dtype=DTYPES[declared.dtype or "f32"])
