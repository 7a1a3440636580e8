"""Checks a program that comes as a graph: `torch.export` or `torch.fx`, on one rank of the mesh."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmdtypes.borders import averaged_axes, expected_types
from spmdtypes.capture import align
from spmdtypes.checker import input_denotations, report_of
from spmdtypes.contracts import Program
from spmdtypes.core.infer import infer
from spmdtypes.diagnostics.compose import compose
from spmdtypes.errors import CannotCheck
from spmdtypes.graph import Graph
from spmdtypes.notation import Type
from spmdtypes.ops import registry
from spmdtypes.report import Report
from spmdtypes.verdict import judge


def as_graph(target: Any, mesh: Mapping[str, int], groups: Mapping[str, tuple[str, ...]]) -> Graph | None:
    """The graph of an exported program or a graph module; None for anything else.

    `groups` names the mesh axes that the process groups in the program span.
    """
    import torch
    from torch import fx

    from spmdtypes.capture.importers import from_export, from_fx

    if isinstance(target, Graph):
        return target
    if isinstance(target, torch.export.ExportedProgram):
        return from_export(target, mesh, dict.fromkeys(mesh, 0), groups)
    if isinstance(target, fx.GraphModule):
        return from_fx(target, mesh, dict.fromkeys(mesh, 0), groups)
    return None


def check_graph(
    graph: Graph,
    *,
    name: str,
    mesh: Mapping[str, int],
    inputs: Mapping[str, Type],
    params: Mapping[str, Type],
    output: Type | Mapping[str, Type] | None = None,
    grads: Mapping[str, str] | None = None,
    reference: Graph | None = None,
    others: Sequence[Graph] = (),
) -> Report:
    """What the rules prove of one recorded rank program.

    `reference` is the same program on the mesh of ones and `others` are other ranks' programs; without
    them, numbers in the graph are taken to be the same everywhere. Raises CannotCheck when an input of
    the graph has no type.
    """
    start = time.perf_counter()
    program = Program(name, mesh, _no_build, inputs, params, output, grads or {})
    graph = replace(align.align(graph, reference, others).graph, mesh=dict(mesh))
    declared = {**params, **inputs}
    missing = sorted({n.name for n in graph.inputs()} - set(declared))
    if missing:
        raise CannotCheck(f"no type is given for {', '.join(missing)}")
    found = infer(
        graph, input_denotations(program, graph, mesh), registry.build, averaged=averaged_axes(program)
    )
    types = expected_types(program, graph.outputs)
    verdicts = [judge(b, t, found, mesh, None) for b, t in types.items()]
    findings = compose(verdicts, program, found, {})
    report = report_of(program, findings, verdicts, found)
    return replace(report, seconds=time.perf_counter() - start)


def _no_build(_: Any) -> Any:
    raise NotImplementedError("a graph is not built")
