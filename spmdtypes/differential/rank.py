"""What one rank of a differential run does, in a process of its own."""

from __future__ import annotations

import math
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, _unregister_all_process_groups
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdtypes.capture import comms
from spmdtypes.capture.functionalise import Functional
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.run import record_program
from spmdtypes.contracts import Program
from spmdtypes.differential import frames, values
from spmdtypes.differential.experiment import Call, Failure
from spmdtypes.differential.layout import block
from spmdtypes.differential.streams import Substitution
from spmdtypes.differential.watch import Noted, Watch
from spmdtypes.differential.widen import WideRecorder, wide_defaults
from spmdtypes.graph import Graph, Ref
from spmdtypes.notation import Dim, Type

LIMIT = 1 << 28  # bytes of values kept of one rank and seed
_LOW = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Job:
    """One execution of a program on a mesh. `types` are those of parameters the program gives none for
    (None: what their shapes here say). `draws[seed][rank]` replaces random draws. `keep_values`: record
    the graph and every value. `wide`: compute in f64 what the program computes in lower precision."""

    program: Program
    mesh: Mapping[str, int]
    seeds: tuple[int, ...]
    regimes: tuple[values.Regime, ...]  # one a seed
    types: Mapping[str, Type] | None = None
    draws: Mapping[int, Sequence[Substitution]] = field(default_factory=dict)
    keep_values: bool = False
    wide: bool = False

    def enter(self, rank: int, store: str, timeout: float) -> DeviceMesh:
        join(rank, math.prod(self.mesh.values()), store, timeout)
        return init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))

    def run(self, state: DeviceMesh, rank: int, index: int, report: Report) -> Outcome:
        return run_seed(self, state, rank, index, report)


@dataclass
class Outcome:
    """One seed on one rank. `program` identifies the sequence of recorded ops."""

    rank: int
    seed: int
    borders: dict[str, torch.Tensor] = field(default_factory=dict)
    noted: list[Noted] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    untyped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    eps: float = 0.0
    failure: Failure | None = None
    graph: Graph | None = None
    values: dict[Ref, torch.Tensor] = field(default_factory=dict)
    program: int = 0
    trail: frames.Places = ()  # places passed after the last collective


Report = Callable[[Call, frames.Places], None]


class Misfit(Exception):
    """A parameter whose local shape is not the declared block."""


def join(rank: int, world: int, store: str, timeout: float) -> None:
    """Make the process group of a freshly forked rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    if dist.is_initialized():
        _abandon_groups()
    dist.init_process_group(
        "gloo",
        store=FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


_ABANDONED: list[object] = []


def _abandon_groups() -> None:
    """Forget process groups inherited from the parent, whose threads do not exist here: to shut them
    down or to free them may wait for those for ever."""
    world = dist.distributed_c10d._world
    _ABANDONED.extend(world.pg_map)
    dist.distributed_c10d._update_default_pg(None)
    tables: tuple[dict[Any, Any], ...] = (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        *(world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state),
    )
    for table in tables:
        table.clear()
    _unregister_all_process_groups()
    world.group_count = 0


def run_seed(job: Job, mesh: DeviceMesh, rank: int, index: int, report: Report) -> Outcome:
    """Build, load, run once. An exception of the program becomes the outcome's failure."""
    seed = job.seeds[index]
    by_seed = job.draws.get(seed)
    watch = Watch(job.mesh, report, by_seed[rank] if by_seed else None, job.wide)
    run = _Run(job, mesh, rank, index, watch, Outcome(rank, seed))
    out = run.out
    try:
        torch.manual_seed(0)
        with watch, wide_defaults() if job.wide else nullcontext():
            if job.keep_values:
                run.recorded()
            else:
                run.plain()
    except Exception as e:
        where = frames.of_traceback(e.__traceback__)
        out.failure = Failure(rank, run.stage, type(e).__name__, str(e), where, seed)
    out.noted, out.eps, out.trail = watch.noted, watch.eps, watch.trail.take()
    return out


