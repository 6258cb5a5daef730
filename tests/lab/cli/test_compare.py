"""The comparison from the command line: built-in tasks, and models and tasks in files."""

import contextlib
import io
import json
import math
import re
import time
from pathlib import Path

import brainstate
import jax
import numpy as np
import pytest

from braintrace.lab.cli import _commands, _parser, main
from braintrace.lab.cli._names import RULES as NAMES
from braintrace.lab.cli._network import CELLS, Network
from braintrace.lab.comparison import _compare
from braintrace.lab.comparison._gradient import Compiled, agreement
from braintrace.lab.comparison._model import pure_model
from braintrace.lab.comparison._output import INTERRUPTED
from braintrace.lab.comparison._rules import BASELINES, parse
from braintrace.lab.comparison._sequences import sequences_of
from braintrace.lab.comparison._training import OPTIMIZERS
from braintrace.lab.tasks import MAKE

from .test_demo import hide

EXAMPLE = Path(__file__).parents[3] / "examples" / "compare_rules.py"
SMALL = ["--quick", "--units", "4", "--batch", "4", "--updates", "4", "--cell", "mingru"]
RULES = ["bptt", "tbptt", "no_trace", "d_rtrl", "pp_prop", "rtrl:memory_limit=10"]


def compared(out, *words):
    """What a comparison prints, its status and its record."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        status = main(["compare", "adding", *SMALL, "--out", str(out), *words])
    return shown.getvalue(), status, json.loads((out / "compare_adding.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    return *compared(out, "--seeds", "2", "--rules", *RULES), out


def rows(record):
    """Rows by rule, as it was asked for."""
    return {row["label"].partition(":window")[0]: row for row in record["rows"]}


def test_compare_chooses_a_window_of_truncated_bptt(run):
    table, _, record, _ = run
    row = rows(record)["tbptt"]
    assert row["label"] == f"tbptt:window={row['window']}" and row["label"] in table
    assert 1 <= row["window"] <= record["task"]["length"]


def test_compare_prints_a_row_for_every_rule(run):
    table, status, _, _ = run
    assert status == 0
    lines = {line.split()[0].partition(":window")[0]: line for line in table.splitlines() if line}
    for rule in RULES[:-1]:
        assert "±" in lines[rule] and len(lines[rule]) <= 80
    assert "rtrl:memory_limit=10: refused, rtrl would store" in table
    assert "squared error" in table and "chance level: 0.1667" in table
    assert "mingru of 4 units, T = 16" in table


def test_compare_writes_everything_it_measured(run):
    _, _, record, out = run
    assert {"schema", "finished", "task", "settings", "rows", "versions", "machine"} == set(record)
    assert record["finished"] and record["settings"]["seeds"] == 2
    assert record["task"]["name"] == "adding" and not record["task"]["higher_is_better"]
    assert list(rows(record)) == RULES
    for label in RULES[:-1]:
        row = rows(record)[label]
        assert row["working_bytes"] > 0 and row["stored_bytes"] > 0 and row["milliseconds"] > 0
        assert [seed["seed"] for seed in row["seeds"]] == [0, 1]
    assert "do:" in rows(record)[RULES[-1]]["refused"]
    image = (out / "compare_adding.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000


def test_compare_agreement_of_exact_and_inexact_rules(run):
    found = rows(run[2])
    for seed in range(2):
        for when in ("initial", "trained"):
            at = {rule: found[rule]["seeds"][seed][when] for rule in RULES[:-1]}
            assert at["bptt"]["error"] == 0 and abs(at["bptt"]["cosine"] - 1) < 1e-12
            assert at["d_rtrl"]["cosine"] > 0.9999 and at["d_rtrl"]["error"] < 1e-9
            assert at["no_trace"]["cosine"] < 0.999 and at["no_trace"]["error"] > 0.01
            assert at["no_trace"]["error_all"] < at["no_trace"]["error"]


def test_compare_adds_rows_to_its_record_and_gives_the_same_numbers(run, tmp_path):
    words = ("--seeds", "2", "--rules")
    _, _, alone = compared(tmp_path, *words, "d_rtrl")
    assert rows(alone)["d_rtrl"]["seeds"] == rows(run[2])["d_rtrl"]["seeds"]
    table, status, both = compared(tmp_path, *words, "no_trace", "--add")
    assert status == 0 and list(rows(both)) == ["d_rtrl", "no_trace"]
    assert rows(both)["no_trace"]["seeds"] == rows(run[2])["no_trace"]["seeds"]
    assert rows(both)["d_rtrl"] == rows(alone)["d_rtrl"] and "d_rtrl " in table


def test_interrupted_comparison_without_extras_shows_what_is_finished(
    tmp_path, monkeypatch, capsys
):
    hide(monkeypatch, "matplotlib", "tqdm")
    train, calls = _compare.Comparison._train, []

    def interrupted(self, row, *rest):
        calls.append(row.label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        train(self, row, *rest)

    monkeypatch.setattr(_compare.Comparison, "_train", interrupted)
    table, status, record = compared(tmp_path, "--rules", "bptt", "no_trace")
    assert status == INTERRUPTED and not record["finished"]
    assert "INTERRUPTED" in table
    assert re.search(r"^bptt .*\d$", table, re.MULTILINE)
    assert re.search(r"^no_trace .*\(0 of 1 seed\)$", table, re.MULTILINE)
    shown = capsys.readouterr().err
    assert "adding 4/8  squared error" in shown and "seed 0, bptt" in shown
    assert "pip install 'braintrace-online[plot]'" in shown
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["copy", "--length", "5"], "copy needs at least 9 steps"),
        (["copy", "--seeds", "0"], "'0' is not a positive whole number"),
        (["copy", "--lr", "fast"], "--lr: 'fast' is not a positive number"),
        (["copy", "--rules", "magic"], "there is no rule 'magic': choose from bptt"),
        (
            ["copy", "--rules", "d_rtrl:speed=9"],
            "there is no option of d_rtrl 'speed'",
        ),
        (["copy", "--rules", "d_rtrl:fast"], "'fast' is not option=value"),
        (["copy", "--rules", "d_rtrl:window=0"], "window=0 is not a positive whole"),
        (["copy", "--rules", "bptt:window=3"], "there is no option of bptt 'window'"),
        (["copy", "--rules", "n=3"], "'n=3' is an option without a rule"),
    ],
)
def test_wrong_comparison__exits_with_2(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *words])
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: braintrace compare" in shown and said in shown


def test_compare_without_optax_says_what_to_install(tmp_path, capsys, monkeypatch):
    hide(monkeypatch, "optax")
    with pytest.raises(SystemExit):
        compared(tmp_path, "--rules", "bptt")
    assert "Adam needs optax: pip install 'braintrace-online[tasks]'" in capsys.readouterr().err


def test_compare_lists_what_there_is(capsys):
    assert main(["compare", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*MAKE, *CELLS, *NAMES))


def test_rules_are_read_with_their_options():
    words = ["bptt,d_rtrl:window=8", "pp_prop:decay_or_rank=(0.9,0.8),vjp_method=multi-step"]
    bptt, windowed, pair = parse([*words, "bptt"])
    assert (bptt.name, bptt.options, bptt.window) == ("bptt", {}, None)
    assert windowed.window == 8 and windowed.options == {}
    assert windowed.label == "d_rtrl:window=8"
    assert pair.options == {"decay_or_rank": (0.9, 0.8)} and pair.window == 1
    (rolling,) = parse(["rolling"])
    assert rolling.label == "rolling:window=8" and rolling.window == 8


def test_all_rules_are_all_names_but_aliases():
    parsed = [choice.name for choice in parse(["all"])]
    assert tuple(parsed) == NAMES and {*BASELINES, "d_rtrl", "rtrl"} <= set(parsed)
    assert "es_d_rtrl" not in parsed


@pytest.mark.parametrize("cell", ["mingru", "lru"])
def test_element_wise_cells_are_exact(cell):
    task = MAKE["mackey_glass"](7)
    sequences = sequences_of(task, 3)
    model = pure_model(Network(cell, task, 4, seed=0), 3, sequences.x)
    batch = sequences.draw(jax.random.key(0))
    rules = (Compiled(choice, model, sequences) for choice in parse(["d_rtrl:block=2", "bptt"]))
    rule, bptt = (each(model.params, batch)[0] for each in rules)
    np.testing.assert_allclose(agreement(rule, bptt, list(bptt)), (1, 0), atol=1e-9)


@pytest.mark.parametrize("cell", CELLS)
def test_cells_advance_and_reset(cell):
    model = Network(cell, MAKE["adding"](20), 5, seed=0)
    brainstate.nn.init_all_states(model, batch_size=4)
    xs = np.ones((6, 4, 2))
    first = brainstate.transform.for_loop(model, xs)
    assert first.shape == (6, 4, 1) and np.isfinite(first).all()
    brainstate.nn.reset_all_states(model, batch_size=4)
    np.testing.assert_array_equal(brainstate.transform.for_loop(model, xs), first)


@pytest.mark.parametrize("cell", ["alif", "adlif", "gif"])
def test_spiking_cell_spikes(cell):
    task = MAKE["match"](60)
    model = Network(cell, task, 64, seed=0)
    brainstate.nn.init_all_states(model, batch_size=8)
    xs, _ = jax.jit(lambda key: task.batch(key, 8))(jax.random.key(0))
    spikes = brainstate.transform.for_loop(model.cell, xs)
    assert set(np.unique(spikes)) == {0, 1}
    assert 0.01 < spikes.mean() < 0.3 and math.isfinite(spikes.sum())


def test_compare_goes_on_where_a_rule_needs_more_than_a_loss(tmp_path):
    _, status, record = compared(
        tmp_path, "--updates", "1", "--rules", "three_factor", "dni", "no_trace"
    )
    assert status == 0
    refused = {label: row["refused"] for label, row in rows(record).items()}
    assert "without a modulator" in refused["three_factor"]
    assert "learns another network" in refused["dni"] and refused["no_trace"] is None


def test_own_model_and_task_of_thirty_lines_take_less_than_a_minute(tmp_path, capsys):
    text = EXAMPLE.read_text()
    body = text[text.index("class Net") : text.index("def main")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 32
    words = ["--model", f"{EXAMPLE}:Net(4)", "--task", f"{EXAMPLE}:Sign", "--out", str(tmp_path)]
    started = time.process_time()
    sizes = ["--seeds", "1", "--updates", "5", "--batch", "4", "--lr", "0.01", "0.001"]
    rules = ["--rules", "bptt", "d_rtrl", "--optimizers", "adam", "sgd", "--update-every", "12"]
    assert main(["compare", *words, *sizes, *rules]) == 0
    assert time.process_time() - started < 60
    table = capsys.readouterr().out
    assert "partial" not in table and "Net, T = 24" in table and "one every 12 steps" in table
    record = json.loads((tmp_path / "compare_Sign.json").read_text())
    assert [row["label"] for row in record["rows"]] == [
        f"{rule} {name}" for rule in ("bptt", "d_rtrl") for name in ("adam", "sgd")
    ]
    assert record["settings"]["rates"] == [0.01, 0.001]
    assert (tmp_path / "compare_Sign.png").exists()


BROKEN = """
import jax.numpy as jnp

