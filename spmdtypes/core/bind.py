"""Index variables of a spec get the layouts of the operand dims they walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtypes.core.denotation import Denotation, RuleError
from spmdtypes.core.layout import Layout, LayoutError
from spmdtypes.core.ranks import Lin
from spmdtypes.core.spec import Expr, Fn, Iota, Load, OpSpec, Out, Rand, Red, Size, Var, Window
from spmdtypes.core.subscript import Num, read


@dataclass(frozen=True, slots=True)
class Block:
    """Variables whose dims share digits (usually one), their layout, and who gave it."""

    vars: tuple[Var, ...]
    layout: Layout
    operand: int
    dims: tuple[int, ...]


@dataclass
class Env:
    """`of[v]`: the block of variable v. `chosen`: axes decided on for open variables.
    `aligned`: literals are known in the reference too; `guessed`: variables whose reference size is not."""

    mesh: Mapping[str, int]
    of: dict[Var, Block] = field(default_factory=dict)
    chosen: dict[Var, tuple[str, ...]] = field(default_factory=dict)
    aligned: bool | None = True
    guessed: set[Var] = field(default_factory=set)

    def sizes(self, v: Var) -> tuple[int, int]:
        """Local and reference extent."""
        b = self.of[v]
        k = b.vars.index(v)
        return b.layout.local_shape[k], b.layout.ref_shape[k]

    def is_open(self, v: Var) -> bool:
        b = self.of[v]
        return bool(b.layout.open) and len(b.vars) == 1

    def block_axes(self, v: Var) -> tuple[str, ...] | None:
        """Axes of a contiguous cut, outermost first; () when whole; None otherwise."""
        b = self.of.get(v)
        if b is None or b.layout.uneven:
            return None
        if self.is_open(v):
            n, m = self.sizes(v)
            return () if n == m else None
        return b.layout.block_axes(b.vars.index(v))

    def axes(self, vars: Iterable[Var]) -> frozenset[str]:
        """Axes over which values walked by these variables are cut. Raises RuleError("axis") on a clash."""
        seen: dict[str, Block] = {}
        for v in vars:
            b = self.of.get(v)
            if b is None:
                continue
            for a in b.layout.axes:
                if seen.setdefault(a, b) is not b:
                    raise RuleError(
                        "axis",
                        f"two dims of one value are cut over {a}: only the diagonal blocks are computed",
                        frozenset([a]),
                        tuple(sorted({seen[a].operand, b.operand})),
                    )
        return frozenset(seen)

    # -- binding --------------------------------------------------------------------------------

    def put(self, vars: Sequence[Var], layout: Layout, operand: int, dims: Sequence[int]) -> None:
        for group, own in layout.parts:
            mine = tuple(vars[k] for k in group)
            if own.open and mine[0] in self.chosen:
                own = own.shard_open(0, self.chosen[mine[0]], self.mesh)
            self._put(Block(mine, own, operand, tuple(dims[k] for k in group)))

    def _put(self, new: Block) -> None:
        if len(set(new.vars)) < len(new.vars):
            raise RuleError(
                "unsupported", "one variable walks two dims of an operand", operands=(new.operand,)
            )
        olds = list({id(self.of[v]): self.of[v] for v in new.vars if v in self.of}.values())
        if not olds:
            for v in new.vars:
                self.of[v] = new
            return
        for old in olds:
            if self._agree(old, new):
                continue
            self._clash(old, new)
        loose = [v for v in new.vars if v not in self.of or self.is_open(v)]
        if len(loose) == len(new.vars) and not (new.layout.open and len(new.vars) == 1):
            for v in new.vars:
                self.of[v] = new

    def _agree(self, old: Block, new: Block) -> bool:
        if set(old.vars) == set(new.vars):
            order = [new.vars.index(v) for v in old.vars]
            mine = new.layout if order == list(range(len(order))) else new.layout.permute(order)
            if mine == old.layout:
                return True
        for a, b in ((old, new), (new, old)):
            if len(a.vars) == 1 and a.layout.open and a.vars[0] in b.vars:
                k = b.vars.index(a.vars[0])
                return a.layout.local_shape[0] == b.layout.local_shape[k] and (
                    a.layout.ref_shape[0] == b.layout.ref_shape[k]
                    or bool(b.layout.open)
                    or a.vars[0] in self.guessed
                )
        return False

    def _clash(self, old: Block, new: Block) -> None:
        def name(b: Block) -> str:
            dims = ", ".join(map(str, b.dims))
            which = f"dim {dims}" if len(b.dims) == 1 else f"dims {dims}"
            return f"{which} of operand {b.operand}" if b.operand >= 0 else "the requested size"

        axes = old.layout.axes ^ new.layout.axes or old.layout.axes | new.layout.axes
        if new.layout.local_shape == old.layout.local_shape == new.layout.ref_shape and not axes:
            axes = frozenset()
        raise RuleError(
            "layout",
            f"{name(old)} is {old.layout.show()} but {name(new)} is {new.layout.show()}",
            axes,
            tuple(sorted({b.operand for b in (old, new) if b.operand >= 0})),
        )


def bind(spec: OpSpec, operands: Sequence[Denotation], env: Env, outs: Sequence[Out]) -> None:
    """Fill `env` from every read of an operand in `outs`. Raises RuleError."""
    for load in loads(o.value for o in outs):
        _bind_read(load.operand, load.index, operands, env)
    wanted = {v for o in outs for v in (*o.vars, *mentioned(o.value)) if isinstance(v, Var)}
    others = [o.value for o in spec.outs if isinstance(o, Out)]
    if not wanted <= set(env.of):
        for load in loads(others):
            if any(isinstance(s, Var) and s in wanted and s not in env.of for s in load.index):
                _bind_read(load.operand, load.index, operands, env)
    for operand, subs in spec.uses:
        if any(v in env.of or v in wanted for v in subs if isinstance(v, Var)):
            _bind_shape(operand, subs, operands, env)
    for v, size in spec.sizes.items():
        _bind_size(v, size, env)
    for a, b in spec.same:
        _bind_same(a, b, env)


def _bind_read(operand: int, subs: Sequence[Any], operands: Sequence[Denotation], env: Env) -> None:
    if operand >= len(operands):
        raise RuleError("missing", f"operand {operand} has no denotation", operands=(operand,))
    subs = [as_variable(s, operands) or s for s in subs]
    try:
        layout, vars = read(operands[operand].layout, subs, env.mesh, env.aligned)
    except LayoutError as e:
        axes = operands[operand].layout.axes
        raise RuleError("unsupported" if e.unsupported else "layout", str(e), axes, (operand,)) from None
    dims = [d for d, s in enumerate(subs) if isinstance(s, (Var, Window))]
    env.put(vars, layout, operand, dims)


def _bind_shape(operand: int, subs: Sequence[Any], operands: Sequence[Denotation], env: Env) -> None:
    """As `_bind_read` for an operand whose elements are not read: dims with the sizes of variables
    that have a layout already may be cut in any way."""
    have = operands[operand].layout if operand < len(operands) else None
    if have is not None and all(isinstance(s, Var) for s in subs):
        sizes = list(zip(have.local_shape, have.ref_shape))
        rest = [d for d, s in enumerate(subs) if s not in env.of or env.is_open(s)]
        settled = [d for d in range(len(subs)) if d not in rest]
        apart = not any(set(block) & set(rest) and set(block) & set(settled) for block in have.blocks)
        if settled and apart and all(env.sizes(subs[d]) == sizes[d] for d in settled):
            env.put([subs[d] for d in rest], have.restrict(rest), operand, rest)
            return
    _bind_read(operand, subs, operands, env)


def as_variable(sub: Any, operands: Sequence[Denotation]) -> Var | None:
    """A data-dependent subscript that is just the position along one variable."""
    if not isinstance(sub, Load):
        return None
    walked = [(d, s) for d, s in enumerate(sub.index) if isinstance(s, Var)]
    read = operands[sub.operand] if sub.operand < len(operands) else None
    value = read.value if read is not None and read.guard is None else None
    if value is None or value.local != value.ref or len(walked) != 1:
        return None
    d, v = walked[0]
    return v if value.local == Lin(0, ((("i", d), 1),)) else None


def _bind_size(v: Var, size: Any, env: Env) -> None:
    try:
        n = Num.of(size, env.aligned is True)
    except LayoutError as e:
        raise RuleError("unsupported", str(e)) from None
    if n.steps:
        raise RuleError("unsupported", "a size that differs between ranks", frozenset(a for a, _ in n.steps))
    if n.ref is None:
        env.guessed.add(v)
    env.put([v], Layout.opened(n.local, n.at(n.local).ref), -1, [0])


def _bind_same(a: Var, b: Var, env: Env) -> None:
    if a in env.of and b in env.of:
        x, y = env.of[a], env.of[b]
        if len(x.vars) == len(y.vars) == 1:
            env.put([a], y.layout, y.operand, y.dims)
            env.put([b], env.of[a].layout, x.operand, x.dims)
    elif a in env.of:
        x = env.of[a]
        env.put([b], x.layout.restrict([x.vars.index(a)]), x.operand, x.dims)
    elif b in env.of:
        _bind_same(b, a, env)


# -- walking expressions ------------------------------------------------------------------------


def loads(exprs: Iterable[Expr]) -> list[Load]:
    """Every read, once per expression object, inner reads of subscripts included."""
    seen: set[int] = set()
    out: list[Load] = []
    stack = list(exprs)[::-1]
    while stack:
        e = stack.pop()
        if id(e) in seen:
            continue
        seen.add(id(e))
        if isinstance(e, Load):
            out.append(e)
        stack += children(e)[::-1]
    return out


def mentioned(e: Expr) -> frozenset[Var]:
    """Every variable of an expression, reduced ones and mere sizes included."""
    match e:
        case Red(_, vars, _):
            own = frozenset(vars)
        case Size(var):
            own = frozenset([var])
        case _:
            own = _own(e)
    return own.union(*map(mentioned, children(e)))


def children(e: Expr) -> list[Expr]:
    match e:
        case Load(_, index):
            return [s for s in index if isinstance(s, Expr)]
        case Fn(_, args):
            return list(args)
        case Red(_, _, body):
            return [body]
    return []


def free(e: Expr, memo: dict[int, frozenset[Var]] | None = None) -> frozenset[Var]:
    """Variables a value depends on."""
    memo = {} if memo is None else memo
    found = memo.get(id(e))
    if found is None:
        found = memo[id(e)] = _own(e).union(*(free(c, memo) for c in children(e)))
        if isinstance(e, Red):
            found = memo[id(e)] = found - frozenset(e.vars)
    return found


def _own(e: Expr) -> frozenset[Var]:
    match e:
        case Load(_, index):
            return frozenset(
                s.var if isinstance(s, Window) else s for s in index if isinstance(s, (Var, Window))
            )
        case Iota(var):
            return frozenset([var])
        case Rand(vars):
            return frozenset(vars)
    return frozenset()
