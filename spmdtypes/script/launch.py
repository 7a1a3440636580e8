"""How a script is started: its command line on a mesh, and on the mesh of ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

# words in the names of options that say how many ranks work together
_DEGREE = re.compile(
    r"(^|[-_.])(tp|dp|pp|cp|ep|etp|sp|fsdp|hsdp|ddp|usp|world|nproc|ngpus?|n-?gpus?|devices|ranks|replicas|"
    r"shards|stages|degree|ulysses|ring)([-_.]|$)|parallel|world[-_]?size|num[-_]?(gpus|ranks|replicas|shards|stages|nodes)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Launch:
    """A script (a path, or with `module` the name of one) and its arguments.

    `{axis}` in an argument stands for the size of that mesh axis. `reference_args` are the arguments on
    the mesh of ones, when they do not follow from `args`. `steps`: optimizer steps to run.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    reference_args: tuple[str, ...] | None = None
    steps: int = 1

    @property
    def name(self) -> str:
        return self.target.rpartition("/")[2]

    def argv(self, mesh: Mapping[str, int]) -> list[str]:
        """The arguments on a mesh. Without placeholders, options that name a degree are 1 on one rank."""
        alone = prod(mesh.values()) == 1
        if alone and self.reference_args is not None:
            return [_filled(a, mesh) for a in self.reference_args]
        filled = [_filled(a, mesh) for a in self.args]
        return ones(filled) if alone and filled == list(self.args) else filled


def _filled(text: str, mesh: Mapping[str, int]) -> str:
    """The text with every `{axis}` replaced; products may be written `{dp*tp}`."""

    def size(m: re.Match[str]) -> str:
        names = m.group(1).split("*")
        return str(prod(mesh[n] for n in names)) if all(n in mesh for n in names) else m.group(0)

    return re.sub(r"\{([\w*]+)\}", size, text)


def ones(args: Sequence[str]) -> list[str]:
    """Arguments with every degree of parallelism set to 1: `--tp 4`, `--tp=4`, `parallel.tp=4`."""
    out = list(args)
    for i, a in enumerate(out):
        key, eq, value = a.partition("=")
        if eq and _DEGREE.search(key.lstrip("-+")) and _several(value):
            out[i] = f"{key}=1"
        elif not eq and a.startswith("-") and _DEGREE.search(a.lstrip("-")):
            for j in range(i + 1, len(out)):
                if not _several(out[j]):
                    break
                out[j] = "1"
    return out


def _several(value: str) -> bool:
    return value.isdecimal() and int(value) > 1
