"""Who is asking: the user's own code, or a library?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spmdtypes.errors import is_user_file

_HERE = Path(__file__).resolve().parent
# what stands between a caller and the function of torch or Python that it calls
_BETWEEN = (
    str(_HERE) + "/",
    *(str(_HERE.parent / f"{name}.py") for name in ("accelerator", "environment", "observers", "patches")),
)


class Callers:
    """Tells the user's frames from those of libraries. Code below a folder of `own` is the user's even
    where it is installed, as for `-m package.module`."""

    def __init__(self, own: Sequence[Path] = ()) -> None:
        self._own = tuple(str(p.resolve()) + "/" for p in own)
        self._known: dict[str, bool | None] = {}

    def _is_user(self, filename: str) -> bool | None:
        """None for what stands between."""
        try:
            return self._known[filename]
        except KeyError:
            found = None if filename.startswith(_BETWEEN) else self._belongs(filename)
            self._known[filename] = found
            return found

    def _belongs(self, filename: str) -> bool:
        return is_user_file(filename) or filename.startswith(self._own)

    def user_asks(self, through: tuple[str, ...] = ()) -> bool:
        """Does the user's code call the function of ours that calls this? Frames of files whose names
        end with one of `through` are looked past."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            is_user = self._is_user(name)
            if is_user is not None and not (through and name.endswith(through)):
                return is_user
            frame = frame.f_back
        return False

    def place(self) -> tuple[str, int] | None:
        """The user's innermost line."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._is_user(frame.f_code.co_filename):
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return None
