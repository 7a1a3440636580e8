"""A `contracts.Program` whose code is annotated for spmd_types: recorded with its claims, and judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from spmdtypes.capture import align, comms
from spmdtypes.capture.environment import environment
from spmdtypes.capture.fake import coordinates, local_shape
from spmdtypes.capture.functionalise import functionalise
from spmdtypes.capture.raw import DTYPES
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.run import execute
from spmdtypes.checker import input_denotations, representative_ranks
from spmdtypes.contracts import Program
from spmdtypes.core.infer import Inference, infer
from spmdtypes.dialects.spmd_types.claims import Claims, judged, watching
from spmdtypes.graph import Graph
from spmdtypes.ops import registry
from spmdtypes.verdict import Verdict


@dataclass(frozen=True)
class Checked:
    """What the rules say of a program and of each of its claims."""

    inference: Inference
    claims: Claims
    verdicts: list[Verdict]

    @property
    def wrong(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.status == "wrong"]


def recorded(program: Program, mesh: Mapping[str, int], rank: int = 0) -> tuple[Graph, Claims]:
    """The program as rank `rank` of `mesh` runs it, on fake tensors; its claims are outputs of the graph."""
    coords = coordinates(mesh, rank)
    with environment(math.prod(mesh.values()), rank):
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        rec = Recorder(mesh, coords, comms.group_axes(device_mesh))
        with FakeTensorMode(allow_non_fake_inputs=True), watching(rec) as claims:
            declared = {**program.params, **program.inputs}
            made = {
                k: torch.empty(local_shape(k, t, mesh), dtype=DTYPES[t.dtype or "f32"])
                for k, t in declared.items()
            }
            params, inputs = ({k: made[k] for k in part} for part in (program.params, program.inputs))
            outputs = execute(program, device_mesh, params, inputs, rec)
            graph = functionalise(rec, {**outputs.views, **claims.views}).graph
    return graph, claims


def check(program: Program) -> Checked:
    """Judge every claim by the rules: a few ranks are recorded, and the mesh of ones."""
    mesh = dict(program.mesh)
    first, claims = recorded(program, mesh)
    others = [recorded(program, mesh, r)[0] for r in representative_ranks(mesh)[1:]]
    reference, _ = recorded(program, dict.fromkeys(mesh, 1))
    graph = align.align(first, reference, others).graph
    inference = infer(graph, input_denotations(program, graph, mesh), registry.build)
    return Checked(inference, claims, judged(claims, inference, mesh))