@dataclass
class _Run:
    """One seed of one rank. `params` and `inputs` hold local values once the module exists."""

    job: Job
    mesh: DeviceMesh
    rank: int
    index: int
    watch: Watch
    out: Outcome
    stage: str = "build"
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    module: torch.nn.Module | None = None
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.job.seeds[self.index]

    @property
    def coords(self) -> dict[str, int]:
        return dict(zip(self.job.mesh, self.mesh.get_coordinate() or ()))

    def prepare(self, pause: Callable[[], AbstractContextManager[None]]) -> torch.nn.Module:
        """The module with its values, and the inputs, ready to run."""
        job, how = self.job, self.job.regimes[self.index]
        self.module = module = job.program.build(self.mesh)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"the constructor returned {type(module).__name__}, not a module")
        self.stage = "load"
        with pause(), self.watch.pause():
            self.params |= load_parameters(job, module, self.seed, how, self.coords, self.out)
            _mark_initial(self.watch, module, self.params)
            self.inputs |= local_inputs(job, module, self.seed, how, self.coords)
        self.stage = "run"
        return module

    def plain(self) -> None:
        module = self.prepare(nullcontext)
        self.out.borders = run_program(
            self.job.program, module, self.mesh, self.inputs, self.job.mesh, self.seed, self.coords
        )

    def recorded(self) -> None:
        """The same under the recorder, which keeps every value and makes the graph."""
        kind = WideRecorder if self.job.wide else Recorder
        rec = kind(self.job.mesh, self.coords, comms.group_axes(self.mesh), keep_values=True)
        step = self._watched_step if self.job.program.step is not None else None
        program = replace(self.job.program, build=lambda mesh: self.prepare(rec.pause), step=step)
        done = record_program(program, self.mesh, self.coords, self.params, self.inputs, rec)
        self.out.borders = self._borders(done)
        self.out.values = within_limit(done.values)
        self.out.program = fingerprint(done.graph)
        if self.index == 0:
            self.out.graph = done.graph

    def _borders(self, done: Functional) -> dict[str, torch.Tensor]:
        assert self.module is not None
        kinds = ("output", "result:")
        found = {
            name: done.values[ref]
            for name, ref in done.graph.outputs.items()
            if name.startswith(kinds) and ref in done.values
        }
        if self.job.program.step is None:
            return found | gradients(self.module)
        plain = {f"result:{k}": _copy(v) for k, v in self.results.items() if _is_value(v)}
        return plain | found | finals(self.job.program, self.module)

    def _watched_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.job.program.step is not None
        results = self.job.program.step(*args, **kwargs)
        if not isinstance(results, Mapping):
            raise TypeError(f"the step returned {type(results).__name__}, not a dict of results")
        self.results = results
        return results


def fingerprint(graph: Graph) -> int:
    """Equal for programs of the same ops: node numbers then mean the same."""
    return zlib.crc32("\n".join(n.op for n in graph.nodes).encode())


def within_limit(kept: Mapping[Ref, torch.Tensor]) -> dict[Ref, torch.Tensor]:
    """The values, without the largest ones when all together are too many."""
    out, total = {}, 0
    for ref, t in sorted(kept.items(), key=lambda item: item[1].numel()):
        total += t.numel() * t.element_size()
        if total > LIMIT:
            break
        out[ref] = t
    return out


def load_parameters(
    job: Job,
    module: torch.nn.Module,
    seed: int,
    how: values.Regime,
    coords: Mapping[str, int],
    out: Outcome,
) -> dict[str, torch.Tensor]:
    """Overwrite parameters and buffers with this rank's blocks, and return those. Raises `Misfit`.

    A parameter without a declared type is replicated, or laid out as its DTensor says; where its shape
    does not allow that it stays as it is.
    """
    declared = job.program.params
    found = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    out.shapes = {n: tuple(_local(p).shape) for n, p in found.items()}
    out.untyped = {n: tuple(p.shape) for n, p in module.named_parameters() if n not in declared}
    others = job.types if job.types is not None else infer_types(out.untyped)
    whole = values.parameters({**others, **declared}, job.program.mesh, seed, how)
    for name, _ in module.named_buffers():  # many are variances
        if name in whole:
            whole[name] = whole[name].abs() if whole[name].is_floating_point() else whole[name]
    local = {}
    with torch.no_grad():
        for name, type_ in {**others, **declared}.items():
            if name not in found:
                raise Misfit(f"the module has no parameter {name!r}")
            target = _local(found[name])
            if name in declared:
                part = whole[name][block(type_, coords, job.mesh)]
                if target.shape != part.shape:
                    have, want = list(target.shape), list(part.shape)
                    raise Misfit(f"{name} has shape {have} where {want} is declared")
            else:
                part = _as_laid_out(whole[name], found[name])
                if target.shape != part.shape:
                    continue
            target.copy_(part)
            local[name] = target.detach().clone()
    return local


