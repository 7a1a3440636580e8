"""Python values with many tensors as two byte strings: a pickle, and the tensors' raw memory."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.blob = bytearray()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        flat = obj.detach().contiguous().reshape(-1)
        if flat.numel() == 1:  # contiguous, whatever its stride
            flat = flat.as_strided((1,), (1,))
        raw = flat.view(torch.uint8).numpy().tobytes()
        start = len(self.blob)
        self.blob += raw + bytes(-len(raw) % 16)
        return start, len(raw), obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, blob: bytearray) -> None:
        super().__init__(file)
        self.blob = blob

    def persistent_load(self, pid: Any) -> torch.Tensor:
        start, size, dtype, shape = pid
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(self.blob, dtype=torch.uint8, count=size, offset=start)
        return raw.view(dtype).reshape(shape)


def dump(obj: Any) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    head = file.getvalue()
    return len(head).to_bytes(8, "little") + head + bytes(pickler.blob)


def load(data: bytes) -> Any:
    """Tensors share one writable buffer. Only for data from processes we forked ourselves."""
    size = int.from_bytes(data[:8], "little")
    return _Unpickler(io.BytesIO(data[8 : 8 + size]), bytearray(data[8 + size :])).load()
