"""All answers together, for the time a script runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdtypes.capture.patches import patched
from spmdtypes.capture.scripting import (
    amp,
    attention,
    compiling,
    cuda,
    fakes,
    files,
    groups,
    launcher,
    loading,
    logs,
    meshes,
    network,
    processes,
    saving,
    settings,
    tensors,
)
from spmdtypes.capture.scripting.callers import Callers
from spmdtypes.capture.scripting.context import Context, Logged
from spmdtypes.capture.scripting.streams import Streams

NODE = 8  # ranks of a machine, unless told


@dataclass
class Surroundings:
    """What became of the script's dealings with the world. `on_batch(k, batch)` may be set to replace the
    k-th batch that data loaders give."""

    _context: Context

    @property
    def logged(self) -> list[Logged]:
        """Values the script printed or gave to a logger, in order."""
        return self._context.logged

    def on_batch(self, replace: Callable[[int, Any], Any] | None) -> None:
        self._context.on_batch = replace


@contextlib.contextmanager
def scripting(
    fake: bool,
    folder: Path,
    note: Callable[[str], None],
    own: Sequence[Path] = (),
    node: int = NODE,
) -> Iterator[Surroundings]:
    """A training script may run in here, on top of `environment()`, as one rank of its job.

    `fake`: nothing is communicated and tensors may be fake. `folder` takes what the script writes, and
    is shared by the ranks of one run; the caller removes it. `note` is told, once each, what is
    answered otherwise than in a real run. Code below `own` is the user's although it is installed.
    `node`: ranks of a machine. Raises CannotCheck, at the user's line, for what has no answer here.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            note(text)

    context = Context(fake, folder, dist.get_rank(), dist.get_world_size(), node, Callers(own), tell)
    devices, streams = tensors.Devices(context), Streams()
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings.restored())
        patches = stack.enter_context(patched())
        launcher.install(patches, context)
        groups.install(patches, context)
        tensors.install(patches, devices, streams)
        fakes.install(patches, devices.of, context.callers.sees_accelerator)
        meshes.install(patches, devices)
        cuda.install(patches, context, devices)
        streams.install(patches, cuda.count(context))
        amp.install(patches)
        attention.install(patches, context)
        compiling.install(patches, context)
        loading.install(patches, context)
        saving.install(patches, context)
        logs.install(patches, context)
        processes.install(patches, context)
        stack.enter_context(network.blocked(patches, context))
        files.install(patches, context)
        stack.callback(processes.run_at_exit, context)
        stack.enter_context(tensors.Marking(devices, streams))
        yield Surroundings(context)
