"""A script finds the job it asks for, however it was launched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmdtypes.errors import CannotCheck
from tests.scripting import run

EITHER = pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])


@EITHER
@pytest.mark.parametrize(
    "arguments",
    [
        "'nccl'",
        "backend='cpu:gloo,cuda:nccl'",
        "",
        "'nccl', init_method='env://', timeout=datetime.timedelta(seconds=5)",
        "'nccl', device_id=torch.device('cuda', 0)",
        "backend='nccl', init_method='tcp://10.0.0.1:29500', rank=RANK, world_size=WORLD",
        "store=dist.TCPStore('localhost', 0, WORLD, RANK == 0), rank=RANK, world_size=WORLD",
    ],
)
def test_a_group_is_made(tmp_path: Path, arguments: str, fake: bool) -> None:
    ran = run(
        f"""
        import datetime, os, torch, torch.distributed as dist
        RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert dist.is_available() and dist.is_nccl_available() and not dist.is_initialized()
        dist.init_process_group({arguments})
        assert dist.is_initialized()
        facts = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        part = dist.new_group([RANK], backend="nccl", timeout=datetime.timedelta(minutes=1))
        t = torch.ones(2, device="cuda")
        dist.all_reduce(t, group=part)
        dist.all_reduce(t)
        dist.barrier(device_ids=[0])
        dist.barrier()
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
        members = dist.get_process_group_ranks(part)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        """,
        tmp_path,
        fake=fake,
    )
    rank, world = (1, 4) if fake else (0, 1)
    backend = "nccl" if "nccl" in arguments.lower() else "fake" if fake else "gloo"
    assert ran["facts"] == (rank, world, backend)
    assert ran["members"] == [rank]


@pytest.mark.parametrize("given", ["world_size=8, rank=1", "world_size=4, rank=0"])
def test_a_job_of_another_size(tmp_path: Path, given: str) -> None:
    with pytest.raises(CannotCheck, match=r"train.py:2: error: the process group is made for .* with"):
        run(f"import torch.distributed as dist\ndist.init_process_group('nccl', {given})", tmp_path)


def test_split_groups(tmp_path: Path) -> None:
    ran = run(
        """
        import torch.distributed as dist
        dist.init_process_group("nccl")
        part = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        members = dist.get_process_group_ranks(part)
        """,
        tmp_path,
    )
    assert ran["members"] == [1, 3]


def test_objects_of_a_fake_job(tmp_path: Path) -> None:
    """Every rank is taken to have what this one has, and that is said."""
    ran = run(
        """
        import torch.distributed as dist
        dist.init_process_group("nccl")
        gathered = [None] * 4
        dist.all_gather_object(gathered, {"n": 3})
        told = ["a", 1]
        dist.broadcast_object_list(told, src=0)
        got = [None]
        dist.scatter_object_list(got, ["w", "x", "y", "z"], src=0)
        collected = [None] * 4
        dist.gather_object(7, collected, dst=1)
        """,
        tmp_path,
    )
    assert ran["gathered"] == [{"n": 3}] * 4 and ran["told"] == ["a", 1]
    assert ran["got"] == ["x"] and ran["collected"] == [7] * 4
    assert [n.split(": ")[0] for n in ran.notes] == [
        f"{n}" for n in [str(tmp_path / "train.py") + f":{i}" for i in (5, 7, 9, 11)]
    ]
    assert "all_gather_object: every rank is taken to give the object of this one" in ran.notes[0]


def test_objects_of_a_real_job(tmp_path: Path) -> None:
    ran = run(
        """
        import torch.distributed as dist
        dist.init_process_group("nccl")
        gathered = [None]
        dist.all_gather_object(gathered, {"n": 3})
        """,
        tmp_path,
        fake=False,
    )
    assert ran["gathered"] == [{"n": 3}] and ran.notes == []


@EITHER
def test_stores(tmp_path: Path, fake: bool) -> None:
    ran = run(
        """
        import os, torch.distributed as dist
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True)
        store.set("a", "1")
        facts = store.get("a"), store.add("n", 2)
        """,
        tmp_path,
        fake=fake,
    )
    assert ran["facts"] == (b"1", 2)


@pytest.mark.parametrize(
    ("world", "rank", "node", "local"),
    [(4, 3, 8, (3, 4, 0, 1)), (16, 11, 8, (3, 8, 1, 2)), (6, 5, 4, (1, 2, 1, 2))],
)
def test_variables_of_torchrun(
    tmp_path: Path, world: int, rank: int, node: int, local: tuple[int, ...]
) -> None:
    ran = run(
        """
        import os, torch.distributed as dist
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
        facts = tuple(int(os.environ[n]) for n in names)
        assert dist.is_torchelastic_launched() and "MASTER_ADDR" in os.environ and os.environ["MASTER_PORT"]
        assert "SLURM_JOB_ID" not in os.environ
        """,
        tmp_path,
        world=world,
        rank=rank,
        node=node,
    )
    assert ran["facts"] == (rank, world, *local)


@pytest.mark.parametrize(
    "code",
    [
        """
        if "SLURM_PROCID" in os.environ:
            rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
            local, nodes = int(os.getenv("SLURM_LOCALID")), int(os.environ.get("SLURM_NNODES"))
            command = ["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]]
            host = subprocess.check_output(command, text=True)
        """,
        """
        rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
        local, nodes = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]), 2
        """,
    ],
    ids=["slurm", "mpi"],
)
def test_variables_of_other_launchers(tmp_path: Path, code: str) -> None:
    import textwrap

    text = "import os, subprocess\n" + textwrap.dedent(code)
    ran = run(text, tmp_path, world=16, rank=9)
    assert (ran["rank"], ran["world"], ran["local"], ran["nodes"]) == (9, 16, 1, 2)
    assert ran.names.get("host", "localhost\n") == "localhost\n"


def test_other_launchers_are_silent_for_scripts_of_torchrun(tmp_path: Path) -> None:
    ran = run(
        "import os\nfacts = [k for k in os.environ if k.startswith(('SLURM_P', 'OMPI', 'PMI'))]", tmp_path
    )
    assert ran["facts"] == []


@EITHER
def test_elastic_entry_points(tmp_path: Path, fake: bool) -> None:
    ran = run(
        """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            return 3
        result = main()
        """,
        tmp_path,
        fake=fake,
    )
    assert ran["result"] == 3


@EITHER
def test_wrappers_of_a_script_for_gpus(tmp_path: Path, fake: bool) -> None:
    """DDP and FSDP2 with device arguments, as scripts write them."""
    ran = run(
        """
        import os, torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("nccl")
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        ddp = DDP(torch.nn.Linear(4, 4).cuda(local), device_ids=[local], output_device=local)
        ddp(torch.ones(2, 4, device=local)).sum().backward()
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model(torch.ones(2, 4, device="cuda")).float().sum().backward()
        grad = model[0].weight.grad
        """,
        tmp_path,
        fake=fake,
        tensors=fake,
    )
    assert ran["ddp"].module.weight.grad is not None
    assert ran["grad"].to_local().shape == ((1, 4) if fake else (4, 4))
    assert not dist.is_initialized() and torch.Generator is not None
