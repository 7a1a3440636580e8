"""What fake tensors do not do by themselves, and scripts ask of tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.patches import Patches

_REAL = "_stays_real"
_STATE = torch.Generator().get_state().numel()


def install(
    patches: Patches, place: Callable[[Tensor], torch.device | None], asks: Callable[[], bool]
) -> None:
    """`place` is where a script believes a tensor to be, `asks` whether its code is the caller."""
    _patch_device(patches, place, asks)
    _patch_swap(patches)
    _patch_copy(patches)
    _patch_addresses(patches)
    _patch_format(patches)


def _patch_device(
    patches: Patches, place: Callable[[Tensor], torch.device | None], asks: Callable[[], bool]
) -> None:
    """Fake tensors answer for their device themselves."""
    real: Any = vars(FakeTensor)["device"]

    def device(self: Any) -> torch.device:
        truth: torch.device = real.fget(self)
        where = place(self)
        if where is None or truth.type == "meta":
            return truth
        # where no mode is on, nobody would understand the answer
        return where if torch._C._is_torch_function_mode_enabled() and asks() else truth

    patches.set(FakeTensor, "device", property(device))


def _patch_swap(patches: Patches) -> None:
    """Modules convert fake parameters by swapping, which fails where anybody watches one."""
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        if isinstance(t1, FakeTensor) and isinstance(t2, FakeTensor):
            t1.fake_device = t2.fake_device
            t1.data = t2.data
        else:
            swap(t1, t2)  # type: ignore[no-untyped-call]

    patches.everywhere(swap, swap_tensors)


def _patch_copy(patches: Patches) -> None:
    """Copies of modules: of fake tensors by cloning, of real ones as if nothing were fake."""
    real: Any = Tensor.__deepcopy__

    @functools.wraps(real)
    def deepcopy(self: Any, memo: Any) -> Any:
        if not isinstance(self, FakeTensor):
            plain = type(self) in (Tensor, torch.nn.Parameter)
            if not plain:
                return real(self, memo)
            with _disable_current_modes():
                return real(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return real(self, memo)
        with torch.no_grad():
            new = self.detach().clone()
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in new.__dict__:  # the rest is what a fake tensor knows of itself
                new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    patches.set(Tensor, "__deepcopy__", deepcopy)


def _patch_addresses(patches: Patches) -> None:
    """The storages of fake tensors are at different addresses, or all would look shared."""
    storage: Any = torch.UntypedStorage
    real = storage.data_ptr

    @functools.wraps(real)
    def data_ptr(self: Any) -> int:
        found = int(real(self)) if self.device.type != "meta" else 0
        return found or (int(self._cdata) if self.nbytes() else 0)

    patches.set(storage, "data_ptr", data_ptr)


def _patch_format(patches: Patches) -> None:
    """A fake scalar is formatted as a real one is: by its number."""
    real: Any = Tensor.__format__

    @functools.wraps(real)
    def formatted(self: Any, format_spec: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0 and format_spec:
            return format(self.item(), format_spec)
        return str(real(self, format_spec))

    patches.set(Tensor, "__format__", formatted)


# ---- states of generators, which are saved, sent and compared as tensors, have to stay real


def all_stay_real(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Are the tensors among these arguments states of generators, or computed from such?"""
    found = False
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            if type(a) is not Tensor or not (_REAL in a.__dict__ or _is_state(a)):
                return False
            found = True
    return found


def _is_state(t: Tensor) -> bool:
    return t.numel() == _STATE and t.dtype is torch.uint8


def really(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    with _disable_current_modes():
        out = func(*args, **kwargs)
    if type(out) is Tensor:
        out.__dict__[_REAL] = True
    return out
