"""Python, torch and the machine are afterwards as they were, also after an error."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from tests.scripting import run

# a script that touches everything
CODE = """
    import atexit, logging, os, random, signal, socket, subprocess, sys, warnings
    import numpy, torch, torch.distributed as dist, torch.multiprocessing as mp
    import torch.distributed.checkpoint
    import sqlite3, wandb
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm
    dist.init_process_group("nccl")
    init_device_mesh("cuda", (4,))
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.manual_seed(7); torch.cuda.manual_seed(8); random.seed(9); numpy.random.seed(10)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(2)
    os.environ["NEW"] = "1"
    os.environ.pop("PATH")
    sys.path.insert(0, "/somewhere")
    sys.argv.append("x")
    sys.setrecursionlimit(12345)
    sys.excepthook = print
    sys.stdout = open("out.txt", "w")
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.DEBUG, force=True)
    logging.disable(logging.INFO)
    signal.signal(signal.SIGUSR1, lambda *a: None)
    os.makedirs("deep/er")
    os.chdir("deep/er")
    for batch in DataLoader(TensorDataset(torch.ones(4)), num_workers=2):
        pass
    x = torch.nn.Linear(2, 2).cuda()(torch.ones(2))
    torch.save(x, "x.pt")
    wandb.init()
    raise_it
"""


def state() -> dict[tuple[str, str], Any]:
    """Every attribute of every module and of every class in one of torch or Python that was there."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        space = getattr(module, "__dict__", None)
        if space is None or name.startswith(("spmdtypes", "tests", "_pytest", "pytest", "__main__")):
            continue
        for key, value in list(space.items()):
            if not inspect.ismodule(value) and key != "__warningregistry__":
                found[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                found |= {(f"{name}.{key}", k): v for k, v in vars(value).items()}
    return found


def settings() -> dict[str, Any]:
    import numpy

    backends = torch.backends
    return {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "meta_path": list(sys.meta_path),
        "recursion": sys.getrecursionlimit(),
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook),
        "warnings": list(warnings.filters),
        "root": (logging.getLogger().level, list(logging.getLogger().handlers), logging.root.manager.disable),
        "signal": signal.getsignal(signal.SIGUSR1),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_anomaly_enabled()),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "backends": (
            backends.cuda.matmul.allow_tf32,
            backends.cudnn.benchmark,
            backends.cuda.flash_sdp_enabled(),
        ),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "gc": gc.isenabled(),
        "stubs": [m for m in sys.modules if m.partition(".")[0] in ("wandb", "mlflow")],
    }


# caches of interpreters and libraries, which are no patches
CACHES = (
    ("torch", "_dynamo"),
    ("re", "_cache"),
    ("os", "environ"),
    ("sys", "last"),
    ("threading", "_"),
    ("_weakrefset", ""),
    ("warnings", "_filters_version"),
    ("abc", ""),
    ("linecache", ""),
    ("torch._guards", ""),
    ("tempfile", "_once_lock"),
    ("torch.autograd.profiler", "_cupti"),
)


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    gone = object()
    return sorted(
        ".".join(key)
        for key in before
        if (old := before[key]) is not (new := after.get(key, gone))
        and not any(key[0] == m and key[1].startswith(a) for m, a in CACHES)
        and (new is gone or not _same(old, new))
    )


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    return isinstance(a, (int, float, str, bytes, tuple, list, dict, set, frozenset, staticmethod)) and a == b


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_everything_is_as_it_was(
    tmp_path: Path, fails: bool, fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("tqdm")
    monkeypatch.chdir(tmp_path)
    code = CODE.replace("raise_it", "raise ZeroDivisionError" if fails else "pass").replace(
        "(4,)", "(4,)" if fake else "(1,)"
    )
    run("import numpy, safetensors.torch, sqlite3, tqdm, torch.utils.tensorboard", tmp_path, fake=fake)
    before, set_before = state(), settings()
    if fails:
        with pytest.raises(ZeroDivisionError):
            run(code, tmp_path, fake=fake)
    else:
        run(code, tmp_path, fake=fake)
    assert settings() == set_before
    assert changed(before, state()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"layer", "train.py"}


def test_a_patch_left_behind_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    monkeypatch.setattr(DeviceMesh, "__init__", lambda self: None)
    monkeypatch.setattr(os, "mkdir", print)
    assert changed(before, state()) == ["os.mkdir", "torch.distributed.device_mesh.DeviceMesh.__init__"]
