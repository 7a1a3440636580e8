"""The command line: `spmdcheck PATH...`, `spmdcheck SCRIPT -n RANKS -- ARGS`, `spmdcheck explain CODE`.

Exit codes: 0 clean, 1 an error was found, 2 something could not be checked.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import spmdtypes
from spmdtypes.config import Config, load_config
from spmdtypes.diagnostics.explain import explain
from spmdtypes.diagnostics.json_format import to_json
from spmdtypes.diagnostics.render import console_for, render_failure, render_report, render_total, show
from spmdtypes.errors import CannotCheck, user_frame
from spmdtypes.exits import nothing_typed, stdout_to_ourselves
from spmdtypes.mesh import Mesh, parse_sizes
from spmdtypes.notation import NotationError
from spmdtypes.report import Report

if TYPE_CHECKING:
    from spmdtypes.entry import Entry

CLEAN, FOUND, BAD_INPUT = 0, 1, 2
INTERRUPTED = 130


@dataclass
class Run:
    """What a run over several programs has gathered."""

    reports: list[Report] = field(default_factory=list)
    failures: list[CannotCheck] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Findings win over failures: an error that was found stays found."""
        codes = [r.exit_code for r in self.reports] + [BAD_INPUT] * bool(self.failures)
        return FOUND if FOUND in codes else max(codes, default=BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["explain"]:
        return _explain(arguments[1:])
    own, script_args = split_arguments(arguments)
    args = _parser().parse_args(own)
    args.script_args = script_args
    with stdout_to_ourselves() as stdout:
        return _run(args, console_for(stdout), console_for(sys.stderr))


def _run(args: argparse.Namespace, out: Console, err: Console) -> int:
    try:
        config = _settings(args)
    except CannotCheck as e:
        show(err, render_failure(e))
        return BAD_INPUT
    quiet_libraries()
    check = check_scripts if is_script_mode(args) else check_paths
    try:
        with nothing_typed():
            run = check([Path(p) for p in args.paths or config.paths], config, args, out, err)
    except KeyboardInterrupt as e:
        place = user_frame(e.__traceback__)
        show(err, render_failure(CannotCheck("interrupted", *place) if place else "interrupted"))
        return INTERRUPTED
    if config.format == "json":
        out.print(to_json(run.reports, run.failures, run.exit_code), markup=False)
    elif len(run.reports) + len(run.failures) > 1:
        show(out, render_total(run.reports, len(run.failures)))
    return run.exit_code


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="spmdcheck",
        description="Says whether a PyTorch SPMD program computes what it would compute on one device.",
        epilog="spmdcheck explain CODE says what a finding means. "
        "Exit codes: 0 clean, 1 an error was found, 2 could not check.",
    )
    p.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files and folders with annotated programs; with -n, one training script, whose own arguments "
        "follow --",
    )
    p.add_argument("-n", "--ranks", type=int, metavar="N", help="run a training script as N ranks")
    p.add_argument(
        "--rank", type=int, metavar="R", help="see a script from this rank, without running it (default: 0)"
    )
    p.add_argument("-m", "--module", metavar="NAME", help="the script is this module, as of python -m")
    p.add_argument("--steps", type=int, default=1, help="optimizer steps of a script (default: 1)")
    p.add_argument(
        "--reference-args",
        metavar="ARGS",
        help="arguments of the script on one rank (default: its own, {axis} and degrees of parallelism 1)",
    )
    p.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds a script may run (default: 120)"
    )
    p.add_argument("--mesh", help="axes and sizes, dp=2,tp=4: instead of what the programs declare")
    p.add_argument("--dim", action="append", default=[], metavar="b=8", help="size of a dim; repeatable")
    p.add_argument("--format", choices=("text", "json"), help="how to report (default: text)")
    p.add_argument(
        "--no-test", action="store_true", help="keep to what the rules prove: run nothing on simulated ranks"
    )
    p.add_argument("--seed", type=int, help="seed of the test values (default: 0)")
    p.add_argument("--debug", action="store_true", help="show the traceback of what could not be checked")
    p.add_argument("-q", "--quiet", action="store_true", help="findings and summary lines only")
    p.add_argument("--version", action="version", version=f"spmdcheck {spmdtypes.__version__}")
    return p


