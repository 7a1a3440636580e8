"""What one rank of a differential run does, in a process of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdtypes.contracts import Program
from spmdtypes.differential import frames, values
from spmdtypes.differential.experiment import Call, Failure
from spmdtypes.differential.layout import block, local_shape
from spmdtypes.differential.streams import Substitution
from spmdtypes.differential.watch import Noted, Watch
from spmdtypes.notation import Dim, Type

_LOW = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Job:
    """One execution of a program on a mesh. `types` adds parameters the program gives no type for.
    `draws[seed][rank]` replaces random draws."""

    program: Program
    mesh: Mapping[str, int]
    seeds: tuple[int, ...]
    types: Mapping[str, Type] = field(default_factory=dict)
    draws: Mapping[int, Sequence[Substitution]] = field(default_factory=dict)
    keep_values: bool = False


@dataclass
class Outcome:
    """One seed on one rank."""

    rank: int
    seed: int
    borders: dict[str, torch.Tensor] = field(default_factory=dict)
    noted: list[Noted] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    untyped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    eps: float = 0.0
    failure: Failure | None = None


class Misfit(Exception):
    """A parameter whose local shape is not the declared block."""


def join(rank: int, sizes: Mapping[str, int], store: str, timeout: float) -> DeviceMesh:
    """The process group and the mesh of a freshly forked rank."""
    from datetime import timedelta

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ.update(GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    if dist.is_initialized():
        dist.destroy_process_group()
    world = 1
    for n in sizes.values():
        world *= n
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def run_seed(job: Job, mesh: DeviceMesh, rank: int, index: int, report: Callable[[Call], None]) -> Outcome:
    """Build, load, run once. An exception of the program becomes the outcome's failure."""
    seed = job.seeds[index]
    out = Outcome(rank, seed)
    by_seed = job.draws.get(seed)
    watch = Watch(job.mesh, report, by_seed[rank] if by_seed else None)
    coords = dict(zip(job.mesh, mesh.get_coordinate() or ()))
    stage = "build"
    try:
        torch.manual_seed(0)
        with watch:
            module = job.program.build(mesh)
        stage = "load"
        how = values.regime(index)
        types = {**job.types, **job.program.params}
        globals_ = values.parameters(types, job.program.mesh, seed, how)
        load_parameters(module, globals_, types, coords, job.mesh, out)
        _mark_initial(watch, module, globals_)
        inputs = local_inputs(job, module, seed, how, coords)
        stage = "run"
        with watch:
            out.borders = run_program(job.program, module, mesh, inputs, job.mesh, seed, coords)
    except Exception as e:
        out.failure = Failure(
            rank, stage, type(e).__name__, str(e), frames.of_traceback(e.__traceback__), seed
        )
    out.noted, out.eps = watch.noted, watch.eps
    return out


def load_parameters(
    module: torch.nn.Module,
    globals_: Mapping[str, torch.Tensor],
    types: Mapping[str, Type],
    coords: Mapping[str, int],
    mesh: Mapping[str, int],
    out: Outcome,
) -> None:
    """Overwrite parameters and buffers with this rank's blocks. Raises `Misfit`."""
    found = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    out.shapes = {n: tuple(_local(p).shape) for n, p in found.items()}
    out.untyped = {n: tuple(p.shape) for n, p in module.named_parameters() if n not in types}
    with torch.no_grad():
        for name, whole in globals_.items():
            if name not in found:
                raise Misfit(f"the module has no parameter {name!r}")
            target = _local(found[name])
            want = local_shape(types[name], coords, mesh)
            if tuple(target.shape) != want:
                raise Misfit(f"{name} has shape {list(target.shape)} where {list(want)} is declared")
            target.copy_(whole[block(types[name], coords, mesh)])


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
        borders = {f"result:{k}": _copy(v) for k, v in results.items()}
        named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        return borders | {f"param:{n}": _copy(named[n]) for n in program.params if n in named}
    output = module(**inputs)
    borders = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, value in _outputs(output):
        borders[name] = _copy(value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            pairs.append((value, _cotangent(name, value, program, sizes, seed, coords)))
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [c for _, c in pairs])
    for name, p in module.named_parameters():
        if p.requires_grad:
            borders[f"grad:{name}"] = _gradient(p)
    return borders


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
    if hasattr(value, "placements"):
        from torch.distributed.tensor import DTensor

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
    watch.noted = [replace(n, initial=True, value=None) if n.storage in places else n for n in watch.noted]


def infer_types(
    untyped: Mapping[str, tuple[int, ...]],
    reference: Mapping[str, tuple[int, ...]],
) -> dict[str, Type]:
    """Parameters without a declared type that have the same shape everywhere are replicated."""
    return {
        n: Type(tuple(Dim(k) for k in shape)) for n, shape in untyped.items() if reference.get(n) == shape
    }
