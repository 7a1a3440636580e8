"""The documents agree with the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spmdtypes.notation import format_type, parse
from tools.write_codes import codes_page

ROOT = Path(__file__).resolve().parent.parent
NOTATION = (ROOT / "docs" / "notation.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def written_types() -> list[str]:
    """What the first column of the notation table shows, and the strings of its example."""
    cells = [row.replace("\\|", "§").split("|")[1] for row in NOTATION.splitlines() if row.startswith("| `")]
    texts = [text.replace("§", "|") for cell in cells for text in re.findall(r"`([^`]*)`", cell)]
    return texts + re.findall(r'Spmd\[[\w.]+, "([^"]*)"\]', NOTATION)


def test_the_page_of_codes_is_up_to_date() -> None:
    assert (ROOT / "docs" / "codes.md").read_text() == codes_page()


@pytest.mark.parametrize("text", written_types())
def test_every_type_shown_can_be_read(text: str) -> None:
    shown = text if " " in text or ":" not in text else f"... | {text}"
    assert parse(format_type(parse(shown))) == parse(shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_example_is_named_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f"examples/{example.name}" in readme
