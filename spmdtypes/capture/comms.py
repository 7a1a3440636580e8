"""Collectives in all their spellings -> one canonical node each, with the mesh axes they span."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch._subclasses import FakeTensor

from spmdtypes.capture import shadow
from spmdtypes.capture.groups import Groups as Groups
from spmdtypes.capture.groups import group_axes as group_axes
from spmdtypes.capture.pending import Started
from spmdtypes.capture.raw import Raw, Res, View
from spmdtypes.graph import Comm, TensorMeta

if TYPE_CHECKING:
    from spmdtypes.capture.recorder import OpInfo, Recorder

_FUNCTIONAL_REDUCE = {"product": "prod"}


@dataclass(frozen=True)
class Exchange:
    """One collective: `inputs` joined along dim 0 go in, the result is cut into `outputs`.
    `listed`: the caller gave a list of outputs, so it is cut even when there is one."""

    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    root: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    reduces: bool = False
    listed: bool = False


_Parse = Callable[[Any, Any], list[Exchange]]


def _each(kind: str, reduces: bool = False) -> _Parse:
    return lambda a, n: [Exchange(kind, [t], [t], reduces=reduces) for t in a[0]]


def _base(kind: str, reduces: bool = False) -> _Parse:
    return lambda a, n: [Exchange(kind, [a[1]], [a[0]], reduces=reduces)]


def _pairs(kind: str, reduces: bool = False) -> _Parse:
    return lambda a, n: [Exchange(kind, [i], [o], reduces=reduces) for o, i in zip(a[0], a[1])]


def _all_to_all_base(a: Any, n: int) -> list[Exchange]:
    out, inp = a[0], a[1]
    outs = tuple(a[3]) or (out.shape[0] // n,) * n
    ins = tuple(a[4]) or (inp.shape[0] // n,) * n
    return [Exchange("all_to_all", [inp], [out], splits=(tuple(map(int, outs)), tuple(map(int, ins))))]


def _all_to_all_list(a: Any, n: int) -> list[Exchange]:
    outs, ins = (tuple(t.shape[0] if t.dim() else 1 for t in ts) for ts in a[:2])
    return [Exchange("all_to_all", list(a[1]), list(a[0]), None, (outs, ins), listed=True)]


def _listed(lists: Any) -> list[Any]:
    return list(lists) or [[]]


_C10D: dict[str, _Parse] = {
    "allreduce_": _each("all_reduce", True),
    "allreduce_coalesced_": _each("all_reduce", True),
    "_allgather_base_": _base("all_gather"),
    "allgather_into_tensor_coalesced_": _pairs("all_gather"),
    "allgather_": lambda a, n: [
        Exchange("all_gather", [i], list(o), listed=True) for o, i in zip(a[0], a[1])
    ],
    "allgather_coalesced_": lambda a, n: [
        Exchange("all_gather", [t], [row[i] for row in a[0]], listed=True) for i, t in enumerate(a[1])
    ],
    "_reduce_scatter_base_": _base("reduce_scatter", True),
    "reduce_scatter_tensor_coalesced_": _pairs("reduce_scatter", True),
    "reduce_scatter_": lambda a, n: [
        Exchange("reduce_scatter", list(i), [o], reduces=True) for o, i in zip(a[0], a[1])
    ],
    "alltoall_base_": _all_to_all_base,
    "alltoall_": _all_to_all_list,
    "broadcast_": lambda a, n: [Exchange("broadcast", [t], [t], a[2]) for t in a[0]],
    "reduce_": lambda a, n: [Exchange("reduce", [t], [t], a[3], reduces=True) for t in a[0]],
    "gather_": lambda a, n: [Exchange("gather", [a[1][0]], list(_listed(a[0])[0]), a[3], listed=True)],
    "scatter_": lambda a, n: [Exchange("scatter", list(_listed(a[1])[0]), [a[0][0]], a[3])],
    "send": lambda a, n: [Exchange("send", [t], [], a[2]) for t in a[0]],
    "recv_": lambda a, n: [Exchange("recv", [], [t], a[2]) for t in a[0]],
    "recv_any_source_": lambda a, n: [Exchange("recv", [], [t], None) for t in a[0]],
    "barrier": lambda a, n: [Exchange("barrier", [], [])],
    "monitored_barrier_": lambda a, n: [Exchange("barrier", [], [])],
}
_NO_ASYNC = ("send", "recv_", "recv_any_source_")


def special(func: Any) -> Callable[..., Any] | None:
    """The handler of a collective op, or None."""
    name = func._schema.name.split("::")[1]
    match func.namespace:
        case "c10d" if name in _C10D:
            return in_place
        case "_c10d_functional" if name == "wait_tensor":
            return _wait_tensor
        case "_c10d_functional" | "_dtensor":
            return _functional
        case "fsdp":
            return _fsdp
    return None


def _group_of(args: Any) -> Any:
    for a in args:
        if isinstance(a, ProcessGroup):
            return a
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()):
            return ProcessGroup.unbox(a)
    raise ValueError("a collective without a process group")


def in_place(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """A c10d op. Its result enters the program when its Work is waited for: an async collective
    that nobody waits for changes nothing."""
    schema = func._schema.arguments
    given = {a.name: v for a, v in zip(schema, args)} | dict(kwargs)
    args = tuple(given.get(a.name, a.default_value) for a in schema)
    pg = _group_of(args)
    name = func._schema.name.split("::")[1]
    exchanges = _C10D[name](args, pg.size())
    sync = rec.pending.issued is None or (name not in _NO_ASYNC and not given.get("async_op", True))
    results = [record(rec, e, pg) for e in exchanges]
    real = rec.keep_values and not any(
        isinstance(t, FakeTensor) for e in exchanges for t in e.inputs + e.outputs
    )
    copies: dict[int, Tensor] = {}
    if real and not sync:
        args = _with_copies(rec, args, copies)
    out = func(*args)
    work = out[-1] if isinstance(out, tuple) else out

    def complete() -> None:
        if real:
            if sync and isinstance(work, torch.ScriptObject):
                with rec.pause():
                    Work.unbox(work).wait()
            with rec.quiet():
                for e in exchanges:
                    for t in e.outputs:
                        if id(t) in copies:
                            t.copy_(copies[id(t)])
        for e, result in zip(exchanges, results):
            store(rec, e, result)

    views = [tuple(rec.view(t) for e in exchanges for t in ts(e)) for ts in (_inputs_of, _outputs_of)]
    started = Started(complete, False, results[0] if results else -1, *views)
    if sync or rec.pending.issued is None:
        started.finish()
    else:
        rec.pending.issued.append(started)
    return out


def _inputs_of(e: Exchange) -> list[Tensor]:
    return e.inputs


def _outputs_of(e: Exchange) -> list[Tensor]:
    return e.outputs


def _with_copies(rec: Recorder, args: Any, copies: dict[int, Tensor]) -> Any:
    """The arguments with every tensor replaced by a copy, so that the effect comes at the wait."""

    def copy(x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in copies:
                with rec.quiet():
                    copies[id(x)] = x.detach().clone()
            return copies[id(x)]
        return [copy(y) for y in x] if isinstance(x, (list, tuple)) else x

    return tuple(copy(a) for a in args)


def record(rec: Recorder, e: Exchange, pg: Any) -> int:
    """Add the canonical node of one collective; its value is `Res(index)`."""
    axes, ranks = rec.groups.locate(pg)
    reduce, factor = rec.pending.reduce if e.reduces else ("", None)
    comm = Comm(e.kind, axes, ranks, reduce, factor, e.splits, e.root, in_place=True)
    inputs = _joined(rec, e, len(ranks))
    raw = Raw(f"comm.{e.kind}", inputs, outs=_result(e, len(ranks)), comm=comm)
    rec.situate(raw)
    return rec.append(raw)


def _emit(rec: Recorder, op: str, args: tuple[Any, ...], shape: tuple[int, ...], dtype: str) -> Res:
    raw = Raw(op, args, outs=(TensorMeta(shape, dtype),))
    rec.situate(raw)
    return Res(rec.append(raw))


def _joined(rec: Recorder, e: Exchange, n: int) -> tuple[Any, ...]:
    """The operand: one tensor, in the shape whose dim 0 the collective cuts or joins."""
    if not e.inputs:
        return ()
    views: list[Any] = [rec.view(t) for t in e.inputs]
    t = e.inputs[0]
    dtype = views[0].dtype
    if t.dim() == 0 and e.kind in ("all_gather", "gather", "all_to_all", "scatter", "reduce_scatter"):
        views = [_emit(rec, "aten.view.default", (v, (1,)), (1,), dtype) for v in views]
    if len(views) > 1:
        rest = tuple(t.shape[1:])
        rows = sum(u.shape[0] if u.dim() else 1 for u in e.inputs)
        return (_emit(rec, "aten.cat.default", (tuple(views), 0), (rows, *rest), dtype),)
    if e.kind == "reduce_scatter":
        out = e.outputs[0]
        want = (n * out.shape[0], *out.shape[1:]) if out.dim() else (n,)
        if tuple(t.shape) != want:
            return (_emit(rec, "aten.view.default", (views[0], want), want, dtype),)
    return (views[0],)


def _result(e: Exchange, n: int) -> tuple[TensorMeta | None, ...]:
    """The canonical result, before it is cut into the caller's tensors."""
    if not e.outputs:
        return ()
    from spmdtypes.capture.raw import dtype_name

    out = e.outputs[0]
    dtype = dtype_name(out.dtype)
    if e.listed or e.kind == "all_to_all":
        rows = sum(t.shape[0] if t.dim() else 1 for t in e.outputs)
        return (TensorMeta((rows, *out.shape[1:]), dtype),)
    if e.kind == "all_gather":
        t = e.inputs[0]
        shape = (n * t.shape[0], *t.shape[1:]) if t.dim() else (n,)
        return (TensorMeta(tuple(shape), dtype),)
    if e.kind in ("reduce_scatter", "scatter") and out.dim() == 0:
        return (TensorMeta((1,), dtype),)
    return (TensorMeta(tuple(out.shape), dtype),)


