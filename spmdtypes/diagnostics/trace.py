"""Questions about a typed graph that a message answers: where did this begin, what lies on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from spmdtypes.core.denotation import Denotation
from spmdtypes.core.infer import Inference
from spmdtypes.graph import Frame, Graph, Node, Ref

Step = tuple[int, str]  # node, sentence
Is = Callable[[Denotation], bool]


def origins(inference: Inference, ref: Ref, holds: Is) -> list[Ref]:
    """The values, going back from `ref`, at which a property of the denotation first holds."""
    graph, values = inference.graph, inference.values
    found: list[Ref] = []
    seen: set[Ref] = set()
    stack = [ref]
    while stack:
        r = stack.pop()
        if r in seen or r not in values or not holds(values[r]):
            continue
        seen.add(r)
        before = [o for o in graph.nodes[r.node].refs() if o in values and holds(values[o])]
        if before:
            stack += before
        else:
            found.append(r)
    return sorted(found, key=lambda r: r.node)


def where_pending(inference: Inference, ref: Ref, axis: str) -> list[Step]:
    """Where a value that is pending over `axis` became so."""
    steps = []
    for r in origins(inference, ref, lambda d: axis in d.partial):
        told = dict(inference.became(r, axis))
        op = inference.values[r].op
        name = "a partial sum" if op == "sum" else f"a pending {op}"
        why = told.get(r.node, "").partition(": ")[2]
        steps.append((r.node, f"became {name} over {axis} here" + (f": {why}" if why else "")))
    return steps


def where_scaled(inference: Inference, ref: Ref, axis: str) -> list[Step]:
    """Where a value's factor of the size of `axis` arose."""
    power = dict(inference.values[ref].scale).get(axis, 0)
    if not power:
        return list(inference.became(ref, axis))
    steps = []
    for r in origins(inference, ref, lambda d: dict(d.scale).get(axis, 0) == power):
        told = dict(inference.became(r, axis)).get(r.node)
        steps.append((r.node, told or f"the factor of the size of {axis} arises here"))
    return steps


def where_standing(inference: Inference, ref: Ref, axis: str, most: int = 3) -> list[Step]:
    """Where a value became what it is over `axis`, nearest steps first."""
    d = inference.values.get(ref)
    if d is None:
        return []
    if axis in d.partial:
        return where_pending(inference, ref, axis)[:most]
    if dict(d.scale).get(axis):
        return where_scaled(inference, ref, axis)[:most]
    return list(reversed(inference.became(ref, axis)))[:most]


def meeting(inference: Inference, problem: int, border: Ref) -> list[Step]:
    """Where a value without a reading meets, element by element, one that has a reading and is not the
    same on all ranks: there its order or meaning should have been restored."""
    graph, values = inference.graph, inference.values
    lost = {problem}
    steps: list[Step] = []
    for node in graph.nodes[problem + 1 :]:
        refs = list(node.refs())
        bad = [r for r in refs if r.node in lost]
        if not bad:
            continue
        if any(Ref(node.id, k) in inference.problems for k in range(len(node.outs))):
            lost.add(node.id)
        else:
            continue
        good = [
            r for r in refs if r not in inference.problems and r in values and not values[r].is_replicated
        ]
        shapes = {m.shape for r in refs if (m := graph.meta(r)) is not None}
        floats = all((m := graph.meta(r)) is not None and m.dtype[0] in "fb" for r in refs)
        if (
            good
            and len(refs) > 1
            and floats
            and _elementwise(graph, node, shapes)
            and node.phase != "backward"
        ):
            steps.append((node.id, f'meets "{values[good[0]]}" here, element by element'))
            break
    return steps


def _elementwise(graph: Graph, node: Node, shapes: set[tuple[int, ...]]) -> bool:
    out = node.outs[0]
    return out is not None and out.shape in shapes and not node.op.startswith(("aten.index", "aten.scatter"))


