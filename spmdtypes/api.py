"""`spmdtypes.check(...)`: check a program given as Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtypes.annotations import Declaration, Typed, as_output, as_types, declaration_of
from spmdtypes.contracts import Program
from spmdtypes.errors import CannotCheck, blame
from spmdtypes.exits import exits_refused
from spmdtypes.mesh import Mesh
from spmdtypes.notation import NotationError, Type
from spmdtypes.report import Report

if TYPE_CHECKING:
    from spmdtypes.entry import Entry


def check(
    program: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    inputs: Mapping[str, Typed] | None = None,
    params: Mapping[str, Typed] | None = None,
    output: Typed | Mapping[str, Typed] | None = None,
    grads: Mapping[str, str] | None = None,
    step: Callable[..., Any] | None = None,
    results: Mapping[str, Typed] | None = None,
    dims: Mapping[str, int] | None = None,
    name: str | None = None,
    test: bool = True,
    seed: int = 0,
    groups: Mapping[str, tuple[str, ...]] | None = None,
) -> Report:
    """Whether `program` computes what it computes on the mesh whose every axis has size 1.

    `program` is an annotated class or function, a function `build(mesh) -> nn.Module` that makes this
    rank's module (then `inputs` and `params` give all types), a `Program`, or a captured graph
    (`torch.export.ExportedProgram`, `torch.fx.GraphModule`). Types are notation texts with global
    sizes: `"f32[8@dp, 16]"`. `grads`: what an outer wrapper does to gradients ("sum" or "avg" by
    axis). `step(module, mesh, **inputs) -> dict` is a training step whose `results` have types.
    `test=False` keeps to what the rules prove. `groups` is for graphs: the mesh axes that process groups
    named in them span; graphs are checked by the rules alone.

    Raises `CannotCheck` (bad input).
    """
    said = Declaration(
        mesh=None if mesh is None else Mesh(mesh),
        dims=dict(dims or {}),
        inputs=as_types(inputs),
        params=as_types(params),
        output=as_output(output),
        grads=None if grads is None else dict(grads),
        results=as_types(results),
        name=name,
    )
    if _is_graph(program):
        return _check_graph(program, said, groups or {})
    programs = _programs(program, said, step)
    return check_programs(programs, test=test, seed=seed)


@exits_refused()
def check_programs(programs: Iterator[Program], test: bool = True, seed: int = 0) -> Report:
    """Check the first program that runs: the others are the same with other sizes.

    When none does, the first one's failure stands: a `CannotCheck`, or a report with failures.
    """
    from spmdtypes.checker import Options, check_program
    from spmdtypes.rehearsal import rehearse

    options = Options(test=test, seeds=tuple(seed + s for s in Options().seeds))
    failed: Report | CannotCheck | None = None
    for program in programs:
        try:
            rehearse(program)
            report = check_program(program, options)
        except CannotCheck as e:
            failed = failed or e.at(program.file, program.line)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            failed = failed or blame(e, f"running {program.name}", program.file, program.line)
        else:
            if not report.failures:
                return report
            failed = failed or report
    if isinstance(failed, Report):
        return failed
    raise failed or CannotCheck("nothing to check")


def _programs(target: Any, said: Declaration, step: Callable[..., Any] | None) -> Iterator[Program]:
    if isinstance(target, Program):
        return iter([target])
    if said.inputs and not isinstance(target, type) and declaration_of(target) is None:
        return iter([_plain(target, said, step)])
    entry = _entry(target, said)
    return entry.programs()


def _entry(target: Any, said: Declaration) -> Entry:
    from torch import nn

    from spmdtypes.entry import Entry, Options

    if isinstance(target, nn.Module):
        raise CannotCheck(
            f"a {type(target).__name__} instance exists on one mesh only: give the class, or a function "
            "mesh -> module"
        )
    if not callable(target):
        raise CannotCheck(f"{type(target).__name__} is no program: give a class, a function, or a Program")
    declared = declaration_of(target) or Declaration()
    changes = {k: v for k, v in vars(said).items() if v not in (None, {}, ())}
    return Entry.of(target, replace(declared, **changes), Options())


def _is_graph(target: Any) -> bool:
    import torch
    from torch import fx

    from spmdtypes.graph import Graph

    return isinstance(target, (Graph, torch.export.ExportedProgram, fx.GraphModule))


def _check_graph(target: Any, said: Declaration, groups: Mapping[str, tuple[str, ...]]) -> Report:
    from spmdtypes.graph_check import as_graph, check_graph

    if said.mesh is None:
        raise CannotCheck("no mesh given: check(..., mesh={'tp': 2})")
    contract = _plain(_graph_is_not_built, said, None)
    graph = as_graph(target, contract.mesh, groups)
    assert graph is not None
    return check_graph(
        graph,
        name=said.name or type(target).__name__,
        mesh=contract.mesh,
        inputs=contract.inputs,
        params=contract.params,
        output=contract.output,
        grads=contract.grads,
    )


def _graph_is_not_built(mesh: Any) -> Any:
    raise CannotCheck("a graph is not built")


def _plain(build: Callable[[Any], Any], said: Declaration, step: Callable[..., Any] | None) -> Program:
    """A program whose types are all given."""
    from spmdtypes.annotations import source_of
    from spmdtypes.notation import bind, resolve

    if said.mesh is None:
        raise CannotCheck("no mesh given: check(..., mesh={'tp': 2})")
    types = {**said.inputs, **said.params, **said.results}
    outputs = said.output if isinstance(said.output, Mapping) else {"output": said.output}
    types |= {f"result {k}": t for k, t in outputs.items() if t is not None}
    try:
        sizes = resolve(types, said.dims, said.mesh)
    except NotationError as e:
        raise CannotCheck(e.message, excerpt=e.excerpt) from e

    def bound(ts: Mapping[str, Type]) -> dict[str, Type]:
        return {k: bind(t, sizes) for k, t in ts.items()}

    output: Type | Mapping[str, Type] | None = said.output
    if output is not None:
        output = bound(output) if isinstance(output, Mapping) else bind(output, sizes)
    file, line = source_of(build)
    return Program(
        name=said.name or str(getattr(build, "__name__", "program")),
        mesh=said.mesh,
        build=build,
        inputs=bound(said.inputs),
        params=bound(said.params),
        output=output,
        grads=said.grads or {},
        step=step,
        results=bound(said.results),
        file=None if file.startswith("<") else Path(file),
        line=line,
    )
