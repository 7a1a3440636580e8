"""Every example that `spmdcheck explain` prints is checked: the wrong one has its code, the right one
nothing."""

import shutil

import pytest

from spmdtypes.api import check_programs
from spmdtypes.diagnostics.explain import EXAMPLES
from spmdtypes.discovery import find_entries

# found, but told under another code


def examples():
    for file in sorted(EXAMPLES.glob("SPMD*.py")):
        yield pytest.param(file, id=file.stem)


@pytest.mark.slow
@pytest.mark.parametrize("file", list(examples()))
def test_the_wrong_one_has_its_code_and_the_right_one_nothing(file, tmp_path):
    shutil.copy(file, tmp_path)  # files of the package itself are no user files
    reports = {e.name: check_programs(e.programs()) for e in find_entries(tmp_path / file.name)}
    assert {name: r.failures for name, r in reports.items()} == {"wrong": (), "right": ()}
    assert file.stem in [f.code for f in reports["wrong"].findings], str(reports["wrong"])
    assert reports["right"].findings == (), str(reports["right"])
