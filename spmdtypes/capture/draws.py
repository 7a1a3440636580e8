"""Random ops: which stream they draw from, and a place to substitute what they draw."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import OpInfo, Recorder


@dataclass(frozen=True)
class Draw:
    """A random op in progress: its name, and the identity of its stream before the draw."""

    op: str
    rng: str


def identify(generator: torch.Generator, fake: bool) -> str:
    """The identity of a stream: what it will draw next. Fake tensors draw nothing, so one number is
    drawn for each of their draws; seeding, saving and restoring then work as they do for real."""
    state = generator.get_state()
    if fake:
        torch.empty(1).uniform_(generator=generator)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def special(func: Any) -> Callable[..., Any] | None:
    return run if torch.Tag.nondeterministic_seeded in func.tags else None


def _is_certain(name: str, given: dict[str, Any]) -> bool:
    """True when these arguments draw nothing."""
    if name == "aten.native_dropout.default":
        return given.get("train") is False or given.get("p") == 0.0
    if "dropout_p" in given or "attention" in name:
        return not given.get("dropout_p", 0.0)
    return "rrelu" in name and not given.get("training", True)


def run(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """Record a random op; what it draws may be replaced by `Recorder.on_random`."""
    given = {a.name: v for a, v in zip(func._schema.arguments, args)} | dict(kwargs)
    if _is_certain(info.name, given):
        return rec.plain(info, func, args, kwargs)
    raw = rec.begin(info.name, func, args, kwargs)
    generator = given.get("generator") or torch.default_generator
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    with rec.quiet():
        raw.rng = identify(generator, fake)
    out = func(*args, **kwargs)
    if rec.on_random is not None:
        rec.draw = Draw(info.name, raw.rng)
        with rec.quiet():
            out = _substitute(rec, info.name, given, out)
        rec.draw = None
    rec.finish(raw, info, args, kwargs, out)
    return out


def _substitute(rec: Recorder, name: str, given: dict[str, Any], out: Any) -> Any:
    """Offer the drawn tensor: the mask of a dropout, else the op's one result."""
    assert rec.on_random is not None
    index = len(rec.trace)
    if name == "aten.native_dropout.default":
        mask = out[1]
        new = rec.on_random(index, tuple(mask.shape), mask.dtype, lambda: mask)
        return out if new is mask else (given["input"] * new / (1.0 - given["p"]), new)
    if not isinstance(out, Tensor) or isinstance(out, FakeTensor):
        return out
    drawn = out
    new = rec.on_random(index, tuple(out.shape), out.dtype, lambda: drawn.clone())
    return out if new is drawn else out.copy_(new)
