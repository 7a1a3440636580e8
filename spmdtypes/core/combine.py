"""Scalar functions of values that are pending, scaled, guarded or rank-dependent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from spmdtypes.core import ranks
from spmdtypes.core.denotation import (
    NONE,
    Denotation,
    RuleError,
    Scale,
    scale_mul,
    scale_number,
    show_scale,
)
from spmdtypes.core.ranks import Truth, Value
from spmdtypes.core.scalar import OPAQUE, Args, Laws, choice, laws, power_laws

FLIP = {"max": "min", "min": "max"}


@dataclass(frozen=True, slots=True)
class Abs:
    """What is known of an expression's value, beside the layouts of its variables.

    As in `Denotation`; forms in `value` and `guard` speak of variables instead of dims. `cut`: axes
    that cut its variables. `fault`: why it has no reading (unless its closed form shows that it does).
    `nonneg`: it is never negative. `grad_free`: no parameter enters.
    """

    op: str = ""
    partial: frozenset[str] = NONE
    scale: Scale = ()
    value: Value | None = None
    guard: Truth | None = None
    zero: bool = False
    cut: frozenset[str] = NONE
    fault: RuleError | None = None
    nonneg: bool = False
    grad_free: bool = True

    @property
    def number(self) -> object:
        return self.value.number if self.value else None

    @property
    def is_zero(self) -> bool:
        n = self.number
        return n is not None and not isinstance(n, bool) and n == 0

    @property
    def owned(self) -> bool:
        """Zero outside its guard: a pending sum whose terms do not overlap."""
        return self.guard is not None and self.zero

    @property
    def loose(self) -> bool:
        """Arbitrary outside its guard."""
        return self.guard is not None and not self.zero


@dataclass
class Rules:
    """One derivation's way of combining values. `resolves`: is the local form right? `placed`: a reference
    form in local positions, if known. `notes` collects assumptions made on the way."""

    mesh: Mapping[str, int]
    averaged: frozenset[str]
    extents: Mapping[object, int]
    resolves: Callable[[Value], bool]
    notes: list[str]
    placed: Callable[[Truth], Truth | None] = lambda form: form

    # -- entry ----------------------------------------------------------------------------------

    def apply(self, name: str, args: Sequence[Abs], cut: frozenset[str]) -> Abs:
        """The function `name` of `args`, whose variables are cut over `cut`."""
        args, name = _literal_bounds(name, args)
        if name == "sub" and len(args) == 2 and args[1].number == 1:
            no = _negation(args[0])
            if no is not None:
                return self.apply("neg", [no], cut)
        base = Abs(cut=cut, nonneg=_nonneg(name, args), grad_free=all(a.grad_free for a in args))
        value = _form(name, args)
        fault = merged(args)
        if value is not None and not any(a.guard for a in args):
            if self.resolves(value):
                return replace(base, value=value)
            if fault is not None:
                return replace(base, value=value, fault=fault)
        found = self._attempted(name, args, base)
        if found.fault is not None and found.guard is None:
            shared = [self.shared(a) for a in args]
            if any(a is not b for a, b in zip(shared, args)):
                again = self._attempted(name, shared, base)
                if again.fault is None:
                    return again
        return self._with_form(found, value, args) if value is not None else found

    def _attempted(self, name: str, args: Sequence[Abs], base: Abs) -> Abs:
        for attempt in (self._select, self._clamped, self._owned):
            found = attempt(name, args, base)
            if found is not None:
                return found
        return self._lawful(name, args, base)

    def _with_form(self, found: Abs, value: Value, args: Sequence[Abs]) -> Abs:
        """`value` holds where all guards of the arguments do."""
        if found.value is not None or found.zero:
            return found
        guard: Truth | None = None
        for g in {a.guard for a in args if a.guard is not None}:
            guard = g if guard is None else ranks.both(guard, g)
            if guard is None:
                return found
        if guard is None or (found.guard is not None and ranks.implies(found.guard, guard, self.extents)):
            return replace(found, value=value)
        if found.guard is None and found.fault is not None:
            return replace(found, value=value, guard=guard)
        return found

    def shared(self, x: Abs) -> Abs:
        """A truth value that one rank has wherever the reference has it: a pending sum of ones."""
        if x.fault is None or x.guard is not None or x.value is None:
            return x
        local, ref = x.value.local, x.value.ref
        if not isinstance(local, Truth) or not isinstance(ref, Truth):
            return x
        one = Abs(value=ranks.constant(1), nonneg=True)
        found = self._masked(one, local, ref, Abs(cut=x.cut, nonneg=True, grad_free=x.grad_free))
        return x if found is None else found

    # -- closed forms and guards ----------------------------------------------------------------

    def _select(self, name: str, args: Sequence[Abs], base: Abs) -> Abs | None:
        """`where` and products by a truth value whose form depends on the rank."""
        if name == "where" and len(args) == 3:
            return self._where(args[0], args[1], args[2], base)
        if name in ("mul", "and", "bitand") and len(args) == 2:
            for c, x in ((args[0], args[1]), (args[1], args[0])):
                if c.value is not None and isinstance(c.value.local, Truth):
                    collapsed = self._collapse(c, self.shared(x), base)
                    if collapsed is not None:
                        return collapsed
                    if c.fault is not None:
                        return self._where(c, x, Abs(value=ranks.constant(0)), base)
        return None

    def _where(self, c: Abs, x: Abs, y: Abs, base: Abs) -> Abs | None:
        if c.value is None or c.fault is None or c.guard is not None:
            return None
        local, ref = c.value.local, c.value.ref
        if not isinstance(local, Truth) or not isinstance(ref, Truth):
            return None
        no_local, no_ref = ranks.negate(local), ranks.negate(ref)
        for keep, other, on, on_ref in ((x, y, local, ref), (y, x, no_local, no_ref)):
            if not self._only_where(on, on_ref):
                continue
            found = self._masked(keep, on, on_ref, base) if other.is_zero else None
            if found is None and other.number is not None:
                found = self._valid_where(keep, on, c.fault.axes, base)
            if found is not None:
                return found
        return None

    def _only_where(self, on: Truth, ref: Truth) -> bool:
        """Where a rank has `on`, the reference has `ref`."""
        there = self.placed(ref)
        return there is not None and ranks.implies(on, there, self.extents)

    def _valid_where(self, x: Abs, on: Truth, axes: frozenset[str], base: Abs) -> Abs | None:
        """x where `on`, anything elsewhere."""
        if x.zero or x.partial & axes or (x.fault is not None and not x.loose and x.value is None):
            return None
        guard: Truth | None = on
        if x.guard is not None and not ranks.implies(on, x.guard, self.extents):
            guard = ranks.both(on, x.guard)
        if guard is None:
            return None
        axes = axes | (x.fault.axes if x.fault is not None else NONE)
        fault = RuleError("rank", f"holds only on the ranks of {_names(axes)} that own it", axes)
        return replace(
            base, op=x.op, partial=x.partial, scale=x.scale, value=x.value, guard=guard, fault=fault
        )

    def _masked(self, x: Abs, on: Truth, ref: Truth, base: Abs) -> Abs | None:
        """x where `on` (which has the reference's `ref` with it), zero elsewhere."""
        if x.owned and x.guard is not None and ranks.implies(x.guard, on, self.extents):
            return replace(x, cut=base.cut, value=None)
        if x.guard is not None and (x.zero or not ranks.implies(on, x.guard, self.extents)):
            return None
        there = self.placed(ref)
        block = ranks.partition(on, there, self.mesh) if there is not None else None
        if block is None or x.op not in ("", "sum"):
            return None
        axes = frozenset(block.axes)
        if axes & (x.partial | base.cut) or self._within(x, axes).fault is not None:
            return None
        return replace(base, op="sum", partial=x.partial | axes, scale=x.scale, guard=on, zero=True)

    def _collapse(self, c: Abs, x: Abs, base: Abs) -> Abs | None:
        """An indicator over a cut variable times a value owned by the same ranks is complete."""
        if not (x.owned and x.guard is not None and c.value is not None and isinstance(c.value.local, Truth)):
            return None
        if x.fault is not None:
            return None
        if c.guard is not None and not ranks.implies(x.guard, c.guard, self.extents):
            return None
        if not self.resolves(c.value) or not ranks.implies(c.value.local, x.guard, self.extents):
            return None
        own = frozenset(x.guard.ranks)
        rest = x.partial - own
        return replace(base, op=x.op if rest else "", partial=rest, scale=x.scale)

    def _clamped(self, name: str, args: Sequence[Abs], base: Abs) -> Abs | None:
        """Bounds on a rank-dependent number: the number itself, where it lies within."""
        values = [a.value for a in args]
        if any(v is None for v in values) or all(a.fault is None for a in args):
            return None
        known = [v for v in values if v is not None]
        local = ranks.clamp_guard(name, [v.local for v in known])
        ref = ranks.clamp_guard(name, [v.ref for v in known])
        if local is None or ref is None or not self._only_where(local[1], ref[1]):
            return None
        guard: Truth | None = local[1]
        for a in args:
            if a.guard is not None and guard is not None:
                guard = ranks.both(a.guard, guard)
        if guard is None:
            return None
        return replace(
            base,
            value=Value(local[0], ref[0]),
            guard=guard,
            fault=_rank_fault("valid on some ranks only", guard, merged(args)),
        )

    def _owned(self, name: str, args: Sequence[Abs], base: Abs) -> Abs | None:
        """Functions that keep the zeros of a value that is zero outside its guard."""
        guards = {a.guard for a in args if a.guard is not None}
        if len(guards) != 1:
            return None
        guard = guards.pop()
        assert guard is not None
        axes = frozenset(guard.ranks)
        inside = [self._within(a, axes) if a.guard else self._settled(a, guard) for a in args]
        if any(a.partial & axes for a in inside):
            return None
        law = self._laws(name, args)
        zero = any(k in law.zero for k, a in enumerate(args) if a.owned)
        every = frozenset(k for k, a in enumerate(args) if a.owned or a.is_zero)
        if not zero and law.degree.get(every, 0) > 0:
            zero = True
        loose = any(a.loose for a in args)
        if not zero and not loose:
            return None
        got = self._lawful(name, inside, base)
        if got.fault is not None:
            return got if loose else None
        if zero:
            if got.op not in ("", "sum") or axes & got.cut:
                return None
            return replace(got, op="sum", partial=got.partial | axes, guard=guard, zero=True)
        return replace(got, guard=guard, fault=_rank_fault("valid on some ranks only", guard, merged(args)))

    def _within(self, a: Abs, axes: frozenset[str]) -> Abs:
        """A guarded value where its guard holds: only what it lacks over other axes is left to say."""
        rest, fault = a.partial - axes, a.fault
        if fault is not None and a.guard is not None:
            exact = self.resolves(a.value) if a.value is not None else fault.axes <= axes
            fault = None if exact else fault
        return replace(a, partial=rest, op=a.op if rest else "", guard=None, zero=False, fault=fault)

    def _settled(self, a: Abs, guard: Truth) -> Abs:
        """A truth value that the guard decides, in both programs."""
        if a.fault is None or a.value is None:
            return a
        local, ref = a.value.local, a.value.ref
        if not isinstance(local, Truth) or not isinstance(ref, Truth):
            return a
        for number, here, there in ((1, local, ref), (0, ranks.negate(local), ranks.negate(ref))):
            if ranks.implies(guard, here, self.extents) and self._only_where(guard, there):
                return replace(a, value=ranks.constant(number), fault=None)
        return a

    # -- laws -----------------------------------------------------------------------------------

    def _laws(self, name: str, args: Sequence[Abs]) -> Laws:
        if name.startswith("choice"):
            return choice(len(args))
        if name == "pow" and len(args) == 2 and isinstance(args[1].number, (int, float)):
            return power_laws(float(args[1].number))
        law = laws(name)
        if name in ("mul", "div"):
            extra = {}
            for k in (0, 1) if name == "mul" else (0,):
                other = args[1 - k]
                if other.partial:
                    continue
                n = other.number
                if other.nonneg or (isinstance(n, (int, float)) and n >= 0):
                    extra.update({(frozenset([k]), op): op for op in FLIP})
                elif isinstance(n, (int, float)):
                    extra.update({(frozenset([k]), op): flipped for op, flipped in FLIP.items()})
            return Laws(law.degree, {**law.hom, **extra}, law.zero, law.nonneg) if extra else law
        return law

    def _lawful(self, name: str, args: Sequence[Abs], base: Abs) -> Abs:
        fault = merged(args)
        if fault is not None and name == "opaque" and fault.kind == "rank" and not any(a.guard for a in args):
            fault = RuleError("unsupported", fault.message, fault.axes, fault.operands)
        if fault is not None:
            return replace(base, fault=fault)
        law = self._laws(name, args)
        if name == "pow" and len(args) == 2 and law is not OPAQUE and law is not laws("pow"):
            args = args[:1]
        try:
            op, pending, scales = self._pending(name, law, list(args), base)
            scale = self._scale(name, law, args, scales)
        except RuleError as e:
            return replace(base, fault=e)
        if pending & base.cut:
            axes = pending & base.cut
            was = next(a.op for a in args if a.partial & axes)
            text = f"{name} combines a pending {was} over {_names(axes)} with a value cut over {_names(axes)}"
            return replace(base, fault=RuleError("mix", text, axes))
        return replace(base, op=op if pending else "", partial=pending, scale=scale)

    def _pending(
        self, name: str, law: Laws, args: list[Abs], base: Abs
    ) -> tuple[str, frozenset[str], list[Scale]]:
        """(op, pending axes, scale per argument) of the result."""
        scales = [a.scale for a in args]
        groups: dict[Args, set[str]] = {}
        for axis in sorted(frozenset().union(*(a.partial for a in args))):
            groups.setdefault(frozenset(k for k, a in enumerate(args) if axis in a.partial), set()).add(axis)
        if not groups:
            return "", NONE, scales
        ops = {a.op for a in args if a.partial}
        if len(ops) > 1:
            raise RuleError(
                "mix", f"{name} combines a pending {' and a pending '.join(sorted(ops))}", self._over(args)
            )
        op = ops.pop()
        results: set[str] = set()
        done: set[str] = set()
        for where, some in groups.items():
            axes = frozenset(some)
            if op == "sum" and self._is_count(name, where, axes, args):
                where = self._per_rank(where, axes, args, scales)
                if not where:
                    continue
            if op == "sum" and self._is_bounded_count(name, where, axes, args):
                results.add("sum")
            else:
                results.add(self._through(name, law, op, where, axes, args, scales))
            done |= axes
        if len(results) > 1:
            raise RuleError(
                "nonlinear", f"{name} turns one pending {op} into different ones", self._over(args)
            )
        return (results.pop() if results else ""), frozenset(done), scales

    def _over(self, args: Sequence[Abs]) -> frozenset[str]:
        return frozenset().union(*(a.partial for a in args))

    def _through(
        self,
        name: str,
        law: Laws,
        op: str,
        where: Args,
        axes: frozenset[str],
        args: list[Abs],
        scales: list[Scale],
    ) -> str:
        """The pending reduction of the result when the arguments `where` are pending over `axes`."""
        direct = law.hom.get((where, op))
        if direct is not None and self._equal_scales(where, args, scales):
            return self._checked(name, op, direct, scales)
        rest = [k for k in range(len(args)) if k not in where]
        for mask in range(1, 1 << len(rest)):
            lifted = frozenset(k for j, k in enumerate(rest) if mask >> j & 1)
            result = law.hom.get((where | lifted, op))
            if result is None or op == "prod" or any(args[k].cut & axes for k in lifted):
                continue
            trial = list(scales)
            if op == "sum":
                for k in lifted:
                    if not args[k].is_zero:
                        trial[k] = scale_mul(trial[k], tuple((a, -1) for a in sorted(axes)))
            if self._equal_scales(where | lifted, args, trial):
                scales[:] = trial
                return self._checked(name, op, result, scales)
        raise self._refusal(name, law, op, where, axes, args, scales)

    def _equal_scales(self, where: Args, args: Sequence[Abs], scales: list[Scale]) -> bool:
        """All equal in number (zeros agree with any); made equal in writing."""
        real = [k for k in sorted(where) if not args[k].is_zero]
        if len(real) > 1:
            first = scale_number(scales[real[0]], self.mesh)
            if any(abs(scale_number(scales[k], self.mesh) - first) > 1e-9 * first for k in real[1:]):
                return False
        for k in where:
            scales[k] = scales[real[0]] if real else ()
        return True

    def _checked(self, name: str, op: str, result: str, scales: Sequence[Scale]) -> str:
        if "prod" in (op, result) and any(scales):
            raise RuleError("scale", f"{name} of a pending {op} that is off by a factor")
        return result

    def _refusal(
        self,
        name: str,
        law: Laws,
        op: str,
        where: Args,
        axes: frozenset[str],
        args: Sequence[Abs],
        scales: Sequence[Scale],
    ) -> RuleError:
        over = _names(axes)
        ks = tuple(sorted(where))
        if len(where) > 1 and name in ("mul", "div"):
            return RuleError("product", f"{name} of two values that are both pending over {over}", axes, ks)
        if (where, op) in law.hom:
            return RuleError("scale", f"{name} of pending values with different factors", axes, ks)
        joint = next((s for s, o in law.hom if o == op and where < s), None)
        if joint is not None:
            text = f"{name} combines a pending {op} over {over} with a value that is complete over {over}"
            return RuleError("mix", text, axes, ks)
        return RuleError(
            "nonlinear", f"{name} is not linear, and its operand is a pending {op} over {over}", axes, ks
        )

    def _is_count(self, name: str, where: Args, axes: frozenset[str], args: Sequence[Abs]) -> bool:
        """The denominator is a pending sum over averaged axes that no parameter enters."""
        k = {"div": 1, "recip": 0}.get(name, -1)
        return k in where and axes <= self.averaged and args[k].grad_free

    def _per_rank(
        self, where: Args, axes: frozenset[str], args: list[Abs], scales: list[Scale]
    ) -> frozenset[int]:
        """Read the count as 1/n of the whole: each rank takes its own mean. Returns who is still pending."""
        k = len(args) - 1
        args[k] = replace(args[k], partial=args[k].partial - axes)
        scales[k] = scale_mul(scales[k], tuple((a, 1) for a in sorted(axes)))
        self.notes.append(f"mean of per-rank means over {_names(axes)}")
        return where - {k}

    def _is_bounded_count(self, name: str, where: Args, axes: frozenset[str], args: Sequence[Abs]) -> bool:
        """A count kept off zero by a constant: `count.clamp(min=1)`."""
        if name != "max" or len(where) != 1 or not axes <= self.averaged:
            return False
        (k,) = where
        bound = args[1 - k].number
        if not args[k].grad_free or not isinstance(bound, (int, float)) or not 0 <= bound <= 1:
            return False
        self.notes.append(f"the count is at least {bound} on every rank of {_names(axes)}")
        return True

    def _scale(self, name: str, law: Laws, args: Sequence[Abs], scales: Sequence[Scale]) -> Scale:
        groups: dict[float, list[int]] = {}
        for k, s in enumerate(scales):
            if k < len(args) and s and not args[k].is_zero:
                groups.setdefault(scale_number(s, self.mesh), []).append(k)
        zeros = [k for k, a in enumerate(args) if a.is_zero]
        out: Scale = ()
        for number, ks in groups.items():
            degree = law.degree.get(frozenset(ks))
            if degree is None:
                degree = law.degree.get(frozenset([*ks, *zeros]))
            if degree is None and number != 1.0:
                axes = frozenset(a for k in ks for a, _ in scales[k])
                text = f"{name} of a value that is off by the factor {show_scale(scales[ks[0]])}"
                raise RuleError("scale", text, axes, tuple(ks))
            out = scale_mul(out, scales[ks[0]], degree or 0)
        return out


def left_out(op: str, axes: frozenset[str], operands: tuple[int, ...] = ()) -> RuleError:
    """A value both pending and cut over the same axes."""
    text = (
        f"each rank of {_names(axes)} holds only its own part of a pending {op} over {_names(axes)}: "
        "the other ranks' terms for that part are left out"
    )
    return RuleError("axis", text, axes, operands)


def of_denotation(d: Denotation, value: Value | None, guard: Truth | None, grad_free: bool) -> Abs:
    """An operand read at variables (`value` and `guard` already speak of them)."""
    fault = None
    if d.varying:
        fault = RuleError("rank", d.reason or f"differs between the ranks of {_names(d.varying)}", d.varying)
    n = value.number if value is not None else None
    return Abs(
        d.op,
        d.partial,
        d.scale,
        value,
        guard,
        d.zero and guard is not None,
        fault=fault,
        nonneg=(isinstance(n, (int, float)) and n >= 0)
        or (value is not None and isinstance(value.local, Truth)),
        grad_free=grad_free,
    )


def _negation(a: Abs) -> Abs | None:
    """1 - a, of a truth value that has no reading."""
    if a.fault is None or a.value is None:
        return None
    local, ref = a.value.local, a.value.ref
    if not isinstance(local, Truth) or not isinstance(ref, Truth):
        return None
    return replace(a, value=Value(ranks.negate(local), ranks.negate(ref)))


def merged(args: Sequence[Abs]) -> RuleError | None:
    """The first fault, over the axes of all."""
    faults = [a.fault for a in args if a.fault is not None]
    if len(faults) < 2:
        return faults[0] if faults else None
    axes = NONE.union(*(f.axes for f in faults))
    first = faults[0]
    return first if axes == first.axes else RuleError(first.kind, first.message, axes, first.operands)


def _rank_fault(text: str, form: Truth, was: RuleError | None) -> RuleError:
    axes = frozenset(form.ranks) | (was.axes if was is not None else NONE)
    return RuleError("rank", f"{text} of {_names(axes)}" if axes else text, axes)


def _names(axes: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(axes))


def _form(name: str, args: Sequence[Abs]) -> Value | None:
    values = [a.value for a in args]
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not known:
        return None
    local = ranks.apply(name, [v.local for v in known])
    ref = ranks.apply(name, [v.ref for v in known])
    return Value(local, ref) if local is not None and ref is not None else None


def _nonneg(name: str, args: Sequence[Abs]) -> bool:
    if name in ("mul", "div", "add", "max", "hypot", "id"):
        return all(a.nonneg for a in args)
    if name == "where":
        return all(a.nonneg for a in args[1:])
    return laws(name).nonneg


def _literal_bounds(name: str, args: Sequence[Abs]) -> tuple[list[Abs], str]:
    return list(args), {"clamp_min": "max", "clamp_max": "min", "maximum": "max", "minimum": "min"}.get(
        name, name
    )
