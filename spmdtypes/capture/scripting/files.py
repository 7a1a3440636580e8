"""Files a script writes go to a throw-away layer; nothing of the user's is changed."""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting import foreign
from spmdtypes.capture.scripting.context import Context
from spmdtypes.capture.scripting.overlay import Entry, Overlay

_WRITES = set("wax+")


def install(patches: Patches, context: Context) -> None:
    overlay = layer(context)
    _patch_temporary(patches, context)
    _patch_open(patches, overlay)
    _patch_reads(patches, overlay)
    _patch_writes(patches, overlay)
    _patch_links(patches, overlay)
    _patch_directory(patches, overlay)
    foreign.install(patches, context, overlay)
    # descriptors of folders would lead past the layer
    patches.set(shutil, "_use_fd_functions", False)


def layer(context: Context) -> Overlay:
    return Overlay(context.folder, _caches(), lambda: context.callers.user_asks(through=_LIBRARY))


# what stands between a script and a file, in Python's library
_LIBRARY: tuple[str, ...] = (
    *("shutil.py", "pathlib.py", "os.py", "tempfile.py", "genericpath.py", "posixpath.py", "contextlib.py"),
    *("<frozen os>", "<frozen posixpath>", "<frozen genericpath>"),
)
_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "TRITON_HOME"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
)


def _caches() -> tuple[str, ...]:
    """Folders where libraries keep what they have fetched or prepared."""
    home = os.path.expanduser("~")
    found = [os.path.join(home, ".cache"), os.path.join(home, ".triton")]
    found += [os.environ[n] for n in _CACHES if n in os.environ]
    return tuple(os.path.abspath(p) for p in found)


def _patch_temporary(patches: Patches, context: Context) -> None:
    """Temporary files are made in the run's own folder, where other code finds them by their names."""
    place = context.folder / "tmp"
    place.mkdir(exist_ok=True)
    patches.set(tempfile, "tempdir", str(place))
    patches.environ(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place)))


def _whole(path: Any, dir_fd: int | None) -> Any:
    """A path relative to an open folder, made absolute; None where the system does not tell."""
    if dir_fd is None or os.path.isabs(path):
        return path
    try:
        return os.path.join(_readlink(f"/proc/self/fd/{dir_fd}"), path)
    except OSError:
        return None


_readlink = os.readlink


def _patch_open(patches: Patches, overlay: Overlay) -> None:
    real_open, real_os_open = builtins.open, os.open

    def placed(path: Any, writes: bool, new: bool, keep: bool) -> Any:
        """Where to open `path`, which is one the layer covers."""
        if overlay.is_special(path) or not writes:
            return overlay.read(path)
        if new and overlay.exists(path):
            raise FileExistsError(17, os.strerror(17), os.fspath(path))
        if overlay.is_dir(path):
            raise IsADirectoryError(21, os.strerror(21), os.fspath(path))
        return overlay.prepare(path, keep)

    @functools.wraps(real_open)
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _is_path(file) and kwargs.get("opener") is None and overlay.covers(file):
            writes = bool(_WRITES & set(mode))
            keep = "w" not in mode and "x" not in mode
            if keep and writes and "r" in mode and not overlay.exists(file):
                raise FileNotFoundError(2, os.strerror(2), os.fspath(file))
            real = placed(file, writes, "x" in mode, keep)
            if real != os.fspath(file):
                return _named(real_open, real, file, mode, *args, **kwargs)
        return real_open(file, mode, *args, **kwargs)

    @functools.wraps(real_os_open)
    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        whole = _whole(path, dir_fd)
        if whole is None or not overlay.covers(whole):
            return real_os_open(path, flags, mode, dir_fd=dir_fd)
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
        if writes and not flags & os.O_CREAT and not overlay.exists(whole):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))
        new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        return real_os_open(placed(whole, writes, new, not flags & os.O_TRUNC), flags, mode)

    patches.by_value(real_open, open)
    patches.set(builtins, "open", open)
    patches.set(io, "open", open)
    patches.set(os, "open", os_open)


def _named(real_open: Callable[..., Any], real: str, shown: Any, *args: Any, **kwargs: Any) -> Any:
    """An open file whose errors and name are the script's."""
    try:
        return real_open(real, *args, **kwargs)
    except OSError as e:
        e.filename = os.fspath(shown)
        raise


def _is_path(x: Any) -> bool:
    return isinstance(x, (str, bytes, os.PathLike))


