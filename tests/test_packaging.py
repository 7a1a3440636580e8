"""What is shipped, and which part may depend on which."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spmdtypes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# these know no torch, so that the mypy plugin and the editor can use them
TORCH_FREE = ("core", "ops", "graph", "notation", "errors", "mesh", "annotations")
# what a part may import of us, itself aside
MAY_IMPORT = {
    "core": {"graph", "notation"},
    "ops": {"core", "graph", "notation"},
    "graph": set(),
    "notation": {"errors"},
}


def modules(part: str = "") -> list[Path]:
    """The source files of a package or module of ours."""
    path = PACKAGE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(path: Path) -> Iterator[str]:
    """Every module name that `path` imports, lazily or not, except for type checkers only."""
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _executed(other)
        else:
            yield child
            yield from _executed(child)


def test_names() -> None:
    assert PROJECT["name"] == "spmdcheck"
    assert PROJECT["scripts"] == {"spmdcheck": "spmdtypes.cli:main"}
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["license"] == "BSD-3-Clause"
    assert set(PROJECT["optional-dependencies"]) == {"mypy", "lsp", "test", "docs"}


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("spmdcheck-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "spmdtypes/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"spmdtypes", "spmdcheck"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_torch_free_parts_import_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(
        f"import spmdtypes.{part}" for part in TORCH_FREE
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_dependencies_flow_one_way(part: str) -> None:
    for path in modules(part):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("spmdtypes.")}
        assert ours <= MAY_IMPORT[part] | {part}, path


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 600


@pytest.mark.parametrize(
    "package", sorted(p.parent for p in PACKAGE.glob("*/__init__.py")), ids=lambda p: p.name
)
def test_a_package_says_what_lives_in_it(package: Path) -> None:
    assert (package / "README.md").is_file()
