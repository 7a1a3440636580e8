"""Is a description true? It is evaluated by brute force and compared with the kernel it describes.

    check_call(torch.ops.aten.mm.default, (a, b), {})      # None, or what is wrong
    with CheckedCalls() as calls: model(x).sum().backward()

Expressions are evaluated in float64 with one tensor dim per index variable. Where an expression says
only "some function of these elements", what can be checked is checked: no other element matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmdtypes.capture.raw import dtype_name
from spmdtypes.core.spec import (
    At,
    Concat,
    Const,
    Expr,
    Fn,
    Iota,
    Load,
    Operand,
    OpSpec,
    Out,
    Rand,
    Red,
    Reshape,
    Size,
    Var,
    Window,
)
from spmdtypes.graph import Lit, Node, Ref
from spmdtypes.ops import build

LIMIT = 1_000_000  # elements of one intermediate


class Unevaluable(Exception):
    """The expression contains a function that is known by its arguments only."""


class TooBig(Exception):
    """Brute force would need too much memory."""


def _truth(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *xs: f(*xs).to(torch.float64)


def _integers(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *xs: f(*(x.to(torch.int64) for x in xs)).to(torch.float64)


_F = torch.nn.functional
_SAME_NAME = """abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh
cosh asinh acosh atanh erf erfc erfinv lgamma digamma sign sgn floor ceil trunc round frac relu
sigmoid tanh real
imag angle xlogy logaddexp logaddexp2 copysign hypot atan2 fmod pow""".split()
FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    **{name: _truth(getattr(torch, name)) for name in "eq ne lt le gt ge isnan isinf isfinite".split()},
    "id": lambda x: x,
    "neg": torch.neg,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "recip": torch.reciprocal,
    "sq": torch.square,
    "cube": lambda x: x**3,
    "max": torch.maximum,
    "min": torch.minimum,
    "where": lambda c, x, y: torch.where(c != 0, x, y),
    "and": _truth(torch.logical_and),
    "or": _truth(torch.logical_or),
    "xor": _truth(torch.logical_xor),
    "not": _truth(torch.logical_not),
    "mod": torch.remainder,
    "floordiv": torch.floor_divide,
    "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "conj": lambda x: torch.conj(x).resolve_conj(),
    "complex": lambda x, y: torch.complex(x.double(), y.double()),
    "softplus": lambda x: _F.softplus(x, threshold=700),
    "relu6": _F.relu6,
    "silu": _F.silu,
    "gelu": _F.gelu,
    "gelu_tanh": lambda x: _F.gelu(x, approximate="tanh"),
    "entr": torch.special.entr,
    "xlog1py": torch.special.xlog1py,
    "bitand": _integers(torch.bitwise_and),
    "bitor": _integers(torch.bitwise_or),
    "bitxor": _integers(torch.bitwise_xor),
    "bitnot": _integers(torch.bitwise_not),
    "shl": _integers(torch.bitwise_left_shift),
    "shr": _integers(torch.bitwise_right_shift),
}
_REDUCTIONS: Mapping[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "sum": lambda x, dims: x.sum(list(dims), keepdim=True),
    "max": lambda x, dims: x.amax(list(dims), keepdim=True),
    "min": lambda x, dims: x.amin(list(dims), keepdim=True),
    "prod": lambda x, dims: _prod(x, dims),
}


def _prod(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in dims:
        x = x.prod(d, keepdim=True)
    return x


def _local(x: Any) -> Any:
    return x.local if isinstance(x, Lit) else x


class Evaluation:
    """An `OpSpec` on real tensors. `tainted`: compute which outputs may depend on these elements."""

    def __init__(self, spec: OpSpec, tensors: Sequence[Tensor], tainted: Sequence[Tensor] | None = None):
        self.spec, self.tensors, self.tainted = spec, [_exact(t) for t in tensors], tainted
        self.sizes: dict[Var, int] = {}
        self.memo: dict[int, Tensor] = {}
        for out in spec.outs:
            if isinstance(out, Out):
                self._scan(out.value, set())
        for operand, subs in spec.uses:
            for d, s in enumerate(subs):
                self._bind(s, tensors[operand].shape[d])
        for var, size in spec.sizes.items():
            self._bind(var, _local(size))
        for a, b in spec.same:
            if self.sizes[a] != self.sizes[b]:
                raise ValueError(f"{a.name} and {b.name} differ in extent")
        self.order = list(self.sizes)

    def outputs(self) -> list[Tensor | None]:
        return [self._output(o) for o in self.spec.outs]

    def _bind(self, s: Any, size: int) -> None:
        if isinstance(s, Window):
            s, size = s.var, _local(s.length)
        if isinstance(s, Var) and self.sizes.setdefault(s, size) != size:
            raise ValueError(f"{s.name} is {self.sizes[s]} and {size} long")

    def _scan(self, e: Expr, seen: set[int]) -> None:
        if id(e) in seen:
            return
        seen.add(id(e))
        if isinstance(e, Load):
            for d, s in enumerate(e.index):
                self._bind(s, self.tensors[e.operand].shape[d])
                if isinstance(s, Expr):
                    self._scan(s, seen)
        for child in children(e):
            self._scan(child, seen)

    def _output(self, out: Any) -> Tensor | None:
        source = self.tensors if self.tainted is None else self.tainted
        if out is None:
            return None
        if isinstance(out, Reshape):
            return source[out.operand].reshape(out.shape)
        if isinstance(out, Concat):
            return torch.cat([source[k] for k in out.operands], out.dim)
        groups = [v if isinstance(v, tuple) else (v,) for v in out.vars]
        vars = [v for group in groups for v in group if isinstance(v, Var)]
        if len(set(vars)) != len(vars):
            raise ValueError("one variable for two output dims")
        value = self._grown(self.value(out.value), vars)
        order = [self.order.index(v) for v in vars]
        rest = [d for d in range(len(self.order)) if d not in order]
        if any(value.shape[d] != 1 for d in rest):
            raise ValueError(f"free variables {[self.order[d].name for d in rest if value.shape[d] != 1]}")
        shape = [math.prod(self.sizes[v] for v in group if isinstance(v, Var)) for group in groups]
        return value.permute(rest + order).reshape(shape)

    def _grown(self, x: Tensor, vars: Sequence[Var]) -> Tensor:
        shape = [self.sizes[v] if v in vars else n for v, n in zip(self.order, x.shape)]
        if math.prod(shape) > LIMIT:
            raise TooBig
        return x.expand(shape)

    def value(self, e: Expr) -> Tensor:
        if id(e) not in self.memo:
            self.memo[id(e)] = self._value(e)
        return self.memo[id(e)]

    def _value(self, e: Expr) -> Tensor:
        match e:
            case Load():
                return self._load(e)
            case Fn(name, args):
                return self._call(name, [self.value(a) for a in args])
            case Red(name, vars, body):
                x = self._grown(self.value(body), vars)
                dims = [self.order.index(v) for v in vars]
                return self._reduce(name, x, dims)
            case Size(var):
                return self._scalar(self.sizes[var])
            case Iota(var):
                return self._scalar(0) if self.tainted is not None else self._positions(var).double()
            case Const(value):
                return self._scalar(_local(value))
            case Rand():
                if self.tainted is None:
                    raise Unevaluable("a random number")
                return self._scalar(0)
        raise TypeError(f"unknown expression {e!r}")

    def _scalar(self, x: Any) -> Tensor:
        shape = [1] * len(self.order)
        if self.tainted is not None:
            return torch.zeros(shape, dtype=torch.bool)
        return torch.full(shape, x, dtype=torch.complex128 if isinstance(x, complex) else torch.float64)

    def _positions(self, var: Var) -> Tensor:
        shape = [1] * len(self.order)
        shape[self.order.index(var)] = self.sizes[var]
        return torch.arange(self.sizes[var]).reshape(shape)

    def _reduce(self, name: str, x: Tensor, dims: Sequence[int]) -> Tensor:
        if self.tainted is not None:
            for d in dims:
                x = x.any(d, keepdim=True)
            return x
        return _REDUCTIONS[name](x, dims)

    def _call(self, name: str, args: list[Tensor]) -> Tensor:
        if math.prod(max(ns) for ns in zip(*(a.shape for a in args))) > LIMIT:
            raise TooBig
        if self.tainted is not None:
            out = self._scalar(0)
            for a in args:
                out = out | a
            return out
        if name not in FUNCTIONS:
            raise Unevaluable(name)
        return FUNCTIONS[name](*args)

    def _load(self, e: Load) -> Tensor:
        x = self.tensors[e.operand]
        index, carried = [], self._scalar(0)
        for d, s in enumerate(e.index):
            n = x.shape[d]
            if isinstance(s, Var):
                index.append(self._positions(s))
            elif isinstance(s, Window):
                index.append(self._positions(s.var) * s.step + _local(s.start))
            elif isinstance(s, At):
                index.append(torch.full([1] * len(self.order), _local(s.where)))
            elif isinstance(s, Expr):
                at = self._index_value(s)
                index.append(torch.where(at < 0, at + n, at).clamp(0, max(n - 1, 0)))
                carried = carried | self.value(s) if self.tainted is not None else carried
            else:
                index.append(torch.zeros([1] * len(self.order), dtype=torch.int64))
        source = x if self.tainted is None else self.tainted[e.operand]
        if not index:
            return source.reshape([1] * len(self.order))
        if 0 in x.shape:
            return source.new_zeros([max(ns) for ns in zip(*(i.shape for i in index))])
        read = source[tuple(index)]
        return read if self.tainted is None else read | carried

    def _index_value(self, e: Expr) -> Tensor:
        """Positions are exact even when dependence is evaluated."""
        if self.tainted is None:
            return self.value(e).real.to(torch.int64)
        plain = Evaluation.__new__(Evaluation)
        plain.spec, plain.tensors, plain.tainted = self.spec, self.tensors, None
        plain.sizes, plain.order, plain.memo = self.sizes, self.order, {}
        return plain.value(e).to(torch.int64)


def children(e: Expr) -> tuple[Expr, ...]:
    if isinstance(e, Fn):
        return e.args
    return (e.body,) if isinstance(e, Red) else ()


def _exact(t: Tensor) -> Tensor:
    t = t.detach()
    if t.is_complex():
        return t.resolve_conj().resolve_neg().to(torch.complex128)
    return t.to(torch.float64)


# -- calls -------------------------------------------------------------------------------------


def encode(func: Any, args: Any, kwargs: Any) -> tuple[Node, list[Operand], list[Tensor]]:
    """A call as capture would record it, with its tensors in the order of `Node.refs`."""
    tensors: list[Tensor] = []

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            return Ref(len(tensors) - 1)
        if isinstance(x, (list, tuple)):
            return tuple(map(one, x))
        if isinstance(x, torch.dtype):
            return dtype_name(x)
        return str(x) if isinstance(x, (torch.device, torch.layout, torch.memory_format)) else x

    node = Node(0, str(func), tuple(map(one, args)), {k: one(v) for k, v in kwargs.items()})
    operands = [
        Operand(k, tuple(t.shape), tuple(t.shape), dtype_name(t.dtype)) for k, t in enumerate(tensors)
    ]
    return node, operands, tensors


def flat(x: Any) -> list[Any]:
    """Outputs as a flat list; lists of tensors are taken apart."""
    return [y for z in x for y in flat(z)] if isinstance(x, (list, tuple)) else [x]


def check_outputs(spec: OpSpec, tensors: Sequence[Tensor], outs: Sequence[Any]) -> str | None:
    """What differs between a description and what the kernel returned; None when nothing does.

    Raises Unevaluable or TooBig when no comparison of values is possible.
    """
    expected = Evaluation(spec, tensors).outputs()
    for k, (want, got) in enumerate(zip(expected, outs)):
        if want is None or not isinstance(got, Tensor):
            continue
        difference = _difference(want, got)
        if difference:
            return f"output {k}: {difference}"
    return None if len(expected) >= len(outs) else f"{len(outs)} outputs, {len(expected)} described"


def _difference(want: Tensor, got: Tensor) -> str | None:
    if want.shape != got.shape:
        return f"shape {tuple(got.shape)} described as {tuple(want.shape)}"
    real = _exact(got)
    if want.is_complex() != real.is_complex():
        want, real = want.to(torch.complex128), real.to(torch.complex128)
    loose = got.dtype in (torch.float16, torch.bfloat16)
    tolerance = 3e-2 if loose else 2e-5 if got.dtype in (torch.float32, torch.complex64) else 1e-8
    if torch.allclose(want, real, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    gap = (want - real).abs()
    return f"values differ by up to {gap[~gap.isnan()].max().item() if gap.numel() else 0:.3g}"


def check_dependence(
    spec: OpSpec, tensors: Sequence[Tensor], call: Callable[[Sequence[Tensor]], Any]
) -> str | None:
    """Changes some elements of each operand and looks for outputs that may not depend on them."""
    before = flat(call(tensors))
    generator = torch.Generator().manual_seed(0)
    for k, t in enumerate(tensors):
        if not t.dtype.is_floating_point or not t.numel():
            continue
        for change in (lambda x: x * 1.25 + 0.01, *[_shuffled(generator)] * 4):
            chosen = torch.rand(t.shape, generator=generator) < 0.1
            chosen.view(-1)[torch.randint(t.numel(), (1,), generator=generator)] = True
            blank = [torch.zeros(x.shape, dtype=torch.bool) for x in tensors]
            may = Evaluation(spec, tensors, [*blank[:k], chosen, *blank[k + 1 :]]).outputs()
            try:
                after = flat(call([*tensors[:k], torch.where(chosen, change(t), t), *tensors[k + 1 :]]))
            except RuntimeError:
                continue  # outside the kernel's domain
            for o, (a, b, allowed) in enumerate(zip(before, after, may)):
                wrong = _moved(a, b, allowed) if isinstance(a, Tensor) and allowed is not None else None
                if wrong:
                    return (
                        f"output {o} {wrong} of operand {k}"
                        if "elements" in wrong
                        else f"output {o}: {wrong}"
                    )
    return None


def _shuffled(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Other values of the same tensor, so that they stay in the kernel's domain."""
    return lambda x: x.reshape(-1)[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)