def placements_by_index(inference: Inference, problem: int, border: Ref) -> list[Step]:
    """Where elements are moved to computed positions between a problem and the border: the positions."""
    graph = inference.graph
    steps: list[Step] = []
    for node in ancestors(graph, graph.nodes[border.node]):
        if node.id <= problem or not node.op.startswith(("aten.index", "aten.scatter", "aten.gather")):
            continue
        for r in node.refs():
            m = graph.meta(r)
            if m is not None and m.dtype in ("i64", "i32") and r in inference.problems:
                steps.append((r.node, "these positions are computed from local data"))
        if len(steps) >= 2:
            break
    return steps[:2]


def ancestors(graph: Graph, start: Node) -> Iterator[Node]:
    """A node and those it depends on, latest first."""
    wanted = {start.id}
    for node in reversed(graph.nodes[: start.id + 1]):
        if node.id in wanted:
            wanted |= {r.node for r in node.refs()}
            yield node


# -- places -------------------------------------------------------------------------------------


def place(graph: Graph, node: Node) -> tuple[Frame, ...]:
    """User frames that say where a node comes from, innermost first: for a node of autograd's own
    backward, those of its forward op."""
    own = graph.frames(node)
    if node.phase not in ("backward", "recompute"):
        return own
    forward: tuple[Frame, ...] = ()
    stack = getattr(node, "forward_stack", 0)
    if stack:
        forward = graph.stacks[stack]
    elif node.forward is not None:
        forward = graph.frames(graph.nodes[node.forward])
    inside = own[: _inside_backward(own)]
    return inside + forward if inside else forward or own


def _inside_backward(frames: Sequence[Frame]) -> int:
    """How many innermost frames run within a backward function written by the user."""
    for i, f in enumerate(frames):
        if f.function.rpartition(".")[2] == "backward":
            return i + 1
    return 0


def backward_call(graph: Graph, node: Node) -> Frame | None:
    """Where the user started the backward pass this node belongs to."""
    own = graph.frames(node)
    rest = own[_inside_backward(own) :]
    return rest[0] if node.phase in ("backward", "hook") and rest else None


def own_backwards(graph: Graph, ref: Ref, most: int = 2) -> list[Frame]:
    """Places in backward functions of the user's that a gradient went through, nearest first."""
    found: dict[str, Frame] = {}
    for node in ancestors(graph, graph.nodes[ref.node]):
        if node.phase == "backward" and len(found) < most:
            frames = graph.frames(node)
            inside = _inside_backward(frames)
            if inside:
                found.setdefault(frames[inside - 1].function, frames[inside - 1])
    return list(found.values())


# -- collectives --------------------------------------------------------------------------------


def unused_collectives(graph: Graph) -> list[Node]:
    """Collectives whose result nothing reads, those while the program was set up left out."""
    used = {r.node for n in graph.nodes for r in n.refs()} | {r.node for r in graph.outputs.values()}
    quiet = ("barrier", "send")
    return [
        n
        for n in graph.nodes
        if n.comm is not None and n.id not in used and n.comm.kind not in quiet and n.phase != "other"
    ]


def collectives_on_path(graph: Graph, ref: Ref, limit: int) -> list[Node]:
    """The last collectives a value went through, nearest first."""
    found: list[Node] = []
    queue, seen = [ref.node], set[int]()
    while queue and len(found) < limit:
        n = queue.pop(0)
        if n in seen:
            continue
        seen.add(n)
        node = graph.nodes[n]
        if node.comm is not None:
            found.append(node)
            continue
        if len(seen) < 60:
            queue += [r.node for r in node.refs()]
    return found


def reaches(graph: Graph, targets: set[int], node: int) -> bool:
    """Does the value at `node` depend on one of `targets`?"""
    seen: set[int] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in targets:
            return True
        if n not in seen and n < len(graph.nodes):
            seen.add(n)
            stack += [r.node for r in graph.nodes[n].refs()]
    return False