def _patch_reads(patches: Patches, overlay: Overlay) -> None:
    def reading(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not _is_path(path):
                return real(path, *args, **kwargs)
            whole = _whole(path, kwargs.get("dir_fd"))
            if whole is None or not overlay.covers(whole):
                return real(path, *args, **kwargs)
            kwargs.pop("dir_fd", None)
            try:
                return real(overlay.read(whole), *args, **kwargs)
            except OSError as e:
                e.filename = os.fspath(path)
                raise

        return call

    for name in ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf"):
        if hasattr(os, name):
            patches.set(os, name, reading(getattr(os, name)))
    listdir, scandir = os.listdir, os.scandir

    @functools.wraps(listdir)
    def merged_names(path: Any = None) -> Any:
        path = "." if path is None else path
        if not _is_path(path) or not overlay.covers(path):
            return listdir(path)
        try:
            names = overlay.names(path)
        except OSError as e:
            e.filename = os.fspath(path)
            raise
        return [os.fsencode(n) for n in names] if isinstance(path, bytes) else names

    @functools.wraps(scandir)
    def merged_entries(path: Any = None) -> Any:
        path = "." if path is None else path
        if not _is_path(path) or isinstance(path, bytes) or not overlay.covers(path):
            return scandir(path)
        names = merged_names(path)
        shown = os.fspath(path)
        return _Entries(Entry(n, f := os.path.join(shown, n), overlay.read(f)) for n in names)

    patches.set(os, "listdir", merged_names)
    patches.set(os, "scandir", merged_entries)


class _Entries:
    """What `os.scandir` gives: an iterator to be closed."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def close(self) -> None: ...


def _patch_writes(patches: Patches, overlay: Overlay) -> None:
    """Functions that change one path, and those that change two."""

    def one(name: str, instead: Callable[..., Any]) -> None:
        real = getattr(os, name)

        @functools.wraps(real)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            whole = _whole(path, dir_fd) if _is_path(path) else None
            if whole is None or not overlay.covers(whole):
                return real(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))
            return instead(whole, *args, **kwargs)

        patches.set(os, name, call)

    def inside(name: str) -> None:
        """Do it to a copy in the layer."""
        real = getattr(os, name)
        if not hasattr(os, name):
            return

        def instead(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not overlay.exists(path):
                raise FileNotFoundError(2, os.strerror(2), os.fspath(path))
            return real(overlay.prepare(path, keep=True), *args, **kwargs)

        one(name, instead)

    one("mkdir", lambda path, mode=0o777: overlay.make_folder(path, mode))
    one("rmdir", lambda path: overlay.remove(path, folder=True))
    one("unlink", overlay.remove)
    one("remove", overlay.remove)
    for name in ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr"):
        inside(name)

    def two(name: str, instead: Callable[[Any, Any], None]) -> None:
        real = getattr(os, name)

        @functools.wraps(real)
        def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            a = _whole(src, kwargs.get("src_dir_fd"))
            b = _whole(dst, kwargs.get("dst_dir_fd", kwargs.get("dir_fd")))
            if a is None or b is None or not (overlay.covers(a) or overlay.covers(b)):
                return real(src, dst, *args, **kwargs)
            return instead(a, b)

        patches.set(os, name, call)

    two("rename", overlay.move)
    two("replace", overlay.move)


def _patch_links(patches: Patches, overlay: Overlay) -> None:
    real_symlink, real_link = os.symlink, os.link

    def fresh(path: str) -> str:
        if overlay.exists(path):
            raise FileExistsError(17, os.strerror(17), path)
        return overlay.prepare(path, keep=False) if overlay.covers(path) else path

    @functools.wraps(real_symlink)
    def symlink(src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        whole = _whole(dst, dir_fd)
        if whole is None or not overlay.covers(whole):
            real_symlink(src, dst, *args, dir_fd=dir_fd, **kwargs)
            return
        # the system follows links, and knows no layer: they lead to where the target is now
        from_here = os.path.join(os.path.dirname(os.path.abspath(whole)), src)
        real_symlink(overlay.read(from_here), fresh(whole))

    @functools.wraps(real_link)
    def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        if not overlay.covers(src) and not overlay.covers(dst):
            real_link(src, dst, *args, **kwargs)
            return
        source = overlay.prepare(src, keep=True) if overlay.covers(src) else src
        real_link(source, fresh(os.fspath(dst)))

    patches.set(os, "symlink", symlink)
    patches.set(os, "link", link)


def _patch_directory(patches: Patches, overlay: Overlay) -> None:
    """The working directory may be a folder that the script has just made."""
    chdir, getcwd = os.chdir, os.getcwd

    def to(path: Any) -> None:
        chdir(overlay.read(path) if _is_path(path) and overlay.covers(path) else path)

    def here() -> str:
        return overlay.down(getcwd())

    patches.set(os, "chdir", functools.wraps(chdir)(to))
    patches.set(os, "getcwd", functools.wraps(getcwd)(here))
