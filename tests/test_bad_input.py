"""Input that cannot be checked: one line that names file and line, exit code 2, no traceback."""

import subprocess
import sys
import textwrap

import pytest

from spmdtypes.cli import main

HEAD = """\
import torch
from torch import Tensor, nn
from spmdtypes import Spmd, program

"""  # the program below starts at line 5


GOOD = """
@program(mesh={"tp": 2})
class Net(nn.Module):
    w: Spmd[nn.Parameter, "d f@tp"]
    def __init__(self, mesh, d, f):
        super().__init__()
        self.w = nn.Parameter(torch.empty(d, f // mesh.size()))
    def forward(self, x: Spmd[Tensor, "b d"]) -> Spmd[Tensor, "b f@tp"]:
        return x @ self.w
"""


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


CASES = {
    "syntax error": ("def f(:\n    pass\n", 5, "syntax error: invalid syntax"),
    "import error": ("import no_such_module\n", 5, "ModuleNotFoundError: No module named 'no_such_module'"),
    "exit while importing": ("raise SystemExit(3)\n", 5, "importing ends the process (exit code 3)"),
    "hard exit while importing": ("import os\nos._exit(0)\n", 6, "importing ends the process"),
    "another base exception while importing": ("raise GeneratorExit\n", 5, "importing: GeneratorExit"),
    "input while importing": ("input('?')\n", 5, "importing: EOFError"),
    "no mapping as mesh": (changed('{"tp": 2}', "[2]"), 6, "mesh [2]: expected names and sizes"),
    "a mark on something else": ("program(mesh={'tp': 2})(print)\n", 5, "marks a class or a function, not"),
    "no module found": ("class Net(nn.Module): ...\n", 1, "no program found"),
    "no mesh": (changed('(mesh={"tp": 2})', "()"), 7, "Net has no mesh"),
    "constructor wants something else": (
        changed("mesh, d, f):", "mesh, config, d, f):"),
        9,
        "the constructor of Net needs 'config', which is no dim of the program",
    ),
    "constructor fails": (
        changed("super().__init__()", "super().__init__(); self.n = d / 0"),
        10,
        "constructing Net: ZeroDivisionError: division by zero",
    ),
    "constructor exits": (
        changed("super().__init__()", "import os; os._exit(0)"),
        10,
        "constructing Net ends the process",
    ),
    "forward exits": (changed("return x", "raise SystemExit; return x"), 13, "ends the process"),
    "forward exits hard": (changed("return x", "import os; os._exit(0); return x"), 13, "ends the process"),
    "an exception that cannot be printed": (
        changed("return x", "raise type('E', (Exception,), {'__str__': None})(); return x"),
        13,
        "running Net on one device: E",
    ),
    "constructor makes no such parameter": (
        changed("self.w =", "self.v ="),
        8,
        "Net.w is annotated, but the constructor makes no such tensor",
    ),
    "constructor makes another shape": (
        changed("f // mesh.size()", "f"),
        8,
        "w is declared 'd f@tp', [4, 5] on each rank of tp=2, but the constructor made [4, 10]",
    ),
    "unknown axis": (
        changed('"d f@tp"', '"d f@tpp"'),
        8,
        "unknown axis 'tpp' in 'd f@tpp': the mesh has tp (did you mean tp?)",
    ),
    "unknown axis of an argument": (changed('"b d"', '"b@dp d"'), 12, "unknown axis 'dp' in 'b@dp d'"),
    "size not divisible": (
        changed('{"tp": 2}', '{"tp": 2}, dims={"f": 5}'),
        12,
        "dim f = 5 is not divisible by axis tp = 2 in 'b f@tp': valid sizes of tp are 1, 5",
    ),
    "argument without a type": (
        changed('x: Spmd[Tensor, "b d"]', "x"),
        12,
        "argument 'x' of Net.forward has no type",
    ),
    "result without a type": (
        changed(' -> Spmd[Tensor, "b f@tp"]', ""),
        12,
        "the result of Net.forward has no type",
    ),
    "output that is no tensor": (
        changed("return x @ self.w", "return [x @ self.w]"),
        12,
        "forward returns list, not a tensor",
    ),
    "output of another shape": (
        changed("return x @ self.w", "return (x @ self.w).t()"),
        12,
        "forward returns shape [10, 3] where 'b f@tp' means [3, 10]",
    ),
    "forward raises": (
        changed("return x @ self.w", "return x @ self.w @ self.w"),
        13,
        "running Net on one device: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "cycle of modules": (
        changed("super().__init__()", "super().__init__(); self.a = nn.Module(); self.a.b = self"),
        7,
        "modules form a cycle: Net.a.b is Net itself",
    ),
    "dim of size 0": (changed('{"tp": 2}', '{"tp": 2}, dims={"d": 0}'), 7, "dim d has size 0"),
    "dim of size 0 in a type": (changed('"b d"', '"0 d"'), 12, "dim of size 0 in '0 d'"),
    "axis of size 0": (changed('{"tp": 2}', '{"tp": 0}'), 6, "mesh axis tp has size 0"),
    "axis used twice": (changed('"d f@tp"', '"d@tp f@tp"'), 8, "axis tp used twice in 'd@tp f@tp'"),
    "typo in a type": (
        changed('"d f@tp"', '"d f@@tp"'),
        8,
        "expected the name of a mesh axis after 'f@', found '@'",
    ),
    "typo in a result": (
        changed('"b f@tp"', '"b f@tp | tp"'),
        12,
        "expected 'axis:P' or 'sum@axis' after '|'",
    ),
    "postponed typo": (
        "from __future__ import annotations\n" + changed('"b d"', '"b d]"'),
        13,
        "expected a dim, '|' or the end, found ']'",
    ),
    "unknown axis of grads": (
        changed('{"tp": 2}', '{"tp": 2}, grads={"dp": "avg"}'),
        7,
        "unknown axis 'dp' in grads: the mesh has tp",
    ),
}


