import json

import pytest

from spmdtypes.diagnostics.codes import CODES, FAMILIES, lookup
from spmdtypes.diagnostics.explain import EXAMPLES, explain
from spmdtypes.diagnostics.finding import Finding, Note, Span, in_order
from spmdtypes.diagnostics.hints import Mend, dialect_of, hint, hint_for, own_function
from spmdtypes.diagnostics.json_format import finding_data, to_json
from spmdtypes.diagnostics.render import plain, render_finding, render_report, render_total
from spmdtypes.errors import CannotCheck
from spmdtypes.report import Report

SOURCE = """\
def forward(self, x):
    y = F.linear(F.gelu(F.linear(x, self.up)), self.down)
    return y
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SOURCE)
    return str(tmp_path / "model.py")


def finding(file, **changes):
    fields = {
        "code": "SPMD101",
        "severity": "error",
        "message": "forward returns a partial sum over tp where 'b s d' is declared",
        "span": Span(file, 3, 11, 3, 12),
        "notes": (Note(Span(file, 2, 8, 2, 57), "became a partial sum over tp here"),),
        "hint": "sum y over tp",
        "axes": ("tp",),
        "also": (Note(Span(file, 2), "grad(x) is a partial sum over tp (SPMD201)"),),
    }
    return Finding(**(fields | changes))


def test_a_finding_on_the_terminal(model):
    assert plain([render_finding(finding(model))]) == (
        "model.py:3:12: error[SPMD101]: forward returns a partial sum over tp where 'b s d' is declared\n"
        "2 |     y = F.linear(F.gelu(F.linear(x, self.up)), self.down)\n"
        "  |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ became a partial sum over tp here\n"
        "3 |     return y\n"
        "  |            ^\n"
        "   = also: grad(x) is a partial sum over tp (SPMD201) (line 2)\n"
        "   = hint: sum y over tp\n"
        "   = evidence: proved\n"
    )


def test_a_long_remark_stands_below_its_caret(model):
    note = Note(Span(model, 2, 8, 2, 57), "became a partial sum over tp here: " + "because " * 8)
    lines = plain([render_finding(finding(model, notes=(note,)))]).splitlines()
    assert lines[2] == "  |         " + "^" * 49
    assert lines[3].startswith("  |         became a partial sum")


def test_a_span_without_columns_marks_its_statement(model):
    text = plain([render_finding(finding(model, span=Span(model, 3), notes=()))])
    assert "  |     ^^^^^^^^\n" in text


def test_a_place_in_a_file_that_is_gone_is_still_named():
    text = plain([render_finding(finding("gone.py"))])
    assert "note: became a partial sum over tp here (gone.py:2:9)" in text


def test_a_report_says_how_much_is_known(model):
    report = Report(
        "Net", (finding(model),), {"proved": 3, "unknown": 1}, {"aten.foo": 2}, ("all valid",), 0.25
    )
    text = str(report)
    assert text == plain([render_report(report)])
    assert text.splitlines()[-3:] == [
        "assumed: all valid",
        "without a rule: aten.foo (2)",
        "Net: 1 error; 3 proved, 0 tested, 0 assumed, 1 unknown (0.2 s)",
    ]
    assert report.exit_code == 1
    assert "<pre>" in report._repr_html_()
    assert plain([render_total([report, report], 1)]).startswith(
        "2 programs, 2 errors, 1 could not be checked;"
    )


def test_a_warning_is_no_error(model):
    report = Report("Net", (finding(model, severity="warning"),))
    assert report.exit_code == 0
    assert "Net: 1 warning;" in report.summary()
    assert Report("Net", failures=("x.py:1: error: no",)).exit_code == 2


def test_errors_come_before_warnings_and_in_line_order():
    found = [
        Finding("SPMD303", "warning", "w", Span("a.py", 1)),
        Finding("SPMD101", "error", "late", Span("a.py", 9)),
        Finding("SPMD101", "error", "early", Span("a.py", 2)),
    ]
    assert [f.message for f in in_order(found)] == ["early", "late", "w"]


def test_json_has_every_field():
    data = finding_data(finding("model.py"))
    assert set(data) == {
        *("code", "severity", "message", "hint", "evidence", "axes", "border", "span", "notes", "also"),
    }
    text = to_json([Report("Net", (finding("model.py"),))], [CannotCheck("no", "x.py", 3)], 1)
    assert json.loads(text)["failures"] == [{"message": "no", "file": "x.py", "line": 3}]


def test_codes_are_well_formed():
    for name, code in CODES.items():
        assert code.name == name
        assert name[4] in FAMILIES
        assert code.title[0].islower()
        assert code.meaning.endswith(".")
    assert lookup("201") is lookup("spmd201") is CODES["SPMD201"]
    assert lookup("nonsense") is None


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("SPMD*.py")), ids=lambda f: f.stem)
def test_every_example_belongs_to_a_code_and_is_explained(file):
    page = explain(file.stem)
    assert page.index("# wrong") < page.index("# right")
    assert file.stem in CODES


RAW = "import torch.distributed as dist\n"
OWN = """\
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return x
    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad, None

