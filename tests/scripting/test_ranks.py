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
