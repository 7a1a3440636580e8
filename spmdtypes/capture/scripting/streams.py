"""The accelerator's random stream, apart from the CPU's, although both draw on the CPU.

A script that seeds the two differently (`torch.manual_seed(seed)` for initial values and
`torch.cuda.manual_seed(seed + rank)` for dropout) must find them apart.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.patches import Patches

# beginnings and parts of names of functions that may draw
_DRAWS = re.compile(
    r"drop|rand|normal|uniform|bernoulli|multinomial|poisson|exponential|cauchy|geometric|rrelu|attention|"
    r"gumbel|lstm|gru|rnn|kaiming|xavier|orthogonal|sparse_|binomial|dirichlet|gamma"
)
_SPREAD = 0x5DEECE66D  # keeps equal seeds of the two streams from giving equal numbers
_LIMIT = 1 << 63


class Streams:
    """The accelerator's default generator, and what seeds, saves and restores it."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self._names: dict[str, bool] = {}
        self.seed(torch.default_generator.initial_seed())

    def seed(self, seed: int) -> None:
        self._seed = int(seed)
        self.generator.manual_seed((self._seed * _SPREAD + 1) % _LIMIT)

    def draws(self, name: str) -> bool:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = _DRAWS.search(name) is not None
        return known

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draws of the default generator come from the accelerator's in here."""
        default, own = torch.default_generator, self.generator
        with _disable_current_modes():
            outside = default.get_state()
            default.set_state(own.get_state())
        try:
            yield
        finally:
            with _disable_current_modes():
                own.set_state(default.get_state())
                default.set_state(outside)

    def install(self, patches: Patches, count: int) -> None:
        cuda, own = torch.cuda, self.generator

        def get_rng_state(device: Any = "cuda") -> torch.Tensor:
            with _disable_current_modes():
                return own.get_state()

        def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
            with _disable_current_modes():
                own.set_state(new_state)

        def manual_seed(seed: int) -> None:
            self.seed(seed)

        def initial_seed() -> int:
            return self._seed

        def seed() -> int:
            self.seed(int(torch.empty((), dtype=torch.int64).random_(generator=own).item()))
            return self._seed

        answers: dict[str, Any] = {
            "get_rng_state": get_rng_state,
            "get_rng_state_all": lambda: [get_rng_state()] * count,
            "set_rng_state": set_rng_state,
            "set_rng_state_all": lambda new_states: set_rng_state(next(iter(new_states))),
            "manual_seed": manual_seed,
            "manual_seed_all": manual_seed,
            "initial_seed": initial_seed,
            "seed": seed,
            "seed_all": seed,
        }
        for name, answer in answers.items():
            patches.set(cuda.random, name, answer)
            patches.set(cuda, name, answer)
        patches.set(cuda, "default_generators", (own,) * count)
        self._install_in_recomputation(patches)

    def _install_in_recomputation(self, patches: Patches) -> None:
        """Activation checkpointing saves the stream of the devices of its inputs, none of which it sees."""
        import torch.utils.checkpoint as module

        def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
            return [0], [torch.cuda.get_rng_state()]

        def set_device_states(devices: Any, states: Any, *, device_type: Any = None) -> None:
            for state in states:
                torch.cuda.set_rng_state(state)

        patches.everywhere(module.get_device_states, get_device_states)
        patches.everywhere(module.set_device_states, set_device_states)
        patches.set(module.DefaultDeviceType, "_default_device_type", "cuda")
        patches.set(torch.cuda, "_initialized", True)
        fork = torch.random.fork_rng

        @functools.wraps(fork)
        def fork_rng(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
            return fork([0] if devices is None else devices, *args, **{"device_type": "cuda", **kwargs})

        patches.everywhere(fork, fork_rng)
