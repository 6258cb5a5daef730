"""`braintrace.compare`: rows, splits, settings, files, and what is refused."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import CompareResult, compare
from braintrace.lab.comparison._figure import draw
from braintrace.lab.comparison._result import short_bytes

from .toy import Sum, network

RULES = ["bptt", "no_trace", "d_rtrl", "rtrl:memory_limit=10"]
SIZES = {"seeds": 2, "updates": 4, "batch": 2, "held_out": 5, "points": 2, "rounds": 1}
SIZES["rates"] = 0.05


class Watched(Sum):
    """Notes which split is asked for."""

    name = title = "Sum"

    def __init__(self):
        self.asked = []

    def validation(self, size):
        self.asked.append("validation")
        return super().validation(size)

    def test(self, size):
        self.asked.append("test")
        return super().test(size)


@pytest.fixture(scope="module")
def task():
    return Watched()


@pytest.fixture(scope="module")
def result(task):
    return compare(network, task, RULES, **SIZES)


def rows(result):
    return {row.label: row for row in result.rows}


def test_rows_start_from_the_same_weights_and_batches(result):
    ran = [rows(result)[rule] for rule in RULES[:-1]]
    assert list(rows(result)) == RULES and result.finished
    for n in range(2):
        assert len({row.seeds[n].scores[0] for row in ran}) == 1
        assert len({round(row.seeds[n].losses[0], 12) for row in ran}) == 1
        for row in ran:
            seed = row.seeds[n]
            assert seed.seed == n and seed.at == [0, 2, 4] and len(seed.losses) == 4
            assert seed.scores[-1] != seed.score  # of another split
    assert ran[0].seeds[0].scores != ran[0].seeds[1].scores


def test_cosines_are_those_of_parameters_that_states_depend_on(result):
    for seed in rows(result)["no_trace"].seeds:
        for at in (seed.initial, seed.trained):
            assert at.cosine < 0.9999 and at.error > at.error_all > 0.01
    assert {s.initial.error for s in rows(result)["bptt"].seeds} == {0}


def test_costs_are_measured(result):
    for rule in RULES[:-1]:
        row = rows(result)[rule]
        assert row.working_bytes > 0 and row.milliseconds > 0
    assert rows(result)["d_rtrl"].stored_bytes > rows(result)["bptt"].stored_bytes == 2 * 3 * 8


def test_auto_is_chosen_in_the_memory_of_d_rtrl():
    (row,) = compare(network, Sum(), ["auto:time=1e6"], **SIZES | {"seeds": 1}).rows
    (ran,) = row.seeds
    assert (row.rule, row.options["time"], row.refused) == ("auto", 1e6, None)
    assert row.options["chosen"] and ran.initial.cosine > 0
    (small,) = compare(network, Sum(), ["auto:memory=1"], **SIZES | {"seeds": 1}).rows
    assert "no rule fits in 1 bytes" in small.refused


def test_refused_rule_is_a_row_with_its_reason(result):
    row = rows(result)[RULES[-1]]
    assert row.seeds == [] and "rtrl would store" in row.refused and "do:" in row.refused
    assert "rtrl:memory_limit=10: refused, rtrl would store" in result.table()


def test_same_seeds_give_the_same_curves_bit_for_bit_whatever_else_runs(result):
    again = compare(network, Sum(), ["d_rtrl"], **SIZES | {"seeds": 1})
    assert again.rows[0].seeds[0] == rows(result)["d_rtrl"].seeds[0]


def test_test_split_is_made_once_and_after_the_first_run(result, task):
    assert task.asked == ["validation", "test"]


def test_table_is_narrow_and_says_what_columns_mean(result):
    table = result.table()
    assert max(map(len, table.splitlines())) <= 80
    head = next(line for line in table.splitlines() if line.startswith("rule"))
    assert head.split() == ["rule", "score", "reach", "cos", "end", "work", "stored", "ms"]
    line = next(line for line in table.splitlines() if line.startswith("d_rtrl"))
    assert "±" in line and len(line.replace(" (1)", "").split()) == 8
    assert "chance level: 1" in table and str(result) == table
    first = rows(result)["d_rtrl"]
    seeds = [dataclasses.replace(first.seeds[0], losses=[1.0, float("nan"), 2.0])]
    broken = dataclasses.replace(result, rows=[dataclasses.replace(first, seeds=seeds)])
    assert "d_rtrl: the loss is not finite from update 2 on: NaN" in broken.table()
    assert "not finite" not in table


def test_updates_to_a_threshold_are_counted_on_the_validation_curve(result):
    row = rows(result)["bptt"]
    scores = row.seeds[0].scores
    at = dataclasses.replace(result, threshold=scores[1])
    assert at.reach(row)[0] == (0 if scores[0] <= scores[1] else 2)
    never = dataclasses.replace(result, threshold=-1.0)
    assert never.reach(row) == [None, None]
    chance, best = 1.0, min(s.scores[-1] for r in result.rows for s in r.seeds)
    assert result.goal == (chance + best) / 2


def test_result_comes_back_from_its_file_and_takes_more_rows(result, tmp_path):
    path = tmp_path / "result.json"
    result.save(path)
    loaded = CompareResult.load(path)
    assert loaded.table() == result.table()
    assert loaded.rows[0] == result.rows[0] and loaded.settings == result.settings
    record = json.loads(path.read_text())
    assert record["versions"]["jax"] == jax.__version__ and record["machine"]["cores"]
    more = compare(network, Sum(), ["d_rtrl", "pp_prop"], add_to=path, **SIZES)
    assert list(rows(more)) == [*RULES, "pp_prop"]
    assert more.rows[2] == loaded.rows[2]  # not trained or timed again
    assert len(rows(more)["pp_prop"].seeds) == 2
    with pytest.raises(ValueError, match="updates is 5 and was 4"):
        compare(network, Sum(), ["d_rtrl"], add_to=path, **SIZES | {"updates": 5})
    path.write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="version"):
        CompareResult.load(path)


def test_what_is_finished_is_in_the_file_whatever_ends_the_program(tmp_path):
    def fails(seed, batch_size):
        if seed == 1:
            raise SystemExit("as if it were killed")
        return network(jax.random.key(seed), batch_size)

    file = tmp_path / "compare.json"
    with pytest.raises(SystemExit):
        compare(fails, Sum(), ["bptt", "no_trace"], save_to=file, **SIZES)
    found = CompareResult.load(file)
    assert not found.finished and [len(row.seeds) for row in found.rows] == [1, 1]
    assert not [p for p in tmp_path.iterdir() if p != file]


def test_figure_shows_every_row_with_its_seeds(result):
    figure = result.figure()
    curves, finals, _ = figure.axes
    labels = [line.get_label() for line in curves.lines]
    assert [label for label in labels if not label.startswith("_")] == RULES[:-1]
    assert len(curves.collections) == 3  # bands over seeds
    dots = [line for line in finals.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [2, 2, 2]


@pytest.mark.parametrize("width", [5, 14])
def test_titles_fit_into_the_figure(result, width):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    long = dataclasses.replace(result, title="sums of two numbers out of many, " * 6)
    figure = draw(long, width)
    FigureCanvasAgg(figure).draw()
    for text in (figure._suptitle, *(axes.title for axes in figure.axes)):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text


class Rated(Sum):
    """On validation larger outputs are better, on the test smaller ones."""

    higher_is_better = True

    def batch(self, key, size):
        return jnp.ones((6, size, 2)), jnp.ones((6, size))

    def test(self, size):
        xs, ys = self.batch(None, size)
        return xs, -ys

    def loss(self, out, target):
        return -out.mean()  # the larger the rate, the larger the outputs

    def score(self, outs, targets):
        value = (outs * targets).mean()
        return jnp.where(jnp.abs(value) > 1e6, jnp.nan, value)


def test_learning_rate_is_chosen_on_the_validation_split_by_optimizer():
    sizes = SIZES | {"rates": [0.001, 0.1, 0.01], "seeds": 1}
    found = compare(network, Rated(), ["bptt"], optimizers=["adam", "sgd"], **sizes)
    assert list(rows(found)) == ["bptt adam", "bptt sgd"]
    for row in found.rows:
        scores = [row.validation[f"{rate:g}"] for rate in (0.001, 0.01, 0.1)]
        assert scores == sorted(scores) and row.rate == 0.1
        assert row.seeds[0].scores[-1] == scores[-1] and row.seeds[0].score < 0
    adam, sgd = found.rows
    assert adam.optimizer == "adam" and adam.seeds[0].losses != sgd.seeds[0].losses
    head = next(line for line in found.table().splitlines() if line.startswith("rule"))
    assert head.split()[-1] == "rate"


def test_rates_that_diverge_are_not_chosen():
    sizes = SIZES | {"rates": [1e300, 0.01], "seeds": 1}
    (row,) = compare(network, Rated(), ["bptt"], optimizers="sgd", **sizes).rows
    assert row.rate == 0.01 and not math.isfinite(row.validation["1e+300"])


def test_updates_within_a_sequence():
    sizes = SIZES | {"updates": 5, "update_every": 2, "seeds": 1}  # three per batch
    rules = ["bptt", "rolling:window=1", "no_trace"]
    found = rows(compare(network, Sum(), rules, **sizes))
    losses = {rule: np.array(row.seeds[0].losses) for rule, row in found.items()}
    assert all(len(each) == 6 for each in losses.values())
    single = losses["rolling:window=1"]
    np.testing.assert_allclose(single, losses["no_trace"], rtol=0, atol=1e-9)
    assert np.abs(losses["bptt"] - single).max() > 1e-3
    assert single[0] == 0  # no step of the first two counts
    first = {row.seeds[0].scores[0] for row in found.values()}
    assert len(first) == 1


class Flow(Watched):
    """A stream: what is scored is what was answered while learning."""

    name = title = "Flow"
    streaming, update_every = True, 2


def test_stream_is_scored_while_it_is_learned():
    task, sizes = Flow(), SIZES | {"rates": [0.001, 0.1]}
    del sizes["updates"]
    found = compare(network, task, ["no_trace"], **sizes)
    (row,) = found.rows
    assert found.settings.updates == 3
    head = next(line for line in found.table().splitlines() if line.startswith("rule"))
    assert head.split()[:4] == ["rule", "score", "loss", "cos"]
    assert set(task.asked) == {"validation", "test"}
    losses = {rate: value for rate, value in row.validation.items()}
    assert row.rate == float(min(losses, key=losses.get))
    assert [len(seed.losses) for seed in row.seeds] == [3, 3]
    assert found.reach(row) == [None, None] and len(found.figure().axes) == 3
    # With nothing learned, the score is that of the initial weights.
    still = compare(network, Flow(), ["no_trace"], **sizes | {"rates": [1e-300], "seeds": 1})
    step, params, h = network(jax.random.key(0), 2)
    xs, targets = Sum().test(2)
    outputs = jax.lax.scan(lambda h, x: step(params, h, x), h, xs)[1]
    (seed,) = still.rows[0].seeds
    np.testing.assert_allclose(seed.score, Sum().score(outputs, targets))
    # So are the losses: of the test, three updates of two steps each by their weights.
    each = ((outputs - targets) ** 2).mean(axis=1)
    np.testing.assert_allclose(seed.losses, [0, each[3], (each[4] + 2 * each[5]) / 3])
    with pytest.raises(ValueError, match="updates=4 for Flow"):
        compare(network, Flow(), ["no_trace"], **SIZES)


def test_brainstate_module_as_it_is():
    class Only(Sum):
        def loss(self, out, target):
            return ((out[:, 0] - target) ** 2).mean()

        def score(self, outs, targets):
            return ((outs[..., 0] - targets) ** 2).mean()

    cell = braintrace.nn.MinGRUCell(2, 1)
    rule = braintrace.rules.pp_prop(0.5)
    found = compare(cell, Only(), [rule], **SIZES)
    assert found.settings.model == "MinGRUCell" and found.rows[0].label == str(rule)
    assert len({seed.scores[0] for seed in found.rows[0].seeds}) == 1  # the same weights
    assert len({seed.losses[0] for seed in found.rows[0].seeds}) == 2  # other batches


class Flat(Sum):
    def batch(self, key, size):
        return jnp.zeros((size, 6, 2)), jnp.zeros((size,))


class Single(Sum):
    def batch(self, key, size):
        return jnp.zeros((6, size, 2))


class Vector(Sum):
    def loss(self, out, target):
        return (out - target) ** 2


class Masked(Sum):
    mask = jnp.zeros(6)


def changed(**values):
    return lambda: compare(network, Sum(), ["bptt"], **SIZES | values)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: compare(network, Sum, ["bptt"], **SIZES), TypeError, "Sum.*missing|self"),
        (lambda: compare(network, object(), **SIZES), TypeError, "task object has no batch, valid"),
        (lambda: compare(network, Flat(), **SIZES), ValueError, r"shapes \(2, 6, 2\), \(2,\)"),
        (lambda: compare(network, Single(), **SIZES), TypeError, "a pair of inputs and targets"),
        (lambda: compare(network, Vector(), **SIZES), TypeError, r"Vector.loss returns float64\[2"),
        (lambda: compare(network, Masked(), **SIZES), ValueError, "the sum 0"),
        (lambda: compare(3, Sum(), **SIZES), TypeError, "the model has type int"),
        (lambda: compare((1, 2), Sum(), **SIZES), TypeError, "the model has type tuple"),
        (lambda: compare(lambda: (1, 2), Sum(), **SIZES), TypeError, "returns a tuple of 2"),
        (changed(seeds=0), ValueError, "seeds=0"),
        (changed(updates=1.5), TypeError, "updates has type float"),
        (lambda: compare(lambda units: 0, Sum(), **SIZES), TypeError, "needs the arguments units"),
        (lambda: compare(network, Sum(), ["magic"], **SIZES), ValueError, "no rule 'magic'"),
        (lambda: compare(network, Sum(), [3], **SIZES), TypeError, "a rule has type int"),
        (changed(update_every=4), ValueError, "update_every=4 for sequences of 6 steps"),
        (changed(optimizers="adm"), ValueError, "no optimizer 'adm': did you mean adam"),
        (changed(rates=()), ValueError, "a positive learning rate"),
        (changed(rates=-1.0), ValueError, "a positive learning rate"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(call, kind, said):
    with pytest.raises(kind, match=said):
        call()


def test_bytes_are_short():
    assert [short_bytes(x) for x in (0, 999, 1000, 348_160, 1.38e6, 2.5e9)] == [
        *("0", "999", "1k", "348k", "1.38M", "2.5G")
    ]
    assert short_bytes(math.nan) == "-"