def store(rec: Recorder, e: Exchange, index: int) -> None:
    """Write the result of collective `index` into the caller's tensors."""
    if not e.outputs:
        return
    (meta,) = rec.trace[index].outs
    if rec.keep_values and not isinstance(e.outputs[0], FakeTensor):
        with rec.quiet():
            parts = [t.detach().reshape(1) if t.dim() == 0 else t.detach() for t in e.outputs]
            whole = (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(meta.shape)
        rec.keep(index, 0, whole)
    start = 0
    for t in e.outputs:
        value = Res(index)
        shape = tuple(t.shape)
        if e.listed:
            rows = shape[0] if shape else 1
            cut = (rows, *meta.shape[1:])
            value = _emit(rec, "aten.slice.Tensor", (value, 0, start, start + rows), cut, meta.dtype)
            start += rows
        else:
            cut = meta.shape
        if cut != shape:
            value = _emit(rec, "aten.view.default", (value, shape), shape, meta.dtype)
        raw = Raw("write", (value,), outs=(rec.view(t),))
        rec.situate(raw)
        rec.append(raw)
    comm = rec.trace[index].comm
    if isinstance(e.outputs[0], FakeTensor) and comm is not None:
        if len(e.inputs) == len(e.outputs) == 1:
            shadow.exchanged(rec, comm, rec.view(e.inputs[0]), rec.view(e.outputs[0]))
        else:
            for t in e.outputs:
                same = comm.kind == "all_gather" and len(e.inputs) == 1
                alone = replace(comm, kind="broadcast")
                shadow.exchanged(rec, alone, rec.view(e.inputs[0]) if same else None, rec.view(t))


# ---- functional collectives


def _reduce_of(text: str) -> str:
    return _FUNCTIONAL_REDUCE.get(text.lower(), text.lower())


def _functional(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    schema = func._schema.arguments
    given = {a.name: v for a, v in zip(schema, args)} | dict(kwargs)
    name = func._schema.name.split("::")[1]
    if "group_name" not in given:
        return rec.plain(info, func, args, kwargs)
    if name == "shard_dim_alltoall":
        return _shard_dim(rec, func, given)
    group = given["group_name"]
    axes, ranks = rec.groups.locate(group)
    kind, reduce, splits, root = _functional_kind(name, given)
    operands: Any = given.get("inputs", given.get("input", given.get("tensor")))
    comm = Comm(kind, axes, ranks, reduce, None, splits, root)
    raws = []
    for t in operands if isinstance(operands, (list, tuple)) else [operands]:
        view: Any = rec.view(t)
        if t.dim() == 0 and kind in ("all_gather", "all_to_all"):
            view = _emit(rec, "aten.view.default", (view, (1,)), (1,), view.dtype)
        raw = Raw(f"comm.{kind}", (view,), comm=comm)
        rec.situate(raw)
        raws.append(raw)
    with rec.pause():
        out = func(*args, **kwargs)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    for raw, t in zip(raws, outs):
        if info.mutates:
            raw.mutated = (rec._view(t)[0],)
        raw.outs = (rec._view(t)[0],)
        index = rec.append(raw)
        if isinstance(t, FakeTensor):
            shadow.exchanged(rec, comm, raw.args[0] if type(raw.args[0]) is View else None, raw.outs[0])
        started = Started(lambda i=index, t=t: rec.keep(i, 0, t), node=index, outputs=raw.outs)  # type: ignore[misc]
        rec.pending.works[-1 - raw.outs[0].storage] = (t, [started])
    return out


def _functional_kind(name: str, given: dict[str, Any]) -> tuple[str, str, Any, int | None]:
    """(kind, reduce op, splits, root) of a `_c10d_functional` op."""
    reduce = _reduce_of(str(given.get("reduce_op", "")))
    if name.startswith("all_reduce"):
        return "all_reduce", reduce, None, None
    if name.startswith("all_gather"):
        return "all_gather", "", None, None
    if name.startswith("reduce_scatter"):
        return "reduce_scatter", reduce, None, None
    if name.startswith("all_to_all"):
        sizes = (given["output_split_sizes"], given["input_split_sizes"])
        return "all_to_all", "", tuple(tuple(map(int, s)) for s in sizes), None
    if name.startswith("broadcast"):
        return "broadcast", "", None, given["src"]
    if name == "isend":
        return "send", "", None, given["dst"]
    return ("recv", "", None, given["src"]) if name == "irecv" else (name, reduce, None, None)


def _wait_tensor(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    with rec.pause():
        out = func(*args, **kwargs)
    source, target = rec.view(args[0]), rec._view(out)[0]
    rec.pending.wait(-1 - source.storage)
    if target.storage != source.storage:  # a fake wait makes a new tensor
        raw = Raw("write", (source,), outs=(target,))
        rec.situate(raw)
        rec.append(raw)
    return out


def drain(rec: Recorder) -> None:
    """Take the values of functional collectives that were never waited for, at the program's end."""
    for key, (t, _) in list(rec.pending.works.items()):
        if key < 0:
            if rec.keep_values and not isinstance(t, FakeTensor):
                with rec.quiet():
                    torch.ops._c10d_functional.wait_tensor.default(t)
            rec.pending.wait(key)


def _shard_dim(rec: Recorder, func: Any, given: dict[str, Any]) -> Any:
    """DTensor's Shard(i) -> Shard(j): cut along the new dim, exchange, join along the old one."""
    x, gather, shard = given["input"], given["gather_dim"], given["shard_dim"]
    axes, ranks = rec.groups.locate(given["group_name"])
    n = len(ranks)
    with rec.pause():
        out = func(*given.values())
    size, dtype = x.shape[shard] // n, rec.view(x).dtype
    piece = list(x.shape)
    piece[shard] = size
    cuts = tuple(
        _emit(rec, "aten.slice.Tensor", (rec.view(x), shard, i * size, (i + 1) * size), tuple(piece), dtype)
        for i in range(n)
    )
    stacked = (n * piece[0], *piece[1:])
    joined = _emit(rec, "aten.cat.default", (cuts, 0), stacked, dtype)
    splits = ((piece[0],) * n, (piece[0],) * n)
    raw = Raw("comm.all_to_all", (joined,), outs=(TensorMeta(stacked, dtype),))
    raw.comm = Comm("all_to_all", axes, ranks, "", None, splits)
    rec.situate(raw)
    result = Res(rec.append(raw))
    back = tuple(
        _emit(rec, "aten.slice.Tensor", (result, 0, i * piece[0], (i + 1) * piece[0]), tuple(piece), dtype)
        for i in range(n)
    )
    final = Raw("aten.cat.default", (back, gather), outs=(rec._view(out)[0],))
    rec.situate(final)
    rec.keep(rec.append(final), 0, out)
    return out


def _fsdp(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """FSDP2's own ops are Python; running their kernels under the mode shows plain ones."""
    collectives = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    kernels = {"all_gather_copy_in": "all_gather_copy_in_cuda"}
    name = func._schema.name.split("::")[1]
    kernel = getattr(collectives, kernels.get(name, name), None)
    if kernel is None:
        return rec.plain(info, func, args, kwargs)
    with rec:
        return kernel(*args, **kwargs)


def higher_order(rec: Recorder, info: OpInfo, func: Any, args: Any, kwargs: Any) -> Any:
    """Higher-order ops; flex attention is opened into its dense form, others stay opaque."""
    dense = {"flex_attention": "sdpa_dense", "flex_attention_backward": "sdpa_dense_backward"}
    kernel = dense.get(func.name())
    if kernel is None:
        rec.note(f"higher-order op {func.name()} is not looked into")
        return func(*args, **kwargs)
    with rec:
        return getattr(sys.modules["torch._higher_order_ops.flex_attention"], kernel)(*args, **kwargs)
