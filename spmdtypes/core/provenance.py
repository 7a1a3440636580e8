"""Where a value's standing over an axis arose."""

from __future__ import annotations

from collections.abc import Mapping

from spmdtypes.core.denotation import Denotation
from spmdtypes.graph import Graph, Node, Ref

LIMIT = 8


def became(graph: Graph, values: Mapping[Ref, Denotation], ref: Ref, axis: str) -> list[tuple[int, str]]:
    """Nodes at which the value at `ref` became what it is over `axis`, in program order."""
    out: dict[int, str] = {}
    seen: set[Ref] = set()
    queue = [ref]
    while queue and len(out) < LIMIT:
        r = queue.pop(0)
        if r in seen or r not in values:
            continue
        seen.add(r)
        node, here = graph.nodes[r.node], standing(values[r], axis)
        operands = [o for o in node.refs() if o in values]
        alike = [o for o in operands if standing(values[o], axis) == here]
        if alike:
            queue.insert(0, alike[0])
            continue
        text = _sentence(node, values, r, operands, axis)
        if text:
            out.setdefault(node.id, text)
        queue += [o for o in operands if standing(values[o], axis) != ""]
    return sorted(out.items())


def standing(d: Denotation, axis: str) -> str:
    """In words, over one axis: "" when every rank has the whole value."""
    if axis in d.varying:
        return "varying"
    parts = []
    if axis in d.partial:
        parts.append(f"Partial({d.op})")
    dims = [k for k in range(d.ndim) if axis in d.axes_of(k)]
    if dims:
        parts.append("Shard(" + ", ".join(map(str, dims)) + ")")
    power = dict(d.scale).get(axis, 0)
    if power:
        parts.append(f"off by {axis}^{power}" if power != 1 else f"off by {axis}")
    return " ".join(parts)


def _sentence(node: Node, values: Mapping[Ref, Denotation], ref: Ref, operands: list[Ref], axis: str) -> str:
    d = values[ref]
    here = standing(d, axis)
    if node.op == "input":
        return f"{node.name} is {here} over {axis} from the start" if here else ""
    before = dict.fromkeys(standing(values[o], axis) for o in operands)
    if here == "":
        done = next((b for b in before if b), "")
        return f"completed over {axis} here (was {done})" if done else ""
    why = _why(node, d, before, axis)
    return f"became {here} over {axis} here" + (f": {why}" if why else "")


def _why(node: Node, d: Denotation, before: Mapping[str, None], axis: str) -> str:
    if axis in d.varying:
        return d.reason
    cut = any("Shard" in b for b in before)
    pending = any("Partial" in b for b in before)
    if axis in d.partial and cut and not pending:
        return (
            f"the dim that is summed is cut over {axis}"
            if d.op == "sum"
            else f"the reduced dim is cut over {axis}"
        )
    if axis in d.partial and d.guard is not None:
        return "each rank fills in only the elements it owns"
    if node.comm is not None:
        return node.comm.kind
    if any(axis == a for a, _ in d.scale):
        if not pending and not cut and not any(before):
            return f"a number here differs from the reference's by the size of {axis}"
        return f"reduced over {axis} by a number of elements or ranks" if pending or cut else ""
    if axis in d.layout.axes and not any(before):
        return "each rank takes its own part"
    return ""
