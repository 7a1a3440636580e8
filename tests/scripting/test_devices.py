"""A script written for GPUs goes on, and is told what it would see there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scripting import run

EITHER = pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])


@EITHER
def test_the_usual_choice_of_a_device(tmp_path: Path, tensors: bool) -> None:
    ran = run(
        """
        import os, torch
        assert torch.cuda.is_available() and torch.cuda.device_count() == 4
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        model = torch.nn.Linear(3, 2).to(device)
        x = torch.randn(4, 3).to(device, non_blocking=True)
        y = model(x)
        facts = (y.device, y.is_cuda, y.device.type, model.weight.is_cuda, torch.cuda.current_device())
        assert y.cpu().device.type == "cpu" and not y.cpu().is_cuda
        """,
        tmp_path,
        tensors=tensors,
    )
    assert ran["facts"] == (torch.device("cuda:1"), True, "cuda", True, 1)
    assert ran["y"].device.type == "cpu"


@EITHER
def test_every_way_to_ask_for_a_device(tmp_path: Path, tensors: bool) -> None:
    ran = run(
        """
        import torch
        made = {
            "factory": torch.zeros(2, device="cuda"),
            "index": torch.zeros(2, device=0),
            "device of an index": torch.zeros(2, device=torch.device(1)),
            "cuda": torch.zeros(2).cuda(),
            "cuda(i)": torch.zeros(2).cuda(3),
            "to": torch.zeros(2).to("cuda:1"),
            "to a tensor": torch.zeros(2).to(torch.ones(1, device="cuda")),
            "like": torch.zeros_like(torch.ones(1, device="cuda")),
            "pinned": torch.zeros(2, pin_memory=True).pin_memory().to("cuda", torch.float64, True),
            "parameter": torch.nn.Parameter(torch.zeros(2, device="cuda")),
            "module": torch.nn.Linear(2, 2, device="cuda").weight,
            "moved module": torch.nn.Linear(2, 2).cuda().weight,
            "view": torch.zeros(4, device="cuda")[1:].view(3, 1).t(),
            "split": torch.zeros(4, device="cuda").chunk(2)[1],
            "out of a function": (torch.zeros(2, device="cuda") + 1) * torch.ones(2, device="cuda"),
        }
        with torch.device("cuda"):
            made["context"] = torch.zeros(2)
        torch.set_default_device("cuda")
        made["default"] = torch.zeros(2)
        torch.set_default_device("cpu")
        on_cuda = {name: t.is_cuda for name, t in made.items()}
        with torch.device("cuda"), torch.device("cpu"):
            inner = torch.zeros(2)
        t = torch.zeros(2, device="cuda")
        others = [torch.zeros(2), inner, t.to("cpu"), t.cpu()]
        on_cpu = [t.is_cpu for t in others]
        """,
        tmp_path,
        tensors=tensors,
    )
    assert [name for name, yes in ran["on_cuda"].items() if not yes] == []
    assert ran["on_cpu"] == [True] * 4
    assert {t.device.type for t in ran["made"].values()} == {"cpu"}


def test_libraries_are_told_the_truth(tmp_path: Path) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "lib_asking.py").write_text(
        "import torch\ndef facts(t):\n"
        "    return torch.cuda.is_available(), torch.cuda.device_count(), t.is_cuda, t.device.type\n"
    )
    code = f"""
        import sys, torch
        sys.path.insert(0, {str(library)!r})
        import lib_asking
        facts = lib_asking.facts(torch.ones(1, device="cuda"))
        """
    assert run(code, tmp_path)["facts"] == (False, 0, False, "cpu")
    assert run(code, tmp_path, own=[library])["facts"] == (True, 4, True, "cuda")


def test_moving_between_host_and_device_copies(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        host = torch.zeros(2)
        moved = host.to("cuda")
        moved += 1
        snapshot = moved.cpu()
        moved += 1
        same = moved.to("cuda")
        same += 1
        leaf = torch.zeros(2, requires_grad=True)
        model = torch.nn.Linear(2, 2)
        before = model.weight
        kept = model.to("cuda").weight is before
        """,
        tmp_path,
    )
    assert (ran["host"][0], ran["snapshot"][0], ran["moved"][0]) == (0, 1, 3)
    assert ran["kept"]


