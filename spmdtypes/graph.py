"""The program as data: one node per ATen op or collective, in program order, without torch.

A `Graph` is what capture produces and everything else reads. It pickles, so the ranks of a
simulated run can send theirs to the process that compares them. Nodes are pure values after
`capture.functionalise`: no aliasing and no mutation is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PHASES = ("forward", "backward", "recompute", "hook", "clip", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Ref:
    """Use of output `out` of node `node`."""

    node: int
    out: int = 0


@dataclass(frozen=True, slots=True)
class Lit:
    """A number that is not the same in every aligned program.

    `local` is its value on the rank whose mesh coordinates are all 0, `ref` on the mesh of ones;
    `rank` holds the growth per unit of a coordinate: value = local + sum(step * coordinate(axis)).
    `affine` is False when the ranks' values fit no such form.
    """

    local: Any
    ref: Any
    rank: tuple[tuple[str, Any], ...] = ()
    affine: bool = True


@dataclass(frozen=True, slots=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: str  # "f32", "bf16", "i64", "bool", ...
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in the user's source. Lines are 1-based, columns 0-based, `end_*` exclusive."""

    file: str
    line: int
    col: int
    end_line: int
    end_col: int
    function: str


@dataclass(frozen=True, slots=True)
class Comm:
    """What a collective node does. `axes` are the mesh axes its group spans, outermost first;
    empty when the group is no product of mesh axes (then `ranks` says what it is)."""

    # all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send recv barrier
    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    reduce_op: str = ""  # sum avg max min prod premul_sum band bor bxor unknown
    factor: float | None = None  # premul_sum
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # all_to_all: (output, input) along dim 0
    root: int | None = None  # rank within the group; send/recv: the peer
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Hazard:
    """`op` used memory that a collective, issued and not waited for yet, was at work on: read it, or
    wrote to it. `frames` say where, `issued` where the collective began, innermost first."""

    op: str
    writes: bool
    frames: tuple[Frame, ...]
    comm: Comm
    issued: tuple[Frame, ...]


@dataclass(slots=True)
class Node:
    """`op` is "aten.mm.default", "comm.all_reduce", "input", "const", or another dispatcher name.

    `args`/`kwargs` hold `Ref`, `Lit`, plain literals, and tuples of them. `stack` indexes
    `Graph.stacks` (user frames, innermost first). `forward` is the forward node a backward node
    belongs to. `ref_outs` are the metas in the aligned reference program, `ref` its node id there.
    """

    id: int
    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[TensorMeta | None, ...] = ()
    stack: int = 0
    phase: str = "forward"
    module: str = ""
    forward: int | None = None
    name: str = ""  # inputs: parameter FQN or argument name
    comm: Comm | None = None
    rng: str | None = None  # identity of the random stream a random op draws from, before the draw
    assumed: str | None = None  # a data-dependent value that capture had to assume
    ref: int | None = None
    ref_outs: tuple[TensorMeta | None, ...] | None = None
    forward_stack: int = 0  # backward nodes: where the forward op (or autograd Function) was called
    rng_axes: tuple[str, ...] | None = None  # axes along which ranks draw from different streams
    apart: tuple[str, ...] = ()  # axes along which some rank takes no such step

    def refs(self) -> Iterator[Ref]:
        """Every tensor operand, in argument order."""
        yield from _refs(self.args)
        yield from _refs(tuple(self.kwargs.values()))


def _refs(x: Any) -> Iterator[Ref]:
    if isinstance(x, Ref):
        yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _refs(y)


@dataclass(slots=True)
class Graph:
    """A recorded program on one rank of one mesh.

    `outputs` maps border names to values: "output" (or "output.<key>"), "grad:<fqn>" (as the
    optimizer sees it), "param:<fqn>" (final value of a parameter or buffer), "result:<key>".
    `coords` are this rank's mesh coordinates.
    """

    mesh: dict[str, int]
    coords: dict[str, int]
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Ref] = field(default_factory=dict)
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    notes: list[str] = field(default_factory=list)  # assumptions made by capture, in user terms
    # outputs that were DTensors: name -> mesh axis -> placement as torch prints it ("S(0)", "P(sum)")
    dtensors: dict[str, dict[str, str]] = field(default_factory=dict)
    hazards: list[Hazard] = field(default_factory=list)

    def meta(self, ref: Ref) -> TensorMeta | None:
        return self.nodes[ref.node].outs[ref.out]

    def frames(self, node: Node) -> tuple[Frame, ...]:
        return self.stacks[node.stack]

    def inputs(self) -> list[Node]:
        return [n for n in self.nodes if n.op == "input"]