def write(tmp_path, source):
    if source.startswith("from __future__"):
        first, _, rest = source.partition("\n")
        source = first + "\n" + HEAD + rest
    else:
        source = HEAD + source
    file = tmp_path / "model.py"
    file.write_text(source)
    return file


@pytest.mark.parametrize("case", CASES)
def test_one_line_that_names_file_and_line(case, tmp_path, monkeypatch, capsys):
    source, line, message = CASES[case]
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, textwrap.dedent(source))
    assert main([file.name]) == 2
    out, err = capsys.readouterr()
    first = err.splitlines()[0]
    assert first.startswith(f"model.py:{line}: error: ")
    assert message in first
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    "case", ["axis used twice", "typo in a type", "typo in a result", "unknown axis", "syntax error"]
)
def test_what_is_misspelt_has_a_caret(case, tmp_path, capsys):
    assert main([str(write(tmp_path, CASES[case][0]))]) == 2
    _, text, caret = capsys.readouterr().err.splitlines()[:3]
    assert caret.strip() == "^"
    assert text[caret.index("^")] in "@tp:("


def test_no_such_file(capsys):
    assert main(["nowhere.py"]) == 2
    assert capsys.readouterr().err.splitlines() == ["nowhere.py:1: error: no such file"]


def test_a_mesh_that_cannot_be_read(capsys):
    assert main(["x.py", "--mesh", "dp:2"]) == 2
    assert capsys.readouterr().err.startswith("error: expected name=number, found 'dp:2'")


def test_settings_that_are_wrong_name_their_line(tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'x'\n[tool.spmdcheck]\nmesh = { dp = 2 }\ntests = 1\n"
    )
    assert main([str(tmp_path / "model.py")]) == 2
    err = capsys.readouterr().err
    assert "pyproject.toml:5: error: [tool.spmdcheck] tests: no such setting" in err


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert main([str(write(tmp_path, "import no_such_module\n")), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bad_file_does_not_hide_the_others(tmp_path, capsys):
    for name, source in (("a.py", "import no_such_module\n"), ("b.py", "raise ValueError('b')\n")):
        (tmp_path / name).write_text(HEAD + source)
    assert main([str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("/")[2].partition(":")[0] for line in lines] == ["a.py", "b.py"]


def test_a_file_that_is_no_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_bytes(b"import spmdtypes\n\0")
    assert main(["model.py"]) == 2
    assert capsys.readouterr().err.startswith("model.py:1: error: syntax error: ")


def test_the_caret_of_a_long_line(tmp_path, capsys):
    (tmp_path / "model.py").write_text("x = " + "1 + " * 200 + ")\n")
    assert main([str(tmp_path / "model.py")]) == 2
    _, text, caret = capsys.readouterr().err.splitlines()
    assert max(len(text), len(caret)) < 110
    assert text[caret.index("^")] == ")"


def test_an_endless_loop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spmdtypes.rehearsal.MAX_WORK", 0.5)
    monkeypatch.setattr("spmdtypes.notation.ATTEMPTS", 1)
    monkeypatch.setattr("spmdtypes.entry.ATTEMPTS", 1)
    file = write(tmp_path, changed("return x", "\n        while True: pass\n        return x"))
    assert main([file.name]) == 2
    assert capsys.readouterr().err.startswith("model.py:14: error: still computing on one device after")


def test_interrupted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, "raise KeyboardInterrupt\n")
    assert main([file.name]) == 130
    assert capsys.readouterr().err == "model.py:5: error: interrupted\n"


def test_a_program_that_runs_on_one_device_only(tmp_path, monkeypatch, capfd):
    """Its sizes fit on the mesh of ones. Libraries log tracebacks of their own."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, changed("return x @ self.w", "return x @ self.w + x @ torch.ones(x.shape[1], 12)"))
    file.write_text(file.read_text().replace('"tp": 2}', '"tp": 2}, dims={"f": 12}'))
    assert main([file.name]) == 2
    out, err = capfd.readouterr()
    assert out.startswith("model.py:13: error: RuntimeError: The size of tensor a (6) must match")
    assert "Traceback" not in out + err


def test_a_process_of_its_own_shows_no_traceback_of_torch(tmp_path):
    """Importing torch, which comes after the first words of the command line, sets levels of loggers."""
    text = changed("return x @ self.w", "return x @ self.w @ self.w")
    file = write(tmp_path, text.replace('"b d"', '"b s d"').replace('"b f@tp"', '"b s f@tp"'))
    ran = subprocess.run([sys.executable, "-m", "spmdtypes.cli", file], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert ":13: error: " in ran.stderr
