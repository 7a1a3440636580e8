"""Nothing is fetched or sent while a program is checked; what is cached locally may be used."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
from collections.abc import Iterator
from typing import Any

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context
from spmdtypes.errors import CannotCheck

_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")


class Offline(ConnectionError):
    """What code that connects is told; many libraries then look into their caches."""


@contextlib.contextmanager
def blocked(patches: Patches, context: Context) -> Iterator[None]:
    """No connection leaves this machine. When the script fails for want of one, that is said at its
    line, by a CannotCheck."""
    refused: list[tuple[str, tuple[str, int] | None]] = []

    def check(host: Any) -> None:
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        if name not in _LOCAL and name != socket.gethostname():
            refused.append((name, context.callers.place()))
            raise Offline(f"{name}: no network while a program is checked")

    connect, connect_ex, lookup = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def guarded(real: Any) -> Any:
        @functools.wraps(real)
        def call(self: Any, address: Any) -> Any:
            if isinstance(address, tuple):
                check(address[0])
            return real(self, address)

        return call

    @functools.wraps(lookup)
    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        check(host)
        return lookup(host, *args, **kwargs)

    patches.set(socket.socket, "connect", guarded(connect))
    patches.set(socket.socket, "connect_ex", guarded(connect_ex))
    patches.set(socket, "getaddrinfo", getaddrinfo)
    for name, flags in _OFFLINE.items():
        module = sys.modules.get(name)
        for flag in flags if module is not None else ():
            patches.set(module, flag, True)
    try:
        yield
    except CannotCheck:
        raise
    except Exception as e:
        wanted = _wanted(e, refused)
        if wanted is None:
            raise
        host, place = wanted
        raise CannotCheck(_sentence(host), *(place or (None, None))) from e


# settings of libraries that are read when they are imported
_OFFLINE = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}


def _sentence(host: str) -> str:
    of = f" from {host}" if host else ""
    return f"this fetches something{of}: nothing is downloaded during a check; fetch it once beforehand"


def _wanted(
    error: BaseException, refused: list[tuple[str, tuple[str, int] | None]]
) -> tuple[str, tuple[str, int] | None] | None:
    """The host and the user's line when `error` comes of a refused connection."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Offline) and refused:
            return refused[-1]
        if "Offline" in type(seen).__name__ or type(seen).__name__ == "LocalEntryNotFoundError":
            from spmdtypes.errors import user_frame

            return "", user_frame(error.__traceback__)
        seen = seen.__cause__ or seen.__context__
    return None
