"""Types of a module's parameters: from annotations, DTensor placements, or sizes on two meshes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Shard, _StridedShard

from spmdtypes.annotations import class_types
from spmdtypes.drive import replicated, short_dtype
from spmdtypes.errors import CannotCheck
from spmdtypes.mesh import Mesh
from spmdtypes.notation import (
    Dim,
    NotationError,
    Type,
    check_axes,
    check_divisible,
    format_type,
    local_shape,
    ways,
)


@dataclass(frozen=True)
class Parameters:
    """Types by fully qualified name, what was assumed, and the root's attribute names."""

    types: dict[str, Type]
    assumptions: tuple[str, ...]
    attributes: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Declared:
    type: Type
    file: str
    line: int


def root_types(cls: type) -> dict[str, tuple[Type, int]]:
    """Annotated attributes of a class: name -> (type, line)."""
    return {name: (t, line) for name, t, _, line in class_types(cls)}


def read_parameters(
    local: nn.Module, whole: nn.Module, mesh: Mesh, given: Mapping[str, Type], file: str, line: int
) -> Parameters:
    """Types of all parameters of `local` (rank 0's module) and of its annotated buffers.

    `whole` is the same module on the mesh of ones: it has the global sizes. Parameters without an
    annotation are replicated where both sizes agree; else their sizes tell how they are cut, if only
    one way fits.
    """
    declared = dict(_annotated(local)) | {n: _Declared(t, file, line) for n, t in given.items()}
    locals_ = dict(local.named_parameters()) | _buffers(local, declared)
    wholes = dict(whole.named_parameters()) | _buffers(whole, declared)
    if missing := [n for n in locals_ if n not in wholes] or [n for n in wholes if n not in locals_]:
        raise CannotCheck(
            f"parameter {missing[0]} exists on one of the meshes {mesh} and {mesh.ones()} only", file, line
        )
    if unknown := [n for n in given if n not in locals_]:
        raise CannotCheck(f"params names {unknown[0]!r}, which the module does not have", file, line)
    types, plain, guessed = {}, [], []
    for name, p in locals_.items():
        shape, whole_shape = tuple(p.shape), tuple(wholes[name].shape)
        dtype = short_dtype(p.dtype)
        if isinstance(p, DTensor):
            types[name] = _dtensor_type(p, dtype)
        elif name in declared:
            types[name] = _sized(name, declared[name], whole_shape, shape, dtype, mesh)
        elif shape == whole_shape:
            types[name] = replicated(shape, dtype)
            plain.append(name)
        else:
            types[name] = _guess(name, shape, whole_shape, dtype, mesh, file, line)
            guessed.append(f"{name} is {format_type(replace(types[name], dtype=None))!r}")
    assumptions = [f"{_listed(plain)} replicated: no annotation"] if plain else []
    assumptions += [f"{', '.join(guessed)}: read off the local sizes"] if guessed else []
    return Parameters(types, tuple(assumptions), frozenset(dir(local)))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _annotated(root: nn.Module) -> Iterator[tuple[str, _Declared]]:
    """Annotations of every submodule's class, by fully qualified name of the tensor."""
    for prefix, m in root.named_modules():
        for name, t, file, line in class_types(type(m)):
            if isinstance(getattr(m, name, None), Tensor):
                yield f"{prefix}.{name}" if prefix else name, _Declared(t, file, line)
            elif not inspect.isroutine(getattr(type(m), name, None)) and not hasattr(m, name):
                raise CannotCheck(
                    f"{type(m).__name__}.{name} is annotated, but the constructor makes no such tensor",
                    file,
                    line,
                )


def _buffers(root: nn.Module, declared: Mapping[str, _Declared]) -> dict[str, Tensor]:
    return {n: b for n, b in root.named_buffers() if n in declared}


def _sized(
    name: str, d: _Declared, whole: tuple[int, ...], local: tuple[int, ...], dtype: str, mesh: Mesh
) -> Type:
    """The annotation with the sizes the module really has."""
    text = d.type.text or format_type(d.type)
    try:
        check_axes(d.type, mesh)
        dims = d.type.dims if d.type.dims is not None else tuple(Dim("_") for _ in whole)
        if len(dims) != len(whole):
            raise NotationError(f"{name} has {len(whole)} dims {list(whole)}, but {text!r} names {len(dims)}")
        for dim, n in zip(dims, whole, strict=True):
            if isinstance(dim.size, int) and dim.size != n:
                raise NotationError(f"{name} has shape {list(whole)}, not {text!r}, on the mesh of ones")
        t = Type(tuple(Dim(n, dim.axes) for dim, n in zip(dims, whole, strict=True)), dtype, d.type.partial)
        check_divisible(replace(t, text=text), mesh, {})
    except NotationError as e:
        raise CannotCheck(e.message, d.file, d.line, e.excerpt) from e
    want = local_shape(t, mesh)
    if want != local:
        raise CannotCheck(
            f"{name} is declared {text!r}, {list(want)} on each rank of {mesh}, "
            f"but the constructor made {list(local)}",
            d.file,
            d.line,
        )
    return t


def _dtensor_type(p: DTensor, dtype: str) -> Type:
    """What a DTensor says of itself. Strided shards lie inside the axes that follow them."""
    axes: list[list[str]] = [[] for _ in p.shape]
    partial: list[tuple[str, str]] = []
    names = p.device_mesh.mesh_dim_names or ()
    pairs = list(zip(names, p.placements, strict=True))
    strided = [x for x in pairs if isinstance(x[1], _StridedShard)]
    for axis, placement in [x for x in pairs if x not in strided] + strided:
        if isinstance(placement, Shard | _StridedShard):
            axes[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            partial.append((axis, str(placement.reduce_op)))
    return Type(tuple(Dim(n, tuple(a)) for n, a in zip(p.shape, axes, strict=True)), dtype, tuple(partial))


def _guess(
    name: str,
    local: tuple[int, ...],
    whole: tuple[int, ...],
    dtype: str,
    mesh: Mesh,
    file: str,
    line: int,
) -> Type:
    """How sizes on the two meshes say a parameter is cut, when only one way fits."""
    dims = []
    for n, total in zip(local, whole, strict=False):
        fitting = [c for c in _cuts(mesh) if n * ways(c, mesh) == total]
        if len(local) != len(whole) or len(fitting) != 1:
            raise CannotCheck(
                f"parameter {name} has shape {list(local)} on {mesh} and {list(whole)} on the mesh of ones: "
                f'annotate how it is cut ({name.rpartition(".")[2]}: Spmd[nn.Parameter, "..."])',
                file,
                line,
            )
        dims.append(Dim(total, fitting[0]))
    return Type(tuple(dims), dtype)


def _cuts(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Every ordered choice of axes larger than one."""
    large = [a for a, n in mesh.items() if n > 1]
    for k in range(len(large) + 1):
        for chosen in combinations(large, k):
            yield from permutations(chosen)
