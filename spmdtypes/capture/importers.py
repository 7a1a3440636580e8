"""`torch.export` programs and `torch.fx` graphs as the same graph that capture makes."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from spmdtypes.capture.comms import _functional_kind
from spmdtypes.capture.raw import dtype_name
from spmdtypes.capture.run import CaptureError
from spmdtypes.graph import Comm, Frame, Graph, Node, Ref, TensorMeta

_TORCH = str(Path(torch.__file__).parent) + "/"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_DROPPED = ("device", "layout", "pin_memory", "non_blocking", "generator")
_SAME = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default"}

Groups = Mapping[str, tuple[str, ...]]


def from_export(
    ep: torch.export.ExportedProgram,
    mesh: Mapping[str, int] | None = None,
    coords: Mapping[str, int] | None = None,
    groups: Groups | None = None,
) -> Graph:
    """The graph of an exported program: inputs by argument name, parameters and buffers by FQN.

    `groups` says which mesh axes the process groups named in the program span. Outputs: "output",
    "param:<fqn>" for updated buffers, "grad:<fqn>" where the export has a backward.
    """
    if any(_mutates(n) for n in ep.graph.nodes):
        ep = ep.run_decompositions({})
    signature = ep.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= dict(getattr(signature, "inputs_to_lifted_tensor_constants", {}))
    outputs: dict[str, str] = {}  # graph node name -> border name
    for spec in signature.output_specs:
        name = getattr(spec.arg, "name", None)
        if name is None:
            continue
        match spec.kind.name:
            case "USER_OUTPUT" | "LOSS_OUTPUT":
                outputs[name] = ""
            case "BUFFER_MUTATION" | "PARAMETER_MUTATION":
                outputs[name] = f"param:{spec.target}"
            case "GRADIENT_TO_PARAMETER":
                outputs[name] = f"grad:{spec.target}"
    return _Importer(ep.graph_module, mesh or {}, coords or {}, groups or {}, names).run(outputs)


def from_fx(
    gm: fx.GraphModule,
    mesh: Mapping[str, int] | None = None,
    coords: Mapping[str, int] | None = None,
    groups: Groups | None = None,
    names: Mapping[str, str] | None = None,
) -> Graph:
    """The graph of a functional ATen-level `GraphModule` whose nodes carry `meta["val"]` (as
    `make_fx` and AOTAutograd make them). `names` renames placeholders, to parameter FQNs for
    example. Raises CaptureError for other graphs."""
    return _Importer(gm, mesh or {}, coords or {}, groups or {}, names or {}).run({})


def _mutates(n: fx.Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


class _Importer:
    def __init__(
        self,
        gm: fx.GraphModule,
        mesh: Mapping[str, int],
        coords: Mapping[str, int],
        groups: Groups,
        names: Mapping[str, str],
    ) -> None:
        self.gm = gm
        self.graph = Graph(dict(mesh), {a: coords.get(a, 0) for a in mesh})
        self.groups = groups
        self.names = names
        self.env: dict[fx.Node, Any] = {}
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}

    def run(self, outputs: Mapping[str, str]) -> Graph:
        for n in self.gm.graph.nodes:
            if n.op == "output":
                self._outputs(n, outputs)
            else:
                self.env[n] = self._visit(n)
        return self.graph

    def _visit(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            name = self.names.get(n.name) or self.names.get(str(n.target)) or str(n.target)
            return self._emit(n, "input", name=name) if self._metas(n) else n.meta.get("val")
        if n.op == "get_attr":
            value = operator.attrgetter(str(n.target))(self.gm)
            n.meta.setdefault("val", value)
            return self._emit(n, "const", name=str(n.target)) if isinstance(value, Tensor) else value
        if n.op != "call_function":
            raise CaptureError(f"{n.op} {n.target}: only graphs of ATen ops can be imported")
        if n.target is operator.getitem:
            source, index = self.env[n.args[0]], n.args[1]  # type: ignore[index]
            if isinstance(source, Ref):
                return Ref(source.node, index)  # type: ignore[arg-type]
            return source[index] if source is not None else None
        if not isinstance(n.target, torch._ops.OpOverload):
            return self._other(n)
        if _mutates(n):
            raise CaptureError(f"{n.target} mutates its arguments: only functional graphs can be imported")
        op = str(n.target)
        if op in _SAME or n.target._schema.name.endswith("::wait_tensor"):
            return self.env[n.args[0]]  # type: ignore[index]
        if n.target.namespace == "_c10d_functional":
            return self._collective(n)
        return self._emit(n, op, self._decode(n.args), self._kwargs(n))

    def _other(self, n: fx.Node) -> Any:
        if n.target in (torch.ops.aten.sym_size, operator.add, operator.mul, operator.floordiv, operator.sub):
            return n.meta.get("val")
        name = getattr(n.target, "__name__", str(n.target))
        self.graph.notes.append(f"{name} is not looked into")
        return self._emit(n, f"hop.{name}", self._decode(n.args))

    def _kwargs(self, n: fx.Node) -> dict[str, Any]:
        return {k: self._decode(v) for k, v in n.kwargs.items() if k not in _DROPPED and v is not None}

    def _decode(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.env[x]
        if isinstance(x, (list, tuple)):
            return tuple(self._decode(y) for y in x)
        if isinstance(x, torch.dtype):
            return dtype_name(x)
        if isinstance(x, (torch.device, torch.layout, torch.memory_format)):
            return str(x).removeprefix("torch.")
        return int(x) if isinstance(x, torch.SymInt) else x

    def _metas(self, n: fx.Node) -> tuple[TensorMeta | None, ...]:
        value = n.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        if not any(isinstance(v, Tensor) for v in values):
            return ()
        return tuple(_meta(v) if isinstance(v, Tensor) else None for v in values)

    def _emit(
        self,
        n: fx.Node,
        op: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "",
    ) -> Ref:
        metas = self._metas(n)
        if not metas and n.op == "call_function" and not op.startswith("hop."):
            raise CaptureError(
                f"node {n.name} ({op}) carries no value in its meta: trace with make_fx or export"
            )
        node = Node(len(self.graph.nodes), op, args, kwargs or {}, metas, name=name)
        node.stack = self._stack(n)
        node.phase = "backward" if n.meta.get("autograd_backward") else "forward"
        modules = n.meta.get("nn_module_stack")
        if modules:
            node.module = next(reversed(modules.values()))[0].removeprefix("L['self'].")
        self.graph.nodes.append(node)
        return Ref(node.id)

    def _collective(self, n: fx.Node) -> Any:
        func: Any = n.target
        given = {a.name: v for a, v in zip(func._schema.arguments, n.args)} | dict(n.kwargs)
        group = str(given["group_name"])
        kind, reduce, splits, root = _functional_kind(func._schema.name.split("::")[1], given)
        axes = self.groups.get(group, ())
        if not axes:
            note = f"the mesh axes of process group {group!r} are not known"
            if note not in self.graph.notes:
                self.graph.notes.append(note)
        comm = Comm(kind, axes, (), reduce, None, splits, root)
        operand = self._decode(given.get("inputs", given.get("input", given.get("tensor"))))
        if not isinstance(operand, tuple):
            ref = self._emit(n, f"comm.{kind}", (operand,))
            self.graph.nodes[ref.node].comm = comm
            return ref
        refs = []
        for x, meta in zip(operand, self._metas(n)):
            ref = self._emit(n, f"comm.{kind}", (x,))
            self.graph.nodes[ref.node].comm, self.graph.nodes[ref.node].outs = comm, (meta,)
            refs.append(ref)
        return refs

    def _outputs(self, n: fx.Node, outputs: Mapping[str, str]) -> None:
        listed = n.args[0] if isinstance(n.args[0], (list, tuple)) else [n.args[0]]
        results = [r for r in listed if isinstance(r, fx.Node) and isinstance(self.env[r], Ref)]
        plain = [r for r in results if not outputs.get(r.name)]
        names = {r: "output" if len(plain) == 1 else f"output.{i}" for i, r in enumerate(plain)}
        for r in results:
            self.graph.outputs[names.get(r) or outputs[r.name]] = self.env[r]

    def _stack(self, n: fx.Node) -> int:
        found = _FRAME.findall(n.meta.get("stack_trace") or n.stack_trace or "")
        frames = tuple(
            Frame(file, int(line), 0, int(line), 0, function)
            for file, line, function in reversed(found)
            if not file.startswith(_TORCH)
        )
        if frames not in self.stacks:
            self.stacks[frames] = len(self.graph.stacks)
            self.graph.stacks.append(frames)
        return self.stacks[frames]


def _meta(t: Tensor) -> TensorMeta:
    return TensorMeta(tuple(int(s) for s in t.shape), dtype_name(t.dtype), t.requires_grad)
