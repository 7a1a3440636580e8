"""Small training scripts, run as two ranks through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmdtypes.cli import main

HEAD = """\
import argparse, os, sys, time
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
"""  # seven lines

LOOP = """\
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 8).chunk(world)[rank]
loss = model(x).square().mean()
loss.backward()
for p in model.parameters():
    dist.all_reduce(p.grad)  # sum
    p.grad /= world
optimizer.step()
total = loss.detach().clone()
dist.all_reduce(total)
print(total.item() / world)
"""

DDP = """\
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for inputs, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""

TENSOR_PARALLEL = """\
parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, required=True)
tp = parser.parse_args().tp
assert tp == world


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        full = torch.randn(8, 4) / 8
        self.weight = nn.Parameter(full.chunk(tp)[rank].clone())

    def forward(self, x):
        y = x.chunk(tp, dim=-1)[rank] @ self.weight
        dist.all_reduce(y)  # complete
        return y


model = Row()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(HEAD + text)
    return file


def line_of(file: Path, words: str) -> int:
    (line,) = [i for i, text in enumerate(file.read_text().splitlines(), 1) if words in text]
    return line


def check(capsys: pytest.CaptureFixture[str], file: Path, *args: str) -> tuple[int, Any]:
    """Exit code and the report as JSON."""
    own, _, rest = " ".join(args).partition("-- ")
    command = [str(file), "-n", "2", "--format", "json", *own.split()]
    code = main([*command, "--", *rest.split()] if rest else command)
    return code, json.loads(capsys.readouterr().out)


def findings(report: Any) -> list[Any]:
    return list(report["programs"][0]["findings"])


def test_data_parallel_training_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, write(tmp_path, DDP))
    assert code == 0
    assert findings(report) == []


def test_gradients_that_are_not_reduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, LOOP.replace("    dist.all_reduce(p.grad)  # sum\n", ""))
    code, report = check(capsys, file)
    assert code == 1
    (finding,) = findings(report)
    assert (finding["code"], finding["span"]["line"]) == ("SPMD201", line_of(file, "loss = model"))
    assert "0.weight" in finding["message"]


def test_tensor_parallel_with_a_placeholder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, write(tmp_path, TENSOR_PARALLEL), "--mesh tp=2 -- --tp {tp}")
    assert (code, findings(report)) == (0, [])


def test_a_missing_all_reduce_under_tensor_parallelism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, TENSOR_PARALLEL.replace("        dist.all_reduce(y)  # complete\n", ""))
    code, report = check(capsys, file, "--mesh tp=2 --reference-args=--tp=1 -- --tp 2")
    assert code == 1
    assert any("tp" in f["axes"] for f in findings(report))


def test_a_metric_of_one_rank_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, write(tmp_path, LOOP.replace("dist.all_reduce(total)\n", "")))
    assert code == 0
    assert [f["severity"] for f in findings(report)] == ["warning"]


def test_replicas_that_start_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path, "torch.manual_seed(rank)\n" + LOOP.replace("torch.randn(8, 8)", "torch.ones(8, 8)")
    )
    code, report = check(capsys, file)
    assert code == 1
    first = findings(report)[0]
    assert (first["code"], first["span"]["line"]) == ("SPMD501", line_of(file, "model = "))


def test_a_collective_of_one_rank_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, write(tmp_path, "if rank == 0: dist.all_reduce(torch.ones(1))\n" + LOOP))
    assert code == 1
    assert [f["code"] for f in findings(report)] == ["SPMD601"]


def test_a_script_that_never_steps_is_compared_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = check(capsys, write(tmp_path, "print(nn.Linear(8, 8)(torch.ones(8, 8)).sum().item())\n"))
    assert code == 0
    assert "before an optimizer step" in str(report["programs"][0]["assumptions"])


# what the first line after the head does -> what is said of it
CANNOT = {
    "exits": ("sys.exit(0)", "the script exits before any module was called"),
    "exits with a code": ("sys.exit(3)", "the script exits with code 3"),
    "exits with words": ("sys.exit('no data')", "the script exits saying: no data"),
    "exception": ("raise ValueError('boom')", "raised ValueError: boom"),
    "missing package": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "loops for ever": ("while True: time.sleep(0.01)", "the script ran out of time before any module"),
}


@pytest.mark.parametrize(("line", "said"), CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_checked_is_one_sentence_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    file = write(tmp_path, line + "\n" + LOOP)
    assert main([str(file), "-n", "2", "--limit", "5"]) == 2
    (told,) = [x for x in capsys.readouterr().err.splitlines() if "error:" in x]
    assert told.count("error:") == 1
    assert "train.py:8: error: " in told
    assert said in told


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing.py", "-n", "2"], "nothing.py:1: error: no such file"),
        ([".", "-n", "2"], "a script is a file, not a folder"),
        (["train.py", "-n", "1"], "1 rank: there is nothing to compare"),
        (["train.py", "-n", "4", "--rank", "4"], "the ranks are 0 to 3"),
        (["train.py", "-n", "2", "--steps", "0"], "at least one step"),
        (["train.py", "-n", "4", "--mesh", "dp=3"], "the mesh dp=3 has 3 ranks, not 4"),
        (["train.py", "-m", "train", "-n", "2"], "give a script or -m train, not both"),
    ],
)
def test_commands_that_make_no_sense(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    said: str,
) -> None:
    write(tmp_path, LOOP)
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert said in capsys.readouterr().err


def test_a_module_is_run_as_python_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LOOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["-m", "train", "-n", "2"]) == 0
    assert "train: no errors" in capsys.readouterr().out
