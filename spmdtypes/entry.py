"""From an annotated class or function to a `contracts.Program`: sizes, constructor, parameters, driver.

The constructor is called by name: `mesh` gets the `DeviceMesh`, a parameter named like a dim gets its
size, `init` may give others, defaults are respected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from spmdtypes import drive
from spmdtypes.annotations import (
    Argument,
    Declaration,
    Signature,
    declaration_of,
    signature_of,
    source_of,
)
from spmdtypes.contracts import Program
from spmdtypes.errors import CannotCheck, blame
from spmdtypes.mesh import Mesh
from spmdtypes.notation import ATTEMPTS, NotationError, Type, bind, is_size, resolve
from spmdtypes.parameters import Parameters, read_parameters, root_types
from spmdtypes.scratch import scratch_mesh

MESH_NAMES = ("mesh", "device_mesh")
MODEL_NAMES = ("model", "module")


@dataclass(frozen=True)
class Options:
    """What the command line or `[tool.spmdcheck]` says over the declaration."""

    mesh: Mapping[str, int] | None = None
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """Something to check: a module class, a function, or a training step of a module class."""

    target: Callable[..., Any]
    declaration: Declaration
    file: str
    line: int
    name: str

    @classmethod
    def of(cls, target: Any, declaration: Declaration | None = None, options: Options | None = None) -> Entry:
        options = options or Options()
        declared = declaration or declaration_of(target) or Declaration()
        if options.mesh is not None:
            declared = replace(declared, mesh=Mesh(options.mesh))
        declared = replace(declared, dims={**declared.dims, **options.dims})
        file, line = source_of(target)
        return cls(target, declared, file, line, declared.name or target.__name__)

    @property
    def is_class(self) -> bool:
        return isinstance(self.target, type)

    @property
    def is_step(self) -> bool:
        return self.declaration.model is not None

    def programs(self) -> Iterator[Program]:
        """The program with ever more accommodating sizes; the first is preferred."""
        for attempt in range(ATTEMPTS):
            yield self.program(attempt)

    def program(self, attempt: int = 0) -> Program:
        """Raises `CannotCheck`."""
        try:
            return _Builder(self, attempt).program()
        except (CannotCheck, NotationError) as e:
            raise blame(e, self.name, self.file, self.line) from e


class _Builder:
    """One attempt at the sizes."""

    def __init__(self, entry: Entry, attempt: int) -> None:
        self.entry, self.declared = entry, entry.declaration
        if not self.declared.mesh:
            raise CannotCheck(
                f"{entry.name} has no mesh: @program(mesh={{...}}), --mesh, or mesh in [tool.spmdcheck]",
                entry.file,
                entry.line,
            )
        self.mesh = Mesh(self.declared.mesh)
        self.signature = self._signature()
        self.inputs = self._inputs()
        self.outputs = self._outputs()
        self.sizes = self._sizes(attempt)

    @property
    def model(self) -> Callable[..., Any]:
        return self.declared.model or self.entry.target

    def _signature(self) -> Signature:
        target: Any = self.entry.target
        return signature_of(target.forward if self.entry.is_class else target)

    def _inputs(self) -> dict[str, Type]:
        """Types of the arguments; those without a type must have a default or be the mesh or model."""
        types: dict[str, Type] = {}
        for a in self.signature.arguments:
            t = self.declared.inputs.get(a.name) or a.type
            if t is not None:
                types[a.name] = self._checked(t, a.line)
            elif a.required and a.name not in (*MESH_NAMES, *MODEL_NAMES):
                raise CannotCheck(
                    f"argument {a.name!r} of {self._where()} has no type: "
                    f'write {a.name}: Spmd[Tensor, "..."]',
                    self.entry.file,
                    a.line,
                )
        return types

    def _where(self) -> str:
        return f"{self.entry.name}.forward" if self.entry.is_class else self.entry.name

    def _checked(self, t: Type, line: int) -> Type:
        """`t`, if the mesh has its axes; else an error at `line`."""
        for axis in t.axes:
            if axis not in self.mesh:
                try:
                    resolve({"": t}, {}, self.mesh)
                except NotationError as e:
                    raise CannotCheck(e.message, self.entry.file, line, e.excerpt) from e
        return t

    def _outputs(self) -> dict[str, Type]:
        if self.entry.is_step:
            return {}
        declared = self.declared.output if self.declared.output is not None else self.signature.output
        if declared is None:
            raise CannotCheck(
                f'the result of {self._where()} has no type: write -> Spmd[Tensor, "..."], or output=...',
                self.entry.file,
                self.signature.line,
            )
        outputs = dict(declared) if isinstance(declared, Mapping) else {"output": declared}
        return {k: self._checked(t, self.signature.line) for k, t in outputs.items()}

    def _sizes(self, attempt: int) -> dict[str, int]:
        """Sizes of all dims: declared, defaults of the constructor, or free."""
        types = dict(self.inputs)
        lines = {a.name: a.line for a in self.signature.arguments}
        for key, t in self.outputs.items():
            types[f"result {key}"], lines[f"result {key}"] = t, self.signature.line
        model = self.model if isinstance(self.model, type) else None
        for name, (t, line) in (root_types(model) if model else {}).items():
            types[f"parameter {name}"], lines[f"parameter {name}"] = self._checked(t, line), line
        types |= {f"parameter {n}": t for n, t in self.declared.params.items()}
        wanted = self._constructor()
        named = {d.size for t in types.values() for d in t.dims or () if isinstance(d.size, str)}
        named |= {t.limit_dim for t in types.values() if t.limit_dim}
        self._refuse_unknown(wanted, named | set(self.declared.dims))
        self.used = named | {a.name for a in wanted}
        defaults = {a.name: int(a.default) for a in wanted if is_size(a.default)}
        names = tuple(a.name for a in wanted if a.required)
        dims = {**defaults, **self.declared.dims}
        try:
            return resolve(types, dims, self.mesh, names=names, attempt=attempt)
        except NotationError as e:
            places = [lines[n] for n, t in types.items() if e.text and t.text == e.text and n in lines]
            raise CannotCheck(e.message, self.entry.file, (*places, self.entry.line)[0], e.excerpt) from e

    def _unused(self) -> tuple[str, ...]:
        """A dim that is given a size, and by its name nothing else: perhaps a typo."""
        unused = [n for n in self.declared.dims if n not in self.used]
        return (
            (f"no type and no constructor names {', '.join(unused)}: the size is unused",) if unused else ()
        )

    def _constructor(self) -> tuple[Argument, ...]:
        """Arguments of the constructor, the mesh and those in `init` left out."""
        init = constructor_of(self.model) if self.entry.is_class or self.entry.is_step else None
        given = (*MESH_NAMES, *self.declared.init)
        return tuple(a for a in signature_of(init).arguments if a.name not in given) if init else ()

    def _refuse_unknown(self, wanted: tuple[Argument, ...], known: set[str]) -> None:
        """A required argument of the constructor must be a size."""
        for a in wanted:
            if a.required and a.name not in known and a.kind != "int":
                name = getattr(self.model, "__name__", self.entry.name)
                raise CannotCheck(
                    f"the constructor of {name} needs {a.name!r}, which is no dim of the "
                    f"program: give it in dims={{...}} or init={{...}}, or a default",
                    source_of(self.model)[0],
                    a.line,
                )

    def program(self) -> Program:
        parameters = self._read_parameters()
        probes = self._probes(parameters)
        held = {argument for argument, _, _ in probes} | self._function_parameters().keys()
        grads, assumptions = self._grads(parameters)
        assumptions += self._unused()
        driver = drive.Driver(
            outputs={k: bind(t, self.sizes) for k, t in self.outputs.items()},
            probes=probes,
            averaged=tuple(a for a, op in grads.items() if op == "avg"),
            file=self.entry.file,
            line=self.signature.line,
        )
        inputs = {n: bind(t, self.sizes) for n, t in self.inputs.items() if n not in held}
        results = {k: bind(t, self.sizes) for k, t in self.declared.results.items()}
        return Program(
            name=self.entry.name,
            mesh=self.mesh,
            build=self._builder(driver),
            inputs=inputs | driver.cotangents(),
            params=parameters.types | {parameter: t for _, parameter, t in probes},
            output=None if self.entry.is_step else driver.contract(),
            grads=grads,
            step=self._step() if self.entry.is_step else None,
            results=results,
            file=Path(self.entry.file),
            line=self.entry.line,
            input_grads=tuple(parameter for _, parameter, _ in probes),
            assumptions=(*parameters.assumptions, *assumptions),
        )

    def _read_parameters(self) -> Parameters:
        """Construct on the mesh and on the mesh of ones, and compare."""
        local = self._construct_on(self.mesh)
        whole = self._construct_on(self.mesh.ones())
        given = {n: self.inputs[n] for n in self._function_parameters()} | dict(self.declared.params)
        return read_parameters(local, whole, self.mesh, given, self.entry.file, self.entry.line)

    def _construct_on(self, sizes: Mesh) -> nn.Module:
        with scratch_mesh(sizes) as mesh:
            return self.construct(mesh)

    def construct(self, mesh: Any) -> nn.Module:
        """The user's module with this rank's parameters."""
        name = getattr(self.model, "__name__", self.entry.name)
        if not self.entry.is_class and not self.entry.is_step:
            return FunctionModule(
                self.entry.target, mesh, self._function_parameters(), self._local_sizes(mesh)
            )
        try:
            module = self.model(**self._arguments(mesh))
        except (CannotCheck, KeyboardInterrupt):
            raise
        except BaseException as e:
            raise blame(e, f"constructing {name}", self.entry.file, self.entry.line) from e
        if not isinstance(module, nn.Module):
            raise CannotCheck(
                f"{name} made a {type(module).__name__}, not an nn.Module", self.entry.file, self.entry.line
            )
        refuse_cycles(module, name, self.entry.file, self.entry.line)
        return module

    def _arguments(self, mesh: Any) -> dict[str, Any]:
        init = constructor_of(self.model)
        names = [a.name for a in signature_of(init).arguments] if init else []
        values: dict[str, Any] = dict.fromkeys(MESH_NAMES, mesh) | self.sizes | dict(self.declared.init)
        return {n: values[n] for n in names if n in values}

    def _function_parameters(self) -> dict[str, Type]:
        """Arguments of a function annotated as parameters."""
        if self.entry.is_class or self.entry.is_step:
            return {}
        names = [a.name for a in self.signature.arguments if a.kind == "Parameter"]
        return {n: bind(self.inputs[n], self.sizes) for n in names if n in self.inputs}

    def _local_sizes(self, mesh: Any) -> dict[str, int]:
        return {a: mesh.size(i) for i, a in enumerate(self.mesh)}

    def _builder(self, driver: drive.Driver) -> Callable[[Any], Any]:
        if self.entry.is_step:
            return self.construct
        return lambda mesh: driver.wrap(self.construct(mesh), mesh, self._local_sizes(mesh))

    def _step(self) -> Callable[..., Any]:
        """The user's training step, given what it names."""
        names = [a.name for a in self.signature.arguments]

        def step(module: Any, mesh: Any, **inputs: Any) -> Any:
            own = dict.fromkeys(MODEL_NAMES, module) | dict.fromkeys(MESH_NAMES, mesh)
            return self.entry.target(**{n: v for n, v in own.items() if n in names}, **inputs)

        return step

    def _probes(self, parameters: Parameters) -> tuple[tuple[str, str, Type], ...]:
        """Arguments whose gradients are checked: floating ones of a program whose result is no loss."""
        if self.entry.is_step:
            return ()
        wanted = self.declared.input_grads
        held = self._function_parameters()
        floating = [n for n, t in self.inputs.items() if drive.is_float(t) and n not in held]
        if wanted is None:
            result = list(self.outputs.values())
            wanted = not (len(result) == 1 and result[0].is_scalar)
        names = floating if wanted is True else list(wanted or ())
        for n in names:
            if n not in floating:
                raise CannotCheck(
                    f"input_grads names {n!r}, which is no floating argument of {self._where()}",
                    self.entry.file,
                    self.entry.line,
                )
        own = {n.partition(".")[0] for n in parameters.types} | parameters.attributes
        probes = [(n, n if n not in own else f"{n} (argument)", self.inputs[n]) for n in names]
        return tuple((n, p, bind(t, self.sizes)) for n, p, t in probes)

    def _grads(self, parameters: Parameters) -> tuple[dict[str, str], tuple[str, ...]]:
        """What is done to gradients outside: as declared, else data axes are reduced as the loss is."""
        if self.declared.grads is not None:
            for axis in self.declared.grads:
                if axis not in self.mesh:
                    raise CannotCheck(
                        f"unknown axis {axis!r} in grads: the mesh has {', '.join(self.mesh)}",
                        self.entry.file,
                        self.entry.line,
                    )
            return dict(self.declared.grads), ()
        if self.entry.is_step:
            return {}, ()
        cut = [a for t in self.inputs.values() for d in t.dims or () for a in d.axes]
        held = {a for t in parameters.types.values() for a in t.axes}
        data = [a for a in self.mesh if a in cut and a not in held]
        if not data or not parameters.types:
            return {}, ()
        pending = {a: op for t in self.outputs.values() if t.is_scalar for a, op in t.partial}
        grads = {a: "avg" if pending.get(a) == "avg" else "sum" for a in data}
        said = ", ".join(f"{op} over {a}" for a, op in grads.items())
        return grads, (f"an outer wrapper reduces gradients: {said} (say grads={{...}} otherwise)",)


