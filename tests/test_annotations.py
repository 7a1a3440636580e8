import sys
from types import SimpleNamespace
from typing import Annotated, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from spmdtypes import I, P, R, S, Spmd, V, program
from spmdtypes.annotations import as_type, declaration_of, signature_of
from spmdtypes.contracts import Program
from spmdtypes.entry import Entry
from spmdtypes.errors import CannotCheck
from spmdtypes.mesh import Mesh, parse_sizes
from spmdtypes.notation import NotationError, format_type, parse

# a placement in Spmd[Tensor, "b@dp s"] looks like a forward reference
# ruff: noqa: F722, F821


def texts(types):
    return {name: format_type(t) for name, t in types.items()}


def test_spmd_is_annotated_at_run_time():
    assert Spmd[Tensor, "b@dp s"] == Annotated[Tensor, parse("b@dp s")]
    with pytest.raises(NotationError, match="Spmd takes a type and a text"):
        Spmd[Tensor]


def test_importing_the_package_needs_no_torch():
    import subprocess

    code = "import sys, spmdtypes as s; s.Spmd, s.Mesh, s.parse; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_letters_make_types_of_a_shape():
    assert as_type(((8, 16), {"dp": S(0), "tp": P})) == parse("8@dp 16 | tp:P")
    assert as_type(((8, 16), {"dp": S(0), "cp": S(0), "tp": R})) == parse("8@dp@cp 16")
    assert as_type(((8,), {"dp": I, "tp": V, "cp": P("avg")})) == parse("8 | dp:I, tp:V, cp:P(avg)")
    with pytest.raises(NotationError, match=r"dp: S\(2\) names no dim"):
        as_type(((8, 16), {"dp": S(2)}))


def test_a_mesh_says_what_is_wrong_with_it():
    assert Mesh(dp=2, tp=4) == {"dp": 2, "tp": 4} == parse_sizes("dp=2, tp=4")
    assert Mesh(dp=2, tp=4).world == 8
    with pytest.raises(NotationError, match="mesh axis tp has size 0"):
        Mesh(tp=0)
    with pytest.raises(NotationError, match="dp given twice"):
        parse_sizes("dp=2,dp=3")


@program(mesh={"dp": 2, "tp": 4})
class Block(nn.Module):
    up: Spmd[nn.Parameter, "f@tp d"]
    down: Spmd[nn.Parameter, "d f@tp"]

    def __init__(self, mesh, d, f, scale=2.0):
        super().__init__()
        width = f // mesh["tp"].size()
        self.scale = scale
        self.norm = nn.LayerNorm(d)
        self.up = nn.Parameter(torch.empty(width, d))
        self.down = nn.Parameter(torch.empty(d, width))

    def forward(self, x: Spmd[Tensor, "b@dp s d"]) -> Spmd[Tensor, "b@dp s d"]:
        return self.norm(x) @ self.up.t() @ self.down.t() * self.scale


def test_hints_of_the_class_stay_usable():
    assert get_type_hints(Block)["up"] is nn.Parameter
    assert declaration_of(Block).mesh == {"dp": 2, "tp": 4}
    assert [a.name for a in signature_of(Block.forward).arguments] == ["x"]


def test_a_class_becomes_a_program():
    p = Entry.of(Block).program()
    assert isinstance(p, Program)
    assert texts(p.params) == {
        "up": "f32[32@tp 7]",
        "down": "f32[7 32@tp]",
        "norm.weight": "f32[7]",
        "norm.bias": "f32[7]",
        "x": "6@dp 5 7",
    }
    assert p.grads == {"dp": "sum"}
    assert p.input_grads == ("x",)
    assert any("norm.weight, norm.bias are replicated" in a for a in p.assumptions)


def test_a_result_that_is_no_loss_is_weighed_with_a_cotangent():
    p = Entry.of(Block).program()
    assert texts(p.inputs) == {"cotangent": "6@dp 5 7"}
    assert texts(p.output) == {"output": "6@dp 5 7", "loss": "f32[] | dp:P"}


def run(p, mesh, seed=0):
    from spmdtypes.notation import local_shape
    from spmdtypes.scratch import scratch_mesh

    torch.manual_seed(seed)
    with scratch_mesh(mesh) as m:
        module = p.build(m)
        for q in module.parameters():
            nn.init.normal_(q)
        inputs = {n: torch.randn(local_shape(t, mesh)) for n, t in p.inputs.items()}
        return module, inputs, module(**inputs)


def test_the_driven_module_keeps_names_and_has_gradients_of_its_arguments():
    p = Entry.of(Block).program()
    module, inputs, out = run(p, p.mesh)
    assert type(module) is Block
    assert set(dict(module.named_parameters())) == set(p.params)
    out["loss"].backward()
    torch.testing.assert_close(out["loss"], (out["output"] * inputs["cotangent"]).sum())
    assert module.x.grad.shape == (3, 5, 7)
    assert not out["output"].requires_grad


