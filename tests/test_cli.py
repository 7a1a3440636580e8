import json
import subprocess
import sys

import pytest

import spmdtypes.checker
from spmdtypes.cli import main
from spmdtypes.diagnostics.finding import Finding, Span
from spmdtypes.report import Report

PROGRAM = """\
import helper
from torch import Tensor, nn
from spmdtypes import Spmd, program

@program(mesh={"dp": 2}, name="NAME")
def NAME(x: Spmd[Tensor, "b@dp d"]) -> Spmd[Tensor, "b@dp d"]:
    print("hello from the user's file")
    return helper.double(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files with programs, and one that imports nothing of ours."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(PROGRAM.replace("NAME", name))
        (tmp_path / name / "helper.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "other.py").write_text("raise RuntimeError('never imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def checked(monkeypatch):
    """Stands for the checker: records the programs, answers what `answers` says by name."""
    seen, answers = [], {}

    def check_program(program, options):
        seen.append((program, options))
        return answers.get(program.name, Report(program.name, counts={"proved": 2, "tested": 1}))

    monkeypatch.setattr(spmdtypes.checker, "check_program", check_program)
    check_program.seen, check_program.answers = seen, answers
    return check_program


def error(name):
    finding = Finding("SPMD101", "error", "it is partial", Span("one/model.py", 8, 4), hint="sum it")
    return Report(name, (finding,), {"proved": 1}, {"aten.foo": 2}, ("all is well",))


def test_clean_programs_of_a_folder(folder, checked, capsys):
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "one: no errors; 2 proved, 1 tested, 0 assumed, 0 unknown" in out
    assert out.splitlines()[-1] == "2 programs, 0 errors; 4 proved, 2 tested, 0 assumed, 0 unknown"
    assert "hello" not in out.splitlines()[0]


def test_an_error_is_exit_code_one(folder, checked, capsys):
    checked.answers["one"] = error("one")
    assert main(["one/model.py", "two/model.py"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("one/model.py:8:5: error[SPMD101]: it is partial\n")
    assert "= hint: sum it" in out
    assert "assumed: all is well" in out
    assert "without a rule: aten.foo (2)" in out


def test_quiet_leaves_the_findings_and_the_summary(folder, checked, capsys):
    checked.answers["one"] = error("one")
    assert main(["one/model.py", "-q"]) == 1
    out = capsys.readouterr().out
    assert "SPMD101" in out
    assert "assumed:" not in out


def test_an_error_found_outweighs_a_file_that_cannot_be_checked(folder, checked, capsys):
    checked.answers["one"] = error("one")
    assert main(["one/model.py", "nowhere.py"]) == 1
    assert main(["two/model.py", "nowhere.py"]) == 2


def test_json(folder, checked, capsys):
    checked.answers["one"] = error("one")
    assert main(["one/model.py", "nowhere.py", "--format", "json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["version"] == 1
    assert data["exit_code"] == 1
    (program,) = data["programs"]
    (finding,) = program["findings"]
    assert finding["code"] == "SPMD101"
    assert finding["span"] == {"file": "one/model.py", "line": 8, "col": 4, "end_line": 0, "end_col": 0}
    assert program["evidence"] == {"proved": 1, "tested": 0, "assumed": 0, "unknown": 0}
    assert data["failures"] == [{"message": "no such file", "file": "nowhere.py", "line": 1}]


def test_the_command_line_wins_over_settings_which_win_over_the_program(folder, checked):
    (folder / "pyproject.toml").write_text(
        "[tool.spmdcheck]\nmesh = { dp = 3 }\ndims = { b = 12 }\ntest = false\n"
    )
    assert main(["one/model.py"]) == 0
    assert main(["one/model.py", "--mesh", "dp=4", "--dim", "b=16", "--dim", "d=5", "--seed", "7"]) == 0
    (first, options), (second, changed) = checked.seen
    assert first.mesh == {"dp": 3}
    assert str(first.params["x"]).startswith("12@dp ")
    assert not options.test
    assert second.mesh == {"dp": 4}
    assert str(second.params["x"]) == "16@dp 5"
    assert changed.seeds[0] == 7


def test_paths_may_come_from_the_settings(folder, checked, capsys):
    (folder / "pyproject.toml").write_text('[tool.spmdcheck]\npaths = ["two"]\n')
    assert main([]) == 0
    assert [p.name for p, _ in checked.seen] == ["two"]


def test_a_program_is_tried_with_other_sizes_before_it_is_given_up(folder, monkeypatch, capsys):
    tried = []

    def check_program(program, options):
        tried.append(str(program.params["x"]))
        if len(tried) < 3:
            return Report(program.name, failures=("one/model.py:8: error: sizes",))
        return Report(program.name)

    monkeypatch.setattr(spmdtypes.checker, "check_program", check_program)
    assert main(["one/model.py"]) == 0
    assert len(set(tried)) == 3


def test_an_error_of_ours_is_called_internal(folder, monkeypatch, capsys):
    def check_program(program, options):
        return spmdtypes.checker.representative_ranks(None)

    monkeypatch.setattr(spmdtypes.checker, "check_program", check_program)
    assert main(["one/model.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("one/model.py:6: error: internal error while running one: TypeError")
    assert len(err.splitlines()) == 1


def test_explain(capsys):
    assert main(["explain", "201"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SPMD201: gradient that is a partial sum")
    assert out.index("# wrong") < out.index("# right")
    assert main(["explain", "SPMD999"]) == 2
    assert "no code 'SPMD999'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out == f"spmdcheck {spmdtypes.__version__}\n"


def test_nothing_but_the_report_reaches_stdout(folder):
    noisy = "import os, subprocess\nos.write(1, b'noise')\nsubprocess.run(['echo', 'noise'])\n"
    (folder / "one" / "model.py").write_text(noisy + "raise RuntimeError\n")
    ran = subprocess.run(
        [sys.executable, "-m", "spmdtypes.cli", "one/model.py", "--format", "json"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert json.loads(ran.stdout)["failures"][0]["line"] == 4


def test_a_file_of_a_folder_in_another_encoding(folder, checked, capsys):
    source = "# coding: latin-1\n# caf\xe9\n" + PROGRAM.replace("NAME", "two")
    (folder / "two" / "model.py").write_bytes(source.encode("latin-1"))
    assert main(["two"]) == 0
    assert checked.seen[0][0].line == 8


def test_a_package_with_relative_imports(folder, checked, capsys):
    """Two packages of the same name, too."""
    for top in ("one", "two"):
        package = folder / top / "pkg" / "sub"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package.parent / "__init__.py").write_text("")
        (package.parent / "helper.py").write_text(f"NAME = '{top}'\n\ndef double(x): return x\n")
        source = PROGRAM.replace("import helper", "from .. import helper\nfrom pkg.helper import NAME")
        (package / "model.py").write_text(source.replace('"NAME"', "NAME").replace("def NAME", "def f"))
    assert main(["one/pkg", "two/pkg/sub/model.py"]) == 0
    assert [p.name for p, _ in checked.seen] == ["one", "two"]
    assert "2 programs, 0 errors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (b"[tool.spmdcheck]\nmsh = 1\n", 2, "msh: no such setting: the settings are paths, mesh, dims"),
        (b"[tool]\nspmdcheck = 1\n", 1, "is no table"),
        (b"\xff", 1, "cannot read"),
    ],
)
def test_settings_that_cannot_be_read(folder, capsys, text, line, message):
    (folder / "pyproject.toml").write_bytes(text)
    assert main(["one/model.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"pyproject.toml:{line}: error: ")
    assert message in err


def test_a_mesh_axis_of_size_zero(folder, capsys):
    assert main(["one/model.py", "--mesh", "dp=0"]) == 2
    assert capsys.readouterr().err == "error: mesh axis dp has size 0: expected a positive number\n"


def test_a_name_that_is_too_long(folder, capsys):
    assert main(["a" * 300 + ".py"]) == 2
    assert "cannot read: " in capsys.readouterr().err


def test_a_size_that_nothing_uses_is_said(folder, checked, capsys):
    assert main(["one/model.py", "--dim", "bb=8"]) == 0
    assert checked.seen[0][0].assumptions[-1] == "no type and no constructor names bb: the size is unused"