def _settings(args: argparse.Namespace) -> Config:
    """`[tool.spmdcheck]` with the command line over it."""
    config = load_config(Path(args.paths[0]).parent if args.paths else Path.cwd())
    changes: dict[str, object] = {}
    try:
        if args.mesh:
            changes["mesh"] = Mesh(parse_sizes(args.mesh))
        if args.dim:
            changes["dims"] = config.dims | parse_sizes(",".join(args.dim))
    except NotationError as e:
        raise CannotCheck(e.message, excerpt=e.excerpt) from e
    if args.format:
        changes["format"] = args.format
    if args.no_test:
        changes["test"] = False
    if args.seed is not None:
        changes["seed"] = args.seed
    if not args.paths and not config.paths and not args.module:
        raise CannotCheck("nothing to check: give files or folders, or paths in [tool.spmdcheck]")
    return config.model_copy(update=changes)


def check_paths(
    paths: Sequence[Path], config: Config, args: argparse.Namespace, out: Console, err: Console
) -> Run:
    """Check every program of the paths, reporting each as it is done (text form)."""
    from spmdtypes.discovery import discover
    from spmdtypes.entry import Options

    run = Run()
    found = discover(paths, Options(config.mesh, config.dims))
    for failure in found.failures:
        _fail(run, failure, config, args, err)
    for entry in found.entries:
        try:
            report = _check(entry, config)
        except CannotCheck as e:
            _fail(run, e, config, args, err)
            continue
        run.reports.append(report)
        if config.format == "text":
            show(out, render_report(report, args.quiet))
    return run


def _check(entry: Entry, config: Config) -> Report:
    from spmdtypes.api import check_programs

    with contextlib.redirect_stdout(io.StringIO()):  # what the user's program prints is not our output
        return check_programs(entry.programs(), test=config.test, seed=config.seed)


def _fail(run: Run, failure: CannotCheck, config: Config, args: argparse.Namespace, err: Console) -> None:
    run.failures.append(failure)
    if args.debug:
        err.print("".join(traceback.format_exception(failure)), markup=False)
    if config.format == "text" or args.debug:
        show(err, render_failure(failure))


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Ours, and what follows `--`: the script's. None: no `--`."""
    if "--" not in arguments:
        return list(arguments), None
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def is_script_mode(args: argparse.Namespace) -> bool:
    return args.ranks is not None or args.module is not None or args.script_args is not None


def check_scripts(
    paths: Sequence[Path], config: Config, args: argparse.Namespace, out: Console, err: Console
) -> Run:
    """Check one training script."""
    from spmdtypes.script.front import check_command

    run = Run()
    try:
        report = check_command(paths, config, args)
    except CannotCheck as e:
        _fail(run, e, config, args, err)
        return run
    run.reports.append(report)
    if config.format == "text":
        show(out, render_report(report, args.quiet))
    return run


def _explain(arguments: Sequence[str]) -> int:
    p = argparse.ArgumentParser(prog="spmdcheck explain", description="What a code means, with examples.")
    p.add_argument("code", metavar="CODE", help="SPMD201, or 201")
    try:
        page = explain(p.parse_args(arguments).code)
    except KeyError as e:
        console_for(sys.stderr).print(f"error: {e.args[0]}")
        return BAD_INPUT
    console_for(sys.stdout).print(page)
    return CLEAN


def quiet_libraries() -> None:
    """Warnings of libraries about our simulated job are not the user's concern."""
    warnings.filterwarnings("ignore", module=r"torch\..*")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_not_a_traceback)


def _not_a_traceback(record: logging.LogRecord) -> bool:
    """A filter and no level: importing torch, which comes later, sets the levels of its loggers."""
    return record.exc_info is None


if __name__ == "__main__":
    sys.exit(main())
