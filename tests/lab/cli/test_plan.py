"""What each rule would cost for a model in a file, and mistakes in naming one."""

import re
import runpy

import jax
import numpy as np
import pytest

import braintrace
from braintrace.lab.cli import main

FILE = """
import brainstate
import equinox as eqx
import jax
import jax.numpy as jnp

import braintrace

cell = eqx.nn.GRUCell(2, 3, key=jax.random.key(0))
number = 3
pair = (cell, 3)


def step(params, h, x):
    h = jnp.tanh(x @ params["w"] + h @ params["r"])
    return h, h


def model(units=3, batch=2):
    params = {"w": jnp.ones((2, units)), "r": jnp.ones((units, units))}
    return step, params, jnp.zeros((batch, units)), jnp.zeros((batch, 2))


def of_equinox():
    return lambda cell, h, x: (cell(x, h),) * 2, cell, jnp.zeros(3), jnp.zeros(2)


def broken():
    _, params, state, x = model()
    return step, {**params, "w": jnp.ones((4, 3))}, state, x


class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(2, 3)

    def update(self, x):
        return self.cell(x)


def plain():
    return brainstate.nn.GRUCell(2, 3), jnp.zeros((4, 2))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "net.py"
    path.write_text(FILE)
    return path


def plan(capsys, *words):
    """Status and what was printed."""
    try:
        status = main(["plan", *map(str, words)])
    except SystemExit as stopped:
        status = stopped.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    "word, words, total, name",
    [
        ("model", [], 2, "r"),
        ("of_equinox", ["--rule", "pp_prop:decay_or_rank=0.5"], 4, "weight_hh"),
        ("Network", ["--input", "4,2", "--batch-size", "4"], 3, "cell.Wz.weight"),
        ("plain", ["--batch-size", "4", "--unmarked"], 2, "Wh.weight"),
    ],
)
def test_plan_prints_what_rules_cost(word, words, total, name, file, capsys):
    status, shown, errors = plan(capsys, f"{file}:{word}", *words)
    assert status == 0 and not errors
    head, *rows = shown.split("\n\n")[0].splitlines()
    assert head.split() == ["rule", "memory", "time", "exact"]
    rules = {row.split()[0]: row for row in rows}
    now = "pp_prop(decay_or_rank=0.5)" if "--rule" in words else "d_rtrl"
    assert list(rules) == [*dict.fromkeys([now, "d_rtrl"]), "snap(n=2)", "rtrl"]
    assert " x 1 " in rules[now] and rules["rtrl"].endswith(f"{total} of {total}")
    assert [line for line in shown.splitlines() if line.startswith(f"{name} ")]
    assert f"Recommended: snap(n=2), {total} of {total} parameters exact, " in shown


def test_plan_measures_if_asked_to(file, capsys):
    status, shown, errors = plan(capsys, f"{file}:model", "--measure")
    assert status == 0 and not errors
    rows = re.findall(r"^(\S+) .* x ([\d.]+) +2 of 2$", shown, re.MULTILINE)
    assert "estimated" not in shown and [call for call, _ in rows] == ["snap(n=2)", "rtrl"]
    recommended = re.search(r"Recommended: (\S+), 2 of 2", shown)[1]
    assert dict(rows)[recommended] == min((time for _, time in rows), key=float)
    assert (
        shown.splitlines()[-1].endswith(" times the time of d_rtrl.")
        and "about" not in (shown.splitlines()[-1])
    )


def test_plan_of_a_mixture_prices_it_beside_the_rules(file, capsys):
    status, shown, errors = plan(capsys, f"{file}:model", "--rule", "r=snap:n=2,*=d_rtrl")
    assert status == 0 and not errors
    rows = [line for line in shown.splitlines() if line.startswith("{r: snap(n=2), *: d_rtrl}")]
    assert rows and " x 1 " in rows[0] and rows[0].endswith("1 of 2")
    status, _, errors = plan(capsys, f"{file}:model", "--rule", "q=snap:n=2,*=d_rtrl")
    assert status == 1 and "no parameter is named 'q'" in errors


def test_plan_measures_a_batch(file, capsys, tmp_path):
    with file.open("a") as more:
        more.write("def loss(out, y):\n    return ((out - y) ** 2).mean()\n")
    step, params, state, x = runpy.run_path(str(file))["model"]()
    out = jax.eval_shape(step, params, state, x)[1]
    data = tmp_path / "batch.npz"
    drawn = lambda like: np.random.default_rng(0).normal(size=(3, *like.shape)).astype(like.dtype)
    np.savez(data, xs=drawn(x), ys=drawn(out))
    words = ("--data", data, "--time", "1e6", "--save", tmp_path / "choice.json")
    status, shown, errors = plan(capsys, f"{file}:model", *words)
    assert status == 0 and not errors and "no_trace, window=3  1.0000" in shown
    assert "Chosen:\n  *  no_trace, window=3" in shown
    assert braintrace.Choice.load(tmp_path / "choice.json").rule["*"][1] == {"window": 3}
    status, shown, _ = plan(capsys, f"{file}:plain", "--unmarked", *words, "--length", "2")
    assert status == 0 and "Chosen:\n  *  no_trace, window=2" in shown
    choice = braintrace.Choice.load(tmp_path / "choice.json")
    assert set(choice.tried[0].parts) == {"Wrz.weight", "Wh.weight"}  # the names of the learner
    status, _, errors = plan(capsys, f"{file}:model", "--data", data, "--length", "4")
    assert status == 2 and "why:   it has 3 steps, not 4" in errors
    status, _, errors = plan(capsys, f"{file}:number", "--data", data)
    assert status == 2 and "number has type int" in errors
    np.savez(data, x=np.ones(3))
    status, _, errors = plan(capsys, f"{file}:model", "--data", data)
    assert status == 2 and "has no batch.\n  why:   it has the arrays x" in errors


def test_plan_respects_a_memory_limit(file, capsys):
    status, shown, _ = plan(capsys, f"{file}:model(40, batch=16)", "--memory", "300kB")
    assert status == 0
    rules = {line.split()[0]: line for line in shown.split("\n\n")[0].splitlines()[1:]}
    assert "over the limit" not in rules["d_rtrl"]
    assert rules["snap(n=2)"].endswith("over the limit") and "8.6 MB" in rules["rtrl"]
    assert "Recommended: d_rtrl, 0 of 2 parameters exact; no other" in shown
    assert "exact within 300 kB." in shown
    words = ("--memory", "300kB", "--length", "10")
    status, shown, _ = plan(capsys, f"{file}:model(40, batch=16)", *words)
    assert "Recommended within 300 kB: no_trace, window=10, 2 of 2 parameters exact, " in shown
    status, shown, _ = plan(capsys, f"{file}:model", "--memory", "1")
    assert "Recommended: no rule of these fits within 1 bytes" in shown


def test_plan_allocates_no_traces(file, capsys):
    status, shown, _ = plan(capsys, f"{file}:model(2048, batch=64)", "--rule", "rtrl")
    assert status == 0 and "4.4 TB" in shown


@pytest.mark.parametrize(
    "word, words, status, said",
    [
        ("cell", [], 2, "cell takes the arguments input, hidden."),
        ("step", [], 2, "step takes the arguments params, h, x."),
        ("number", [], 2, "number has type int."),
        ("pair", [], 2, "pair has type tuple of GRUCell, int."),
        ("Network", [], 2, "there is no input."),
        ("nothing", [], 2, "has no nothing.\n  why:   it defines "),
        ("model", ["--rule", "magic"], 2, "there is no rule 'magic'"),
        ("model", ["--rule", "dni"], 2, "--rule dni."),
        ("model", ["--memory", "much"], 2, "'much' is not a memory such as 2GB"),
        ("broken", [], 1, "net.py:15 (step)"),
        ("plain", ["--batch-size", "4"], 1, "--unmarked recognises plain JAX"),
    ],
)
def test_mistakes_are_told_in_four_parts(word, words, status, said, file, capsys):
    found, shown, errors = plan(capsys, f"{file}:{word}", *words)
    assert found == status and said in errors and not shown
    assert "Traceback" not in errors
    assert ("why:" in errors and "do:" in errors) or "usage: braintrace plan" in errors