def test_the_two_random_streams_are_apart(tmp_path: Path) -> None:
    """Seeding the accelerator by rank leaves initial values, drawn on the CPU, as they are."""
    code = """
        import torch
        torch.manual_seed(0)
        torch.cuda.manual_seed(SEED)
        model = torch.nn.Linear(4, 4)
        model.cuda()
        weight = model.weight.detach().clone()
        x = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
        fresh = torch.rand(4, device="cuda")
        host = torch.rand(4)
        in_place = torch.empty(4, device="cuda").normal_()
        """
    first, second = (run(code.replace("SEED", s), tmp_path) for s in ("1", "2"))
    for name in ("weight", "host"):
        assert torch.equal(first[name], second[name]), name
    for name in ("x", "fresh", "in_place"):
        assert not torch.equal(first[name], second[name]), name


def test_manual_seed_seeds_both(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        def draw():
            torch.manual_seed(3)
            return torch.rand(3), torch.rand(3, device="cuda")
        a, b = draw(), draw()
        state = torch.cuda.get_rng_state()
        c = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        d = torch.rand(3, device="cuda")
        with torch.random.fork_rng(devices=[0]):
            e = torch.rand(3, device="cuda")
        f = torch.rand(3, device="cuda")
        g = torch.Generator(device="cuda").manual_seed(5)
        h = torch.rand(3, device="cuda", generator=g)
        """,
        tmp_path,
    )
    assert torch.equal(ran["a"][0], ran["b"][0]) and torch.equal(ran["a"][1], ran["b"][1])
    assert torch.equal(ran["c"], ran["d"])
    assert torch.equal(ran["e"], ran["f"])
    assert not torch.equal(ran["a"][0], ran["a"][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_what_the_forward_drew(tmp_path: Path, reentrant: bool) -> None:
    ran = run(
        f"""
        import torch
        from torch.utils.checkpoint import checkpoint
        masks = []
        def f(x):
            y = torch.nn.functional.dropout(x, 0.5)
            masks.append(y.detach() != 0)
            return (y * x).sin()
        x = torch.ones(64, device="cuda", requires_grad=True)
        checkpoint(f, x, use_reentrant={reentrant}).sum().backward()
        """,
        tmp_path,
    )
    first, again = ran["masks"]
    assert torch.equal(first, again) and 0 < first.sum() < 64


@pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])
def test_calls_that_only_a_gpu_answers(tmp_path: Path, tensors: bool) -> None:
    run(
        """
        import torch
        torch.cuda.empty_cache(); torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
        gb = torch.cuda.max_memory_allocated() / 2**30 + torch.cuda.memory_stats()["num_alloc_retries"]
        assert "GB" in torch.cuda.get_device_name(0) and torch.cuda.get_device_capability() >= (8, 0)
        assert torch.cuda.get_device_properties(0).total_memory > 0
        free, total = torch.cuda.mem_get_info()
        torch.cuda.memory._record_memory_history(max_entries=10)
        torch.cuda.memory._dump_snapshot("snapshot.pickle")
        print(torch.cuda.memory_summary())
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(); end.record(); end.synchronize()
        rate = 1 / start.elapsed_time(end)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.cuda.nvtx.range("x"), torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
            torch.cuda.nvtx.range_push("a"); torch.cuda.nvtx.range_pop()
        x = torch.cuda.FloatTensor([1.0, 2.0])
        x.record_stream(side)
        torch.cuda.profiler.start(); torch.cuda.cudart().cudaProfilerStop()
        acc = torch.accelerator
        assert acc.is_available() and acc.current_accelerator().type == "cuda"
        acc.set_device_index(2)
        assert acc.current_device_index() == 2 == torch.cuda.current_device()
        module = torch.get_device_module("cuda")
        module.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        handler = torch.profiler.tensorboard_trace_handler("traces")
        with torch.profiler.profile(activities=activities, on_trace_ready=handler) as prof:
            with torch.profiler.record_function("step"):
                torch.ones(2, device="cuda").sum()
            prof.step()
        prof.key_averages().table(sort_by="cuda_time_total")
        s, e = torch.Stream(device="cuda"), torch.Event(device="cuda")
        assert isinstance(device := torch.device("cuda"), torch.device) and device == torch.device("cuda")
        assert isinstance(torch.Generator("cuda"), torch.Generator)
        """,
        tmp_path,
        tensors=tensors,
    )
    assert not (tmp_path / "traces").exists()


def test_mixed_precision_of_a_gpu(tmp_path: Path) -> None:
    """Scaling and unscaling happen as there, also in a step whose gradients are not finite."""
    ran = run(
        """
        import torch
        model = torch.nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        old = torch.cuda.amp.GradScaler()
        x = torch.ones(2, 4, device="cuda")
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
            half = model(x)
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            bf16 = model(x)
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
            loss = model(x).float().sum()
        scaler.scale(loss).backward()
        scaled = model.bias.grad.item()
        scaler.unscale_(opt)
        unscaled = model.bias.grad.item()
        scaler.step(opt)
        scaler.update()
        before = model.bias.detach().clone()
        model.bias.grad.fill_(float("inf"))
        scaler.step(opt)
        scaler.update()
        skipped = torch.equal(before, model.bias)
        """,
        tmp_path,
    )
    assert (ran["half"].dtype, ran["bf16"].dtype) == (torch.float16, torch.bfloat16)
    assert (ran["scaled"], ran["unscaled"]) == (2048.0, 2.0)
    assert ran["skipped"] and ran["scaler"].get_scale() == 512.0 and ran["old"].is_enabled()


def test_custom_functions_under_autocast(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        from torch.amp import custom_bwd, custom_fwd
        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x
            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, g):
                return 2 * g * ctx.saved_tensors[0]
        x = torch.ones(2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = Square.apply(x)
        y.sum().backward()
        assert y.is_cuda
        """,
        tmp_path,
    )
    assert ran["y"].dtype == torch.float32


