import dataclasses

import pytest
import torch
from torch import Tensor, nn

import spmdtypes
import spmdtypes.checker
from spmdtypes import CannotCheck, P, S, Spmd, check, program
from spmdtypes.notation import format_type
from spmdtypes.report import Report


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.w = nn.Parameter(torch.empty(8 // mesh.size(), 4))

    def forward(self, x):
        return x @ self.w


def build(mesh):
    return Net(mesh)


@pytest.fixture
def seen(monkeypatch):
    programs = []

    def check_program(program, options):
        programs.append((program, options))
        return Report(program.name)

    monkeypatch.setattr(spmdtypes.checker, "check_program", check_program)
    return programs


def test_a_builder_with_all_types_given(seen):
    types = {"inputs": {"x": "b f@tp"}, "params": {"w": "f@tp 4"}, "output": "b 4 | tp:P"}
    check(build, mesh={"tp": 2}, dims={"b": 6, "f": 8}, test=False, seed=5, **types)
    ((program, options),) = seen
    assert program.name == "build"
    assert format_type(program.inputs["x"]) == "6 8@tp"
    assert format_type(program.output) == "6 4 | tp:P"
    assert (options.test, options.seeds[0]) == (False, 5)


def test_types_may_be_shapes_with_placements(seen):
    given = {"inputs": {"x": ((6, 8), {"tp": S(1)})}, "output": ((6, 4), {"tp": P})}
    check(build, mesh={"tp": 2}, params={"w": "8@tp 4"}, **given)
    assert format_type(seen[0][0].inputs["x"]) == "6 8@tp"
    assert format_type(seen[0][0].output) == "6 4 | tp:P"


def test_a_program_is_taken_as_it_is(seen):
    program = spmdtypes.Program("it", {"tp": 2}, build, params={"w": spmdtypes.parse("8@tp 4")})
    with pytest.raises(CannotCheck, match="missing 1 required positional argument: 'x'"):
        check(program)


def test_a_module_instance_is_refused():
    with pytest.raises(CannotCheck, match="a Linear instance exists on one mesh only"):
        check(nn.Linear(2, 2), mesh={"tp": 2})


def test_what_is_no_program_is_refused():
    with pytest.raises(CannotCheck, match="int is no program"):
        check(3, mesh={"tp": 2})


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(CannotCheck, match="dim 7 is not divisible by axis tp = 2"):
        check(build, mesh={"tp": 2}, inputs={"x": "6 7@tp"}, params={"w": "8@tp 4"})


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = spmdtypes.nonsense


def test_a_function_with_a_parameter_positional_only_arguments_and_a_dataclass():
    """On two axes of one size only the annotation says which of them cuts the parameter."""

    @dataclasses.dataclass
    class Result:
        y: Tensor

    @program(mesh={"dp": 2, "tp": 2}, input_grads=(), grads={"dp": "sum"}, output={"y": "b@dp f@tp"})
    def up(x: Spmd[Tensor, "b@dp d"], /, w: Spmd[nn.Parameter, "f@tp d"]):  # noqa: F722
        return Result(x @ w.t())

    report = check(up)
    assert report.ok, str(report)
    assert not report.assumptions
