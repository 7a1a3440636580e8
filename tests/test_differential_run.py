"""Programs really run on all ranks and on the mesh of ones; only wrong ones show a wrong border."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdtypes import differential
from spmdtypes.checker import check_program
from spmdtypes.contracts import Program
from spmdtypes.notation import parse


def program(build: Callable[..., nn.Module], mesh: dict[str, int], **types: Any) -> Program:
    for key in ("inputs", "params", "results"):
        types[key] = {n: parse(t) for n, t in types.get(key, {}).items()}
    if isinstance(types.get("output"), str):
        types["output"] = parse(types["output"])
    return Program(build.__name__, mesh, build, **types)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Mlp(nn.Module):
    copies = True

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.tp = mesh.get_group("tp")
        self.norm = nn.LayerNorm(4)
        self.up = nn.Parameter(torch.empty(6 // mesh["tp"].size(), 4))
        self.down = nn.Parameter(torch.empty(4, 6 // mesh["tp"].size()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.copies:
            h = Copy.apply(h, self.tp)
        y = Reduce.apply(F.gelu(h @ self.up.t()) @ self.down.t(), self.tp)
        return (x + y).square().mean()


class Uncopied(Mlp):
    copies = False


class MeanOfSum(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


MLP = {
    "inputs": {"x": "f32[8@dp, 4]"},
    "params": {"norm.weight": "[4]", "norm.bias": "[4]", "up": "[6@tp, 4]", "down": "[4, 6@tp]"},
    "output": "f32[] | dp:P(avg)",
    "grads": {"dp": "avg"},
}
MESH = {"dp": 2, "tp": 2}


def test_a_right_program_has_no_wrong_border() -> None:
    found = differential.run(program(Mlp, MESH, **MLP))
    assert found.ok
    assert found.tested_axes == ("dp", "tp")
    assert len(found.seeds) == 3
    assert set(found.borders) == {
        "output",
        "grad:norm.weight",
        "grad:norm.bias",
        "grad:up",
        "grad:down",
    }


def test_a_missing_reduction_shows_at_the_gradients_upstream() -> None:
    found = differential.run(program(Uncopied, MESH, **MLP))
    assert {b.name: b.kind for b in found.wrong} == {
        "grad:norm.weight": "replicas differ",
        "grad:norm.bias": "replicas differ",
    }


def test_a_uniform_factor_is_named() -> None:
    sums = MLP | {"output": "f32[] | dp:P", "grads": {"dp": "sum"}}
    found = differential.run(program(Mlp, MESH, **sums))
    assert {b.name: round(b.ratio or 0, 6) for b in found.wrong} == dict.fromkeys(found.borders, 2.0)


def test_only_other_axes_are_tested_when_the_reference_is_forced_to_keep_one() -> None:
    sums = MLP | {"output": "f32[] | dp:P", "grads": {"dp": "sum"}}
    found = differential.run(program(Mlp, MESH, **sums), reference_mesh={"dp": 2})
    assert found.ok
    assert found.tested_axes == ("tp",)
    assert found.kept_axes == ("dp",)


class OneExpertARank(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.ep = mesh.get_group("ep")
        self.w = nn.Parameter(torch.empty(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w[0]).sum()


def test_an_axis_the_program_cannot_do_without_is_kept() -> None:
    types: dict[str, Any] = {"inputs": {"x": "f32[8@dp, 4]"}, "params": {"w": "[2@ep, 4]"}}
    types |= {"output": "f32[] | dp:P ep:P", "grads": {"dp": "sum"}}
    found = differential.run(program(OneExpertARank, {"dp": 2, "ep": 2}, **types))
    assert found.ok
    assert found.kept_axes == ("ep",)
    assert found.tested_axes == ("dp",)
    alone = types | {"inputs": {"x": "f32[8, 4]"}, "output": "f32[] | ep:P", "grads": {}}
    found = differential.run(program(OneExpertARank, {"ep": 2}, **alone))
    assert found.tested_axes == ()
    assert {b.kind for b in found.borders.values()} == {"untested"}
    assert any("no axis was tested" in n for n in found.notes)


class Plain(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.group = mesh.get_group("dp")
        self.w = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).square().mean()


PLAIN = {"inputs": {"x": "f32[8@dp, 4]"}, "params": {"w": "[4]"}}


def only_the_first_reduces(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    loss = model(x).detach()
    if dist.get_rank() == 0:
        dist.all_reduce(loss, group=model.group)
    return {"loss": loss}


def other_order(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    loss = model(x).detach()
    calls = [lambda: dist.all_reduce(loss), lambda: dist.broadcast(loss, 0)]
    for call in calls if dist.get_rank() == 0 else calls[::-1]:
        call()
    return {"loss": loss}


def waits_for_a_message(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
    dist.barrier()
    return {"loss": model(x).detach()}


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (only_the_first_reduces, {"all_reduce", None}),
        (other_order, {"all_reduce", "broadcast"}),
        (waits_for_a_message, {"recv", "barrier"}),
    ],
)
def test_ranks_that_cannot_meet_are_named_with_the_place(step: Any, kinds: set[str | None]) -> None:
    found = differential.run(program(Plain, {"dp": 2}, step=step, **PLAIN))
    assert found.divergence is not None
    assert {c.kind if c else None for c in found.divergence.calls} == kinds
    frames = [c.frames[0] for c in found.divergence.calls if c]
    assert {Path(f.file).name for f in frames} == {Path(__file__).name}
    assert set(found.divergence.ranks) == {0, 1}
    assert {d["dp"] for d in found.divergence.coords} == {0, 1}


def fails(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    if dist.get_rank() == 1:
        raise KeyError("missing")
    dist.barrier()
    return {}


def test_an_exception_on_one_rank_is_a_failure_with_its_line() -> None:
    found = differential.run(program(Plain, {"dp": 2}, step=fails, **PLAIN))
    (failure,) = found.failures
    assert (failure.rank, failure.error, failure.stage) == (1, "KeyError", "run")
    assert failure.frames[0].function == "fails"
    assert found.divergence is None


def dies(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    if dist.get_rank() == 1:
        os.write(2, b"last words")
        os._exit(3)
    dist.barrier()
    return {}


def test_a_dead_rank_is_a_failure_with_what_it_printed(capfd: Any) -> None:
    found = differential.run(program(Plain, {"dp": 2}, step=dies, **PLAIN))
    assert [f.rank for f in found.failures] == [1]
    assert "last words" in found.failures[0].output
    assert capfd.readouterr() == ("", "")


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    differential.run(program(Plain, {"dp": 2}, step=other_order, **PLAIN))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert torch.get_default_dtype() is torch.float32
    assert not dist.is_initialized()


class Dropped(nn.Module):
    """Dropout on a sharded and on a replicated value; `seed(mesh)` makes the streams."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.tp = mesh.get_group("tp")
        rank = mesh.get_local_rank("tp")
        self.shared = torch.Generator().manual_seed(5)
        self.own = torch.Generator().manual_seed(6 + rank)
        self.up = nn.Parameter(torch.empty(6 // mesh["tp"].size(), 4))
        self.down = nn.Parameter(torch.empty(4, 6 // mesh["tp"].size()))

    def streams(self) -> tuple[torch.Generator, torch.Generator]:
        return self.own, self.shared

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.streams()
        h = x @ self.up.t()
        y = Reduce.apply((h * torch.empty_like(h).bernoulli_(0.5, generator=inner)) @ self.down.t(), self.tp)
        return (x + y * (torch.rand(y.shape, generator=outer) < 0.5)).square().mean()


class SameOnShards(Dropped):
    def streams(self) -> tuple[torch.Generator, torch.Generator]:
        return self.shared, self.shared


class OtherOnReplicas(Dropped):
    def streams(self) -> tuple[torch.Generator, torch.Generator]:
        return self.own, self.own


DROPPED = {
    "inputs": {"x": "f32[8, 4]"},
    "params": {"up": "[6@tp, 4]", "down": "[4, 6@tp]"},
    "output": "f32[]",
}


def test_random_numbers_of_a_right_program_equal_the_reference() -> None:
    found = differential.run(program(Dropped, {"tp": 2}, **DROPPED))
    assert found.ok
    assert [(d.treatment, d.streams) for d in found.draws] == [("block", ("tp",)), ("same", ())]


@pytest.mark.parametrize(("build", "bad"), [(SameOnShards, 0), (OtherOnReplicas, 1)])
def test_streams_that_do_not_fit_their_values_show(build: Any, bad: int) -> None:
    found = differential.run(program(build, {"tp": 2}, **DROPPED))
    assert "output" in {b.name for b in found.wrong}
    assert [d.treatment == "own" for d in found.draws] == [i == bad for i in range(2)]


class Single(nn.Module):
    """Works in single precision inside."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() @ self.w.float()).square().mean().double()


def test_rounding_of_a_low_precision_is_no_error() -> None:
    types = PLAIN | {"output": "f32[] | dp:P(avg)", "grads": {"dp": "avg"}}
    found = differential.run(program(Single, {"dp": 4}, **types))
    assert found.ok
    assert found.tolerance > 1e-6


class Block(nn.Module):
    """A result that is no scalar: its cotangent is random, cut like the result."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(4 // mesh["tp"].size(), 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_a_result_may_be_a_pending_sum() -> None:
    types = {"inputs": {"x": "f32[8@dp, 4@tp]"}, "params": {"w": "[4@tp, 3]"}, "grads": {"dp": "sum"}}
    assert differential.run(program(Block, MESH, output="f32[8@dp, 3] | tp:P", **types)).ok
    assert not differential.run(program(Block, MESH, output="f32[8@dp, 3]", **types)).ok


class Ring(nn.Module):
    """Every rank sees all blocks, passed around; on one rank the ring is a message to itself."""

    stale = False

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.cp = mesh.get_group("cp")
        self.w = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        n, rank = self.cp.size(), dist.get_rank(self.cp)
        block = (x @ self.w).detach()
        total = torch.zeros_like(block)
        for _ in range(n):
            total = total + block.sum(0)
            arriving = torch.empty_like(block)
            send = dist.P2POp(dist.isend, block, group=self.cp, group_peer=(rank + 1) % n)
            receive = dist.P2POp(dist.irecv, arriving, group=self.cp, group_peer=(rank - 1) % n)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            block = block if self.stale else arriving
        return (x @ self.w * total).sum()


class StaleRing(Ring):
    stale = True


def test_a_ring_is_tested_down_to_one_rank() -> None:
    types = {"inputs": {"x": "[8@cp, 4]"}, "params": {"w": "[4, 4]"}, "output": "[] | cp:P"}
    right, stale = (
        differential.run(program(build, {"cp": 4}, grads={"cp": "sum"}, **types))
        for build in (Ring, StaleRing)
    )
    assert right.ok
    assert right.tested_axes == ("cp",)
    assert {b.name for b in stale.wrong} == {"output", "grad:w"}


def picky(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    if x.abs().max() > 8:
        raise ValueError("spike")
    loss = model(x).detach()
    dist.all_reduce(loss)
    return {"loss": loss / mesh.size()}


def test_values_that_only_make_the_program_raise_do_not_count() -> None:
    found = differential.run(program(Plain, {"dp": 2}, step=picky, **PLAIN))
    assert found.ok
    assert found.kept_axes == ()
    assert found.seeds == (0, 1)
    assert any("seed 2 does not count" in n for n in found.notes)


def root(model: Any, mesh: Any, x: Tensor) -> dict[str, Tensor]:
    total = (x + model.w.abs()).sqrt().sum().detach()
    dist.all_reduce(total)
    return {"total": total}


def test_where_nothing_is_finite_positive_values_are_tried() -> None:
    found = differential.run(program(Plain, {"dp": 2}, step=root, **PLAIN))
    assert found.seeds == (0, 1, 2)
    assert found.ok


class Contradictory(OneExpertARank):
    """Its result is declared equal on the ranks of an axis that cannot be tested."""


def test_what_replicas_should_share_is_tested_on_kept_axes_too() -> None:
    types: dict[str, Any] = {"inputs": {"x": "f32[8, 4]"}, "params": {"w": "[2@ep, 4]"}, "output": "f32[]"}
    found = differential.run(program(Contradictory, {"ep": 2}, **types))
    assert [(b.name, b.kind) for b in found.wrong] == [("output", "replicas differ")]


def exchanges(model: Any, mesh: Any, x: Tensor) -> dict[str, Any]:
    if mesh.size() > 1:
        other = 1 - dist.get_rank()
        here, there = torch.full((1,), 2.0), torch.empty(1)
        receive = dist.P2POp(dist.irecv, there, other)
        for work in dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, here, other)]):
            work.wait()
    return {"size": float(mesh.size())}


@pytest.mark.parametrize("keep_values", [False, True])
def test_receives_posted_first_are_no_deadlock_and_numbers_count_as_results(keep_values: bool) -> None:
    found = differential.run(program(Plain, {"dp": 2}, step=exchanges, **PLAIN), keep_values=keep_values)
    assert found.divergence is None
    assert not found.failures
    assert [(b.name, b.ratio) for b in found.wrong] == [("result:size", 2.0)]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="CPU time of other processes is not known")
def test_ranks_that_stop_for_no_reason_of_the_program_are_no_finding() -> None:
    parent = os.getpid()

    class Stops(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if os.getppid() == parent and dist.get_rank() == 1:
                signal.pause()
            return super().forward(x)

    stops = program(Stops, {"dp": 1, "tp": 2}, **MLP)
    assert differential.run(stops, seeds=(0,)).stalled
    report = check_program(stops)
    assert report.findings == ()
    assert report.failures == ()
    assert any("could not be tested" in a for a in report.assumptions)
