"""The value of one output's expression: what is pending, scaled or rank-dependent about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from spmdtypes.core import ranks
from spmdtypes.core.bind import Env, as_variable, free
from spmdtypes.core.combine import Abs, Rules, left_out, merged, of_denotation
from spmdtypes.core.denotation import NONE, Denotation, RuleError, scale_mul, scale_of_ratio
from spmdtypes.core.draws import same_numbers
from spmdtypes.core.layout import LayoutError
from spmdtypes.core.ranks import Lin, Truth, Value
from spmdtypes.core.spec import ONE, At, Const, Expr, Fn, Iota, Load, OpSpec, Rand, Red, Size, Var, Window
from spmdtypes.core.subscript import Num


class Restart(Exception):
    """A layout was chosen for an open variable: evaluate again."""


@dataclass
class Context:
    """One output of one op. `chosen`: layouts decided on so far for open variables."""

    spec: OpSpec
    operands: list[Denotation]
    mesh: Mapping[str, int]
    averaged: frozenset[str]
    grad_free: tuple[bool, ...]
    streams: frozenset[str]
    aligned: bool | None
    notes: list[str]
    chosen: dict[Var, tuple[str, ...]] = field(default_factory=dict)


class Run:
    """Evaluation of one output's expression under bound layouts."""

    def __init__(self, case: Context, env: Env) -> None:
        self.case, self.env = case, env
        self.memo: dict[int, Abs] = {}
        self.frees: dict[int, frozenset[Var]] = {}
        self.pinned: set[Var] = set()
        extents: dict[object, int] = {v: env.sizes(v)[0] for v in env.of}
        extents.update({("r", a): n for a, n in case.mesh.items()})
        self.rules = Rules(case.mesh, case.averaged, extents, self.resolves, case.notes, self.placed)

    def value(self, e: Expr) -> Abs:
        found = self.memo.get(id(e))
        if found is None:
            found = self.memo[id(e)] = self._value(e)
        return found

    def cut(self, e: Expr) -> frozenset[str]:
        return self.env.axes(free(e, self.frees))

    def _value(self, e: Expr) -> Abs:
        match e:
            case Load():
                return self._load(e)
            case Const(value):
                return self._const(value)
            case Size(var):
                return self._size(var)
            case Iota(var):
                return self._iota(var)
            case Rand(vars):
                return self._rand(vars)
            case Red():
                return self._reduce(e)
            case Fn(name, args):
                return self.rules.apply(name, [self.value(x) for x in args], self.cut(e))
        raise RuleError("unsupported", f"expression {type(e).__name__}")

    # -- leaves ---------------------------------------------------------------------------------

    def _const(self, x: Any) -> Abs:
        if not isinstance(x, (int, float, complex)) and not hasattr(x, "affine"):
            return Abs()
        try:
            n = Num.of(x)
        except LayoutError as e:
            return Abs(fault=RuleError("unsupported", str(e), frozenset(self.case.mesh)))
        if isinstance(n.local, complex) or not isinstance(n.local, (int, float)):
            same = n.local == n.ref
            return (
                Abs() if same else Abs(fault=RuleError("scale", f"{n.local} here, {n.ref} in the reference"))
            )
        if n.local != n.local:
            return Abs()
        value = Value(
            Lin.of(n.local, {("r", a): s for a, s in n.steps if self.case.mesh.get(a, 1) > 1}), Lin(n.ref)
        )
        if value.local == value.ref:
            return Abs(value=value, nonneg=n.local >= 0)
        if value.local.ranks:
            axes = frozenset(value.local.ranks)
            return Abs(
                value=value,
                fault=RuleError(
                    "unsupported" if self.case.aligned is False else "rank",  # no twin to compare with
                    f"a number that grows with the rank in {_names(axes)}",
                    axes,
                ),
            )
        return self._scaled(n.local, n.ref, value)

    def _scaled(self, local: Any, ref: Any, value: Value) -> Abs:
        """A number that is not the reference's: off by a product of axis sizes, or by no such factor."""
        scale = None
        if local and ref and abs(local) != float("inf") and abs(ref) != float("inf"):
            ratio = Fraction(ref).limit_denominator(10**9) / Fraction(local).limit_denominator(10**9)
            prefer = NONE.union(*(d.axes for d in self.case.operands))
            scale = scale_of_ratio(ratio.limit_denominator(10**6), self.case.mesh, prefer)
        if scale is None:
            text = f"{local} here, {ref} in the reference: no product of axis sizes apart"
            kind = "scale" if self._nearly_scaled(local, ref) else "unsupported"
            return Abs(value=value, fault=RuleError(kind, text, frozenset(self.case.mesh)))
        return Abs(scale=scale, value=value, nonneg=local >= 0)

    def _nearly_scaled(self, local: Any, ref: Any) -> bool:
        """A size corrected by one or two, like the count of a variance; else the number may be data."""
        return any(
            local != c != ref and scale_of_ratio(Fraction(int(ref) - c, int(local) - c), self.case.mesh)
            for c in (-2, -1, 1, 2)
            if local == int(local) and ref == int(ref)
        )

    def _size(self, v: Var) -> Abs:
        if v not in self.env.of:
            raise RuleError("unsupported", "size of an unknown variable")
        local, ref = self.env.sizes(v)
        value = ranks.constant(local, ref)
        if local == ref:
            return Abs(value=value, nonneg=True)
        b = self.env.of[v]
        if b.layout.uneven:
            raise RuleError("unsupported", f"the size of a dim of {ref} that is cut unevenly", b.layout.axes)
        axes = b.layout.axes_of(b.vars.index(v))
        exact = tuple(sorted((a, 1) for a in axes))
        product = 1
        for a in axes:
            product *= self.case.mesh[a]
        if axes and product * local == ref:
            return Abs(scale=exact, value=value, nonneg=True)
        return self._scaled(local, ref, value)

    def _iota(self, v: Var) -> Abs:
        self.pinned.add(v)
        form = Lin(0, ((("i", v), 1),))
        value = Value(form, form)
        axes = self.env.axes([v])
        if self.resolves(value):
            return Abs(value=value, cut=axes, nonneg=True)
        if not axes:
            local, ref = self.env.sizes(v)
            axes = self._ratio_axes(local, ref)
        text = f"positions count from 0 on every rank of {_names(axes)}" if axes else "positions count from 0"
        return Abs(value=value, cut=self.env.axes([v]), fault=RuleError("rank", text, axes), nonneg=True)

    def _ratio_axes(self, local: int, ref: int) -> frozenset[str]:
        scale = scale_of_ratio(Fraction(ref, local), self.case.mesh) if local else None
        return frozenset(a for a, _ in scale or ())

    def _rand(self, vars: tuple[Var, ...]) -> Abs:
        mesh, streams = self.case.mesh, self.case.streams
        for v in vars:
            self.pinned.add(v)
            if v in self.env.of and self.env.is_open(v):
                self._settle_random(v)
        cut = self.env.axes(vars)
        same = {a for a in cut if a not in streams}
        apart = {a for a in streams if a not in cut and mesh.get(a, 1) > 1}
        if same:
            chosen = any(v in self.case.chosen for v in vars)
            sizes = {mesh[a] for a in same}
            others = {a for a in mesh if mesh[a] in sizes and a not in streams and a not in cut}
            if chosen and others and len(same) == 1:
                return Abs(cut=cut, fault=same_numbers(same | others, alternatives=True))
            return Abs(cut=cut, fault=same_numbers(same))
        if apart:
            text = f"ranks of {_names(apart)} draw different numbers for one and the same value"
            return Abs(cut=cut, fault=RuleError("random", text, frozenset(apart)))
        return Abs(cut=cut)

    def _settle_random(self, v: Var) -> None:
        local, ref = self.env.sizes(v)
        if local == ref:
            return
        free_axes = [a for a in self.case.mesh if a in self.case.streams]
        scale = (
            scale_of_ratio(Fraction(ref, local), {a: self.case.mesh[a] for a in free_axes}) if local else None
        )
        if scale is None:
            scale = scale_of_ratio(Fraction(ref, local), self.case.mesh) if local else None
        if scale is None or any(k != 1 for _, k in scale):
            raise RuleError(
                "unsupported", f"random numbers for {local} positions here, {ref} in the reference"
            )
        self._choose(v, tuple(a for a in self.case.mesh if a in dict(scale)))

    def _choose(self, v: Var, axes: tuple[str, ...]) -> None:
        if v in self.case.chosen:
            raise RuleError("unsupported", "no layout found for a new dim", frozenset(axes))
        self.case.chosen[v] = axes
        raise Restart

    # -- reads ----------------------------------------------------------------------------------

    def _load(self, e: Load) -> Abs:
        d = self.case.operands[e.operand]
        grad_free = e.operand < len(self.case.grad_free) and self.case.grad_free[e.operand]
        subs = [as_variable(s, self.case.operands) or s for s in e.index]
        cut = self.cut(e)
        value, guard = self._forms(d, subs)
        if value is not None:
            self.pinned |= {
                v for f in (value.local, value.ref) for v in ranks.dims_of(f) if isinstance(v, Var)
            }
        out = replace(of_denotation(d, value, guard, grad_free), cut=cut)
        if out.fault is None and d.guard is not None and guard is None:
            out = replace(out, zero=False)
        for k, s in enumerate(subs):
            if isinstance(s, Expr):
                out = self._indirect(out, d, k, self.value(s))
        if out.value is not None and out.guard is None and out.fault is not None and self.resolves(out.value):
            out = replace(out, fault=None)
        clash = out.partial & cut
        if clash and out.fault is None:
            out = replace(out, fault=left_out(out.op, clash, (e.operand,)))
        return out

    def _forms(self, d: Denotation, subs: Sequence[Any]) -> tuple[Value | None, Truth | None]:
        """The operand's closed forms, in variables."""
        if d.value is None and d.guard is None:
            return None, None
        names: dict[Any, Any] = {ONE: ONE}
        moved: dict[int, tuple[Lin, Lin]] = {}
        for k, s in enumerate(subs):
            if isinstance(s, Var):
                names[k] = s
            elif s is ONE:
                names[k] = ONE
            elif isinstance(s, (Window, At)):
                n = Num.of(s.start if isinstance(s, Window) else s.where)
                here = Lin.of(n.local, {("r", a): c for a, c in n.steps})
                step = ((("i", s.var), s.step),) if isinstance(s, Window) else ()
                moved[k] = (here.plus(Lin(0, step)), Lin(n.ref, step))
        rename = ranks.renamer(names)

        def at(form: Any, side: int) -> Any:
            for k, lins in moved.items():
                form = form.substitute(("i", k), lins[side])
            return form.mapped(lambda a: a if a[0] == "i" and isinstance(a[1], Var) else rename(a))

        value = None
        if d.value is not None:
            local, ref = at(d.value.local, 0), at(d.value.ref, 1)
            value = Value(local, ref) if local is not None and ref is not None else None
        return value, at(d.guard, 0) if d.guard is not None else None

    def _indirect(self, out: Abs, d: Denotation, dim: int, index: Abs) -> Abs:
        """A data-dependent subscript: harmless when complete; on a cut dim the rank's own rows, guarded."""
        held = d.layout.axes_of(dim) if dim not in d.layout.open_dims else ()
        if not held and not index.fault and not index.partial and not index.scale and index.guard is None:
            return replace(out, value=out.value if out.number is not None else None)
        if index.partial or index.scale:
            return replace(
                out, fault=RuleError("nonlinear", "the index is a pending reduction", index.partial)
            )
        if held and index.value is not None and out.guard is None and not self.resolves(index.value):
            guard = self._own_rows(d, dim, index)
            if guard is not None:
                axes = frozenset(guard.ranks)
                fault = RuleError("rank", f"holds only for the rows a rank of {_names(axes)} owns", axes)
                if index.fault is not None and index.fault.axes - axes:
                    fault = index.fault
                if out.fault is not None:
                    return replace(out, value=None, fault=merged([out, Abs(fault=fault)]))
                return replace(out, value=None, guard=guard, fault=fault)
        if held:
            axes = frozenset(held)
            text = f"dim {dim} is cut over {_names(axes)} but indexed by whole positions"
            return replace(out, value=None, fault=RuleError("layout", text, axes))
        return replace(
            out, value=None, fault=index.fault or RuleError("rank", "the index holds only on some ranks")
        )

    def _own_rows(self, d: Denotation, dim: int, index: Abs) -> Truth | None:
        """Where `reference position - block start` is read from a block: exact wherever the index is."""
        assert index.value is not None
        local, ref = index.value.local, index.value.ref
        axes = d.layout.block_axes(dim)
        if not isinstance(local, Lin) or not isinstance(ref, Lin) or not axes:
            return None
        size = d.layout.local_shape[dim]
        block = ranks.steps_of_blocks({a: -c for a, c in local.ranks.items()}, size, self.case.mesh)
        shifted = Lin(local.const, tuple(t for t in local.terms if t[0][0] != "r"))
        if block is None or block.axes != axes or shifted != ref:
            return None
        return index.guard or Truth(frozenset([local, local.times(-1).shift(size - 1)]))

    # -- reductions -----------------------------------------------------------------------------

    def _reduce(self, e: Red) -> Abs:
        body = self.value(e.body)
        cut = self.cut(e)
        inner = free(e.body, self.frees)
        vars = [v for v in e.vars if v in self.env.of]
        if len(vars) < len(e.vars):
            raise RuleError("unsupported", "reduction over a variable of unknown size")
        over: set[str] = set()
        for v in vars:
            over |= self._reduced_axes(v, e.vars, inner)
        if all(self.env.sizes(v) == (1, 1) for v in vars):
            return self._without(body, vars, cut)
        if over and isinstance(e.body, Fn) and e.body.name == "opaque" and not body.partial:
            text = f"each rank of {_names(over)} sees only its own part of what is ordered or searched"
            return Abs(cut=cut, fault=RuleError("unsupported", text, frozenset(over)))
        if body.fault is not None:
            body = self.rules.shared(body)
        if body.fault is not None:
            return replace(body, cut=cut, value=None, guard=None, zero=False)
        return self._pending_over(e, body, frozenset(over), vars, cut)

    def _without(self, body: Abs, vars: Sequence[Var], cut: frozenset[str]) -> Abs:
        """The one term of a reduction over variables of size 1."""

        def rename(a: ranks.Atom) -> ranks.Atom | None:
            if a[0] == "i" and a[1] in vars:
                return None
            return ("u", a[1], tuple(ONE if d in vars else d for d in a[2])) if a[0] == "u" else a

        value = body.value.mapped(rename) if body.value is not None else None
        guard = body.guard.mapped(rename) if body.guard is not None else None
        lost = body.guard is not None and guard is None
        return replace(body, cut=cut, value=None if lost else value, guard=guard, zero=body.zero and not lost)

    def _reduced_axes(self, v: Var, reduced: Sequence[Var], inner: frozenset[Var]) -> frozenset[str]:
        b = self.env.of[v]
        if any(w not in reduced for w in b.vars):
            raise RuleError(
                "layout", f"reduces a dim whose elements are not in the reference's order ({b.layout.show()})"
            )
        if b.layout.fixed:
            raise RuleError(
                "layout", f"reduces over one part of a dim only ({b.layout.show()})", b.layout.axes
            )
        return b.layout.axes

    def _pending_over(
        self, e: Red, body: Abs, over: frozenset[str], vars: Sequence[Var], cut: frozenset[str]
    ) -> Abs:
        if body.partial and body.op != e.op:
            text = f"{e.op} over a dim of a value that is a pending {body.op} over {_names(body.partial)}"
            return Abs(cut=cut, fault=RuleError("nonlinear", text, body.partial))
        scale = body.scale
        if e.op == "prod" and scale:
            return Abs(cut=cut, fault=RuleError("scale", "product of values off by a factor", NONE))
        if e.op == "sum":
            for v in vars:
                if self.env.is_open(v):
                    local, ref = self.env.sizes(v)
                    if local != ref and not body.is_zero:
                        scale = scale_mul(scale, self._scaled(local, ref, ranks.constant(local, ref)).scale)
        pending = body.partial | over
        guard = body.guard
        if guard is not None and ranks.dims_of(guard) & set(vars):
            guard = None
        out = Abs(
            e.op if pending else "",
            pending,
            scale,
            value=body.value if body.is_zero else None,
            guard=guard,
            zero=body.zero and guard is not None,
            cut=cut,
            nonneg=body.nonneg,
            grad_free=body.grad_free,
        )
        clash = pending & cut
        if clash:
            return replace(out, fault=left_out(out.op, clash))
        return out

    # -- closed forms ---------------------------------------------------------------------------

    def resolves(self, value: Value) -> bool:
        """The local form is the reference form once reference positions are written out."""
        if value.local == value.ref and not ranks.dims_of(value.local):
            return True
        ref = value.ref
        for a in ranks.atoms(value.ref):
            if a[0] != "i":
                continue
            here = self._position(a[1])
            if here is None:
                axes = self._axes_by_form(a[1], value)
                if axes is None:
                    return False
                self._choose(a[1], axes)
            else:
                ref = ref.substitute(a, here)
        return value.local == ref

    def placed(self, form: Truth) -> Truth | None:
        """A reference form in rank and local positions."""
        for a in ranks.atoms(form):
            if a[0] == "i":
                here = self._position(a[1])
                if here is None:
                    return None
                form = form.substitute(a, here)
        return form

    def _position(self, v: Var) -> Lin | None:
        """The reference position along a variable that is whole or cut into blocks."""
        axes = self.env.block_axes(v) if v in self.env.of else None
        if axes is None:
            return None
        step = self.env.sizes(v)[0]
        here: dict[ranks.Atom, int] = {("i", v): 1}
        for axis in reversed(axes):
            here[("r", axis)] = step
            step *= self.case.mesh[axis]
        return Lin.of(0, here)

    def _axes_by_form(self, v: Var, value: Value) -> tuple[str, ...] | None:
        """Blocks of an open dim that a form like `position + rank * size` speaks of."""
        if v not in self.env.of or not self.env.is_open(v) or v in self.case.chosen:
            return None
        local, ref = self.env.sizes(v)
        forms = [value.local] if isinstance(value.local, Lin) else list(value.local.conj)
        for f in forms:
            c = f.coefficient(("i", v))
            if c and f.ranks:
                block = ranks.steps_of_blocks({a: s / c for a, s in f.ranks.items()}, local, self.case.mesh)
                if block is not None and block.count * local == ref:
                    return block.axes
        return None


def _names(axes: Any) -> str:
    return ", ".join(sorted(axes))
