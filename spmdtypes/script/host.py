"""Runs a script in this process, as one rank of a job that exists."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler

from spmdtypes.capture.patches import Patches, patched
from spmdtypes.errors import user_frame
from spmdtypes.script.launch import Launch
from spmdtypes.script.recorder import EndOfSteps, ScriptRecorder, described


class TimeUp(BaseException):
    """Raised in a script that has run long enough."""


def run(launch: Launch, mesh: Mapping[str, int], rec: ScriptRecorder, limit: float) -> str:
    """Run the script; how it ended: "steps", "end", "exit" or "time". Its own exceptions pass through."""
    rec.stacks.stop_at(run.__code__)
    rec.stacks.stop_at(_execute.__code__)
    with _started_as(launch, mesh), _time_limit(limit), patched() as patches:
        _watch_samplers(patches, rec)
        _watch_groups(patches, rec, alone=all(n == 1 for n in mesh.values()))
        try:
            with rec.recording():
                try:
                    _execute(launch)
                    ended = "end"
                except EndOfSteps:
                    ended = "steps"
                except SystemExit as e:
                    if e.code not in (None, 0):
                        raise
                    ended, rec.facts.stopped = "exit", user_frame(e.__traceback__)
                except TimeUp as e:
                    ended, rec.facts.stopped = "time", user_frame(e.__traceback__)
                if rec.loaded:
                    rec.close()
        finally:
            _note_groups(rec)
    return ended


def _execute(launch: Launch) -> None:
    if launch.module:
        runpy.run_module(launch.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(launch.target, run_name="__main__")


def own_files(launch: Launch) -> Any:
    """Says of a file whether it belongs to the script: it lies in its folder or, for a module, package."""
    if launch.module:
        import importlib.util

        spec = importlib.util.find_spec(launch.target.partition(".")[0])
        root = str(Path((spec and spec.origin) or ".").parent)
    else:
        root = str(Path(launch.target).resolve().parent)
    root += os.sep

    def own(file: str) -> bool:
        inside = file.removeprefix(root)
        return (file.startswith(root) and "site-packages" not in inside) or file == launch.target

    return own


@contextmanager
def _started_as(launch: Launch, mesh: Mapping[str, int]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [launch.target, *launch.argv(mesh)]
    sys.path.insert(0, "" if launch.module else str(Path(launch.target).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _watch_samplers(patches: Patches, rec: ScriptRecorder) -> None:
    """The reference's data loaders are as long as a rank's: its samplers are those of the first replica."""
    init = DistributedSampler.__init__

    def sampler_init(
        self: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *a: Any, **k: Any
    ) -> None:
        known = rec.facts.samplers
        given = rec.replacement.samplers if rec.replacement is not None else ()
        if len(known) < len(given):
            num_replicas, rank = given[len(known)], 0
        init(self, dataset, num_replicas, rank, *a, **k)
        known.append(self.num_replicas)

    patches.set(DistributedSampler, "__init__", sampler_init)


# ---- process groups and meshes, and where they were made


def _watch_groups(patches: Patches, rec: ScriptRecorder, alone: bool) -> None:
    """Note where groups are made; on the mesh of ones every device mesh has axes of size 1."""
    c10d = dist.distributed_c10d
    make = c10d.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            rec.sites[group.group_name] = _site(rec, group)
        return group

    new_group.__name__ = "new_group"
    patches.everywhere(make, new_group)
    init = DeviceMesh.__init__

    def mesh_init(self: Any, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        if alone and mesh is not None:
            mesh = torch.zeros([1] * torch.as_tensor(mesh).ndim, dtype=torch.int)
        init(self, device_type, mesh, *args, **kwargs)
        known = {(names, shape) for names, shape, _ in rec.facts.meshes}  # wrappers make thousands alike
        if self.mesh_dim_names and (tuple(self.mesh_dim_names), tuple(self.mesh.shape)) not in known:
            ranks = tuple(int(r) for r in self.mesh.flatten().tolist())
            rec.facts.meshes.append((tuple(self.mesh_dim_names), tuple(self.mesh.shape), ranks))

    patches.set(DeviceMesh, "__init__", mesh_init)
    if alone:
        import torch.distributed.device_mesh as module

        made = module.init_device_mesh

        def init_device_mesh(device_type: str, mesh_shape: Any, *args: Any, **kwargs: Any) -> Any:
            return made(device_type, (1,) * len(mesh_shape), *args, **kwargs)

        init_device_mesh.__name__ = "init_device_mesh"
        patches.everywhere(made, init_device_mesh)


def _site(rec: ScriptRecorder, group: Any) -> str:
    """A name for what makes this group, the same on every rank and on the mesh of ones."""
    if desc := described(group):
        return desc
    walk = rec.stacks.walk(sys._getframe(2))
    frames = rec.stacks.resolve(rec.stacks.intern(walk.key))[:3]
    return " < ".join(f"{f.file}:{f.line}" for f in frames) or group.group_name


def _note_groups(rec: ScriptRecorder) -> None:
    world = dist.distributed_c10d._world
    for group, names in world.pg_group_ranks.items():
        name = getattr(group, "group_name", "")
        site = rec.sites.get(name) or described(group)
        if site:
            rec.facts.groups[site] = tuple(sorted(names))
