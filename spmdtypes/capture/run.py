"""Run a `contracts.Program` under a recorder, on fake or on real tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from spmdtypes.capture import comms, shadow
from spmdtypes.capture.functionalise import Functional, functionalise
from spmdtypes.capture.raw import Raw, Res, View
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.replay import complete
from spmdtypes.contracts import Program
from spmdtypes.graph import Graph, TensorMeta


class CaptureError(Exception):
    """The program cannot be run as declared; the message is for its author."""


def run_program(
    program: Program,
    device_mesh: Any,
    coords: Mapping[str, int],
    params: Mapping[str, Tensor] | None,
    inputs: Mapping[str, Tensor],
    recorder: Recorder,
) -> Graph:
    """The pure graph of one run; see `record_program`."""
    return record_program(program, device_mesh, coords, params, inputs, recorder).graph


def record_program(
    program: Program,
    device_mesh: Any,
    coords: Mapping[str, int],
    params: Mapping[str, Tensor] | None,
    inputs: Mapping[str, Tensor],
    recorder: Recorder,
) -> Functional:
    """Build, load `params` (local values), run forward and backward (or the step), functionalise.

    Parameters and inputs become input nodes. Raises CaptureError when names or shapes do not fit;
    exceptions of the program itself pass through.
    """
    outputs = execute(program, device_mesh, params or {}, inputs, recorder)
    result = functionalise(recorder, outputs.views)
    result.graph.dtensors = outputs.placements
    if recorder.keep_values:
        complete(result.graph, result.values)
    return result


def execute(
    program: Program,
    device_mesh: Any,
    params: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    rec: Recorder,
) -> Outputs:
    """The recorded run itself: `rec.trace` is filled, and what the outputs are is returned."""
    for code in (execute.__code__, _run_module.__code__, _run_step.__code__, _build.__code__):
        rec.stacks.stop_at(code)
    with rec.recording():
        module = _build(rec, program, device_mesh)
        _load(rec, module, params)
        for name, value in inputs.items():
            rec.bind(value, name)
            if isinstance(value, FakeTensor):
                shadow.assume_input(
                    rec, value, program.inputs[name].limit if name in program.inputs else None
                )
        run = _run_step if program.step is not None else _run_module
        outputs = run(rec, program, module, device_mesh, inputs)
        with rec.pause():
            comms.drain(rec)
            outputs |= _finals(rec, module)
    return outputs


class Outputs:
    """Named results: the views that hold them, and the placements of those that were DTensors."""

    def __init__(self) -> None:
        self.views: dict[str, View | Res] = {}
        self.placements: dict[str, dict[str, str]] = {}

    def add(self, rec: Recorder, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            if value is not None:
                rec.note(f"{name} is no tensor ({type(value).__name__}) and is not checked")
            return
        placements = getattr(value, "placements", None)
        if placements is not None:
            mesh = value.device_mesh  # type: ignore[attr-defined]
            self.placements[name] = {a: str(p) for a, p in zip(mesh.mesh_dim_names or (), placements)}
        self.views[name] = rec.view(local(value))

    def __ior__(self, other: Outputs) -> Outputs:
        self.views |= other.views
        self.placements |= other.placements
        return self


def local(t: Tensor) -> Tensor:
    """The plain tensor behind a DTensor or an unfinished functional collective."""
    if hasattr(t, "_local_tensor"):
        t = t._local_tensor
    if type(t).__name__ == "AsyncCollectiveTensor":
        t = t.wait()  # type: ignore[attr-defined]
    return t.detach() if t.requires_grad else t


def _build(rec: Recorder, program: Program, device_mesh: Any) -> torch.nn.Module:
    rec.building = True
    try:
        module = program.build(device_mesh)
    finally:
        rec.building = False
    if not isinstance(module, torch.nn.Module):
        raise CaptureError(f"{program.name}: build returned {type(module).__name__}, not a module")
    return module


def _named(module: torch.nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_buffers(remove_duplicate=False))
    return named | dict(module.named_parameters(remove_duplicate=False))


def _load(rec: Recorder, module: torch.nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copy local values into parameters and buffers and make them inputs of the graph."""
    with rec.pause(), torch.no_grad():
        rec.register(module)
        named = _named(module)
        for name, value in params.items():
            if name not in named:
                known = ", ".join(named) or "none"
                raise CaptureError(f"the module has no parameter or buffer {name!r} (it has: {known})")
            target = local(named[name])
            if target.shape != value.shape:
                have, want = tuple(target.shape), tuple(value.shape)
                raise CaptureError(f"{name} has local shape {have}, declared is {want}")
            target.copy_(value)
        bound = set()
        for name, tensor in [*module.named_parameters(), *((k, named[k]) for k in params)]:
            if id(tensor) in bound:
                continue
            bound.add(id(tensor))
            rec.bind(local(tensor), name, tensor.requires_grad, rec.declared_at.get(id(tensor), 0))


def _run_module(
    rec: Recorder, program: Program, module: torch.nn.Module, mesh: Any, inputs: Mapping[str, Tensor]
) -> Outputs:
    out = module(**inputs)
    outputs = Outputs()
    with rec.pause():
        for name, value in _results(out).items():
            outputs.add(rec, name, value)
    loss = _loss(out)
    if loss is None:
        rec.note("the module returns no scalar that needs a gradient: its backward is not checked")
        return outputs
    loss.backward()
    with rec.pause():
        for name, p in module.named_parameters():
            if not p.requires_grad:
                continue
            if p.grad is not None:
                outputs.add(rec, f"grad:{name}", p.grad)
            else:
                outputs.views[f"grad:{name}"] = _zeros(rec, local(p))
    return outputs


def _zeros(rec: Recorder, p: Tensor) -> Res:
    meta = rec.meta(p)
    raw = Raw(
        "aten.zeros.default", (meta.shape,), {"dtype": meta.dtype}, outs=(TensorMeta(meta.shape, meta.dtype),)
    )
    index = rec.append(raw)
    if rec.keep_values:
        rec.keep(index, 0, torch.zeros_like(p))
    return Res(index)


def _results(out: Any) -> dict[str, Any]:
    if isinstance(out, Mapping):
        return {f"output.{k}": v for k, v in out.items()}
    if isinstance(out, (tuple, list)):
        return {f"output.{i}": v for i, v in enumerate(out)}
    return {"output": out}


def _loss(out: Any) -> Any:
    """What `.backward()` is called on: the output, or its entry "loss", or its first scalar."""
    values = [out]
    if isinstance(out, Mapping):
        values = [out["loss"]] if "loss" in out else list(out.values())
    elif isinstance(out, (tuple, list)):
        values = list(out)
    for v in values:
        if isinstance(v, Tensor) and v.requires_grad and v.numel() == 1:
            return v
    return None


def _run_step(
    rec: Recorder, program: Program, module: torch.nn.Module, mesh: Any, inputs: Mapping[str, Tensor]
) -> Outputs:
    assert program.step is not None
    out = program.step(module, mesh, **inputs)
    outputs = Outputs()
    with rec.pause():
        results = out if isinstance(out, Mapping) else {} if out is None else {"output": out}
        for name, value in results.items():
            outputs.add(rec, f"result:{name}", value)
    return outputs


def _finals(rec: Recorder, module: torch.nn.Module) -> Outputs:
    outputs = Outputs()
    for name, tensor in _named(module).items():
        outputs.add(rec, f"param:{name}", tensor)
    return outputs
