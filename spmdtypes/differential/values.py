"""Global values of inputs and parameters: one draw a seed, from ever less even distributions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from spmdtypes.differential.layout import Mesh, global_shape
from spmdtypes.notation import Type

FLOATS = ("f64", "f32", "bf16", "f16", None)
_INTS = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8}
_NORMS = ("norm", "ln", "gamma", "scale")


@dataclass(frozen=True)
class Regime:
    """How the values of a seed are spread. Shards are told apart by `skew`: the share of ones in a
    mask, and the magnitude of floats, change by that factor from one shard to the next."""

    name: str
    params: float = 0.3
    inputs: float = 1.0
    skew: float = 1.0
    positive: bool = False


REGIMES = (
    Regime("plain"),
    Regime("uneven shards", skew=0.35),
    Regime("small parameters, one large shard", params=0.1, skew=8.0),
)


def regimes(count: int, positive: bool = False) -> tuple[Regime, ...]:
    return tuple(replace(REGIMES[i % len(REGIMES)], positive=positive) for i in range(count))


def parameters(types: Mapping[str, Type], mesh: Mesh, seed: int, how: Regime) -> dict[str, torch.Tensor]:
    out = {}
    for name, t in types.items():
        x = _draw(t, _generator("param", name, seed), mesh, Regime("plain"))
        if x.is_floating_point():
            x = x * how.params + (1.0 if x.ndim == 1 and _is_norm(name) else 0.0)
        out[name] = _signed(x, how)
    return out


def inputs(types: Mapping[str, Type], mesh: Mesh, seed: int, how: Regime) -> dict[str, torch.Tensor]:
    return {n: _signed(_draw(t, _generator("input", n, seed), mesh, how), how) for n, t in types.items()}


def _signed(x: torch.Tensor, how: Regime) -> torch.Tensor:
    return x.abs() if how.positive and x.is_floating_point() else x


def cotangent(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """What flows into a result that is no scalar: one on scalars."""
    if math.prod(shape) == 1:
        return torch.ones(shape, dtype=torch.float64)
    return torch.randn(shape, generator=_generator("cotangent", name, seed), dtype=torch.float64)


def _generator(role: str, name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{role} {name} {seed}".encode()))


def _is_norm(name: str) -> bool:
    *_, owner, leaf = ["", *name.lower().split(".")]
    return leaf != "bias" and any(w in owner or w in leaf for w in _NORMS)


def _draw(type_: Type, g: torch.Generator, mesh: Mesh, how: Regime) -> torch.Tensor:
    shape = global_shape(type_)
    if type_.dtype in FLOATS:
        x = torch.randn(shape, generator=g, dtype=torch.float64) * how.inputs
        return x * _per_shard(type_, mesh, how.skew) if how.skew != 1.0 else x
    if type_.dtype == "bool" or type_.limit == 2:
        share = 0.5 * _per_shard(type_, mesh, min(how.skew, 1 / how.skew)) if how.skew != 1.0 else 0.5
        ones = torch.rand(shape, generator=g, dtype=torch.float64) < share
        return ones if type_.dtype == "bool" else ones.to(_INTS.get(type_.dtype or "", torch.int64))
    limit = type_.limit or 10
    x = torch.randint(limit, shape, generator=g)
    if how.skew != 1.0:  # low numbers are the frequent ones
        x = torch.minimum(x, torch.randint(limit, shape, generator=g))
    return x.to(_INTS.get(type_.dtype or "", torch.int64))


def _per_shard(type_: Type, mesh: Mesh, skew: float) -> torch.Tensor:
    """skew ** (number of the shard), the numbers of the sharded dims added up."""
    shape = global_shape(type_)
    power = torch.zeros(shape, dtype=torch.float64)
    for d, (n, dim) in enumerate(zip(shape, type_.dims or ())):
        k = math.prod(mesh[a] for a in dim.axes)
        if k > 1:
            step = -(-n // k)
            along = torch.div(torch.arange(n), step, rounding_mode="floor").double()
            power = power + along.reshape([-1 if i == d else 1 for i in range(len(shape))])
    return torch.as_tensor(skew, dtype=torch.float64) ** power.clamp(max=3.0)
