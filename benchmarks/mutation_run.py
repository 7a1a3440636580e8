"""Runs the mutants of one program: simulate, count those that change a border, ask the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.mutants import KINDS, Mutant, changed, mutants
from spmdtypes import lockstep
from spmdtypes.borders import averaged_axes, expected_types
from spmdtypes.capture.align import align
from spmdtypes.capture.fake import capture
from spmdtypes.checker import input_denotations, representative_ranks
from spmdtypes.contracts import Program
from spmdtypes.core.infer import infer
from spmdtypes.core.simulate import local_indices
from spmdtypes.graph import Graph, Node, Ref
from spmdtypes.ops import registry
from spmdtypes.verdict import judge


def recorded(program: Program) -> Graph:
    """The program's aligned graph, recorded under fake tensors."""
    mesh = dict(program.mesh)
    ones = capture(program, dict.fromkeys(mesh, 1), 0)
    others = [capture(program, mesh, r) for r in representative_ranks(mesh)[1:]]
    return align(capture(program, mesh, 0), ones, others).graph


def flagged(program: Program, graph: Graph, memo: dict[Any, Any] | None = None) -> bool:
    """Does the engine find any border that is not as declared?"""
    inputs = input_denotations(program, graph, graph.mesh)
    found = infer(graph, inputs, registry.build, averaged=averaged_axes(program), memo=memo)
    types = expected_types(program, graph.outputs)
    return any(judge(b, t, found, graph.mesh, None).status == "wrong" for b, t in types.items())


def feeder(program: Program, graph: Graph, seed: int) -> Callable[[Node, Mapping[str, int]], torch.Tensor]:
    """Local values of inputs and constants, cut from global ones."""
    generator = torch.Generator().manual_seed(seed)
    declared = {**program.params, **program.inputs}
    dens = input_denotations(program, graph, graph.mesh)
    whole: dict[str, torch.Tensor] = {}
    for name, t in declared.items():
        shape = [int(d.size) for d in t.dims or ()]
        if t.limit is not None:
            whole[name] = torch.randint(t.limit, shape, generator=generator)
        else:
            whole[name] = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5

    def feed(node: Node, coords: Mapping[str, int]) -> torch.Tensor:
        meta = node.outs[0]
        assert meta is not None
        if node.name in whole:
            den = dens[node.name]
            flat = whole[node.name].flatten()[local_indices(den, coords)]
            return flat.reshape(den.local_shape)
        fixed = torch.Generator().manual_seed(node.id)
        if meta.dtype == "bool" or meta.dtype.startswith(("i", "u")):
            return torch.zeros(meta.shape, dtype=torch.int64)
        return torch.randn(meta.shape, generator=fixed, dtype=torch.float64)

    return feed


def borders(graph: Graph, values: Mapping[object, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {name: values[ref] for name, ref in graph.outputs.items() if ref in values}


def unchanged(
    mutant: Mutant, graph: Graph, values: Mapping[Ref, list[torch.Tensor]]
) -> dict[Ref, list[torch.Tensor]]:
    """The values of the original that the mutant has too, by its own numbers."""
    dirty = {mutant.at}
    for node in mutant.graph.nodes[mutant.at + 1 :]:
        if any(r.node in dirty for r in node.refs()):
            dirty.add(node.id)
    moved = lambda n: n + (mutant.inserted and n >= mutant.at)  # noqa: E731
    return {Ref(moved(r.node), r.out): v for r, v in values.items() if moved(r.node) not in dirty}


def run_program(
    program: Program, per_kind: int, seed: int, kinds: Sequence[str] = KINDS
) -> tuple[bool, dict[str, tuple[int, int]], list[str]]:
    """(clean is silent, kind -> (mutants that change a result, flagged), texts of the missed)."""
    graph = recorded(program)
    memo: dict[Any, Any] = {}
    clean = not flagged(program, graph, memo)
    feed = feeder(program, graph, seed)
    values = lockstep.simulate(graph, feed)
    base = borders(graph, values)
    rows, missed = {}, []
    for kind in kinds:
        rng = random.Random(f"{seed}{kind}")
        made = hit = 0
        seen: set[str] = set()
        tries = 0
        for m in mutants(graph, kind, rng):
            tries += 1
            if made >= per_kind or tries > 12 * per_kind:
                break
            if m.text in seen:
                continue
            seen.add(m.text)
            try:
                new = borders(m.graph, lockstep.simulate(m.graph, feed, unchanged(m, graph, values)))
            except (RuntimeError, IndexError):
                continue  # no such program: it would crash
            if not changed(base, new):
                continue
            made += 1
            if flagged(program, m.graph, memo):
                hit += 1
            else:
                missed.append(f"{kind}: {m.text}")
        rows[kind] = (made, hit)
    return clean, rows, missed
