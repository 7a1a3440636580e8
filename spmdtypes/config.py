"""`[tool.spmdcheck]` in pyproject.toml.

[tool.spmdcheck]
paths = ["models"]
mesh = { dp = 2, tp = 4 }
dims = { b = 8 }
format = "text"
test = true
seed = 0
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from spmdtypes.errors import CannotCheck

TABLE = "[tool.spmdcheck]"


class Config(BaseModel):
    """Settings; the command line wins over them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: tuple[str, ...] = ()
    mesh: dict[str, PositiveInt] | None = None
    dims: dict[str, PositiveInt] = Field(default_factory=dict)
    format: Literal["text", "json"] = "text"
    test: bool = True
    seed: int = 0


def find_pyproject(start: Path) -> Path | None:
    """The nearest pyproject.toml at or above `start`."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file():
            return folder / "pyproject.toml"
    return None


def load_config(start: Path) -> Config:
    """Settings that hold for `start`. Raises `CannotCheck` with file and line."""
    file = find_pyproject(start)
    if file is None:
        return Config()
    try:
        text = file.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as e:
        raise CannotCheck(f"cannot read: {e}", file, 1) from e
    except tomllib.TOMLDecodeError as e:
        at = re.search(r"at line (\d+)", str(e))
        raise CannotCheck(f"not valid TOML: {e}", file, int(at[1]) if at else 1) from e
    tool = data.get("tool")
    table = tool.get("spmdcheck", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise CannotCheck(f"{TABLE} is no table", file, _line_of(text, "spmdcheck"))
    try:
        return Config.model_validate(table)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(p) for p in first["loc"])
        said = first["msg"]
        if first["type"] == "extra_forbidden":
            said = f"no such setting: the settings are {', '.join(Config.model_fields)}"
        raise CannotCheck(f"{TABLE} {key}: {said}", file, _line_of(text, str(first["loc"][0]))) from e


def _line_of(text: str, key: str) -> int:
    """Line of a key of our table."""
    inside, table = False, 1
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            inside = stripped.startswith(TABLE)
            table = number if inside else table
        if inside and re.match(rf'"?{re.escape(key)}"?\s*=', stripped):
            return number
    return table
