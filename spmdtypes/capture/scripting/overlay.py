"""A throw-away layer over the file system: writes go there, and reads look there first.

Paths in here are the script's. `upper` holds, under their absolute paths, the files it has written;
`gone` holds a mark for each file of the user's it has removed. Nothing outside these two is changed.
The layer is on disk, so that the ranks of a run, each in its process, see what the others wrote.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# the real functions: their names in `os` are replaced while a script runs
_lstat, _stat, _mkdir, _unlink, _rmdir = os.lstat, os.stat, os.mkdir, os.unlink, os.rmdir
_scandir, _listdir, _open, _rename, _readlink = os.scandir, os.listdir, os.open, os.rename, os.readlink
_MARK = ".gone"  # a name in `gone/<path>/`
_SYSTEM = ("/dev", "/proc", "/sys", "/run")


class Overlay:
    """Where each path of the script really is. Libraries write to their `caches` as ever; `user_asks`
    says whether the script itself would."""

    def __init__(
        self, folder: Path, caches: tuple[str, ...] = (), user_asks: Callable[[], bool] = lambda: True
    ) -> None:
        self.upper, self.gone = str(folder / "upper"), str(folder / "gone")
        self._exempt = (str(folder), *_SYSTEM)
        self._caches, self._user_asks = caches, user_asks
        for p in (self.upper, self.gone):
            with_parents(p)

    # ---- names

    def covers(self, path: Any) -> bool:
        """Is `path` one whose writes are kept apart?"""
        p = absolute(path)
        if _within(p, self._exempt):
            return False
        return not _within(p, self._caches) or self._user_asks()

    def up(self, path: Any) -> str:
        return self.upper + absolute(path)

    def down(self, path: str) -> str:
        """The script's name of a place in the layer."""
        return path[len(self.upper) :] or "/" if path.startswith(self.upper) else path

    # ---- looking

    def _exists(self, real: str) -> bool:
        try:
            _lstat(real)
        except (OSError, ValueError):
            return False
        return True

    def is_gone(self, path: str) -> bool:
        """Has the script removed the user's file, or a folder above it?"""
        if not _listdir(self.gone):
            return False
        place = self.gone
        for part in absolute(path).split("/")[1:]:
            place += "/" + part
            if self._exists(place + "/" + _MARK):
                return True
        return False

    def read(self, path: Any) -> str:
        """The real place to read `path` from; a missing file's is one where nothing is."""
        p = absolute(path)
        if not self.covers(p):
            return p
        up = self.upper + p
        if self._exists(up):
            own = _lstat(up)
            if not stat.S_ISDIR(own.st_mode) or not self._exists(p) or self.is_gone(p):
                return up
            return p  # a folder in both: only its listing differs
        return up if self.is_gone(p) else p

    def exists(self, path: Any) -> bool:
        return self._exists(self.read(path))

    def is_dir(self, path: Any) -> bool:
        try:
            return stat.S_ISDIR(_stat(self.read(path)).st_mode)
        except OSError:
            return False

    def is_special(self, path: Any) -> bool:
        """A pipe, a socket or a device: there is nothing in it to lose."""
        try:
            mode = _stat(absolute(path)).st_mode
        except (OSError, ValueError):
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def names(self, path: Any) -> list[str]:
        """The listing of a folder."""
        p = absolute(path)
        up = self.upper + p
        found: dict[str, None] = {}
        if not self.is_gone(p) and self._exists(p):
            found |= dict.fromkeys(n for n in _listdir(p) if not self._hidden(p, n))
            if self._exists(up):
                found |= dict.fromkeys(_listdir(up))
        else:
            found |= dict.fromkeys(_listdir(up))
        return list(found)

    def _hidden(self, folder: str, name: str) -> bool:
        return self._exists(f"{self.gone}{folder.rstrip('/')}/{name}/{_MARK}")

    def entries(self, path: Any) -> Iterator[Entry]:
        shown = os.fspath(path)
        for name in self.names(path):
            full = os.path.join(shown, name)
            yield Entry(name, full, self.read(full))

    # ---- changing

    def prepare(self, path: Any, keep: bool) -> str:
        """A real place to write `path` to; with `keep` it holds what the script sees there now. Raises
        FileNotFoundError when the folder is missing."""
        p = absolute(path)
        up = self.upper + p
        self._need_folder(p)
        with_parents(os.path.dirname(up))
        if keep and not self._exists(up) and not self.is_gone(p) and self._exists(p):
            if stat.S_ISDIR(_stat(p).st_mode):
                _mkdir(up)
            else:
                copy(p, up)
        return up

    def _need_folder(self, p: str) -> None:
        folder = os.path.dirname(p)
        if folder != p and not self.is_dir(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), p)

    def make_folder(self, path: Any, mode: int = 0o777) -> None:
        p = absolute(path)
        if self.exists(p):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        _mkdir(self.prepare(p, keep=False), mode)

    def remove(self, path: Any, folder: bool = False) -> None:
        """A file, or an empty folder."""
        p = absolute(path)
        if not self.exists(p):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        if folder and self.names(p):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        if folder != self.is_dir(p) and not os.path.islink(self.read(p)):
            code = errno.ENOTDIR if folder else errno.EISDIR
            raise OSError(code, os.strerror(code), os.fspath(path))
        up = self.upper + p
        if self._exists(up):
            (_rmdir if folder else _unlink)(up)
        if self._exists(p) and not self.is_gone(p):
            self._mark(p)

    def _mark(self, p: str) -> None:
        with_parents(self.gone + p)
        os.close(_open(f"{self.gone}{p}/{_MARK}", os.O_CREAT | os.O_WRONLY))

    def move(self, source: Any, target: Any) -> None:
        """Rename a file or a folder, over what is at the target."""
        old, new = absolute(source), absolute(target)
        if not self.exists(old):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(source))
        if old == new:
            return
        if self.is_dir(old) and not os.path.islink(self.read(old)):
            if not self.exists(new):
                self.make_folder(new)
            for name in self.names(old):
                self.move(f"{old}/{name}", f"{new}/{name}")
            self.remove(old, folder=True)
            return
        place = self.prepare(new, keep=False) if self.covers(new) else new
        mine = self.upper + old if self.covers(old) else old
        if self._exists(mine):
            _rename(mine, place)
        else:
            copy(self.read(old), place)
        if self.covers(old) and self._exists(old) and not self.is_gone(old):
            self._mark(old)


class Entry:
    """A directory entry: named as the script sees it, and read where it is."""

    def __init__(self, name: str, path: str, real: str) -> None:
        self.name, self.path, self._real = name, path, real

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except OSError:
            return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return (_stat if follow_symlinks else _lstat)(self._real)

    def inode(self) -> int:
        return _lstat(self._real).st_ino


def _within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == f or path.startswith(f + "/") for f in folders)


def absolute(path: Any) -> str:
    """Without `..`, links as they are written."""
    text = os.fspath(path)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    return str(os.path.abspath(text))


def with_parents(folder: str) -> None:
    """Make a real folder and those above it; another rank may be making them too."""
    try:
        _mkdir(folder)
    except FileNotFoundError:
        with_parents(os.path.dirname(folder))
        with_parents(folder)
    except FileExistsError:
        pass


def copy(source: str, target: str) -> None:
    """A real file's content, time and mode."""
    if os.path.islink(source):
        os.symlink(_readlink(source), target)
        return
    with open_real(source, "rb") as a, open_real(target, "wb") as b:
        shutil.copyfileobj(a, b)
    own = _stat(source)
    os.utime(target, ns=(own.st_atime_ns, own.st_mtime_ns))


open_real = open
