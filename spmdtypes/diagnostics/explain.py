"""`spmdcheck explain CODE`: what a code means, with a wrong and a right program.

The programs are `examples/SPMDxxx.py` beside this module: one file a code, in which the classes or
functions named `Wrong...` and `Right...` are programs. A test checks every one of them.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from spmdtypes.diagnostics.codes import CODES, Code, lookup

EXAMPLES = Path(__file__).parent / "examples"


def example_file(code: str) -> Path | None:
    file = EXAMPLES / f"{code}.py"
    return file if file.is_file() else None


def explain(name: str) -> str:
    """The page of a code. Raises KeyError with the known codes."""
    code = lookup(name)
    if code is None:
        raise KeyError(f"no code {name!r}: the codes are {', '.join(CODES)}")
    parts = [f"{code.name}: {code.title}", f"({code.family})", "", *textwrap.wrap(code.meaning, 96), ""]
    return "\n".join(parts) + _examples(code)


def _examples(code: Code) -> str:
    """The example file, with the two kinds of programs headed as such."""
    file = example_file(code.name)
    if file is None:
        return ""
    source = file.read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    for kind in ("right", "wrong"):
        starts = [_start(n) for n in tree.body if getattr(n, "name", "").lower().startswith(kind)]
        if starts:
            lines.insert(min(starts) - 1, f"# {kind}")
    return "\n" + "\n".join(lines) + "\n"


def _start(node: ast.stmt) -> int:
    return min([d.lineno for d in getattr(node, "decorator_list", [])], default=node.lineno)
