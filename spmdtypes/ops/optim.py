"""Whole-list ops of optimizers: the same elementwise op for each member, and fused steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spmdtypes.core.spec import Expr, Operand, OpSpec, fn
from spmdtypes.ops.parts import elementwise, join
from spmdtypes.ops.registry import Call, builder_of, op

_OVERLOADS = {
    "List": "Tensor",
    "ScalarList": "Scalar",
    "Tensor": "Tensor",
    "Scalar": "Scalar",
    "default": "default",
}
_UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac log log10 log1p log2 neg reciprocal
round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero""".split()
_BINARY = "add sub mul div maximum minimum clamp_min clamp_max pow".split()


def _register(name: str, member: str) -> None:
    """`_foreach_<op>`: lists are taken apart, everything else goes to each member."""

    @op(name)
    def build(first: list[Operand], *args: Any, **kwargs: Any) -> OpSpec:
        builder = builder_of(member)
        if builder is None:
            raise ValueError(f"{member} has no description")
        return join(
            _one(builder(x, *(_pick(a, i) for a in args), **{k: _pick(v, i) for k, v in kwargs.items()}))
            for i, x in enumerate(first)
        )


def _pick(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, (list, tuple)) else x


def _one(spec: OpSpec | None) -> OpSpec:
    if spec is None:
        raise ValueError("a member has no description")
    return spec


for _name in _UNARY:
    _register(f"_foreach_{_name}", f"aten.{_name}.default")
for _name in _BINARY:
    for _overload in ("List", "Scalar", "ScalarList", "Tensor"):
        _target = _OVERLOADS[_overload]
        if _name in ("maximum", "minimum"):
            _target = "default"
        elif _name.startswith("clamp"):
            _target = "Tensor" if _target == "Tensor" else "default"
        elif _name == "pow":
            _target = "Tensor_Tensor" if _target == "Tensor" else "Tensor_Scalar"
        _register(f"_foreach_{_name}.{_overload}", f"aten.{_name}.{_target}")
for _name in ("addcmul", "addcdiv"):
    for _overload in ("Scalar", "ScalarList", "Tensor"):
        _register(f"_foreach_{_name}.{_overload}", f"aten.{_name}.default")
for _overload in ("List", "Scalar", "ScalarList"):
    _register(f"_foreach_lerp.{_overload}", f"aten.lerp.{_OVERLOADS[_overload]}")
_register("_foreach_copy", "aten.copy.default")
_register("_foreach_norm.Scalar", "aten.linalg_vector_norm.default")
_register("_foreach_max", "aten.max.default")


_ADAM = "params grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 weight_decay eps"
_SCALED = "maximize=False grad_scale=None found_inf=None"


def _adam(a: Call, decoupled: bool, p: Expr, g: Expr, m: Expr, v: Expr, step: Expr) -> tuple[Expr, ...]:
    """(parameter, gradient, first moment, second moment) after one step."""
    lr = a.lr[()] if isinstance(a.lr, Operand) else a.lr
    d = -g if a.maximize else g
    if a.weight_decay:
        p, d = (p * (1 - lr * a.weight_decay), d) if decoupled else (p, d + p * a.weight_decay)
    m = m * a.beta1 + d * (1 - a.beta1)
    v = v * a.beta2 + fn("sq", d) * (1 - a.beta2)
    bias1, bias2 = 1 - fn("pow", a.beta1, step), 1 - fn("pow", a.beta2, step)
    return p - lr / bias1 * m / (fn("sqrt", v) / fn("sqrt", bias2) + a.eps), g, m, v


def _members(step: Callable[..., tuple[Expr, ...]], lists: Sequence[Sequence[Operand]], outs: int) -> OpSpec:
    """`step` for each member of the lists; all first outputs, then all second ones, and so on."""

    def member(*tensors: Operand) -> OpSpec:
        parts = [elementwise(lambda *e, k=k: step(*e)[k], *tensors) for k in range(outs)]
        return OpSpec.of(*(s.outs[0] for s in parts))

    joined = join(member(*tensors) for tensors in zip(*lists))
    return replace(joined, outs=tuple(o for k in range(outs) for o in joined.outs[k::outs]))


def _register_adam(name: str, decoupled: bool) -> None:
    @op(f"{name} {name}.tensor_lr", f"{_ADAM} amsgrad=False {_SCALED}")
    def build(a: Call) -> OpSpec | None:
        """Outputs in the order of the functional schema: params, grads, and the moments."""
        if a.amsgrad or a.grad_scale is not None or a.found_inf is not None:
            return None
        lists = [a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, a.state_steps]
        return _members(lambda *e: _adam(a, decoupled, *e), lists, 4)


_register_adam("_fused_adamw", decoupled=True)
_register_adam("_fused_adam", decoupled=False)


@op(
    "_fused_sgd _fused_sgd.tensor_lr",
    "params grads buffers weight_decay momentum lr dampening nesterov maximize is_first_step "
    "grad_scale=None found_inf=None",
)
def fused_sgd(a: Call) -> OpSpec | None:
    if a.grad_scale is not None or a.found_inf is not None:
        return None
    lr = a.lr[()] if isinstance(a.lr, Operand) else a.lr

    def step(p: Expr, g: Expr, *buffer: Expr) -> tuple[Expr, ...]:
        d = -g if a.maximize else g
        d = d + p * a.weight_decay if a.weight_decay else d
        if not buffer:
            return p - d * lr, g
        b = d if a.is_first_step else buffer[0] * a.momentum + d * (1 - a.dampening)
        return p - (d + b * a.momentum if a.nesterov else b) * lr, g, b

    lists = [params for params in (a.params, a.grads, a.buffers) if params]
    return _members(step, lists, len(lists))
