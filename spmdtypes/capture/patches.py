"""Replacing attributes for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

_MISSING = object()


class Patches:
    """Attributes and dict entries replaced for a while; `undo` puts back exactly what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # pybind methods must come back from __dict__: getattr would unwrap them
        before = vars(owner).get(name, _MISSING)

        def undo() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(undo)

    def everywhere(self, old: Any, new: Any) -> None:
        """Replace a function in every module that imported it by value."""
        for module in list(sys.modules.values()):
            space = getattr(module, "__dict__", None)
            if space is None:
                continue
            for name in (old.__name__, "_" + old.__name__):
                if space.get(name) is old:
                    self.set(module, name, new)

    def by_value(self, old: Any, new: Any) -> None:
        """Replace an object under whatever name a module has it, this package's aside."""
        for name, module in list(sys.modules.items()):
            space = getattr(module, "__dict__", None)
            if space is not None and not name.startswith(__package__):
                for key in [k for k, v in list(space.items()) if v is old]:
                    self.set(module, key, new)

    def item(self, table: Any, key: Any, value: Any) -> None:
        """Replace an entry of a dict."""
        before = table.get(key, _MISSING)

        def undo() -> None:
            if before is _MISSING:
                table.pop(key, None)
            else:
                table[key] = before

        table[key] = value
        self._undo.append(undo)

    def on_undo(self, callback: Callable[[], Any]) -> None:
        self._undo.append(callback)

    def environ(self, values: dict[str, str]) -> None:
        for key, value in values.items():
            before = os.environ.get(key)

            def undo(key: str = key, before: str | None = before) -> None:
                if before is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = before

            os.environ[key] = value
            self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


@contextlib.contextmanager
def patched() -> Iterator[Patches]:
    patches = Patches()
    try:
        yield patches
    finally:
        patches.undo()