class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad, None

"""


@pytest.mark.parametrize(
    ("source", "dialect", "all_reduce", "copy"),
    [
        (RAW, "raw", "dist.all_reduce(y, group=mesh.get_group(", "identity forward and dist.all_reduce(grad"),
        (OWN, "autograd", "Leave.apply(y", "Enter.apply(y"),
        (
            "import torch.distributed._functional_collectives as funcol\n",
            "functional",
            'all_reduce(y, "sum"',
            "y",
        ),
        ("from torch.distributed.nn import all_reduce\n", "nn_functional", "its backward sums too", "y"),
        (
            "from torch.distributed.tensor import DTensor\n",
            "dtensor",
            "redistribute",
            "grad_placements=[Partial()]",
        ),
        (
            "from megatron.core import tensor_parallel\n",
            "megatron",
            "reduce_from_tensor_model_parallel_region(y)",
            "copy_to_tensor_model_parallel_region(y)",
        ),
        (
            "import spmd_types\n",
            "spmd_types",
            'all_reduce(y, "tp", src=P, dst=I)',
            'reinterpret(y, "tp", src=I, dst=R)',
        ),
    ],
)
def test_hints_speak_the_dialect_of_the_file(source, dialect, all_reduce, copy, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(source)
    assert dialect_of(source) == dialect
    place = Span(str(file), 3)
    assert all_reduce in hint(Mend("all_reduce", "tp", "y", after=place))
    assert "after line 3" in hint(Mend("all_reduce", "tp", "y", after=place))
    assert copy in hint(Mend("copy", "tp", "y", before=place))


def test_own_functions_are_told_apart_by_where_they_communicate():
    assert own_function(OWN, "", "all_reduce") == "Enter"
    assert own_function(OWN, "all_reduce", "") == "Leave"
    assert own_function(OWN, "all_reduce", "all_reduce") is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("SPMD101", "sum the result of line 2 over tp: dist.all_reduce(it"),
        ("SPMD102", "sum it over tp before it is used (line 2)"),
        ("SPMD103", "after the sum over tp"),
        ("SPMD402", 'should run over tp: pass mesh.get_group("tp")'),
        ("SPMD404", "add the offset of this rank's block"),
        ("SPMD501", "seeded alike on every rank of tp"),
        ("SPMD703", "sum squares over tp before the root"),
    ],
)
def test_each_code_has_its_mend(code, words, model):
    assert words in hint_for(finding(model, code=code))


def test_a_gradient_is_mended_where_it_is_lost(model):
    other = finding(model, code="SPMD201", border="grad:norm.weight", also=())
    own = finding(model, code="SPMD201", border="grad:up", also=())
    assert hint_for(other).startswith("sum the gradient of what enters line 2 over tp: pass it through")
    assert hint_for(own).startswith("reduce the gradient of up over tp before the optimizer reads it")


def test_no_mend_is_made_up(model):
    assert hint_for(finding(model, code="SPMD106")) is None
    assert hint_for(finding(model, axes=())) is None
    assert hint_for(finding(model, code="SPMD301")) is None
    assert hint_for(finding(model, code="SPMD301"), factor="1/tp") == "multiply it by 1/tp (line 2)"