def test_under_an_averaging_wrapper_the_local_loss_makes_up_for_the_mean():
    p = Entry.of(program(mesh={"dp": 2}, grads={"dp": "avg"})(type("Sub", (Plain,), {}))).program()
    assert texts(p.output)["loss"] == "f32[] | dp:P(avg)"
    module, inputs, out = run(p, p.mesh)
    out["loss"].backward()
    torch.testing.assert_close(out["loss"], 2 * (out["output"] * inputs["cotangent"]).sum())
    torch.testing.assert_close(module.x.grad, inputs["cotangent"] * module.w)


class Plain(nn.Module):
    w: Spmd[nn.Parameter, "d"]

    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.empty(d))

    def forward(self, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
        return x * self.w


def test_a_scalar_result_is_the_loss_and_its_arguments_are_data():
    @program(mesh={"dp": 2})
    def loss(x: Spmd[Tensor, "b@dp d"], w: Spmd[nn.Parameter, "d"]) -> Spmd[Tensor, "[] | dp:P(avg)"]:
        return (x * w).mean()

    p = Entry.of(loss).program()
    assert texts(p.inputs) == {"x": "6@dp 4"}
    assert texts(p.params) == {"w": "f32[4]"}
    assert format_type(p.output) == "[] | dp:P(avg)"
    assert p.grads == {"dp": "avg"}
    assert run(p, p.mesh)[2].shape == ()


def test_a_training_step_gets_what_it_names():
    @program(mesh={"dp": 2}, model=Plain, results={"loss": "[]"})
    def step(model, mesh, x: Spmd[Tensor, "b@dp d"]):
        return {"loss": mesh.size(), "w": model.w, "x": x}

    p = Entry.of(step).program()
    module, mesh = Plain(3), SimpleNamespace(size=lambda: 2)
    assert p.step(module, mesh, x=1) == {"loss": 2, "w": module.w, "x": 1}
    assert texts(p.results) == {"loss": "[]"}
    assert texts(p.params) == {"w": "f32[4]"}
    assert p.output is None


def test_several_results_are_typed_by_position():
    @program(mesh={"dp": 2})
    def pair(x: Spmd[Tensor, "b@dp d"]) -> tuple[Spmd[Tensor, "b@dp d"], Spmd[Tensor, "b@dp"]]:
        return x * 2, x.sum(-1)

    p = Entry.of(pair).program()
    assert texts(p.inputs) == {"cotangent_0": "6@dp 4", "cotangent_1": "6@dp"}
    assert set(run(p, p.mesh)[2]) == {"0", "1", "loss"}


def test_parameters_of_submodules_and_sizes_tell_how_they_are_cut():
    class Column(nn.Module):
        weight: Spmd[nn.Parameter, "out@tp in_"]

        def __init__(self, n, m):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(n, m))
            self.bias = nn.Parameter(torch.empty(n))

    @program(mesh={"dp": 2, "tp": 4})
    class Net(nn.Module):
        def __init__(self, mesh, d=8):
            super().__init__()
            tp = mesh["tp"].size()
            self.layers = nn.ModuleList([Column(16 // tp, d), Column(24 // tp, 16)])

        def forward(self, x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp f@tp"]:
            raise AssertionError

    p = Entry.of(Net).program()
    assert texts(p.params) == {
        "layers.0.weight": "f32[16@tp 8]",
        "layers.0.bias": "f32[16@tp]",
        "layers.1.weight": "f32[24@tp 16]",
        "layers.1.bias": "f32[24@tp]",
        "x": "6@dp 8",
    }
    assert any("layers.0.bias is '16@tp'" in a for a in p.assumptions)


def test_sizes_that_fit_several_ways_must_be_annotated():
    @program(mesh={"dp": 2, "tp": 2})
    class Net(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            self.w = nn.Parameter(torch.empty(8 // mesh["tp"].size()))

        def forward(self, x: Spmd[Tensor, "b@dp"]) -> Spmd[Tensor, "b@dp"]:
            raise AssertionError

    with pytest.raises(CannotCheck, match=r"parameter w has shape \[4\] on dp=2,tp=2 and \[8\]"):
        Entry.of(Net).program()


def test_dtensor_parameters_say_it_themselves():
    from torch.distributed.tensor import DTensor, Replicate, Shard

    @program(mesh={"dp": 2, "tp": 4})
    class Net(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            local = torch.empty(8 // mesh["tp"].size(), 4)
            self.w = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False))

        def forward(self, x: Spmd[Tensor, "b@dp"]) -> Spmd[Tensor, "b@dp"]:
            raise AssertionError

    assert texts(Entry.of(Net).program().params)["w"] == "f32[8@tp 4]"


def test_later_attempts_suit_programs_that_want_more_divisibility():
    @program(mesh={"tp": 2})
    class Attention(nn.Module):
        def __init__(self, mesh, d, heads: int):
            super().__init__()
            if d % heads or heads % 2 or (d // heads) % 2:
                raise ValueError("sizes")
            self.w = nn.Parameter(torch.empty(d))

        def forward(self, x: Spmd[Tensor, "b d"]) -> Spmd[Tensor, "b d"]:
            return x * self.w

    with pytest.raises(CannotCheck, match="constructing Attention: ValueError: sizes"):
        Entry.of(Attention).program(0)
    assert Entry.of(Attention).program(2)