class FunctionModule(nn.Module):
    """A function as a module, whose `nn.Parameter` arguments are parameters."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Any,
        parameters: Mapping[str, Type],
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__()
        self._function, self._mesh = function, mesh
        self._names = set(inspect.signature(function).parameters)
        for name, t in parameters.items():
            self.register_parameter(name, drive.empty_parameter(t, sizes))

    def forward(self, **inputs: Any) -> Any:
        own: dict[str, Any] = {n: p for n, p in self._parameters.items() if n in self._names}
        own |= {n: self._mesh for n in MESH_NAMES if n in self._names}
        return drive.call_by_name(self._function, own | inputs)


def constructor_of(model: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function whose arguments make a module: `__init__` of a class unless inherited from torch."""
    if not isinstance(model, type):
        return model
    init: Callable[..., Any] = getattr(model, "__init__")  # noqa: B009
    return None if init is nn.Module.__init__ else init


def refuse_cycles(module: nn.Module, name: str, file: str, line: int) -> None:
    """A module that contains itself makes most of PyTorch recurse for ever."""

    def walk(m: nn.Module, path: str, above: dict[nn.Module, str]) -> None:
        if m in above:
            raise CannotCheck(f"modules form a cycle: {path} is {above[m]} itself", file, line)
        for child, sub in m.named_children():
            walk(sub, f"{path}.{child}", above | {m: path})

    walk(module, name, {})
