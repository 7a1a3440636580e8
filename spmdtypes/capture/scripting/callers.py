"""Who is asking: the user's own code, or a library?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spmdtypes.errors import is_user_file

# packages that choose devices and process groups on the user's behalf
TRAINERS = frozenset(
    "accelerate lightning lightning_fabric pytorch_lightning deepspeed composer colossalai torchtitan "
    "torchtune megatron nemo fairscale ignite trl catalyst fastai mmengine".split()
)
# of these only the files that run the training: their models choose kernels by the device
_ALSO_MODELS = {"transformers": "train"}
_HERE = Path(__file__).resolve().parent
# what stands between a caller and the function of torch or Python that it calls
_BETWEEN = (
    str(_HERE) + "/",
    *(str(_HERE.parent / f"{name}.py") for name in ("accelerator", "environment", "observers", "patches")),
)


def _main_package() -> tuple[str, ...]:
    """The folder of the installed package whose module runs as the script."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    before, installed, inside = file.rpartition("site-packages/")
    name, below, _ = inside.partition("/")
    return (before + installed + name + "/",) if installed and below else ()


class Callers:
    """Tells the user's frames from those of libraries. Code below a folder of `own` is the user's even
    where it is installed, and so is the package whose module is the script (`-m package.module`)."""

    def __init__(self, own: Sequence[Path] = ()) -> None:
        self._own = tuple(str(p.resolve()) + "/" for p in own)
        self._known: dict[str, bool | None] = {}
        self._steers: dict[str, bool] = {}

    def _is_user(self, filename: str) -> bool | None:
        """None for what stands between."""
        try:
            return self._known[filename]
        except KeyError:
            found = None if filename.startswith(_BETWEEN) else self._belongs(filename)
            self._known[filename] = found
            return found

    def _belongs(self, filename: str) -> bool:
        return is_user_file(filename) or filename.startswith((*self._own, *_main_package()))

    def user_asks(self, through: tuple[str, ...] = ()) -> bool:
        """Does the user's code call the function of ours that calls this? Frames of files whose names
        end with one of `through` are looked past."""
        return self._is_user(self._caller(through)) is True

    def sees_accelerator(self) -> bool:
        """Is the caller to be told of an accelerator: the user's code, or a library that runs the
        training for it?"""
        name = self._caller(())
        return self._is_user(name) is True or self._is_trainer(name)

    def _caller(self, through: tuple[str, ...]) -> str:
        """The file of the nearest frame that is not between."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if self._is_user(name) is not None and not (through and name.endswith(through)):
                return name
            frame = frame.f_back
        return ""

    def _is_trainer(self, filename: str) -> bool:
        try:
            return self._steers[filename]
        except KeyError:
            parts = filename.rpartition("site-packages/")[2].split("/")
            start = _ALSO_MODELS.get(parts[0])
            trains = parts[0] in TRAINERS or (start is not None and parts[-1].startswith(start))
            found = self._steers[filename] = "site-packages/" in filename and trains
            return found

    def place(self) -> tuple[str, int] | None:
        """The user's innermost line."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._is_user(frame.f_code.co_filename):
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return None
