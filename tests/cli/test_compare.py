"""The comparison runs from end to end, and its gradients and rows are what they say."""

import contextlib
import io
import json
import math
import re

import brainstate
import jax
import numpy as np
import pytest
from braintrace.cli._comparison import Trainer
from braintrace.cli._output import INTERRUPTED
from braintrace.cli._rules import BASELINES, parse

from braintrace.cli import main
from braintrace.cli._gradient import Compiled, agreement, matching_window
from braintrace.cli._names import RULES as NAMES
from braintrace.cli._network import CELLS, Network
from braintrace.tasks import MAKE

from .test_demo import hide

SMALL = ["--quick", "--units", "4", "--batch", "4", "--updates", "4", "--cell", "mingru"]
RULES = ["bptt", "tbptt", "no_trace", "d_rtrl", "pp_prop", "rtrl:memory_limit=10"]
NUMBERS = 8  # columns of numbers in the table


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
        assert len(re.findall(r"\s\d+\.\d+|\d+ of", lines[rule])) == NUMBERS + 2, lines[rule]
        assert lines[rule].endswith("2 of 2")
    assert "refused: RTRL would store" in lines[RULES[-1]]
    assert "squared error" in table and "chance level: 0.1667" in table


def test_compare_writes_everything_it_measured(run):
    _, _, record, out = run
    assert {"schema", "finished", "task", "settings", "rows", "versions", "machine"} == set(record)
    assert record["finished"] and record["settings"]["seeds"] == 2
    assert record["task"]["name"] == "adding" and not record["task"]["higher_is_better"]
    assert record["versions"]["jax"] == jax.__version__
    assert list(rows(record)) == RULES
    for label in RULES[:-1]:
        row = rows(record)[label]
        assert row["working_bytes"] > 0 and row["kept_bytes"] > 0 and row["milliseconds"] > 0
        assert [seed["seed"] for seed in row["seeds"]] == [0, 1]
        for seed in row["seeds"]:
            assert len(seed["losses"]) == 4 and seed["at"] == [0, 2, 4]
            assert seed["scores"][-1] == seed["score"] and len(seed["scores"]) == 3
    assert rows(record)[RULES[-1]]["seeds"] == []
    assert "do:" in rows(record)[RULES[-1]]["refused"]
    image = (out / "compare_adding.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000


def test_compare_starts_all_rules_from_the_same_weights_and_batches(run):
    found = rows(run[2])
    for n in range(2):
        first = {found[rule]["seeds"][n]["scores"][0] for rule in RULES[:-1]}
        losses = {round(found[rule]["seeds"][n]["losses"][0], 12) for rule in RULES[:-1]}
        assert len(first) == len(losses) == 1
    assert found["bptt"]["seeds"][0]["scores"] != found["bptt"]["seeds"][1]["scores"]


def test_compare_agreement_of_exact_and_inexact_rules(run):
    found = rows(run[2])
    for seed in range(2):
        for when in ("initial", "trained"):
            at = {rule: found[rule]["seeds"][seed][when] for rule in RULES[:-1]}
            assert at["bptt"]["error"] == 0 and abs(at["bptt"]["cosine"] - 1) < 1e-12
            assert at["d_rtrl"]["cosine"] > 0.9999 and at["d_rtrl"]["error"] < 1e-9
            assert at["no_trace"]["cosine"] < 0.999 and at["no_trace"]["error"] > 0.01
            assert at["no_trace"]["error_all"] < at["no_trace"]["error"]


def test_compare_gives_the_same_numbers_again_whatever_else_runs(run, tmp_path):
    _, _, again = compared(tmp_path, "--seeds", "1", "--rules", "d_rtrl")
    old, new = (rows(record)["d_rtrl"]["seeds"][0] for record in (run[2], again))
    assert new == old


def test_interrupted_comparison_without_extras_shows_what_is_finished(
    tmp_path, monkeypatch, capsys
):
    hide(monkeypatch, "matplotlib", "tqdm")
    train, calls = Trainer.train, []

    def interrupted(self, gradient, row, *rest):
        calls.append(row.label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        train(self, gradient, row, *rest)

    monkeypatch.setattr(Trainer, "train", interrupted)
    table, status, record = compared(tmp_path, "--rules", "bptt", "no_trace")
    assert status == INTERRUPTED and not record["finished"]
    assert "INTERRUPTED" in table
    assert re.search(r"^bptt .*1 of 1$", table, re.MULTILINE)
    assert re.search(r"^no_trace .*0 of 1$", table, re.MULTILINE)
    shown = capsys.readouterr().err
    assert "adding 4/8  squared error" in shown and "seed 0, bptt" in shown
    assert "pip install 'braintrace[plot]'" in shown
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
    assert "Adam needs optax: pip install 'braintrace[tasks]'" in capsys.readouterr().err


def test_compare_lists_what_there_is(capsys):
    assert main(["compare", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*MAKE, *CELLS, *NAMES))


def test_rules_are_read_with_their_options():
    words = ["bptt,d_rtrl:window=8", "pp_prop:decay_or_rank=(0.9,0.8),vjp_method=multi-step"]
    bptt, windowed, pair = parse([*words, "bptt"])
    assert (bptt.name, bptt.options, bptt.window) == ("bptt", {}, None)
    assert windowed.window == 8 and windowed.options == {"vjp_method": "multi-step"}
    assert windowed.label == "d_rtrl:window=8"
    assert pair.options == {"decay_or_rank": (0.9, 0.8), "vjp_method": "multi-step"}


def test_all_rules_are_all_names_but_aliases():
    parsed = [choice.name for choice in parse(["all"])]
    assert tuple(parsed) == NAMES and {*BASELINES, "d_rtrl", "rtrl"} <= set(parsed)
    assert "es_d_rtrl" not in parsed


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
    assert "no synthesizer" in refused["dni"] and refused["no_trace"] is None
