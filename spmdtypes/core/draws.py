"""Which shards get equal random numbers, when several mesh axes are of the size that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from spmdtypes.core.denotation import RuleError
from spmdtypes.graph import Graph

if TYPE_CHECKING:
    from spmdtypes.core.infer import Inference, Problem


def same_numbers(axes: Collection[str], alternatives: bool = False) -> RuleError:
    """Blocks of one tensor hold equal numbers: over all of `axes`, or over one that is not known."""
    names = (" or " if alternatives else ", ").join(sorted(axes))
    text = f"every rank of {names} draws the same numbers for its own part"
    return RuleError("random", text, frozenset(axes))


DEALT = "draws the same numbers for its own samples"


def dealt(graph: Graph, batch: Collection[str]) -> tuple[Graph, list[tuple[int, str]]]:
    """Draws for the samples of each rank along `batch` axes, made with equal streams: read as draws of
    their own, with a remark (node, text) each: equal masks for different samples are odd, not wrong."""
    nodes, remarks = list(graph.nodes), []
    for n in graph.nodes:
        if n.phase == "other":  # made with the module, for no rank's samples
            continue
        if n.rng is None or not n.ref_outs or n.ref_outs[0] is None or n.outs[0] is None:
            continue
        ratio, whole = prod(n.ref_outs[0].shape), prod(n.outs[0].shape)
        have = set(n.rng_axes or ())
        need = ratio / max(whole, 1) / prod(graph.mesh.get(a, 1) for a in have)
        spare = [a for a in graph.mesh if a in batch and a not in have and graph.mesh[a] > 1]
        for k in range(1, len(spare) + 1):
            more = next((c for c in combinations(spare, k) if prod(graph.mesh[a] for a in c) == need), None)
            if more is not None:
                nodes[n.id] = replace(n, rng_axes=tuple(a for a in graph.mesh if a in have or a in more))
                remarks.append((n.id, f"every rank of {', '.join(more)} {DEALT}"))
                break
    return replace(graph, nodes=nodes) if remarks else graph, remarks


def narrow(inference: Inference) -> None:
    """Of the axes that fit a draw keep the one that cuts other dims of the same size the most."""
    narrowed: dict[Problem, Problem] = {}
    for ref, problem in inference.problems.items():
        error = problem.error
        if error.kind != "random" or error.message != same_numbers(error.axes, True).message:
            continue
        if problem not in narrowed:
            axis = _likeliest(inference, problem)
            chosen = same_numbers([axis]) if axis is not None else error
            narrowed[problem] = replace(
                problem,
                error=RuleError("random", chosen.message, chosen.axes, error.operands, error.poisoned),
            )
        inference.problems[ref] = narrowed[problem]


def _likeliest(inference: Inference, problem: Problem) -> str | None:
    node = inference.graph.nodes[problem.node]
    if node.ref_outs is None:
        return None
    sizes = {
        whole
        for mine, theirs in zip(node.outs, node.ref_outs)
        if mine is not None and theirs is not None
        for part, whole in zip(mine.shape, theirs.shape)
        if part != whole
    }
    votes: Counter[str] = Counter()
    for ref, d in inference.values.items():
        if ref in inference.problems:
            continue
        for dim in range(d.ndim):
            if d.ref_shape[dim] in sizes and dim not in d.layout.open_dims:
                votes.update(a for a in d.axes_of(dim) if a in problem.error.axes)
    first, *rest = [*votes.most_common(2), ("", 0)]
    return first[0] if first[1] > (rest[0][1] if rest else 0) else None
