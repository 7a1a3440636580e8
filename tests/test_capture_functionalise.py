"""A recorded program, made pure, computes what it computed when it ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from spmdtypes.capture.functionalise import functionalise
from spmdtypes.capture.raw import DTYPES
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.replay import replay
from spmdtypes.capture.variants import overload
from spmdtypes.graph import Graph, Ref

SHAPE = (4, 6)


def pure(run: Callable[[dict[str, Tensor]], dict[str, Tensor]], inputs: dict[str, Tensor]) -> Graph:
    """Record `run`, check that its graph is pure and replays to the same results, return the graph."""
    given_values = {k: v.clone() for k, v in inputs.items()}
    rec = Recorder({}, {}, keep_values=True)
    with rec.recording():
        for name, t in inputs.items():
            rec.bind(t, name)
        results = run(inputs)
    done = functionalise(rec, {k: rec.view(t) for k, t in results.items()})
    graph = done.graph
    drawn = lambda node: [done.values.get(Ref(node.id, k)) for k in range(len(node.outs))]  # noqa: E731
    constants = {
        n.id: done.values[Ref(n.id)] for n in graph.nodes if n.op == "const" and Ref(n.id) in done.values
    }
    env = replay(graph, given_values, lambda node, _: drawn(node), constants, drawn)
    for name, t in results.items():
        torch.testing.assert_close(env[graph.outputs[name]], t.detach(), equal_nan=True)
    for ref, value in done.values.items():
        if not graph.nodes[ref.node].op.startswith(("aten.empty", "aten.new_empty")):
            torch.testing.assert_close(env[ref], value, equal_nan=True)
    for node in graph.nodes:
        func = overload(node.op)
        assert func is None or not func._schema.is_mutable, node.op
        for out, ref in zip(node.outs, (Ref(node.id, k) for k in range(len(node.outs)))):
            if out is not None:
                assert (out.shape, DTYPES[out.dtype]) == (tuple(env[ref].shape), env[ref].dtype)
    return graph


def ops(graph: Graph) -> list[str]:
    return [n.op.removeprefix("aten.") for n in graph.nodes if n.op != "input"]


def x() -> dict[str, Tensor]:
    return {"x": torch.arange(24.0).reshape(SHAPE)}


def test_in_place_chain() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        y = t["x"].clone()
        y.mul_(2).add_(1).relu_()
        return {"y": y, "x": t["x"]}

    assert ops(pure(run, x())) == ["clone.default", "mul.Tensor", "add.Tensor", "relu.default"]


def test_write_through_a_view_reaches_the_base() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t["x"][1:3].view(-1)[2:5].mul_(10)
        return {"x": t["x"]}

    pure(run, x())


def test_base_write_reaches_views_taken_earlier() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        row, column = t["x"][1], t["x"][:, 2]
        t["x"].add_(1)
        return {"row": row * 2, "column": column * 3}

    pure(run, x())


def test_buffer_filled_piece_by_piece_is_a_concatenation() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        a, b = t["x"] + 1, t["x"] * 2
        buffer = torch.empty(48)
        buffer[:24].view(SHAPE).copy_(a)
        buffer[24:].view(SHAPE).copy_(b)
        return {"out": buffer * 1.0}

    graph = pure(run, x())
    assert "cat.default" in ops(graph)
    assert not any("scatter" in op or "empty" in op for op in ops(graph))


def test_reading_back_a_piece_needs_no_buffer() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        buffer = torch.empty(48)
        buffer[:24].view(SHAPE).copy_(t["x"] + 1)
        return {"out": buffer[:24].view(SHAPE).sin()}

    assert "slice.Tensor" not in ops(pure(run, x()))


def test_rows_filled_one_by_one_are_a_stack() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        out = torch.empty(SHAPE)
        for i in range(4):
            out[i] = t["x"][3 - i]
        return {"out": out + 0}

    assert "stack.default" in ops(pure(run, x()))


def test_as_strided_of_as_strided() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        a = t["x"].as_strided((3, 4), (8, 2), 1)
        b = a.as_strided((2, 2), (3, 5), 2)
        b.mul_(-1)
        return {"x": t["x"], "a": a + 0, "b": b + 0}

    pure(run, x())


def test_data_swap() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        p = nn.Parameter(t["x"].clone())
        p.data = p.data[:2] * 3
        p.data.add_(1)
        return {"p": p * 2}

    pure(run, x())


def test_out_variants_and_lists() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        a = torch.empty(0)
        torch.add(t["x"], 1, out=a)
        b = torch.empty(4, 4)
        torch.mm(t["x"], t["x"].t(), out=b)
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.max(t["x"], dim=1, out=(values, indices))
        return {"a": a, "b": b, "values": values, "indices": indices}

    pure(run, x())


def test_in_place_keeps_the_dtype_of_its_target() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        half = t["x"].to(torch.bfloat16)
        half.add_(t["x"])
        half[0] = t["x"][1]
        return {"half": half}

    pure(run, x())


def test_in_place_views() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        y = t["x"].clone()
        y.t_().unsqueeze_(0).mul_(2)
        return {"y": y}

    pure(run, x())


def test_foreach() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        ps = [t["x"].clone(), t["x"] + 1]
        torch._foreach_mul_(ps, 2.0)
        torch._foreach_add_(ps, [t["x"], t["x"]], alpha=0.5)
        torch._foreach_addcdiv_(ps, [t["x"], t["x"]], [t["x"] + 1, t["x"] + 2], [0.1, 0.2])
        torch._foreach_lerp_(ps, [t["x"], t["x"]], 0.3)
        norms = torch._foreach_norm(ps)
        roots = torch._foreach_sqrt(torch._foreach_abs(ps))
        torch._foreach_maximum_(ps, 1.0)
        torch._foreach_zero_(roots[:1])
        torch._foreach_copy_(roots[1:], ps[:1])
        return {"p0": ps[0], "p1": ps[1], "n": norms[1], "r0": roots[0], "r1": roots[1]}

    assert not any("_foreach" in op for op in ops(pure(run, x())))


def test_bucket_ops_of_fsdp() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.empty(2, 16)
        torch._chunk_cat([t["x"], t["x"][:1, :4]], 0, 2, out=flat)
        a, b = torch.empty(2, 12), torch.empty(2, 4)
        torch.split_with_sizes_copy(flat, [12, 4], dim=1, out=[a, b])
        return {"flat": flat, "a": a, "b": b}

    pure(run, x())


def test_random_and_batch_norm_state() -> None:
    norm = nn.BatchNorm1d(6)

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        noise = torch.empty(SHAPE).normal_().clamp_(-1, 1)
        y = nn.functional.dropout(norm(t["x"] + noise), 0.5)
        assert norm.running_mean is not None
        return {"y": y, "mean": norm.running_mean, "noise": noise}

    pure(run, x())


def test_complex_views() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        z = torch.view_as_complex(t["x"].reshape(4, 3, 2))
        w = torch.view_as_real(z * z.conj() * 1j)
        w[..., 0] += 1
        return {"w": w.flatten(1)}

    pure(run, x())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
    ],
)
def test_optimizer_steps(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 1))
    optimizer = make(model.parameters())

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(t["x"] / 24).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return dict(model.named_parameters()) | {
            f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None
        }

    pure(run, x())


def test_dead_steps_go_and_reads_stay() -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t["x"].cos()
        n = int(t["x"].sum().item())
        return {"y": t["x"] + n}

    assert ops(pure(run, x())) == ["sum.default", "_local_scalar_dense.default", "add.Tensor"]


# ---- any program of views and mutations

VIEWS: list[Callable[[Tensor, int], Tensor]] = [
    lambda t, k: t[k % t.shape[0] :] if t.dim() and t.shape[0] else t,
    lambda t, k: t[: max(1, k % (t.shape[0] + 1))] if t.dim() and t.shape[0] else t,
    lambda t, k: t[::2] if t.dim() else t,
    lambda t, k: t.select(k % t.dim(), k % t.shape[k % t.dim()]) if t.dim() and 0 not in t.shape else t,
    lambda t, k: t.t() if t.dim() == 2 else t,
    lambda t, k: t.transpose(0, -1) if t.dim() else t,
    lambda t, k: t.unsqueeze(k % (t.dim() + 1)),
    lambda t, k: t.squeeze(),
    lambda t, k: t.view(-1) if t.is_contiguous() else t,
    lambda t, k: t.view(2, -1) if t.is_contiguous() and t.numel() % 2 == 0 and t.numel() else t,
    lambda t, k: t.chunk(2)[k % 2] if t.dim() and t.shape[0] > 1 else t,
    lambda t, k: t.unbind(0)[k % t.shape[0]] if t.dim() and t.shape[0] else t,
    lambda t, k: t.diagonal() if t.dim() == 2 else t,
    lambda t, k: t.detach(),
    lambda t, k: t.view(torch.int32) if t.dtype == torch.float32 else t.view(torch.float32),
    lambda t, k: t.as_strided((2,), (3,), t.storage_offset()) if t.numel() > 3 and t.is_contiguous() else t,
]
WRITES: list[Callable[[Tensor, Tensor, int], Any]] = [
    lambda t, u, k: t.add_(k),
    lambda t, u, k: t.mul_(-1),
    lambda t, u, k: t.zero_(),
    lambda t, u, k: t.fill_(k),
    lambda t, u, k: t.copy_(u) if t.shape == u.shape else t.add_(u.float().mean().to(t.dtype)),
    lambda t, u, k: t.clamp_(-k, k),
    lambda t, u, k: t.masked_fill_(t > k, k),
]
MAKES: list[Callable[[Tensor, Tensor, int], Tensor]] = [
    lambda t, u, k: t + k,
    lambda t, u, k: t.clone(),
    lambda t, u, k: t + u if t.shape == u.shape and t.dtype == u.dtype else t * 2,
    lambda t, u, k: torch.cat([t.reshape(-1).float(), u.reshape(-1).float()])[:24],
]
STEPS = st.lists(
    st.tuples(st.sampled_from(["view", "view", "write", "write", "make"]), *[st.integers(0, 50)] * 4),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_program_of_views_and_mutations(steps: list[tuple[str, int, int, int, int]]) -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        live = [t["x"]]
        for kind, which, i, j, k in steps:
            a, b = live[i % len(live)], live[j % len(live)]
            if kind == "view":
                live.append(VIEWS[which % len(VIEWS)](a, k))
            elif kind == "write":
                WRITES[which % len(WRITES)](a, b, k)
            else:
                live.append(MAKES[which % len(MAKES)](a, b, k))
        return {str(i): v for i, v in enumerate(live)}

    pure(run, x())
