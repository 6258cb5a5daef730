"""The certificate of a model in a file, and mistakes in naming it."""

import textwrap

import pytest

import braintrace
from braintrace.lab.cli import main

FILE = """
import brainstate
import braintrace
from neighbour import UNITS


class Network(brainstate.nn.Module):
    def __init__(self, inputs=3, units=UNITS):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(inputs, units)

    def update(self, x):
        return self.cell(x)


class Table(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = brainstate.ParamState(brainstate.random.rand(5, 3))
        self.cell = braintrace.nn.GRUCell(3, 2)

    def update(self, i, gain):
        return self.cell(gain * braintrace.embedding(i, self.table.value))


network = Network(2)
number = 3


def make(name="net"):
    import late_neighbour

    return Network(units=late_neighbour.UNITS)


def broken():
    return 1 / 0
"""


@pytest.fixture
def file(tmp_path):
    for name in ("neighbour", "late_neighbour"):
        (tmp_path / f"{name}.py").write_text("UNITS = 2\n")
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def explain(capsys, *words):
    """Status and what was printed."""
    try:
        status = main(["explain", *map(str, words)])
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    "word, words",
    [
        ("Network", ["--input", "4,3", "--batch-size", "4"]),
        ("network", ["--input", "2", "--rule", "rtrl", "--verbose"]),
        ("make('a:b')", ["--input", "3", "--level", "3"]),
        ("Network(5, units=2)", ["--input", "(5,)", "--rule", "pp_prop:decay_or_rank=0.5"]),
    ],
)
def test_explain_prints_the_certificate(word, words, file, capsys):
    status, shown, errors = explain(capsys, f"{file}:{word}", *words)
    assert status == 0 and not errors
    assert "cell.Wz.weight  " in shown and f"{file.name}:13 (Network.update)" in shown
    whole = "--level" in words or "--verbose" in words
    assert ("cell.Wz.weight: " in shown and f"{file}:13" in shown) == whole
    assert whole or len(shown.splitlines()) < 20
    exact = "all 3" if "rtrl" in words else "0 of 3"
    rule = words[words.index("--rule") + 1].partition(":")[0] if "--rule" in words else "d_rtrl"
    assert f"{rule}: {exact} parameters are exact (equal BPTT)" in shown
    assert ("Diagnostics" in shown) == ("--level" in words)


def test_explain_takes_inputs_from_the_file(file, capsys):
    for example in ("np.zeros((4, 3))", "lambda: np.zeros((4, 3))"):
        file.write_text(FILE + f"\nimport numpy as np\nexample_input = {example}\n")
        assert explain(capsys, f"{file}:Network", "--batch-size", "4")[0] == 0
    file.write_text(FILE + "\nimport numpy as np\nexample_input = (np.zeros((), int), 0.5)\n")
    status, shown, _ = explain(capsys, f"{file}:Table")
    assert status == 0 and "── table  " in shown and "within-step" in shown
    file.write_text(FILE + "\nexample_input = lambda: 1 / 0\n")
    status, _, errors = explain(capsys, f"{file}:Table")
    assert status == 1 and "ZeroDivisionError" in errors and "net.py:39" in errors


def test_explain_writes_a_page(file, tmp_path, capsys, monkeypatch):
    def to_html(self, path):
        path.write_text(repr(self))

    monkeypatch.setattr(braintrace.CompilationReport, "to_html", to_html, raising=False)
    page = tmp_path / "deep" / "page.html"
    status, shown, _ = explain(capsys, f"{file}:Network", "--input", "3", "--html", page)
    assert status == 0 and f"Page: {page}" in shown
    assert page.read_text().startswith("CompilationReport(hidden_groups=1")
    status, _, errors = explain(capsys, f"{file}:Network", "--input", "3", "--html", file / "page")
    assert status == 1 and f"{file / 'page'} cannot be written." in errors


@pytest.mark.parametrize(
    "word, words, status, said",
    [
        ("Network", [], 2, "there is no input."),
        ("Missing", ["--input", "3"], 2, "has no Missing.\n  why:   it defines Network, Table, "),
        ("number", ["--input", "3"], 2, "number has type int."),
        ("Network(1 + )", ["--input", "3"], 2, "'Network(1 + )' is not a name."),
        ("Network(open('x'))", ["--input", "3"], 2, "is not a name."),
        ("Network", ["--input", "3", "--input-dtype", "magic"], 2, "is not an array type"),
        ("Network", ["--input", "3", "--rule", "magic"], 2, "there is no rule 'magic'"),
        ("Network", ["--input", "3", "--rule", "bptt"], 2, "bptt has no traces"),
        ("Network", ["--input", "3,x"], 2, "'3,x' is not a shape such as 16,3"),
        ("Network", ["--input", "4,5", "--batch-size", "4"], 1, "does not fit weight"),
        ("Network('a')", ["--input", "3"], 1, "raised an error"),
        ("broken", ["--input", "3"], 1, "net.py:37 (broken)\n  why:   ZeroDivisionError"),
    ],
)
def test_mistakes_are_told_in_four_parts(word, words, status, said, file, capsys):
    found, shown, errors = explain(capsys, f"{file}:{word}", *words)
    assert found == status and said in errors and not shown
    assert "Traceback" not in errors and "JAX_TRACEBACK" not in errors
    assert ("why:" in errors and "do:" in errors) or "usage: braintrace explain" in errors


def test_files_that_cannot_be_read_are_told(file, capsys):
    status, _, errors = explain(capsys, "nowhere.py:Network")
    assert status == 2 and "there is no file nowhere.py." in errors
    assert explain(capsys, "Network")[0] == 2
    other = file.with_suffix(".txt")
    other.write_text("")
    status, _, errors = explain(capsys, f"{other}:Network")
    assert status == 2 and "its name does not end in .py" in errors
    file.write_text("x = 1\ny = (\n")
    status, _, errors = explain(capsys, f"{file}:Network")
    assert status == 1 and f"{file}:2" in errors and "SyntaxError" in errors
    file.write_text("raise SystemExit(0)\n")
    status, _, errors = explain(capsys, f"{file}:Network")
    assert status == 1 and f"{file}:1" in errors and "SystemExit" in errors
    file.write_text("import no_such_package\n")
    status, _, errors = explain(capsys, f"{file}:Network")
    assert status == 1 and f"{file}:1" in errors and "no_such_package" in errors
