"""Meshes asked for on an accelerator: told so to the script, and drawing as DTensors draw there."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.device_mesh as module
import torch.distributed.tensor._random as random
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.tensors import Devices


def install(patches: Patches, devices: Devices) -> None:
    init, make = DeviceMesh.__init__, module.init_device_mesh
    supported = random.is_rng_supported_mesh
    asks = devices.context.callers.sees_accelerator

    def asked(device_type: Any) -> None:
        """A script is for accelerators once it has one such mesh."""
        if str(device_type).startswith("cuda") and devices.mesh_type != "cuda":
            devices.mesh_type = "cuda"
            patches.set(random, "_rng_tracker", ShardStreams())

    @functools.wraps(init)
    def mesh_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        asked(device_type)
        devices.context.initialised = True
        init(self, device_type, *args, **kwargs)

    @functools.wraps(make)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        asked(device_type)
        kwargs.pop("backend_override", None)
        return make(device_type, *args, **kwargs)

    def device_type(self: Any) -> str:
        return devices.mesh_type if asks() else str(self._device_type)

    def is_rng_supported_mesh(device_mesh: Any) -> bool:
        return devices.mesh_type == "cuda" or bool(supported(device_mesh))

    patches.set(DeviceMesh, "__init__", mesh_init)
    patches.set(DeviceMesh, "device_type", property(device_type))
    patches.everywhere(make, init_device_mesh)
    patches.everywhere(supported, functools.wraps(supported)(is_rng_supported_mesh))


class ShardStreams:
    """What DTensor asks before it draws: shards draw numbers of their own, replicas the same, and
    afterwards the streams of all ranks stand at the same place."""

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        if not self.distribute_region_enabled:
            yield
            return
        default = torch.default_generator
        own = generator if generator is not None else default
        with _disable_current_modes():
            outside, state = default.get_state(), own.get_state()
        default.manual_seed(_mixed(state, _shard(spec)))
        try:
            yield
        finally:
            with _disable_current_modes():
                default.set_state(outside)
                own.set_state(state)
                torch.empty(1).uniform_(generator=own)


def _shard(spec: Any) -> int:
    """The number of this rank's shard; replicas have the same."""
    number = 0
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard() or type(placement).__name__ == "_StridedShard":
            number = number * spec.mesh.size(axis) + spec.mesh.get_local_rank(axis)
    return number


def _mixed(state: torch.Tensor, shard: int) -> int:
    with _disable_current_modes():
        text = state.numpy().tobytes() + shard.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
