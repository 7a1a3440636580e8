"""Finds the programs in files and folders. Whatever goes wrong is one `CannotCheck` with a line."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spmdtypes.annotations import declaration_of, type_in
from spmdtypes.errors import CannotCheck, blame
from spmdtypes.exits import exits_refused
from spmdtypes.notation import NotationError

if TYPE_CHECKING:
    from spmdtypes.entry import Entry, Options

_SKIPPED = {"__pycache__", "node_modules", "build", "dist", "site-packages"}


@dataclass(frozen=True)
class Discovery:
    """Programs and failures, in the order of the files."""

    entries: tuple[Entry, ...]
    failures: tuple[CannotCheck, ...]


def discover(paths: Sequence[Path], options: Options | None = None) -> Discovery:
    """Programs of every path. A named file must have one; a folder's files need not, but one of them."""
    entries: list[Entry] = []
    failures: list[CannotCheck] = []
    for path in paths:
        named = not _is_folder(path)
        for file in [path] if named else python_files(path):
            try:
                found = find_entries(file, options)
            except CannotCheck as e:
                failures.append(e)
                continue
            if not found and named:
                failures.append(CannotCheck(NOTHING, file, 1))
            entries += found
        if (
            not named
            and not any(Path(e.file).is_relative_to(path.resolve()) for e in entries)
            and not failures
        ):
            failures.append(CannotCheck(NOTHING, path, 1))
    return Discovery(tuple(entries), tuple(failures))


NOTHING = "no program found: annotate a module with Spmd[...] or mark it with @spmdtypes.program(mesh=...)"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long
        return False


def python_files(folder: Path) -> Iterator[Path]:
    """Files that mention us; importing the others could do anything."""
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).parts
        if any(p in _SKIPPED or p.startswith(".") for p in parts):
            continue
        with contextlib.suppress(OSError):
            if b"spmdtypes" in file.read_bytes():
                yield file


def find_entries(file: Path, options: Options | None = None) -> list[Entry]:
    """Programs defined in one file: those marked with `@program`, else every module whose `forward` is
    annotated. Raises `CannotCheck`."""
    from spmdtypes.entry import Entry

    module = load(file)
    own = [v for v in vars(module).values() if getattr(v, "__module__", None) == module.__name__]
    own = list({id(v): v for v in own}.values())
    marked = [v for v in own if declaration_of(v) is not None]
    targets = marked or [v for v in own if is_annotated_module(v)]
    return [Entry.of(t, options=options) for t in targets]


def is_annotated_module(target: Any) -> bool:
    """An `nn.Module` class whose `forward` takes an annotated argument."""
    from torch import nn

    from spmdtypes.annotations import signature_of

    if not isinstance(target, type) or not issubclass(target, nn.Module):
        return False
    forward = target.__dict__.get("forward")
    if forward is None or not any(_mentions_type(h) for h in forward.__annotations__.values()):
        return False
    return any(a.type is not None for a in signature_of(forward).arguments)


def _mentions_type(hint: Any) -> bool:
    return "Spmd" in hint if isinstance(hint, str) else type_in(hint) is not None


def load(file: Path) -> ModuleType:
    """Import a file: of a package as its module, else under a name of its own with its folder first on
    the path. Raises `CannotCheck`."""
    try:
        path = file.resolve(strict=True)
    except FileNotFoundError as e:
        raise CannotCheck("no such file", file, 1) from e
    except (OSError, RuntimeError) as e:
        raise CannotCheck(f"cannot read: {e}", file, 1) from e
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as e:
        raise blame(e, "reading", path) from e
    except (OSError, ValueError) as e:
        raise CannotCheck(f"cannot read: {e}", path, 1) from e
    root, name = _package_of(path)
    if (loaded := sys.modules.get(name)) and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotCheck("not a Python file", path, 1)
    module = importlib.util.module_from_spec(spec)
    _make_importable(root)
    try:
        with contextlib.redirect_stdout(io.StringIO()), exits_refused():
            if package := name.rpartition(".")[0]:
                importlib.import_module(package)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    except NotationError as e:
        sys.modules.pop(name, None)
        raise _with_place(e, path, tree) from e
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        sys.modules.pop(name, None)
        raise blame(e, "importing", path) from e
    return module


_folders: list[Path] = []


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder to import from and the module's name; a file of no package gets a name of its own."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    if len(parts) == 1 or path.stem == "__init__":
        return path.parent, f"{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    return root, ".".join(parts)


def _make_importable(folder: Path) -> None:
    """Put `folder` first on the path. A module of the same name as one of its files that came from an
    earlier folder makes room for it; who imported it keeps it."""
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if "." in name or not origin:
            continue
        package = Path(origin).name == "__init__.py"
        home = Path(origin).parent.parent if package else Path(origin).parent
        if home == folder or home not in _folders:
            continue
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            for gone in [n for n in sys.modules if n.partition(".")[0] == name]:
                del sys.modules[gone]
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    if folder not in _folders:
        _folders.append(folder)


def _with_place(error: NotationError, file: Path, tree: ast.Module) -> CannotCheck:
    """The line of the text itself: a signature that spans lines is reported at its first otherwise."""
    found = blame(error, "importing", file)
    found.message = error.message
    if error.text:
        lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == error.text]
        later = [n for n in lines if n >= (found.line or 1)]
        if str(found.file) == str(file) and later:
            found.line = later[0]
    return found
