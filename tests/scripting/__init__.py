"""Small scripts, run as one rank of a job that is not there."""

from __future__ import annotations

import os
import runpy
import sys
import textwrap
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._subclasses import FakeTensorMode

from spmdtypes.capture.environment import environment
from spmdtypes.capture.scripting import Logged, scripting


@dataclass
class Ran:
    """The variables a script left, what it logged, and what was noted."""

    names: dict[str, Any]
    logged: list[Logged]
    notes: list[str]

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


def run(
    code: str,
    folder: Path,
    world: int = 4,
    rank: int = 1,
    fake: bool = True,
    tensors: bool = False,
    **options: Any,
) -> Ran:
    """Run `code`, a script in `folder`, as a rank: with `fake`, of a group that does not communicate, else
    of a real group of one. `tensors`: those are fake too."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code))
    notes: list[str] = []
    with ExitStack() as stack:
        if not fake:
            world, rank = 1, 0
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(environment(world, rank, fake=fake))
        around = stack.enter_context(scripting(fake, folder / "layer", notes.append, **options))
        if tensors:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        names = runpy.run_path(str(script), run_name="__main__")
        return Ran(names, around.logged, notes)
