"""What a script writes is there for it, and nowhere else."""

# ruff: noqa: E501 (one program a line)
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripting import run


def tree(folder: Path) -> dict[str, str | None]:
    """Every file and folder of the user's, with its content."""
    return {
        str(p.relative_to(folder)): p.read_text(errors="replace") if p.is_file() else None
        for p in sorted(folder.rglob("*"))
        if "layer" not in p.parts and p.name != "train.py"
    }


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with things its owner wants to keep."""
    folder = tmp_path / "user"
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "runs" / "old" / "log.txt").write_text("one\n")
    return folder


# each ends with `facts`, what the script sees afterwards
PROGRAMS = {
    "write": ("open('new.txt', 'w').write('x'); facts = open('new.txt').read()", "x"),
    "overwrite": ("open('a.txt', 'w').write('b'); facts = open('a.txt').read()", "b"),
    "append": ("open('runs/old/log.txt', 'a').write('two'); facts = open('runs/old/log.txt').read()", "one\ntwo"),
    "update": ("f = open('a.txt', 'r+'); f.write('z'); f.close(); facts = open('a.txt').read()", "z"),
    "create": ("open('n', 'xb').write(b'x'); facts = sorted(os.listdir())", ["a.txt", "n", "runs"]),
    "path": ("Path('p.txt').write_text('p'); facts = Path('p.txt').read_text()", "p"),
    "descriptor": (
        "fd = os.open('fd', os.O_CREAT | os.O_WRONLY); os.write(fd, b'd'); os.close(fd); facts = open('fd').read()",
        "d",
    ),
    "folders": ("os.makedirs('x/y/z', exist_ok=True); facts = os.path.isdir('x/y/z')", True),
    "pathlib folders": ("Path('x/y').mkdir(parents=True); facts = [p.name for p in Path('.').iterdir() if p.is_dir()]", ["runs", "x"]),
    "existing folder": ("os.makedirs('runs', exist_ok=True); open('runs/n', 'w'); facts = sorted(os.listdir('runs'))", ["n", "old"]),
    "remove": ("os.remove('a.txt'); facts = (os.path.exists('a.txt'), os.listdir())", (False, ["runs"])),
    "remove twice": ("os.remove('a.txt'); open('a.txt', 'w').write('2'); Path('a.txt').unlink(); facts = Path('a.txt').exists()", False),
    "unlink missing": ("Path('none').unlink(missing_ok=True); facts = 1", 1),
    "rmtree": ("shutil.rmtree('runs'); facts = os.path.exists('runs/old/log.txt'), os.listdir()", (False, ["a.txt"])),
    "rmtree and again": ("shutil.rmtree('runs'); os.makedirs('runs/new'); facts = os.listdir('runs')", ["new"]),
    "rename": ("os.rename('a.txt', 'b.txt'); facts = sorted(os.listdir()), open('b.txt').read()", (["b.txt", "runs"], "a")),
    "replace": ("open('t', 'w').write('n'); os.replace('t', 'a.txt'); facts = open('a.txt').read(), sorted(os.listdir())", ("n", ["a.txt", "runs"])),
    "rename folder": ("os.rename('runs', 'r2'); facts = open('r2/old/log.txt').read(), os.path.exists('runs')", ("one\n", False)),
    "move": ("shutil.move('a.txt', 'runs/a.txt'); facts = sorted(os.listdir('runs')), os.path.exists('a.txt')", (["a.txt", "old"], False)),
    "copy": ("shutil.copy('a.txt', 'c.txt'); facts = open('c.txt').read()", "a"),
    "copytree": ("shutil.copytree('runs', 'runs2'); facts = open('runs2/old/log.txt').read()", "one\n"),
    "walk": ("open('runs/n', 'w'); facts = sorted(f for _, _, fs in os.walk('.') for f in fs)", ["a.txt", "log.txt", "n"]),
    "glob": ("open('b.txt', 'w'); facts = sorted(glob.glob('*.txt')), sorted(str(p) for p in Path('.').rglob('*.txt'))", (["a.txt", "b.txt"], ["a.txt", "b.txt", "runs/old/log.txt"])),
    "link": ("os.symlink('a.txt', 'latest'); facts = open('latest').read(), os.path.islink('latest')", ("a", True)),
    "link to a new file": ("open('n', 'w').write('n'); os.symlink('n', 'latest'); facts = open('latest').read()", "n"),
    "touch": ("os.utime('a.txt', (1, 1)); facts = os.stat('a.txt').st_mtime", 1.0),
    "mode": ("os.chmod('a.txt', 0o600); facts = os.stat('a.txt').st_mode & 0o777", 0o600),
    "truncate": ("os.truncate('a.txt', 0); facts = os.path.getsize('a.txt')", 0),
    "change directory": ("os.makedirs('w'); os.chdir('w'); open('f', 'w').write('f'); facts = os.path.basename(os.getcwd()), open('f').read(), sorted(os.listdir('..'))", ("w", "f", ["a.txt", "runs", "w"])),
    "json": ("import json; json.dump({'a': 1}, open('c.json', 'w')); facts = json.load(open('c.json'))", {"a": 1}),
    "numpy": ("import numpy; numpy.save('x.npy', numpy.ones(2)); facts = numpy.load('x.npy').tolist()", [1.0, 1.0]),
    "memory map": ("import numpy; m = numpy.memmap('m.bin', dtype='int32', mode='w+', shape=3); m[:] = 5; m.flush(); facts = numpy.memmap('m.bin', dtype='int32', mode='r').tolist()", [5, 5, 5]),
    "raw numbers": ("import numpy; numpy.arange(3).tofile('r.bin'); facts = numpy.fromfile('r.bin', dtype=int).tolist()", [0, 1, 2]),
    "zip": ("import zipfile; zipfile.ZipFile('z.zip', 'w').writestr('a', 'b'); facts = zipfile.ZipFile('z.zip').read('a')", b"b"),
    "gzip": ("import gzip; gzip.open('g.gz', 'wt').write('b'); facts = gzip.open('g.gz', 'rt').read()", "b"),
    "log file": ("import logging; h = logging.FileHandler('l.log'); logging.getLogger('x').addHandler(h); logging.getLogger('x').error('e'); h.close(); facts = open('l.log').read()", "e\n"),
    "temporary": ("import tempfile; d = tempfile.mkdtemp(); open(d + '/f', 'w').write('t'); shutil.move(d + '/f', 'moved'); facts = open('moved').read()", "t"),
    "device": ("open(os.devnull, 'w').write('x'); facts = 1", 1),
    "database": ("import sqlite3; c = sqlite3.connect('d.db'); c.execute('create table t (x)'); c.commit(); facts = os.path.exists('d.db')", True),
    "csv": ("import csv; f = open('m.csv', 'a', newline=''); csv.writer(f).writerow([1]); f.close(); facts = os.path.getsize('m.csv')", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_files_are_the_scripts_alone(tmp_path: Path, user: Path, name: str) -> None:
    code, expected = PROGRAMS[name]
    before = tree(tmp_path)
    ran = run(
        f"import os, shutil, glob\nfrom pathlib import Path\nos.chdir({str(user)!r})\n{code}\n", tmp_path
    )
    facts: Any = ran["facts"]
    assert (sorted(facts) if isinstance(facts, list) else facts) == expected
    assert tree(tmp_path) == before


ERRORS = {
    "missing": ("open('none')", FileNotFoundError),
    "missing folder": ("open('none/x', 'w')", FileNotFoundError),
    "exists": ("open('a.txt', 'x')", FileExistsError),
    "folder exists": ("os.mkdir('runs')", FileExistsError),
    "folder": ("open('runs', 'w')", IsADirectoryError),
    "not empty": ("os.rmdir('runs')", OSError),
    "removed": ("os.remove('a.txt'); open('a.txt')", FileNotFoundError),
    "remove missing": ("os.remove('none')", FileNotFoundError),
    "list missing": ("os.listdir('none')", FileNotFoundError),
    "rename missing": ("os.rename('none', 'x')", FileNotFoundError),
    "update missing": ("open('none', 'r+')", FileNotFoundError),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_usual_ones(tmp_path: Path, user: Path, name: str) -> None:
    code, kind = ERRORS[name]
    with pytest.raises(kind) as caught:
        run(f"import os\nos.chdir({str(user)!r})\n{code}\n", tmp_path)
    assert "layer" not in str(caught.value)


def test_ranks_see_what_others_wrote(tmp_path: Path, user: Path) -> None:
    run(
        f"import os\nos.chdir({str(user)!r})\nopen('ck', 'w').write('0')\nos.remove('a.txt')",
        tmp_path,
        rank=0,
    )
    ran = run(
        f"import os\nos.chdir({str(user)!r})\nfacts = open('ck').read(), os.path.exists('a.txt')", tmp_path
    )
    assert ran["facts"] == ("0", False)
    assert (user / "a.txt").exists() and not (user / "ck").exists()


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_checkpoints(tmp_path: Path, user: Path, fake: bool) -> None:
    """Saved ones are read again; those of the user's are loaded, from whatever device."""
    torch.save({"weight": torch.ones(2, 2), "step": 7}, user / "old.pt")
    ran = run(
        f"""
        import io, os, torch
        os.chdir({str(user)!r})
        old = torch.load("old.pt", map_location="cuda:0", weights_only=True)
        lazy = torch.load("old.pt", map_location=lambda storage, loc: storage.cuda(), mmap=True)
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        os.makedirs("ck", exist_ok=True)
        torch.save({{"model": model.state_dict(), "opt": optimizer.state_dict()}}, "ck/last.pt")
        again = torch.load("ck/last.pt", map_location={{"cuda:0": "cuda:1"}})
        model.load_state_dict(again["model"])
        optimizer.load_state_dict(again["opt"])
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        same = torch.load(buffer)["weight"].shape
        names = os.listdir("ck")
        """,
        tmp_path,
        fake=fake,
        tensors=fake,
    )
    assert ran["old"]["step"] == 7 and torch.equal(ran["old"]["weight"], torch.ones(2, 2))
    assert torch.equal(ran["lazy"]["weight"], torch.ones(2, 2))
    assert ran["same"] == (2, 2) and ran["names"] == ["last.pt"]
    assert not (user / "ck").exists()


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_safetensors(tmp_path: Path, user: Path, fake: bool) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, user / "old.safetensors")
    ran = run(
        f"""
        import os, torch
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file
        os.chdir({str(user)!r})
        old = load_file("old.safetensors", device="cuda")["w"]
        with safe_open("old.safetensors", framework="pt", device="cuda:0") as f:
            one = f.get_tensor("w")
        save_file({{"w": torch.zeros(3)}}, "new.safetensors")
        """,
        tmp_path,
        fake=fake,
        tensors=fake,
    )
    assert torch.equal(ran["old"], torch.ones(3)) and torch.equal(ran["one"], torch.ones(3))
    assert not (user / "new.safetensors").exists()


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_distributed_checkpoints(tmp_path: Path, user: Path, fake: bool) -> None:
    ran = run(
        f"""
        import os, torch, torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        dist.init_process_group("cpu:gloo,cuda:nccl")
        os.chdir({str(user)!r})
        model = torch.nn.Linear(2, 2)
        state = {{"model": model.state_dict()}}
        dcp.save(state, checkpoint_id="ck/step-1")
        before = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        dcp.load(state, checkpoint_id="ck/step-1")
        future = dcp.async_save(state, checkpoint_id="ck/step-2")
        future.result()
        """,
        tmp_path,
        fake=fake,
    )
    assert fake or torch.equal(ran["model"].weight, ran["before"])
    assert not (user / "ck").exists()
    assert os.path.exists(user)
