"""Several real ranks of one script share what it writes, and talk to each other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import textwrap
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp

from spmdtypes.capture.environment import environment
from spmdtypes.capture.recorder import Recorder
from spmdtypes.capture.scripting import scripting


def _rank(rank: int, world: int, script: Path, pipe: Any) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = script.parent / "rendezvous"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        notes: list[str] = []
        with (
            environment(world, rank, fake=False),
            scripting(False, script.parent / "layer", notes.append) as around,
            Recorder({"dp": world}, {"dp": rank}).recording() as rec,
        ):
            names = runpy.run_path(str(script), run_name="__main__")
        logged = [(e.sink, e.name, float(e.value)) for e in around.logged]
        pipe.send((names["facts"], logged, notes, len(rec.trace)))
    except BaseException:
        pipe.send(traceback.format_exc())


def run_on(world: int, code: str, folder: Path) -> list[Any]:
    """(facts, logged, notes, ops recorded) of each rank."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code))
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(world)]
    gc.freeze()
    try:
        ranks = [context.Process(target=_rank, args=(r, world, script, pipes[r][1])) for r in range(world)]
        for r in ranks:
            r.start()
        found = []
        for ours, _ in pipes:
            assert ours.poll(120), "a rank does not answer"
            found.append(ours.recv())
    finally:
        gc.unfreeze()
        for r in ranks:
            r.join(5)
            r.kill()
    for f in found:
        assert not isinstance(f, str), f
    return found


def test_a_whole_training_script(tmp_path: Path) -> None:
    found = run_on(
        2,
        """
        import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, wandb
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        dist.init_process_group("nccl")
        rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        torch.manual_seed(0)
        torch.cuda.manual_seed(rank)
        data = TensorDataset(torch.arange(16.0).reshape(16, 1), torch.ones(16, 1))
        loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
        model = DDP(torch.compile(torch.nn.Linear(1, 1).cuda()), device_ids=[local])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda")
        if rank == 0:
            wandb.init(project="p")
            os.makedirs("checkpoints/last", exist_ok=True)
        dist.barrier()
        assert os.path.isdir("checkpoints/last")
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x.cuda(non_blocking=True)), y.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            dist.all_reduce(loss, op=dist.ReduceOp.SUM)
            if rank == 0:
                wandb.log({"loss": loss / 2, "norm": norm})
            break
        state = {"model": model.module.state_dict()}
        dcp.save(state, checkpoint_id="checkpoints/dcp")
        weight = model.module.weight.detach().clone()
        torch.nn.init.zeros_(model.module.weight)
        dcp.load(state, checkpoint_id="checkpoints/dcp")
        assert torch.equal(weight, model.module.weight)
        if rank == 0:
            torch.save(state, "checkpoints/last/m.pt")
        dist.barrier(device_ids=[local])
        loaded = torch.load("checkpoints/last/m.pt", map_location=f"cuda:{local}", weights_only=True)
        assert torch.equal(loaded["model"]["weight"], weight)
        store = dist.TCPStore("localhost", 29400, 2, rank == 0)
        store.set(f"from{rank}", str(rank))
        other = int(store.get(f"from{1 - rank}"))
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        facts = (weight.item(), sorted(os.listdir("checkpoints")), other, objects, float(norm))
        dist.destroy_process_group()
        """,
        tmp_path,
    )
    (first, logged, notes, ops), (second, none, _, _) = found
    assert first[0] == second[0] and first[4] == second[4]
    assert first[1] == second[1] == ["dcp", "last"]
    assert (first[2], second[2]) == (1, 0)
    assert first[3] == second[3] == [{"rank": 0}, {"rank": 1}]
    assert [(s, n) for s, n, _ in logged] == [("wandb", "loss"), ("wandb", "norm")] and none == []
    assert notes == [] and ops > 50
    assert not (tmp_path / "checkpoints").exists() and not Path("checkpoints").exists()


def test_collectives_of_gpus(tmp_path: Path) -> None:
    """What NCCL does and a CPU's backend does not, or not by that name."""
    found = run_on(
        2,
        """
        import torch, torch.distributed as dist
        from torch.distributed.distributed_c10d import _coalescing_manager
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        def ones(*shape, dtype=torch.float32):
            return torch.ones(*shape, device="cuda", dtype=dtype)
        mean = ones(2) * rank
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        low = ones(2, dtype=torch.bfloat16)
        dist.all_reduce(low)
        part = ones(1)
        dist.reduce_scatter_tensor(part, torch.arange(2.0, device="cuda"), op=dist.ReduceOp.AVG)
        whole = ones(4)
        dist.all_gather_into_tensor(whole, ones(2) * rank)
        swapped = ones(2)
        dist.all_to_all_single(swapped, torch.arange(2.0, device="cuda") + 10 * rank)
        a, b = ones(1), ones(2)
        with _coalescing_manager(device=torch.device("cuda"), async_ops=True) as manager:
            dist.all_reduce(a)
            manager.append(dist.all_reduce(b, async_op=True))
        manager.wait()
        with dist._coalescing_manager():
            dist.all_reduce(a)
        got = ones(1)
        sends = [dist.P2POp(dist.isend, ones(1) * rank, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        facts = [t.tolist() for t in (mean, low, part, whole, swapped, a, b, got)]
        """,
        tmp_path,
    )
    expected = [[0.5, 0.5], [2, 2], [0], [0, 0, 1, 1], [0, 10], [4], [2, 2], [1]]
    assert found[0][0] == expected
    assert found[1][0] == [*expected[:2], [1], expected[3], [1, 11], [4], [2, 2], [0]]
