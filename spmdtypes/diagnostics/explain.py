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
    file = example_file(code.name)
    if file is None:
        return ""
    source = file.read_text()
    lines = source.splitlines()
    shared, shown = [], {"Wrong": "", "Right": ""}
    for node in ast.parse(source).body:
        text = _text(lines, node)
        kind = next((k for k in shown if getattr(node, "name", "").lower().startswith(k.lower())), None)
        if kind is not None:
            shown[kind] += f"\n{text}\n"
        elif not _is_docstring(node):
            shared.append(text)
    head = "\n".join(shared)
    return f"{head}\n\n\n# wrong{shown['Wrong']}\n\n# right{shown['Right']}"


def _text(lines: list[str], node: ast.stmt) -> str:
    start = min([d.lineno for d in getattr(node, "decorator_list", [])], default=node.lineno)
    return "\n".join(lines[start - 1 : node.end_lineno])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