def _as_laid_out(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """The part of a global value that a DTensor holds here; all of it for a plain tensor."""
    if not hasattr(like, "placements") or tuple(like.shape) != tuple(whole.shape):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))]


def local_inputs(
    job: Job, module: torch.nn.Module, seed: int, how: values.Regime, coords: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """This rank's blocks of the global inputs. A low precision counts only if the module has it too."""
    whole = values.inputs(job.program.inputs, job.program.mesh, seed, how)
    present = {p.dtype for p in module.parameters()}
    local = {}
    for name, type_ in job.program.inputs.items():
        x = whole[name][block(type_, coords, job.mesh)].clone()
        low = _LOW.get(type_.dtype or "")
        local[name] = x.to(low) if low in present else x
    return local


def run_program(
    program: Program,
    module: torch.nn.Module,
    mesh: DeviceMesh,
    inputs: dict[str, torch.Tensor],
    sizes: Mapping[str, int],
    seed: int,
    coords: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """Forward and backward, or the step; the rank's local value at every border."""
    if program.step is not None:
        results = program.step(module, mesh, **inputs)
        if not isinstance(results, Mapping):
            raise TypeError(f"the step returned {type(results).__name__}, not a dict of results")
        borders = {f"result:{k}": _copy(v) for k, v in results.items() if _is_value(v)}
        return borders | finals(program, module)
    output = module(**inputs)
    borders = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, value in _outputs(output):
        borders[name] = _copy(value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            pairs.append((value, _cotangent(name, value, program, sizes, seed, coords)))
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [c for _, c in pairs])
    return borders | gradients(module)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"grad:{n}": _gradient(p) for n, p in module.named_parameters() if p.requires_grad}


def finals(program: Program, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the declared parameters and buffers hold in the end."""
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    return {f"param:{n}": _copy(named[n]) for n in program.params if n in named}


def _outputs(output: Any) -> list[tuple[str, Any]]:
    """The result, or its entries, under their border names."""
    if isinstance(output, Mapping):
        return [(f"output.{k}", v) for k, v in output.items() if _is_value(v)]
    if isinstance(output, (tuple, list)):
        return [(f"output.{i}", v) for i, v in enumerate(output) if _is_value(v)]
    return [("output", output)] if _is_value(output) else []


def _is_value(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, int, float))


def output_type(program: Program, border: str) -> Type | None:
    if isinstance(program.output, Mapping):
        return program.output.get(border.removeprefix("output."))
    return program.output


def _cotangent(
    name: str,
    value: torch.Tensor,
    program: Program,
    mesh: Mapping[str, int],
    seed: int,
    coords: Mapping[str, int],
) -> torch.Tensor:
    """This rank's block of the global cotangent, in the form (plain or DTensor) of the result."""
    type_ = output_type(program, name)
    local = _local(value)
    if type_ is None or not type_.dims:
        whole = values.cotangent(name, tuple(local.shape), seed)
    else:
        shape = tuple(d.size for d in type_.dims if isinstance(d.size, int))
        whole = values.cotangent(name, shape, seed)[block(type_, coords, mesh)]
    whole = whole.to(value.dtype)
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return DTensor.from_local(whole, value.device_mesh, value.placements, run_check=False)
    return whole


def _gradient(p: torch.nn.Parameter) -> torch.Tensor:
    """As an optimizer reads it; none counts as zero, a DTensor is laid out as its parameter."""
    g: Any = p.grad
    if g is None:
        return torch.zeros_like(_local(p)).detach()
    if hasattr(g, "placements") and g.placements != (placements := getattr(p, "placements", None)):
        g = g.redistribute(placements=placements)
    return _copy(g)


def _local(x: Any) -> torch.Tensor:
    local: torch.Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _copy(x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        return torch.as_tensor(x)
    return _local(x.detach()).clone()


def _mark_initial(watch: Watch, module: torch.nn.Module, loaded: Iterable[str]) -> None:
    """Random initial values that loaded values have replaced need not agree with anybody's."""
    found = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    places = {_local(found[n]).untyped_storage().data_ptr() for n in loaded}
    watch.noted = [
        replace(n, building=True, initial=True, value=None)
        if n.storage in places
        else replace(n, building=True)
        for n in watch.noted
    ]


def infer_types(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Type]:
    """Replicated types of these global shapes."""
    return {n: Type(tuple(Dim(k) for k in shape)) for n, shape in shapes.items()}
