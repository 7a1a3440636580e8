"""Data loaders give the batches that their worker processes would give."""

from __future__ import annotations

import multiprocessing
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripting import run

MAP = """
    import random, numpy, torch
    from torch.utils.data import DataLoader, Dataset
    class Noisy(Dataset):
        def __len__(self):
            return 13
        def __getitem__(self, i):
            return i, torch.rand(()).item(), random.random(), float(numpy.random.rand())
    torch.manual_seed(3)
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=3, pin_memory=True, OPTIONS)
    batches = [[t.tolist() for t in b] for _ in range(2) for b in loader]
    after = torch.rand(()).item()
"""
ITERABLE = """
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
    class Stream(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            yield from range(info.id * 100, info.id * 100 + 3 + 2 * info.id)
    loader = DataLoader(Stream(), batch_size=2, num_workers=3, OPTIONS)
    batches = [b.tolist() for _ in range(2) for b in loader]
    after = get_worker_info()
"""
INIT = """
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info
    seen = {}
    def init(worker):
        seen["seed"] = worker * 10
        torch.manual_seed(worker)
    class Numbers(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, i):
            return i, torch.rand(()).item(), get_worker_info().id, get_worker_info().num_workers
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_init_fn=init, OPTIONS)
    batches = [[t.tolist() for t in b] for b in loader]
    after = 0
"""


def _in_processes(code: str, pipe: Any) -> None:
    space: dict[str, Any] = {"__name__": "script"}
    torch.set_num_threads(1)
    exec(textwrap.dedent(code), space)
    pipe.send((space["batches"], space["after"]))


@pytest.mark.parametrize(
    "options", ["persistent_workers=True", "prefetch_factor=4, multiprocessing_context='fork'"]
)
@pytest.mark.parametrize("code", [MAP, ITERABLE, INIT], ids=["map", "iterable", "init"])
def test_batches_are_those_of_worker_processes(tmp_path: Path, code: str, options: str) -> None:
    code = code.replace("OPTIONS", options)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_processes, args=(code, theirs))
    process.start()
    assert ours.poll(60)
    expected = ours.recv()
    process.join(10)
    ran = run(code, tmp_path)
    assert (ran["batches"], ran["after"]) == expected
    assert len(expected[0]) > 3


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_is_real_where_tensors_are_fake(tmp_path: Path, workers: int) -> None:
    ran = run(
        f"""
        import torch, torch.distributed as dist
        from torch._subclasses import FakeTensor
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        torch.manual_seed(0)
        dist.init_process_group("nccl")
        data = TensorDataset(torch.arange(16.0).reshape(16, 1))
        import numpy
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 16
            def __getitem__(self, i):
                return torch.tensor([float(i)])
        rows = Rows()
        sampler = DistributedSampler(rows, shuffle=False)
        loader = DataLoader(rows, batch_size=2, sampler=sampler, num_workers={workers})
        sampler.set_epoch(1)
        batch = next(iter(loader))
        fake = isinstance(batch, FakeTensor)
        """,
        tmp_path,
        tensors=True,
    )
    assert not ran["fake"] and ran["batch"].flatten().tolist() == [1.0, 5.0]
