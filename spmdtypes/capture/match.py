"""Which node of one program is which node of another, when the two are not equal step by step."""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Hashable, Sequence

from spmdtypes.graph import Graph, Node

_CELLS = 400_000  # of one dynamic-programming table


def matched(a: Graph, b: Graph) -> list[int | None]:
    """For each node of `a` the node of `b` at the same point of the program, or None.

    Order is kept: matches never cross.
    """
    if len(a.nodes) == len(b.nodes) and all(_same(x, y) for x, y in zip(a.nodes, b.nodes)):
        return list(range(len(a.nodes)))
    out: list[int | None] = [None] * len(a.nodes)
    found: list[tuple[int, int]] = []
    for token in (_exact, _placeless, _op):
        tokens = [token(a, n) for n in a.nodes], [token(b, n) for n in b.nodes]
        found = _refined(found, *tokens)
    for i, j in found:
        out[i] = j
    return out


def _refined(
    found: list[tuple[int, int]], a: Sequence[Hashable], b: Sequence[Hashable]
) -> list[tuple[int, int]]:
    """The matches found so far and those that other tokens give between them."""
    out = list(found)
    i = k = 0
    for j, m in [*found, (len(a), len(b))]:
        if i < j and k < m:
            out += [(i + p, k + q) for p, q in pairs(a[i:j], b[k:m])]
        i, k = j + 1, m + 1
    return sorted(out)


def _same(x: Node, y: Node) -> bool:
    return x.op == y.op and x.name == y.name and (x.comm is None or _channel(x) == _channel(y))


def _channel(n: Node) -> Hashable:
    """What must agree for two collectives to be the same call. Groups of size 1 have no axes."""
    assert n.comm is not None
    return (n.comm.kind, n.comm.axes if len(n.comm.ranks) > 1 else None)


def _exact(g: Graph, n: Node) -> Hashable:
    """The same op from the same place in the source."""
    frames = g.stacks[n.stack] or g.stacks[n.forward_stack]
    return (*_placeless(g, n), tuple((f.file, f.line, f.col) for f in frames[:3]))


def _placeless(g: Graph, n: Node) -> tuple[Hashable, ...]:
    """The same op in the same module, called another way (through hooks of a framework)."""
    return (*_op(g, n), n.module)


def _op(g: Graph, n: Node) -> tuple[Hashable, ...]:
    return (n.op, n.name, n.phase, len(n.args), n.comm and n.comm.kind)


def pairs(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """A common subsequence of two token sequences: tokens that occur once on both sides anchor it."""
    out: list[tuple[int, int]] = []
    todo = [(0, len(a), 0, len(b))]
    while todo:
        i, j, k, m = todo.pop()
        while i < j and k < m and a[i] == b[k]:
            out.append((i, k))
            i, k = i + 1, k + 1
        while i < j and k < m and a[j - 1] == b[m - 1]:
            j, m = j - 1, m - 1
            out.append((j, m))
        if i == j or k == m:
            continue
        anchors = _anchors(a, b, i, j, k, m)
        if not anchors:
            out += _leaf(a, b, i, j, k, m)
            continue
        for p, q in [*anchors, (j, m)]:
            todo.append((i, p, k, q))
            if p < j:
                out.append((p, q))
            i, k = p + 1, q + 1
    return sorted(out)


def _anchors(
    a: Sequence[Hashable], b: Sequence[Hashable], i: int, j: int, k: int, m: int
) -> list[tuple[int, int]]:
    """Tokens that occur once in both ranges, in an order common to both."""
    count_a, count_b = Counter(a[i:j]), Counter(b[k:m])
    where = {t: q for q, t in enumerate(b[k:m], k) if count_b[t] == 1 and count_a.get(t) == 1}
    candidates = [(p, where[t]) for p, t in enumerate(a[i:j], i) if t in where]
    tails: list[int] = []
    ends: list[int] = []
    back: list[int] = []
    for index, (_, q) in enumerate(candidates):
        at = bisect.bisect_left(tails, q)
        back.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(q)
            ends.append(index)
        else:
            tails[at], ends[at] = q, index
    chain = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(candidates[index])
        index = back[index]
    return chain[::-1]


def _leaf(
    a: Sequence[Hashable], b: Sequence[Hashable], i: int, j: int, k: int, m: int
) -> list[tuple[int, int]]:
    """Longest common subsequence of two short ranges, matching as early as possible."""
    if (j - i) * (m - k) > _CELLS:
        blocks = difflib.SequenceMatcher(None, a[i:j], b[k:m], autojunk=False).get_matching_blocks()
        return [(i + s.a + x, k + s.b + x) for s in blocks for x in range(s.size)]
    rows, columns = j - i, m - k
    length = [[0] * (columns + 1) for _ in range(rows + 1)]
    for p in range(rows - 1, -1, -1):
        row, below, token = length[p], length[p + 1], a[i + p]
        for q in range(columns - 1, -1, -1):
            row[q] = below[q + 1] + 1 if token == b[k + q] else max(below[q], row[q + 1])
    out = []
    p = q = 0
    while p < rows and q < columns:
        if a[i + p] == b[k + q]:
            out.append((i + p, k + q))
            p, q = p + 1, q + 1
        elif length[p + 1][q] >= length[p][q + 1]:
            p += 1
        else:
            q += 1
    return out
