"""Other processes, exits, signals, input and downloads: each has an answer, or one clear sentence."""

from __future__ import annotations

import atexit
import signal
from pathlib import Path

import pytest

from spmdtypes.errors import CannotCheck
from tests.scripting import run


def test_spawned_ranks(tmp_path: Path) -> None:
    ran = run(
        """
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        found = []
        def main(rank, world, text):
            dist.init_process_group("nccl", rank=rank, world_size=world, init_method="tcp://localhost:12355")
            found.append((rank, dist.get_rank(), world, text))
        if __name__ == "__main__":
            world = torch.cuda.device_count()
            mp.set_start_method("spawn", force=True)
            mp.spawn(main, args=(world, "x"), nprocs=world, join=True)
        """,
        tmp_path,
    )
    assert ran["found"] == [(1, 1, 4, "x")]


@pytest.mark.parametrize("kind", ["mp.Process", "mp.get_context('spawn').Process", "multiprocessing.Process"])
def test_ranks_started_one_by_one(tmp_path: Path, kind: str) -> None:
    ran = run(
        f"""
        import multiprocessing, torch.distributed as dist, torch.multiprocessing as mp
        found = []
        def main(rank, world):
            dist.init_process_group("gloo", rank=rank, world_size=world)
            found.append(rank)
        processes = [{kind}(target=main, args=(r, 4)) for r in range(4)]
        for p in processes:
            p.start()
        for p in processes:
            p.join()
        codes = [p.exitcode for p in processes]
        """,
        tmp_path,
    )
    assert ran["found"] == [1] and ran["codes"] == [0] * 4
    assert "taken as rank 1" in ran.notes[0]