def _moved(before: Tensor, after: Tensor, allowed: Tensor) -> str | None:
    if before.shape != allowed.shape:
        return f"shape {tuple(before.shape)} described as {tuple(allowed.shape)}"
    changed = ~torch.isclose(_exact(before), _exact(after), rtol=1e-9, atol=1e-12, equal_nan=True)
    return "depends on undescribed elements" if bool((changed & ~allowed).any()) else None


def check_call(func: Any, args: Any, kwargs: Any, outs: Any = None) -> tuple[str, str]:
    """(verdict, detail). Verdicts: "right", "wrong", "dependence" (only that was checked and is right),
    "unknown" (no description), "assumed" (differs where the description names an assumption), "big"."""
    node, operands, tensors = encode(func, args, kwargs)
    try:
        spec = build(node, operands)
    except ValueError as error:
        return "unknown", str(error)
    if spec is None:
        return "unknown", node.op
    return check_spec(spec, tensors, lambda ts: call_with(func, args, kwargs, ts), outs)


def call_with(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """The call with its tensors, in the order of `encode`, replaced."""
    given = iter(tensors)

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return next(given)
        return [one(y) for y in x] if isinstance(x, (list, tuple)) else x

    return func(*map(one, args), **{k: one(v) for k, v in kwargs.items()})


def check_spec(
    spec: OpSpec, tensors: Sequence[Tensor], call: Callable[[Sequence[Tensor]], Any], outs: Any = None
) -> tuple[str, str]:
    """As `check_call`, for a description and a way to run what it describes."""
    got = flat(call(tensors) if outs is None else outs)
    try:
        wrong = check_outputs(spec, tensors, got)
    except Unevaluable:
        if any(isinstance(e, Rand) for o in spec.outs if isinstance(o, Out) for e in walk(o.value)):
            return _check_shapes(spec, tensors, got)
        wrong = check_dependence(spec, tensors, call)
        return ("wrong", wrong) if wrong else ("dependence", "")
    except TooBig:
        return "big", ""
    except ValueError as error:
        wrong = str(error)
    if wrong is None:
        return "right", ""
    return ("assumed", wrong) if spec.assumes else ("wrong", wrong)


def _check_shapes(spec: OpSpec, tensors: Sequence[Tensor], outs: Sequence[Any]) -> tuple[str, str]:
    blank = [torch.zeros(t.shape, dtype=torch.bool) for t in tensors]
    for want, got in zip(Evaluation(spec, tensors, blank).outputs(), outs):
        if want is not None and isinstance(got, Tensor) and want.shape != got.shape:
            return "wrong", f"shape {tuple(got.shape)} described as {tuple(want.shape)}"
    return "dependence", ""


def walk(e: Expr) -> Iterator[Expr]:
    """Every subexpression, subscripts included."""
    yield e
    if isinstance(e, Load):
        for s in e.index:
            if isinstance(s, Expr):
                yield from walk(s)
    for child in children(e):
        yield from walk(child)


class CheckedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks calls made inside, of at most `largest` elements and `per_op` times an op, against their
    descriptions; `found` counts (op, verdict)."""

    def __init__(self, per_op: int = 8, largest: int = 3000) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.per_op, self.largest = per_op, largest
        self.found: Counter[tuple[str, str]] = Counter()
        self.wrong: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        mutable = func._schema.is_mutable
        size = sum(t.numel() for t in flat([args, list(kwargs.values())]) if isinstance(t, Tensor))
        if self.found[name, "seen"] >= self.per_op or size > self.largest:
            return func(*args, **kwargs)
        self.found[name, "seen"] += 1
        before = _copied((args, kwargs)) if mutable else (args, kwargs)
        outs = func(*args, **kwargs)
        result = outs if not mutable or flat(outs) else _mutated(func, args, kwargs)
        verdict, detail = check_call(func, before[0], before[1], result)
        self.found[name, verdict] += 1
        if verdict == "wrong":
            self.wrong.setdefault(name, f"{detail} for {_described(before)}")
        return outs


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        return type(x)(map(_copied, x))
    return {k: _copied(v) for k, v in x.items()} if isinstance(x, dict) else x


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
    return [t for a in func._schema.arguments if a.is_write for t in flat(named.get(a.name))]


def _described(x: Any) -> str:
    def show(y: Any) -> Any:
        if isinstance(y, Tensor):
            return f"{dtype_name(y.dtype)}{list(y.shape)}"
        if isinstance(y, (list, tuple)):
            return [show(z) for z in y]
        return {k: show(v) for k, v in y.items()} if isinstance(y, dict) else y

    return str(show(x))[:400]