class Empty:
    pass

class Silent:
    chance, higher_is_better = 0.5, True
    batch = validation = test = lambda self, *_: (jnp.zeros((4, 1, 2)), jnp.zeros((4, 1)))
    loss = score = lambda self, outs, targets: ((outs - targets) ** 2).mean()

def net(key, batch_size):
    return lambda params, h, x: (1 / 0, x), jnp.ones(2), jnp.zeros((batch_size, 2))
"""


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["{}:Nothing"], 2, "has no Nothing"),
        (["{}:Empty"], 1, "the task Empty has no batch"),
        (["{}:Silent", "--batch", "1"], 2, "does not say how many outputs"),
        (["{}:Silent", "--batch", "1", "--model", "{}:net"], 1, "net.py:13 (<lambda>)"),
        (["{}:Silent", "--length", "9"], 2, "--length is for built-in tasks"),
        (["adding", "--model", "{}:net", "--units", "3"], 2, "for the built-in network"),
        (["adding", "--add"], 2, "to add to"),
        (["adding", "--optimizers", "adm"], 2, "there is no optimizer 'adm': did you mean adam?"),
        (["adding", "--update-every", "5"], 2, "update_every=5 for sequences of 96 steps"),
    ],
)
def test_mistakes_with_files_and_settings(words, code, said, tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(BROKEN)
    words = [word.format(file) for word in words]
    try:
        status = main(["compare", *words, "--out", str(tmp_path), "--rules", "bptt"])
    except SystemExit as stopped:
        status = stopped.code
    assert status == code
    assert said in capsys.readouterr().err


def test_names_of_the_command_are_those_of_the_library():
    assert _parser.OPTIMIZERS == OPTIMIZERS and _commands.COMPARED == _compare.RULES
