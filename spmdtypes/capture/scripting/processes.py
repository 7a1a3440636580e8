"""Other processes, the end of this one, signals, and waiting for someone to type."""

from __future__ import annotations

import atexit
import builtins
import functools
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent import futures
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import torch

from spmdtypes.capture.accelerator import returning
from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context

# programs that only tell something, by name; of git, what only tells
_TELLS = frozenset(
    ("hostname", "uname", "whoami", "which", "id", "date", "nproc", "lscpu", "free", "df", "ls", "cat")
)
_GIT = frozenset("rev-parse describe log status diff show".split())
_INSIDE = (
    "subprocess.py",
    "multiprocessing/context.py",
    "multiprocessing/process.py",
    "multiprocessing/spawn.py",
)


def install(patches: Patches, context: Context) -> None:
    _patch_spawn(patches, context)
    _patch_process(patches, context)
    _patch_pools(patches, context)
    _patch_commands(patches, context)
    _patch_end(patches, context)
    _patch_signals(patches, context)
    _patch_typing(patches, context)


# ---- one process a rank


def _patch_spawn(patches: Patches, context: Context) -> None:
    """Processes made as the ranks of this machine: this one is one of them."""

    def spawn(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        _check_number(context, nprocs)
        fn(context.local_rank, *args)
        return None if join else _Done()

    for name in ("spawn", "start_processes"):
        real = getattr(torch.multiprocessing, name)
        patches.everywhere(real, functools.wraps(real)(spawn))


def _check_number(context: Context, nprocs: int) -> None:
    here = min(context.node, context.world - context.node_rank * context.node)
    if nprocs != here:
        context.note(f"{nprocs} processes are started where this job has {here} ranks on a machine")


class _Done:
    """Processes that have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _patch_process(patches: Patches, context: Context) -> None:
    """Before the script has a process group, the k-th process it starts is rank k of this machine."""
    started: list[Any] = []
    start = BaseProcess.start

    def begin(self: Any) -> None:
        if not context.callers.user_asks(through=_INSIDE):
            return start(self)
        ranks = min(context.node, context.world - context.node_rank * context.node)
        if context.initialised and not 0 < len(started) < ranks:
            raise context.refuse(
                f"another process is started ({getattr(self._target, '__name__', type(self).__name__)}): "
                "a check follows the ranks alone; run the script without it here"
            )
        number = len(started)
        started.append(self)
        self.__dict__["_ended"] = True
        if number == context.local_rank:
            context.note(f"the process started here is taken as rank {context.rank}")
            self.run()
        return None

    def joined(real: Any, answer: Any) -> Any:
        @functools.wraps(real)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return answer if "_ended" in self.__dict__ else real(self, *args, **kwargs)

        return call

    patches.set(BaseProcess, "start", begin)
    for name, answer in (("join", None), ("is_alive", False), ("terminate", None), ("kill", None)):
        patches.set(BaseProcess, name, joined(getattr(BaseProcess, name), answer))
    patches.set(BaseProcess, "close", joined(BaseProcess.close, None))
    exitcode: Any = BaseProcess.exitcode
    code = property(lambda self: 0 if "_ended" in self.__dict__ else exitcode.fget(self))
    patches.set(BaseProcess, "exitcode", code)
    fork = os.fork

    def forked() -> int:
        if context.callers.user_asks():
            raise context.refuse("another process is forked: a check follows the ranks alone")
        return fork()

    patches.set(os, "fork", forked)


def _patch_pools(patches: Patches, context: Context) -> None:
    """Pools of processes become a thread each: results are the same."""
    from multiprocessing.context import BaseContext
    from multiprocessing.pool import ThreadPool

    pool, manager = BaseContext.Pool, BaseContext.Manager

    def thread_pool(self: Any, processes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not context.callers.user_asks(through=_INSIDE):
            return pool(self, processes, *args, **kwargs)
        return ThreadPool(1, *args[:2], **{k: v for k, v in kwargs.items() if k.startswith("init")})

    def local_manager(self: Any) -> Any:
        return _Manager() if context.callers.user_asks(through=_INSIDE) else manager(self)

    class Executor(futures.ThreadPoolExecutor):
        def __init__(self, max_workers: Any = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(1, initializer=kwargs.get("initializer"), initargs=kwargs.get("initargs", ()))

    real = futures.ProcessPoolExecutor

    def executor(*args: Any, **kwargs: Any) -> Any:
        return (Executor if context.callers.user_asks() else real)(*args, **kwargs)

    patches.set(BaseContext, "Pool", thread_pool)
    patches.set(multiprocessing, "Pool", functools.partial(thread_pool, multiprocessing))
    patches.set(torch.multiprocessing, "Pool", functools.partial(thread_pool, multiprocessing))
    patches.set(BaseContext, "Manager", local_manager)
    patches.set(multiprocessing, "Manager", functools.partial(local_manager, multiprocessing))
    patches.set(torch.multiprocessing, "Manager", functools.partial(local_manager, multiprocessing))
    patches.set(futures, "ProcessPoolExecutor", executor)
    for space in (multiprocessing, torch.multiprocessing):
        patches.set(space, "set_start_method", returning(None))
        patches.set(space, "set_sharing_strategy", returning(None))


class _Manager:
    """Shared objects, of one process."""

    def __enter__(self) -> _Manager:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def list(self, *args: Any) -> list[Any]:
        return list(*args)

    def Namespace(self, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(**kwargs)

    def Value(self, typecode: Any, value: Any) -> SimpleNamespace:
        return SimpleNamespace(value=value)

    def shutdown(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        import queue
        import threading

        found = getattr(queue, name, None) or getattr(threading, name, None)
        if found is None or name.startswith("_"):
            raise AttributeError(name)
        return found


# ---- other programs


def _patch_commands(patches: Patches, context: Context) -> None:
    """Programs that only tell something run; others do not, which is noted."""
    system, os_popen = os.system, os.popen

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        """A process, or one that has ended well and written nothing."""

        def __init__(self, args: Any, *rest: Any, **kwargs: Any) -> None:
            if not context.callers.user_asks(through=_INSIDE) or _only_tells(args):
                super().__init__(args, *rest, **kwargs)
                return
            answer = _answer(context, args)
            context.note(f"`{_shown(args)}` is not run here")
            text = any(kwargs.get(k) for k in ("text", "universal_newlines", "encoding"))
            super().__init__(
                [sys.executable, "-c", f"print({answer!r}, end='')"],
                **{k: v for k, v in kwargs.items() if k in ("stdin", "stdout", "stderr")},
                text=text,
            )
            self.args = args

    def quiet(command: Any) -> int:
        if context.callers.user_asks() and not _only_tells(command):
            context.note(f"`{_shown(command)}` is not run here")
            return 0
        return system(command)

    def read(cmd: Any, *args: Any, **kwargs: Any) -> Any:
        if context.callers.user_asks() and not _only_tells(cmd):
            context.note(f"`{_shown(cmd)}` is not run here")
            return os_popen("true")
        return os_popen(cmd, *args, **kwargs)

    patches.set(subprocess, "Popen", Popen)
    patches.set(os, "system", quiet)
    patches.set(os, "popen", read)
    for name in ("execv", "execve", "execvp", "execvpe", "execl", "execlp", "posix_spawn"):
        if hasattr(os, name):
            patches.set(os, name, _refused(context, f"os.{name} replaces this process by another program"))


def _refused(context: Context, text: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise context.refuse(text)

    return call


def _words(command: Any) -> list[str]:
    if isinstance(command, (str, bytes)):
        try:
            return shlex.split(os.fsdecode(command))
        except ValueError:
            return []
    try:
        return [os.fsdecode(w) for w in command]
    except TypeError:
        return []


def _shown(command: Any) -> str:
    return " ".join(_words(command))[:60]


def _only_tells(command: Any) -> bool:
    words = _words(command)
    if not words or any(c in w for w in words for c in ";|&><`$"):
        return False
    program = os.path.basename(words[0])
    if program == "git":
        rest = [w for w in words[1:] if not w.startswith("-")]
        return bool(rest) and any(w in _GIT for w in words[1:4])
    return program in _TELLS


def _answer(context: Context, command: Any) -> str:
    """What little is known without running it."""
    words = _words(command)
    return "localhost\n" if "scontrol" in words[:1] else ""


# ---- the end


def _patch_end(patches: Patches, context: Context) -> None:
    """`atexit` functions of the script run when it ends, not when the check does."""
    register, unregister = atexit.register, atexit.unregister

    def registered(func: Any, *args: Any, **kwargs: Any) -> Any:
        if not context.callers.user_asks():
            return register(func, *args, **kwargs)
        context.at_exit.append(functools.partial(func, *args, **kwargs))
        return func

    def unregistered(func: Any) -> None:
        context.at_exit[:] = [p for p in context.at_exit if p.func is not func]
        unregister(func)

    def leave(status: int = 0) -> Any:
        raise SystemExit(status)

    patches.set(atexit, "register", registered)
    patches.set(atexit, "unregister", unregistered)
    real_exit, owner = os._exit, os.getpid()
    patches.set(os, "_exit", lambda status=0: leave(status) if os.getpid() == owner else real_exit(status))
    patches.set(os, "abort", functools.partial(leave, 134))
    kill = os.kill

    def killed(pid: int, number: int) -> None:
        if pid in (owner, os.getppid(), 0, -1) and number != 0 and context.callers.user_asks():
            leave(128 + number)
        kill(pid, number)

    patches.set(os, "kill", killed)


def run_at_exit(context: Context) -> None:
    """Last registered first; one that fails is noted and keeps none of the others from running."""
    while context.at_exit:
        act = context.at_exit.pop()
        try:
            act()
        except (Exception, SystemExit) as e:
            context.tell(f"{getattr(act.func, '__name__', 'a function')} at exit: {type(e).__name__}: {e}")


def _patch_signals(patches: Patches, context: Context) -> None:
    """Handlers are remembered, and no signal comes."""
    handlers: dict[Any, Any] = {}
    getsignal, real = signal.getsignal, signal.signal

    def install_handler(signalnum: Any, handler: Any) -> Any:
        if not context.callers.user_asks():
            return real(signalnum, handler)
        before = handlers.get(signalnum, getsignal(signalnum))
        handlers[signalnum] = handler
        return before

    def handler_of(signalnum: Any) -> Any:
        return handlers.get(signalnum, getsignal(signalnum))

    patches.set(signal, "signal", install_handler)
    patches.set(signal, "getsignal", handler_of)
    for name, nothing in (("alarm", 0), ("setitimer", (0.0, 0.0)), ("pause", None), ("raise_signal", None)):
        if hasattr(signal, name):
            patches.set(signal, name, _not_for_users(context, getattr(signal, name), nothing))


def _not_for_users(context: Context, real: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        return nothing if context.callers.user_asks() else real(*args, **kwargs)

    return call


def _patch_typing(patches: Patches, context: Context) -> None:
    """Nobody types."""

    def no_input(prompt: Any = "") -> str:
        raise context.refuse("input() waits for someone to type: pass the answer as an argument")

    def no_stop(*args: Any, **kwargs: Any) -> None:
        context.note("breakpoint() does not stop here")

    patches.set(builtins, "input", no_input)
    patches.set(builtins, "breakpoint", no_stop)
    patches.set(sys, "breakpointhook", no_stop)
    for name in ("pdb", "ipdb"):
        module: Any = sys.modules.get(name)
        if module is not None:
            patches.set(module, "set_trace", no_stop)
