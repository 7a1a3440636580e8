"""Process groups a script makes: the one it runs in is there already, whatever it asks for."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore
from torch.utils._python_dispatch import _disable_current_modes

from spmdtypes.capture.patches import Patches
from spmdtypes.capture.scripting.context import Context

_c10d = dist.distributed_c10d
_STORE_WAIT = timedelta(seconds=1)  # nobody else will ever set a key of a fake job


def install(patches: Patches, context: Context) -> None:
    state = _Asked(context)
    _patch_making(patches, context, state)
    _patch_questions(patches, context, state)
    _patch_barriers(patches, context)
    _patch_stores(patches, context)
    if context.fake:
        _patch_objects(patches, context)
    else:
        patches.everywhere(_c10d._coalescing_manager, _one_by_one)


@contextlib.contextmanager
def _one_by_one(*args: Any, **kwargs: Any) -> Iterator[_c10d._CoalescingManager]:
    """Collectives that are to be issued together, which CPU backends cannot, are issued as they come."""
    manager = _c10d._CoalescingManager()
    yield manager
    if not kwargs.get("async_ops", args[2] if len(args) > 2 else False):
        manager.wait()  # type: ignore[no-untyped-call]


_one_by_one.__name__ = "_coalescing_manager"


class _Asked:
    """The backends the script asked for."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.default = ""
        self.backends: dict[Any, str] = {}

    def initialise(self, backend: Any, world: Any, rank: Any) -> None:
        mine = self.context
        given = ((world, mine.world, "ranks"), (rank, mine.rank, "as rank"))
        for asked, have, what in given:
            if isinstance(asked, int) and asked >= 0 and asked != have:
                said = f"{asked} ranks" if what == "ranks" else f"rank {asked}"
                is_ = f"{have} ranks" if what == "ranks" else f"rank {have}"
                raise mine.refuse(
                    f"the process group is made for {said}, but this is a job with {is_}: the script must "
                    "take both from the launcher (RANK and WORLD_SIZE) or from its arguments"
                )
        self.context.initialised = True
        self.default = str(backend) if backend is not None else ""


def _patch_making(patches: Patches, context: Context, state: _Asked) -> None:
    init, new_group, destroy = _c10d.init_process_group, _c10d.new_group, _c10d.destroy_process_group

    @functools.wraps(init)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        state.initialise(backend, world_size, rank)

    @functools.wraps(new_group)
    def new_group_here(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kept = {k: v for k, v in kwargs.items() if k in ("group_desc", "use_local_synchronization")}
        with _disable_current_modes():
            group = new_group(ranks, backend="fake" if context.fake else "gloo", **kept)
        if backend is not None:
            state.backends[group] = str(backend)
        return group

    @functools.wraps(_c10d.split_group)
    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        members = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
        made = [new_group_here([members[i] for i in ranks]) for ranks in split_ranks or []]
        own = [g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER]
        return own[0] if own else None

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            context.initialised = False

    patches.everywhere(init, init_process_group)
    patches.everywhere(new_group, new_group_here)
    patches.everywhere(_c10d.split_group, split_group)
    patches.everywhere(destroy, destroy_process_group)
    abort = getattr(_c10d, "_abort_process_group", None)
    if abort is not None:
        patches.everywhere(abort, destroy_process_group)


def _patch_questions(patches: Patches, context: Context, state: _Asked) -> None:
    asks = context.callers.sees_accelerator
    is_initialized, get_backend = _c10d.is_initialized, _c10d.get_backend

    def initialised() -> bool:
        """The script learns of the group when it has made one, by whatever means."""
        return is_initialized() and (context.initialised or not asks())

    def backend(group: Any = None) -> str:
        mine = get_backend(group)
        asked = state.backends.get(group) or state.default
        if not asks() or not asked:
            return mine
        return "nccl" if "nccl" in asked else asked

    patches.everywhere(is_initialized, functools.wraps(is_initialized)(initialised))
    patches.everywhere(get_backend, functools.wraps(get_backend)(backend))
    for name in ("is_nccl_available", "is_backend_available"):
        real = getattr(_c10d, name)
        patches.everywhere(real, _yes_to_users(real, context))


def _yes_to_users(real: Callable[..., bool], context: Context) -> Callable[..., bool]:
    @functools.wraps(real)
    def answer(*args: Any, **kwargs: Any) -> bool:
        return context.callers.sees_accelerator() or real(*args, **kwargs)

    return answer


def _patch_barriers(patches: Patches, context: Context) -> None:
    barrier = _c10d.barrier

    @functools.wraps(barrier)
    def any_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    patches.everywhere(barrier, any_barrier)
    if context.fake:
        patches.everywhere(_c10d.monitored_barrier, lambda *args, **kwargs: None)


def _patch_stores(patches: Patches, context: Context) -> None:
    """Stores that a script makes connect to nobody: a file stands for them, or this process' memory."""

    def store(name: str) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if context.fake:
                context.note(f"{name} holds what this rank has put into it, and nothing of other ranks")
                made: Any = HashStore()
                made.set_timeout(_STORE_WAIT)
                return made
            where = [str(a) for a in (*args[:2], *(kwargs.get(k, "") for k in ("host_name", "port")))]
            path = context.folder / ("store" + "".join(c if c.isalnum() else "_" for c in "-".join(where)))
            return FileStore(str(path), context.world)

        return make

    patches.set(dist, "TCPStore", store("TCPStore"))
    if context.fake:
        patches.set(dist, "FileStore", store("FileStore"))


# ---- objects, which a group that does not communicate cannot pass on


def _patch_objects(patches: Patches, context: Context) -> None:
    """Every rank is taken to have the object that this rank has."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        context.note("all_gather_object: every rank is taken to give the object of this one")
        for i in range(len(object_list)):
            object_list[i] = copy.copy(obj)

    def gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
        context.note("gather_object: every rank is taken to give the object of this one")
        if object_gather_list is not None:
            for i in range(len(object_gather_list)):
                object_gather_list[i] = copy.copy(obj)

    def broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        context.note("broadcast_object_list: the source is taken to have the objects of this rank")

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Any = None,
        src: Any = None,
        group: Any = None,
        group_src: Any = None,
    ) -> None:
        context.note("scatter_object_list: this rank takes its entry of its own list, or the first")
        given = list(scatter_object_input_list or [None])
        place = dist.get_rank(group)
        scatter_object_output_list[0] = given[place if place < len(given) else 0]

    def send_object_list(*args: Any, **kwargs: Any) -> None:
        context.note("send_object_list: nothing is sent")

    def recv_object_list(object_list: list[Any], src: Any = None, *args: Any, **kwargs: Any) -> int:
        context.note("recv_object_list: the objects are taken to be those this rank has there already")
        return src if isinstance(src, int) else 0

    stubs = (
        *(all_gather_object, gather_object, broadcast_object_list),
        *(scatter_object_list, send_object_list, recv_object_list),
    )
    for stub in stubs:
        real = getattr(_c10d, stub.__name__)
        assert inspect.isfunction(real)
        patches.everywhere(real, functools.wraps(real)(stub))
