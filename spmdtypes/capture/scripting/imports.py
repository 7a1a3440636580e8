"""Modules that a script imports later: patched when they come, or replaced by others."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context

_IMPORT = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", "importlib/__init__.py")


class Hooks(importlib.abc.MetaPathFinder):
    """`when(name, act)` runs `act(module)` now or when the module is imported. `instead(name, make)`
    gives `make(full_name)` for a package and all below it: to everyone where the real one is installed,
    to the user's code alone where it is not."""

    def __init__(self, patches: Patches, context: Context) -> None:
        self._patches, self._asks = patches, context.callers.user_asks
        self._acts: dict[str, list[Callable[[Any], None]]] = {}
        self._makers: dict[str, Callable[[str], ModuleType]] = {}
        self._looking = False
        sys.meta_path.insert(0, self)
        patches.on_undo(lambda: sys.meta_path.remove(self))

    def when(self, name: str, act: Callable[[Any], None]) -> None:
        if name in sys.modules:
            act(sys.modules[name])
        else:
            self._acts.setdefault(name, []).append(act)

    def instead(self, name: str, make: Callable[[str], ModuleType]) -> None:
        self._makers[name] = make
        for known in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            before = sys.modules.pop(known)
            self._patches.on_undo(lambda k=known, b=before: sys.modules.__setitem__(k, b))  # type: ignore[misc]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._looking:
            return None
        make = next((m for n, m in self._makers.items() if (fullname + ".").startswith(n + ".")), None)
        if make is None and fullname not in self._acts:
            return None
        real = self._real(fullname, path)
        if make is not None:
            parent = fullname.rpartition(".")[0]
            if real is None and parent not in sys.modules and not self._asks(through=_IMPORT):
                return None
            spec = importlib.machinery.ModuleSpec(fullname, _Maker(make), is_package=True)
            self._patches.on_undo(lambda: sys.modules.pop(fullname, None))
            return spec
        if real is not None and real.loader is not None:
            real.loader = _Acting(real.loader, self._acts.pop(fullname))
        return real

    def _real(self, fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        self._looking = True
        try:
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(fullname, path, None)
                if spec is not None:
                    return spec
            return None
        finally:
            self._looking = False


class _Maker(importlib.abc.Loader):
    def __init__(self, make: Callable[[str], ModuleType]) -> None:
        self._make = make

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._make(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Acting(importlib.abc.Loader):
    """The real loader, and then what waits for the module."""

    def __init__(self, real: Any, acts: list[Callable[[Any], None]]) -> None:
        self._real, self._acts = real, acts

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        for act in self._acts:
            act(module)
