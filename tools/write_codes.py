"""Write docs/codes.md from the table of codes.

python tools/write_codes.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from spmdtypes.diagnostics.codes import CODES, FAMILIES

HEAD = """# Codes

A finding has a stable code. `spmdcheck explain SPMD201` prints what is below, with an example.
This page is written by `make docs`.
"""


def codes_page() -> str:
    """The page as Markdown, families in order of their digit."""
    parts = [HEAD]
    for digit, family in FAMILIES.items():
        parts.append(f"## SPMD{digit}xx: {family}\n")
        for code in sorted(CODES.values(), key=lambda code: code.name):
            if code.name[4] == digit:
                parts.append(f"**{code.name}** {code.title}\n\n{code.meaning}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    default = Path(__file__).resolve().parent.parent / "docs" / "codes.md"
    Path(sys.argv[1] if len(sys.argv) > 1 else default).write_text(codes_page())
