"""What a user hears of a script that ended early: one sentence with its file and line."""

from __future__ import annotations

from dataclasses import replace

from spmdtypes.differential import frames
from spmdtypes.differential.experiment import Failure
from spmdtypes.differential.process import STALLED
from spmdtypes.errors import CannotCheck
from spmdtypes.graph import Frame
from spmdtypes.script.facts import Facts
from spmdtypes.script.launch import Launch

_ENDED = {"exit": "the script exits", "time": "the script ran out of time"}


def failure(rank: int, error: BaseException) -> Failure:
    """What was raised on a rank, with the place it is about."""
    found = Failure(rank, "run", type(error).__name__, str(error), frames.of_traceback(error.__traceback__))
    if isinstance(error, CannotCheck):
        found = replace(found, message=error.message)
        if error.file is not None:
            return replace(found, frames=(_frame(str(error.file), error.line or 1),))
    if isinstance(error, SyntaxError) and error.filename:
        return replace(found, message=error.msg, frames=(_frame(error.filename, error.lineno or 1),))
    return found


def _frame(file: str, line: int) -> Frame:
    return Frame(file, line, 0, line, 0, "")


def heard(f: Failure, where: str, launch: Launch) -> CannotCheck:
    """A failure in one sentence. `where` says of which run, "" for that of the ranks."""
    at = f.frames[0] if f.frames else None
    file, line = (at.file, at.line) if at else (_file(launch), 1)
    first = next((x.strip() for x in f.message.splitlines() if x.strip()), "")
    if f.error == STALLED:
        said = f"the ranks stood still{where}: {first}"
    elif f.error == "SystemExit":
        how = f"with code {first}" if first.isdecimal() else f"saying: {first}"
        said = f"the script exits{where} {how}"
    elif f.error == "CannotCheck":
        said = first
    else:
        tail = f.output.strip().splitlines()[-1:] if f.error == "Died" else []
        said = f"rank {f.rank}{where} raised {f.error}" + (f": {first}" if first else "")
        said += "".join(f" ({t[:300]})" for t in tail)
    return CannotCheck(said, file, line)


def too_early(facts: Facts, where: str, launch: Launch) -> CannotCheck | None:
    """Of a script that ended before anything could be compared; None: it did not."""
    if facts.held:
        return None
    said = f"{_ENDED.get(facts.ended, 'the script ended')}{where} before any module was called"
    return CannotCheck(said, *(facts.stopped or (_file(launch), 1)))


def incomplete(facts: Facts, wanted: int) -> str | None:
    """A remark on a script that did fewer optimizer steps than wanted; what it did is compared."""
    if facts.steps >= wanted or facts.ended not in ("end", "exit", "time"):
        return None
    said = _ENDED.get(facts.ended, "the script ends")
    at = f" (line {facts.stopped[1]})" if facts.stopped else ""
    done = f"after {facts.steps} of {wanted} optimizer steps" if facts.steps else "before an optimizer step"
    return f"{said}{at} {done}: what it did until then is compared"


def _file(launch: Launch) -> str | None:
    return None if launch.module else launch.target