REFUSED = {
    "process": (
        "import multiprocessing as mp, torch.distributed as dist\n"
        "dist.init_process_group()\nmp.Process(target=print).start()",
        "train.py:3: error: another process is started (print)",
    ),
    "fork": ("import os\nif os.fork() == 0:\n    pass", "train.py:2: error: another process is forked"),
    "exec": ("import os, sys\nos.execv(sys.executable, ['python'])", "train.py:2: error: os.execv replaces"),
    "input": ("name = input('name? ')", "train.py:1: error: input() waits for someone to type"),
    "urllib": (
        "from urllib.request import urlopen\nurlopen('http://data.example.com/x')",
        "train.py:2: error: this fetches something from data.example.com: nothing is downloaded",
    ),
    "torch.hub": (
        "import torch\ntorch.hub.load_state_dict_from_url('https://download.example.org/m.pth')",
        "train.py:2: error: this fetches something from download.example.org",
    ),
    "socket": (
        "import socket\ns = socket.socket()\ns.connect(('10.1.2.3', 80))",
        "train.py:3: error: this fetches something from 10.1.2.3",
    ),
    "hub": (
        "from huggingface_hub import hf_hub_download\nhf_hub_download('gpt2', 'config.json')",
        "train.py:2: error: this fetches something",
    ),
    "transformers": (
        "from transformers import AutoConfig\nAutoConfig.from_pretrained('nobody/nothing-like-it')",
        "train.py:2: error: this fetches something",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_sentence(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, expected = REFUSED[name]
    if "huggingface" in code:
        pytest.importorskip("huggingface_hub")
    if "transformers" in code:
        pytest.importorskip("transformers")
    with pytest.raises(CannotCheck) as caught:
        run(code, tmp_path)
    assert str(caught.value).startswith(expected), str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_of_the_script_stay_its_own(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="flash_attn"):
        run("import flash_attn", tmp_path)
    with pytest.raises(ConnectionError, match="mine"):
        run("raise ConnectionError('mine')", tmp_path)


def test_a_connection_the_script_can_do_without(tmp_path: Path) -> None:
    ran = run(
        """
        import urllib.request
        try:
            urllib.request.urlopen("http://169.254.169.254/latest/meta-data", timeout=1)
            cloud = True
        except OSError:
            cloud = False
        """,
        tmp_path,
    )
    assert not ran["cloud"]


def test_commands(tmp_path: Path) -> None:
    """Those that only tell something run; others are left out, which is said."""
    ran = run(
        """
        import os, subprocess
        told = subprocess.check_output(["uname"], text=True).strip()
        copied = subprocess.run(["aws", "s3", "cp", "a", "b"], capture_output=True, text=True, check=True)
        status = os.system("mkdir -p made && touch made/x")
        piped = os.popen("rm -rf made").read()
        answer = subprocess.check_output("touch other", shell=True)
        process = subprocess.Popen(["sleep", "1000"])
        code = process.wait()
        """,
        tmp_path,
    )
    assert ran["told"] and ran["copied"].stdout == "" and ran["copied"].returncode == 0
    assert (ran["status"], ran["piped"], ran["answer"], ran["code"]) == (0, "", b"", 0)
    assert len(ran.notes) == 5 and "`aws s3 cp a b` is not run here" in ran.notes[0]
    assert not (tmp_path / "made").exists() and not Path("made").exists() and not Path("other").exists()


def test_pools_of_processes(tmp_path: Path) -> None:
    ran = run(
        """
        import multiprocessing as mp
        from concurrent.futures import ProcessPoolExecutor
        seen = []
        def square(x):
            seen.append(x)
            return x * x
        with mp.Pool(8) as pool:
            a = pool.map(square, range(4))
        with mp.get_context("spawn").Pool(2) as pool:
            b = list(pool.imap(square, range(2)))
        with ProcessPoolExecutor(max_workers=4) as executor:
            c = list(executor.map(square, [5]))
        with mp.Manager() as manager:
            d = manager.dict(a=1)
            q = manager.Queue()
            q.put(1)
        """,
        tmp_path,
    )
    assert (ran["a"], ran["b"], ran["c"]) == ([0, 1, 4, 9], [0, 1], [25])
    assert ran["seen"] == [0, 1, 2, 3, 0, 1, 5]


def test_what_a_script_leaves_for_its_exit(tmp_path: Path) -> None:
    """It runs when the script ends, with the script's surroundings, last one first."""
    before = signal.getsignal(signal.SIGTERM)
    atexit_before = atexit._ncallbacks()
    ran = run(
        """
        import atexit, os, signal, torch
        order = []
        atexit.register(order.append, "first")
        @atexit.register
        def close():
            order.append(torch.cuda.is_available())
        signal.signal(signal.SIGTERM, lambda *a: order.append("never"))
        signal.alarm(1)
        handler = signal.getsignal(signal.SIGTERM)
        breakpoint()
        """,
        tmp_path,
    )
    assert ran["order"] == [True, "first"] and callable(ran["handler"])
    assert signal.getsignal(signal.SIGTERM) is before and atexit._ncallbacks() == atexit_before


@pytest.mark.parametrize(
    "code", ["sys.exit(3)", "os._exit(3)", "exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_ends(tmp_path: Path, code: str) -> None:
    with pytest.raises(SystemExit):
        run(f"import os, signal, sys\n{code}", tmp_path)


COMPILERS = {
    "function": "f = torch.compile(lambda x: x + 1)",
    "decorator": "@torch.compile\ndef f(x):\n    return x + 1",
    "decorator with options": "@torch.compile(fullgraph=True)\ndef f(x):\n    return x + 1",
    "options": "f = torch.compile(lambda x: x + 1, backend='inductor', options={'triton.cudagraphs': True})",
    "dynamo": "import torch._dynamo\nf = torch._dynamo.optimize('inductor')(lambda x: x + 1)",
    "disabled": "@torch.compiler.disable(recursive=False)\ndef f(x):\n    return x + 1",
    "disabled by dynamo": "import torch._dynamo\n@torch._dynamo.disable\ndef f(x):\n    return x + 1",
    "script": "@torch.jit.script\ndef f(x):\n    return x + 1",
}


@pytest.mark.parametrize("name", COMPILERS)
def test_compiled_functions(tmp_path: Path, name: str) -> None:
    ran = run(f"import torch\n{COMPILERS[name]}\ny = f(torch.ones(2))\ntorch.compiler.reset()", tmp_path)
    assert ran["y"].tolist() == [2, 2]


def test_compiled_modules(tmp_path: Path) -> None:
    ran = run(
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        compiled = torch.compile(model, mode="reduce-overhead")
        raw = compiled._orig_mod
        model[0].compile(fullgraph=True)
        model.compile()
        for i, layer in enumerate(model):
            model[i] = torch.compile(layer)
        names = sorted(model.state_dict())
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(torch.ones(1, 2))
        """,
        tmp_path,
    )
    assert ran["raw"] is ran["model"] and ran["names"] == ["0.bias", "0.weight"]
