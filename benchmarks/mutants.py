"""Mutation test of the proof engine: break the collectives of clean captured transformers.

Every mutant removes, adds, re-axes, re-operates or rescales one collective. It counts only if a
simulation on all ranks shows that it changes a border; the engine, which sees no values, must then
flag it. Prints a table by kind of mutation; exits 1 below the target.

    python benchmarks/mutants.py [--per-kind 120] [--seed 0] [--target 0.99]
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from spmdtypes.graph import Comm, Graph, Lit, Node, Ref

KINDS = ("remove", "re-axis", "insert", "rescale", "reduce-op")


@dataclass(frozen=True)
class Mutant:
    """`at`: the changed node, or the `inserted` one (later nodes have moved up by one)."""

    kind: str
    text: str
    graph: Graph
    at: int
    inserted: bool = False


def _rewire(x: object, old: Ref, new: Ref) -> object:
    if x == old:
        return new
    if isinstance(x, (tuple, list)):
        return tuple(_rewire(y, old, new) for y in x)
    return x


def _insert_after(graph: Graph, at: Ref, node: Node, keep: Ref | None = None) -> Graph:
    """A copy of `graph` in which `node` (its id is ignored) follows `at` and replaces its later uses."""
    shift = lambda r: Ref(r.node + (r.node > at.node), r.out)  # noqa: E731
    moved = lambda x: (  # noqa: E731
        shift(x) if isinstance(x, Ref) else tuple(moved(y) for y in x) if isinstance(x, (tuple, list)) else x
    )
    new = Ref(at.node + 1, 0)
    nodes = []
    for n in graph.nodes:
        m = copy.copy(n)
        m.args, m.kwargs = moved(n.args), {k: moved(v) for k, v in n.kwargs.items()}
        m.id = n.id + (n.id > at.node)
        if n.id > at.node:
            m.args = _rewire(m.args, at, new)
            m.kwargs = {k: _rewire(v, at, new) for k, v in m.kwargs.items()}
        nodes.append(m)
        if n.id == at.node:
            extra = copy.copy(node)
            extra.id = new.node
            nodes.append(extra)
    out = copy.copy(graph)
    out.nodes = nodes
    out.outputs = {k: new if v == at else shift(v) for k, v in graph.outputs.items()}
    return out


def _replaced(graph: Graph, node: Node) -> Graph:
    out = copy.copy(graph)
    out.nodes = list(graph.nodes)
    out.nodes[node.id] = node
    return out


def _like(graph: Graph, ref: Ref, op: str, args: tuple, comm: Comm | None = None) -> Node:
    src = graph.nodes[ref.node]
    ref_outs = None if src.ref_outs is None else (src.ref_outs[ref.out],)
    return replace(
        src,
        id=-1,
        op=op,
        args=args,
        kwargs={},
        outs=(src.outs[ref.out],),
        comm=comm,
        ref_outs=ref_outs,
        name="",
    )


def _identity(graph: Graph, node: Node) -> Node | None:
    """What a program without the collective would use instead, of the same shape."""
    operand = next(node.refs())
    out = copy.copy(node)
    out.comm = None
    if node.comm.kind == "all_reduce":
        out.op, out.args, out.kwargs = "aten.clone.default", (operand,), {}
        return out
    n = 1
    for a in node.comm.axes:
        n *= graph.mesh[a]
    if node.comm.kind == "all_gather":
        out.op, out.args, out.kwargs = "aten.cat.default", ((operand,) * n, 0), {}
        return out
    if node.comm.kind == "reduce_scatter" and len(node.comm.axes) == 1:
        rows = node.outs[0].shape[0]
        axis = node.comm.axes[0]
        full = graph.meta(operand).shape[0] if node.ref_outs is None else node.ref_outs[0].shape[0]
        start, stop = Lit(0, 0, ((axis, rows),)), Lit(rows, full, ((axis, rows),))
        out.op, out.args, out.kwargs = "aten.slice.Tensor", (operand, 0, start, stop), {}
        return out
    return None


def mutants(graph: Graph, kind: str, rng: random.Random) -> Iterator[Mutant]:
    """Endless stream of mutants of one kind (ends when the graph has no place for it)."""
    comms = [n for n in graph.nodes if n.comm is not None and n.comm.kind != "barrier"]
    floats = [
        Ref(n.id, i)
        for n in graph.nodes
        for i, m in enumerate(n.outs)
        if m is not None and m.dtype.startswith("f") and n.op not in ("input", "const")
    ]
    axes = [a for a, n in graph.mesh.items() if n > 1]
    while comms and floats:
        node = rng.choice(comms)
        line = _line(graph, node)
        if kind == "remove":
            new = _identity(graph, node)
            if new is not None:
                yield Mutant(kind, f"{node.comm.kind} at {line} removed", _replaced(graph, new), node.id)
        elif kind == "re-axis":
            others = [
                a
                for a in axes
                if (a,) != node.comm.axes
                and len(node.comm.axes) == 1
                and graph.mesh[a] == graph.mesh[node.comm.axes[0]]
            ]
            if others:
                new = copy.copy(node)
                new.comm = replace(node.comm, axes=(rng.choice(others),))
                text = f"{node.comm.kind} at {line} over {new.comm.axes[0]}"
                yield Mutant(kind, text, _replaced(graph, new), node.id)
        elif kind == "insert":
            ref, axis = rng.choice(floats), rng.choice(axes)
            comm = Comm("all_reduce", (axis,), (), "sum")
            new = _like(graph, ref, "comm.all_reduce", (ref,), comm)
            after = graph.nodes[ref.node]
            text = f"all_reduce over {axis} after {after.op} at {_line(graph, after)}"
            yield Mutant(kind, text, _insert_after(graph, ref, new), ref.node + 1, True)
        elif kind == "rescale":
            ref, axis = Ref(node.id, 0), rng.choice(axes)
            n = float(graph.mesh[axis])
            value = rng.choice((Lit(n, 1.0), Lit(1.0 / n, 1.0)))
            if graph.meta(ref) is None or not graph.meta(ref).dtype.startswith("f"):
                continue
            new = _like(graph, ref, "aten.mul.Tensor", (ref, value))
            text = f"scaled by {value.local} after {node.comm.kind} at {line}"
            yield Mutant(kind, text, _insert_after(graph, ref, new), ref.node + 1, True)
        elif kind == "reduce-op" and node.comm.kind in ("all_reduce", "reduce_scatter"):
            new = copy.copy(node)
            op = rng.choice([o for o in ("sum", "avg", "max", "min") if o != node.comm.reduce_op])
            new.comm = replace(node.comm, reduce_op=op)
            yield Mutant(kind, f"{node.comm.kind} at {line} with {op}", _replaced(graph, new), node.id)


def _line(graph: Graph, node: Node) -> str:
    frames = graph.frames(node)
    return f"line {frames[0].line} (node {node.id})" if frames else f"node {node.id}"


def changed(base: dict[str, list[torch.Tensor]], new: dict[str, list[torch.Tensor]]) -> bool:
    """Does a border differ on any rank?"""
    for name, want in base.items():
        got = new.get(name)
        if got is None:
            return True
        for a, b in zip(want, got, strict=True):
            scale = float(a.double().abs().max()) + 1e-12
            if a.shape != b.shape or not float((a.double() - b.double()).abs().max()) <= 1e-6 * scale:
                return True
    return False


def main() -> int:
    from benchmarks.mutation_run import run_program
    from tests.programs.transformers import PROGRAMS

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--per-kind", type=int, default=60)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--target", type=float, default=0.99)
    args = ap.parse_args()
    made: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    clean_ok = True
    for name, make in PROGRAMS.items():
        ok, rows, missed = run_program(make(), args.per_kind, args.seed)
        clean_ok &= ok
        print(f"{name}: clean program {'silent' if ok else 'FLAGGED'}")
        for kind, (n, hit) in rows.items():
            made[kind] += n
            caught[kind] += hit
        for text in missed:
            print(f"  missed: {text}")
    for kind in KINDS:
        print(f"{kind:10s} {made[kind]:5d} mutants  {caught[kind]:5d} flagged")
    total, hit = sum(made.values()), sum(caught.values())
    print(f"total      {total:5d} mutants  {hit:5d} flagged  {100 * hit / max(total, 1):.1f}%")
    return 0 if clean_ok and hit >= args.target * total else 1


if __name__ == "__main__":
    sys.exit(main())