def test_a_cuda_graph_runs_once(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        graph, runs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            runs.append(1)
        f = torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2).cuda(), (torch.ones(2, device="cuda"),))
        try:
            graph.replay()
        except Exception as e:
            error = e
        """,
        tmp_path,
    )
    assert ran["runs"] == [1]
    assert "CUDA graph is replayed" in str(ran["error"]) and "train.py:8" in str(ran["error"])


def test_meta_modules_are_made_real_on_the_device(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        with torch.device("meta"):
            model = torch.nn.Linear(3, 2)
        assert model.weight.is_meta and model.weight.device.type == "meta"
        model = model.to_empty(device="cuda")
        torch.nn.init.ones_(model.weight)
        """,
        tmp_path,
    )
    assert ran["model"].weight.sum() == 6


@pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])
def test_modules_change_their_type(tmp_path: Path, tensors: bool) -> None:
    ran = run(
        """
        import torch
        model = torch.nn.Linear(3, 2)
        weight = model.weight
        model.to("cuda", torch.bfloat16)
        """,
        tmp_path,
        tensors=tensors,
    )
    assert ran["model"].weight is ran["weight"] and ran["weight"].dtype == torch.bfloat16


def test_threads_of_the_script_see_the_same(tmp_path: Path) -> None:
    ran = run(
        """
        import threading, torch
        found = []
        t = threading.Thread(target=lambda: found.append(torch.zeros(2, device="cuda").is_cuda))
        t.start()
        t.join()
        """,
        tmp_path,
    )
    assert ran["found"] == [True]


