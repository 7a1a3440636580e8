"""Script mode from the command line."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from math import prod
from pathlib import Path

from spmdtypes.config import Config
from spmdtypes.errors import CannotCheck
from spmdtypes.report import Report
from spmdtypes.script.choose import check_any
from spmdtypes.script.launch import Launch


def check_command(paths: Sequence[Path], config: Config, args: argparse.Namespace) -> Report:
    """Check the script the arguments name. Raises `CannotCheck`."""
    launch = _launch(paths, args)
    world = _world(config, args)
    if args.rank is not None and not 0 <= args.rank < world:
        raise CannotCheck(f"--rank {args.rank}: the ranks are 0 to {world - 1}")
    return check_any(launch, world, config.mesh, args.limit, config.test, args.rank)


def _launch(paths: Sequence[Path], args: argparse.Namespace) -> Launch:
    reference = tuple(shlex.split(args.reference_args)) if args.reference_args is not None else None
    if args.steps < 1:
        raise CannotCheck(f"--steps {args.steps}: at least one step is needed")
    own = tuple(args.script_args or ())
    if args.module is not None:
        if paths and args.paths:
            raise CannotCheck(f"give a script or -m {args.module}, not both")
        return Launch(args.module, own, True, reference, args.steps)
    if len(paths) != 1:
        raise CannotCheck("give one script: a file, or -m NAME")
    (path,) = paths
    if not path.is_file():
        raise CannotCheck(
            "no such file" if not path.exists() else "a script is a file, not a folder", path, 1
        )
    return Launch(str(path.resolve()), own, False, reference, args.steps)


def _world(config: Config, args: argparse.Namespace) -> int:
    """The number of ranks: as said, else of the mesh, else what torchrun's environment says."""
    if args.ranks is not None:
        world = int(args.ranks)
    elif config.mesh:
        world = prod(config.mesh.values())
    elif os.environ.get("WORLD_SIZE", "").isdecimal():
        world = int(os.environ["WORLD_SIZE"])
    else:
        raise CannotCheck("as how many ranks? Say -n N, or --mesh dp=2,tp=4")
    if world < 2:
        raise CannotCheck(f"{world} rank: there is nothing to compare with one device")
    return world
