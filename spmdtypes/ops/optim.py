"""Whole-list ops of optimizers: the same elementwise op for each member, and fused steps."""

from __future__ import annotations

from typing import Any

from spmdtypes.core.spec import Expr, Operand, OpSpec, fn
from spmdtypes.ops.parts import Maybe, elementwise, join
from spmdtypes.ops.registry import builder_of, op

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


def _adam(
    p: Expr,
    g: Expr,
    m: Expr,
    v: Expr,
    step: Expr,
    lr: Any,
    beta1: Any,
    beta2: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    decoupled: bool,
) -> tuple[Expr, Expr, Expr]:
    """(parameter, first moment, second moment) after one step."""
    g = -g if maximize else g
    if weight_decay:
        p, g = (p * (1 - lr * weight_decay), g) if decoupled else (p, g + p * weight_decay)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + fn("sq", g) * (1 - beta2)
    bias1, bias2 = 1 - fn("pow", beta1, step), 1 - fn("pow", beta2, step)
    return p - lr / bias1 * m / (fn("sqrt", v) / fn("sqrt", bias2) + eps), m, v


def _register_adam(name: str, decoupled: bool) -> None:
    @op(f"{name} {name}.tensor_lr")
    def build(
        params: list[Operand],
        grads: list[Operand],
        exp_avgs: list[Operand],
        exp_avg_sqs: list[Operand],
        max_exp_avg_sqs: list[Operand],
        state_steps: list[Operand],
        *,
        lr: Any,
        beta1: Any,
        beta2: Any,
        weight_decay: Any,
        eps: Any,
        amsgrad: bool = False,
        maximize: bool = False,
        grad_scale: Maybe = None,
        found_inf: Maybe = None,
    ) -> OpSpec | None:
        """Outputs in the order of the functional schema: params, grads, and the moments."""
        if amsgrad or grad_scale is not None or found_inf is not None:
            return None
        rate = lr[()] if isinstance(lr, Operand) else lr

        def member(*tensors: Operand) -> OpSpec:
            new = lambda *e: _adam(*e, rate, beta1, beta2, weight_decay, eps, maximize, decoupled)  # noqa: E731
            specs = [elementwise(lambda *e, k=k: new(*e)[k], *tensors) for k in range(3)]
            kept = elementwise(lambda g: g, tensors[1])
            return OpSpec.of(specs[0].outs[0], kept.outs[0], specs[1].outs[0], specs[2].outs[0])

        each = list(zip(params, grads, exp_avgs, exp_avg_sqs, state_steps))
        joined = join(member(*ts) for ts in each)
        return OpSpec(tuple(o for k in range(4) for o in joined.outs[k::4]))


_register_adam("_fused_adamw", decoupled=True)
_register_adam("_fused_adam", decoupled=False)


@op("_fused_sgd _fused_sgd.tensor_lr")
def fused_sgd(
    params: list[Operand],
    grads: list[Operand],
    momentum_buffers: list[Operand],
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Maybe = None,
    found_inf: Maybe = None,
) -> OpSpec | None:
    if grad_scale is not None or found_inf is not None:
        return None
    rate = lr[()] if isinstance(lr, Operand) else lr

    def step(p: Expr, g: Expr, *buffer: Expr) -> tuple[Expr, ...]:
        d = -g if maximize else g
        d = d + p * weight_decay if weight_decay else d
        if not buffer:
            return p - d * rate, g
        b = d if is_first_step else buffer[0] * momentum + d * (1 - dampening)
        return p - (d + b * momentum if nesterov else b) * rate, g, b

    lists = [params, grads, *([momentum_buffers] if momentum_buffers else [])]

    def member(*tensors: Operand) -> OpSpec:
        parts = [elementwise(lambda *e, k=k: step(*e)[k], *tensors) for k in range(len(tensors))]
        return OpSpec.of(*(s.outs[0] for s in parts))

    joined = join(member(*ts) for ts in zip(*lists))
    return OpSpec(tuple(o for k in range(len(lists)) for o in joined.outs[k :: len(lists)]))