def test_tensors_of_a_mesh_draw_as_on_gpus(tmp_path: Path) -> None:
    """Shards draw numbers of their own, replicas the same ones."""
    code = """
        import os, torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        torch.manual_seed(0)
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh.device_type == "cuda"
        def masks(*placements):
            x = DTensor.from_local(torch.ones(32, device="cuda"), mesh, placements, run_check=False)
            assert x.is_cuda and x.device.type == "cuda"
            return torch.nn.functional.dropout(x, 0.5).to_local()
        from torch.distributed.tensor import distribute_tensor
        with torch.device("meta"):
            empty = distribute_tensor(torch.zeros(4), mesh, [Replicate(), Shard(0)])
        assert empty.device.type == "meta"
        sharded, replicated = masks(Replicate(), Shard(0)), masks(Replicate(), Replicate())
        after = torch.rand(2, device="cuda")
        """
    first, tp, dp = (run(code, tmp_path, rank=r) for r in (0, 1, 2))
    assert not torch.equal(first["sharded"], tp["sharded"])
    assert torch.equal(first["sharded"], dp["sharded"])
    assert torch.equal(first["replicated"], tp["replicated"])
    assert torch.equal(first["after"], tp["after"])


def test_copies_of_fake_modules(tmp_path: Path) -> None:
    """As for a teacher or an average of weights."""
    ran = run(
        """
        import copy, torch
        model = torch.nn.Linear(3, 3).cuda()
        model.register_buffer("count", torch.tensor(1.0))
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        teacher = copy.deepcopy(model)
        facts = (teacher.weight is model.weight, teacher.weight.is_cuda, teacher.weight.requires_grad,
                 isinstance(teacher.weight, torch.nn.Parameter), teacher.weight.grad is not None)
        a, b = torch.ones(3), torch.ones(3)
        apart = a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
        same = a.untyped_storage().data_ptr() == a[1:].untyped_storage().data_ptr()
        text = f"{torch.tensor(2.5):.2f}"
        """,
        tmp_path,
        tensors=True,
    )
    assert ran["facts"] == (False, True, True, True, True)
    assert ran["apart"] and ran["same"] and ran["text"] == "2.50"


def test_random_states_are_no_fakes(tmp_path: Path) -> None:
    """They are saved, sent to other ranks and set again."""
    ran = run(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        state = torch.get_rng_state()
        unchanged = torch.all(state == torch.get_rng_state()).item()
        sent = state.to("cuda")
        dist.broadcast(sent, 0)
        torch.set_rng_state(sent.cpu())
        torch.cuda.set_rng_state(torch.cuda.get_rng_state().clone())
        g = torch.Generator("cuda")
        g.set_state(g.get_state())
        """,
        tmp_path,
        tensors=True,
    )
    assert ran["unchanged"] is True


@pytest.mark.parametrize("tensors", [False, True], ids=["real", "fake"])
def test_libraries_that_train_for_the_user_see_a_gpu(tmp_path: Path, tensors: bool) -> None:
    trainer = tmp_path / "site-packages" / "accelerate"
    trainer.mkdir(parents=True)
    (trainer / "__init__.py").write_text(
        "import torch, subprocess\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
    )
    ran = run(
        f"""
        import sys
        sys.path.insert(0, {str(trainer.parent)!r})
        import accelerate
        device = accelerate.device
        for name in [n for n in sys.modules if n.partition(".")[0] == "accelerate"]:
            del sys.modules[name]
        """,
        tmp_path,
        tensors=tensors,
    )
    assert ran["device"] == torch.device("cuda")


def test_an_installed_script_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `-m package.train`: all of its package sees what a script sees."""
    package = tmp_path / "site-packages" / "someones_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "tools.py").write_text("import torch\nfound = torch.cuda.is_available()\n")
    (package / "train.py").write_text("from someones_trainer.tools import found\n")
    monkeypatch.syspath_prepend(str(package.parent))
    ran = run(
        """
        import runpy
        found = runpy.run_module("someones_trainer.train", run_name="__main__", alter_sys=True)["found"]
        """,
        tmp_path,
    )
    assert ran["found"] is True
