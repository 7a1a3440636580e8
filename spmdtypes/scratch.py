"""A mesh to construct modules on, in one process, undone afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmdtypes.errors import CannotCheck


@contextmanager
def scratch_mesh(sizes: Mapping[str, int], real: bool = False) -> Iterator[DeviceMesh]:
    """Rank 0's `DeviceMesh` of these sizes; random state is restored. Its collectives do nothing, or,
    when `real`, what they do in a job of one process (all sizes must be 1)."""
    if dist.is_initialized():
        raise CannotCheck("a process group is initialised already: check in a process of its own")
    with torch.random.fork_rng(devices=[]):
        world = prod(sizes.values())
        if real:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        finally:
            dist.destroy_process_group()
