"""Script mode without processes: command lines, meshes, parameters and data put together, stages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spmdtypes.errors import CannotCheck
from spmdtypes.graph import Frame
from spmdtypes.notation import Type, format_type
from spmdtypes.script import axes, stages
from spmdtypes.script.contract import contract, parted_replicas
from spmdtypes.script.facts import Arrival, Facts, Held, Key
from spmdtypes.script.launch import Launch, ones
from spmdtypes.script.refusals import failure, heard, incomplete, too_early
from spmdtypes.script.stitch import Parts, Whole, data, parameter

GRID = {"dp": 2, "tp": 2}
WHOLE = torch.arange(32.0).reshape(8, 4)


def shown(whole: Whole | None) -> str:
    assert whole is not None
    return format_type(Type(whole.type.dims))


# ---- how a script is started


def test_placeholders_are_sizes_of_axes_and_one_on_one_rank() -> None:
    launch = Launch("train.py", ("--tp", "{tp}", "--world={dp*tp}", "--lr", "{x}"))
    assert launch.argv(GRID) == ["--tp", "2", "--world=4", "--lr", "{x}"]
    assert launch.argv({"dp": 1, "tp": 1}) == ["--tp", "1", "--world=1", "--lr", "{x}"]


def test_with_placeholders_other_degrees_stay_as_they_are() -> None:
    launch = Launch("train.py", ("--tp", "{tp}", "--pipeline-stages", "4"))
    assert launch.argv({"dp": 1, "tp": 1}) == ["--tp", "1", "--pipeline-stages", "4"]


@pytest.mark.parametrize(
    ("args", "alone"),
    [
        (["--tp", "4"], ["--tp", "1"]),
        (["--tensor-parallel-size=2"], ["--tensor-parallel-size=1"]),
        (["parallel.pp=2"], ["parallel.pp=1"]),
        (["--mesh-dp", "2", "3"], ["--mesh-dp", "1", "1"]),
        (["--steps", "4", "--batch=8", "--depth", "2"], ["--steps", "4", "--batch=8", "--depth", "2"]),
        (["--dp-backend", "gloo"], ["--dp-backend", "gloo"]),
    ],
)
def test_degrees_of_parallelism_are_one_on_one_rank(args: list[str], alone: list[str]) -> None:
    assert ones(args) == alone
    assert Launch("t.py", tuple(args)).argv({"dp": 2}) == args


def test_reference_arguments_are_taken_as_given() -> None:
    launch = Launch("t.py", ("--tp", "2"), reference_args=("--plain", "{tp}"))
    assert launch.argv({"tp": 2}) == ["--tp", "2"]
    assert launch.argv({"tp": 1}) == ["--plain", "1"]


# ---- the mesh


def with_groups(groups: dict[str, Sequence[tuple[int, ...]]], world: int) -> list[Facts]:
    """What every rank knows of groups, by site."""
    return [
        Facts(groups={site: next(g for g in gs if r in g) for site, gs in groups.items()})
        for r in range(world)
    ]


def test_without_groups_all_ranks_are_data_parallel() -> None:
    assert axes.mesh_of([Facts()] * 4, 4, None) == {"dp": 4}


def test_the_mesh_is_read_off_groups_and_their_names() -> None:
    facts = with_groups({"mesh_tp": [(0, 1), (2, 3)], "mesh_dp": [(0, 2), (1, 3)]}, 4)
    assert axes.mesh_of(facts, 4, None) == {"dp": 2, "tp": 2}
    facts = with_groups({"expert": [(0, 1, 2, 3), (4, 5, 6, 7)]}, 8)
    assert axes.mesh_of(facts, 8, None) == {"dp": 2, "ep": 4}


def test_a_device_mesh_names_the_axes() -> None:
    facts = [Facts(meshes=[(("replica", "shard"), (2, 3), tuple(range(6)))]) for _ in range(6)]
    assert axes.mesh_of(facts, 6, None) == {"replica": 2, "shard": 3}


def test_a_device_mesh_that_the_groups_do_not_fit_is_not_the_whole_story() -> None:
    facts = with_groups({"mesh_tp": [(0, 1), (2, 3)]}, 4)
    facts[0].meshes.append((("all",), (4,), (0, 1, 2, 3)))
    assert axes.mesh_of(facts, 4, None) == {"dp": 2, "tp": 2}


def test_a_declared_mesh_counts_but_must_have_as_many_ranks() -> None:
    assert axes.mesh_of([Facts()] * 4, 4, {"a": 4}) == {"a": 4}
    with pytest.raises(CannotCheck, match="the mesh dp=2,tp=3 has 6 ranks, not 4"):
        axes.mesh_of([], 4, {"dp": 2, "tp": 3})


def test_sites_stand_for_axes() -> None:
    facts = with_groups({"a": [(0, 1), (2, 3)], "b": [(0, 2), (1, 3)]}, 4)[0]
    assert axes.axes_by_site(facts, GRID) == {"a": ("tp",), "b": ("dp",)}


# ---- parameters and data


def test_a_parameter_is_put_together_along_the_axis_that_explains_its_size() -> None:
    upper, lower = WHOLE.chunk(2)
    found = parameter(Parts((upper, lower, upper, lower), GRID), (8, 4), None, [])
    assert shown(found) == "8@tp 4"
    assert found is not None and torch.equal(found.value, WHOLE) and not found.parted


def test_a_parameter_may_be_cut_along_its_last_dim() -> None:
    left, right = WHOLE.chunk(2, dim=1)
    found = parameter(Parts((left, left, right, right), GRID), (8, 4), None, [])
    assert shown(found) == "8 4@dp"
    assert found is not None and torch.equal(found.value, WHOLE)


def test_equal_parts_are_cut_as_other_parameters_are() -> None:
    parts = Parts((torch.zeros(4),) * 4, GRID)
    assert shown(parameter(parts, (8,), None, ["tp"])) == "8@tp"
    assert shown(parameter(parts, (8,), None, ["dp"])) == "8@dp"


def test_a_parameter_of_full_size_is_replicated_and_parted_where_it_differs() -> None:
    other = WHOLE + 1
    found = parameter(Parts((WHOLE, WHOLE, other, other), GRID), (8, 4), None, [])
    assert shown(found) == "8 4"
    assert found is not None and found.parted == ("dp",)


def test_sizes_that_do_not_fit_are_not_put_together() -> None:
    assert parameter(Parts((torch.zeros(3),) * 4, GRID), (8,), None, []) is None
    assert parameter(Parts((torch.zeros(4, 2),) * 4, GRID), (8,), None, []) is None


def test_data_is_joined_along_rows_over_the_axes_where_it_differs() -> None:
    upper, lower = WHOLE.chunk(2)
    found = data(Parts((upper, upper, lower, lower), GRID), None, ["dp"])
    assert shown(found) == "8@dp 4"
    assert found is not None and torch.equal(found.value, WHOLE)


def test_data_is_cut_along_the_dim_that_is_longer_on_one_rank() -> None:
    left, right = WHOLE.chunk(2, dim=1)
    found = data(Parts((left, right), {"cp": 2}), WHOLE, ["cp"])
    assert shown(found) == "8 4@cp"
    assert data(Parts((right, left), {"cp": 2}), WHOLE, ["cp"]) is None  # dealt in another order


def test_data_that_one_rank_has_by_itself_is_left_alone() -> None:
    assert data(Parts((WHOLE, WHOLE), {"dp": 2}), WHOLE, []) is None
    found = data(Parts((WHOLE, WHOLE), {"dp": 2}), WHOLE + 1, [])
    assert found is not None and torch.equal(found.value, WHOLE)


def test_numbers_that_are_nan_on_all_ranks_do_not_differ() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert Parts((nan, nan.clone()), {"dp": 2}).differing == ()
    assert Parts((nan, nan + 1), {"dp": 2}).differing == ("dp",)


# ---- contracts


def holding(value: Tensor, batch: Tensor | None = None) -> Facts:
    """A rank with one trained parameter and perhaps a batch."""
    facts = Facts(held={"w": Held(value, True, shape=tuple(value.shape), frames=(AT,))})
    if batch is not None:
        facts.arrivals = [Arrival(Key("batch", (), 0), None, batch)]  # type: ignore[arg-type]
    return facts


AT = Frame("train.py", 7, 0, 7, 5, "main")


def test_a_contract_has_global_parameters_and_batches() -> None:
    ranks = [holding(w, b) for w, b in zip(WHOLE.chunk(2), torch.eye(6).chunk(2))]
    found = contract(ranks, holding(torch.zeros(8, 4), torch.zeros(3, 6)), {"tp": 2}, {})
    assert format_type(Type(found.types()["w"].dims)) == "8@tp 4"
    ((name, batch),) = found.data.values()
    assert name == "batch 0 of the data loader"
    assert torch.equal(batch.value, torch.eye(6))
    assert found.assumptions == ["how w are cut is read off their sizes"]
    assert found.counts() == {3: 6, 18: 36}


def test_replicas_that_start_apart_are_told_where_the_parameter_is_made() -> None:
    ranks = [holding(WHOLE), holding(WHOLE + 1)]
    finding = parted_replicas(contract(ranks, holding(WHOLE), {"dp": 2}, {}), ranks)
    assert finding is not None and finding.code == "SPMD501" and finding.lines() == (7,)
    same = [holding(WHOLE), holding(WHOLE)]
    assert parted_replicas(contract(same, holding(WHOLE), {"dp": 2}, {}), same) is None


# ---- stages


def stage(*names: str) -> Facts:
    return Facts(held={n: Held(torch.tensor(float(i)), True) for i, n in enumerate(names)})


def test_axes_along_which_parameters_have_other_names_split_the_mesh() -> None:
    mesh = {"pp": 2, "dp": 2}
    facts = [stage("first"), stage("first"), stage("second"), stage("second")]
    split = stages.split_axes(facts, mesh)
    assert split == ("pp",)
    assert [(p.ranks, p.mesh) for p in stages.parts_of(mesh, split)] == [
        ((0, 1), {"dp": 2}),
        ((2, 3), {"dp": 2}),
    ]
    assert stages.split_axes([stage("a")] * 4, mesh) == ()


def test_ranks_that_form_a_mesh_of_their_own() -> None:
    assert stages.common([0, 1], GRID) == {"tp": 2}
    assert stages.common([0, 2], GRID) == {"dp": 2}
    assert stages.common([0, 3], GRID) is None


def test_lists_that_each_rank_numbers_from_zero_are_renamed() -> None:
    from spmdtypes.script.facts import ScriptOutcome

    def holds(first: int, n: int) -> Facts:
        return Facts(held={f"experts.{i}.w": Held(torch.full((2,), first + i), True) for i in range(n)})

    ranks = [ScriptOutcome(r, 0, facts=holds(2 * r, 2)) for r in range(2)]
    names = stages.renamed(ranks, holds(0, 4), {"ep": 2})
    assert names[0] == {"experts.0.w": "experts.0.w", "experts.1.w": "experts.1.w"}
    assert names[1] == {"experts.0.w": "experts.2.w", "experts.1.w": "experts.3.w"}
    stages.rename(ranks[1], names[1])
    assert sorted(ranks[1].facts.held) == ["experts.2.w", "experts.3.w"]


# ---- what cannot be checked


def test_an_exception_is_told_with_its_place() -> None:
    launch = Launch("/x/train.py")
    said = heard(failure(1, CannotCheck("no network", "/x/load.py", 5)), "", launch)
    assert (said.message, said.file, said.line) == ("no network", "/x/load.py", 5)
    syntax = SyntaxError("invalid syntax", ("/x/model.py", 3, 1, "def", 3, 4))
    said = heard(failure(0, syntax), "", launch)
    assert (said.message, said.line) == ("rank 0 raised SyntaxError: invalid syntax", 3)
    said = heard(failure(0, SystemExit("no data")), "", launch)
    assert (said.message, said.line) == ("the script exits saying: no data", 1)
    assert heard(failure(0, SystemExit(3)), "", launch).message == "the script exits with code 3"


def test_ends_before_anything_happened_and_before_all_steps() -> None:
    launch = Launch("/x/train.py")
    early = too_early(Facts(ended="time", stopped=("/x/train.py", 9)), "", launch)
    assert early is not None and early.line == 9
    assert early.message == "the script ran out of time before any module was called"
    some = Facts(held=stage("w").held, ended="end")
    assert too_early(some, "", launch) is None
    assert (
        incomplete(some, 1) == "the script ends before an optimizer step: what it did until then is compared"
    )
    some.steps = 1
    assert incomplete(some, 1) is None
    assert "after 1 of 2 optimizer steps" in (incomplete(some, 2) or "")
