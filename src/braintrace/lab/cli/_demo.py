"""The demo: one network, trained online and by BPTT on the same batches."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import brainstate
import jax
import jax.numpy as jnp

from ... import nn
from .._table import aligned
from ..comparison._gradient import Compiled, agreement
from ..comparison._model import builder
from ..comparison._output import save_figure
from ..comparison._progress import progress_bar, stage
from ..comparison._rules import BPTT, Choice
from ..comparison._sequences import sequences_of
from ..comparison._training import Optimizer, Run, by_sequence, scorer
from ..tasks import Recall
from ._commands import QUICK_UPDATES, UPDATES
from ._figures import draw_demo
from ._network import Network, set_bias

ONLINE, REVERSE = "D-RTRL", "BPTT"
CHOICES = (
    Choice(ONLINE, "d_rtrl", {}, block=10),  # a divisor of the lengths: a rest is another program
    Choice(REVERSE, BPTT, {}),
)
RATE = 5e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of a run; memory is measured for `factors` times the length."""

    task: Callable[..., Recall]
    length: int
    units: int
    batch: int
    tests: int
    factors: tuple[float, ...]


FULL = Setting(partial(Recall, 8), 100, 32, 32, tests=32, factors=(0.1, 0.3, 1, 3, 10))
QUICK = Setting(partial(Recall, 4, cue=2, asked=2), 20, 8, 8, tests=4, factors=(1, 10))


def run(options: argparse.Namespace) -> int:
    """Train, print the table and write `demo.png`; returns the exit status."""
    setting = QUICK if options.quick else FULL
    task, size = setting.task(length=setting.length), setting.batch
    updates = options.updates or (QUICK_UPDATES if options.quick else UPDATES)
    sequences = sequences_of(task, size)
    network = lambda: Network(_gru, task, setting.units, options.seed)
    build = builder(network, lambda n: jnp.zeros((n, task.inputs)))
    train_key, test_key = jax.random.split(jax.random.key(options.seed))
    batches = [task.batch(key, size) for key in jax.random.split(test_key, setting.tests)]
    held_out = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *batches)
    score = scorer(build, sequences, held_out)
    print(
        f"{task.title.capitalize()} ({task.chance_level}),\n"
        f"GRU of {setting.units} units, batches of {size}."
    )
    keys = jax.random.split(train_key, updates)
    model, adam = build(0, size), Optimizer("adam")
    draw = lambda n: sequences.draw(keys[n])
    gradients = {choice.label: Compiled(choice, model, sequences) for choice in CHOICES}
    runs = {
        label: Run(
            by_sequence(gradient, adam, RATE), model.params, adam.init(model.params), draw, score
        )
        for label, gradient in gradients.items()
    }

    def compare() -> tuple[float, float]:
        """Cosine and relative error of the gradients at the weights that were trained online."""
        weights = runs[ONLINE].weights
        online, bptt = (gradients[name](weights, batches[0])[0] for name in (ONLINE, REVERSE))
        return agreement(online, bptt, list(weights))

    with stage("compiling both gradients"):
        before = compare()
    seconds = _train(runs, updates)
    with stage("held-out accuracy"):
        rates = {name: run.score() for name, run in runs.items()}
    after = compare()
    lengths = [round(factor * task.length) for factor in setting.factors]
    with stage(f"memory of sequences of {lengths[0]} to {lengths[-1]} steps"):
        others = {t: sequences_of(setting.task(length=t), size) for t in lengths}
        memory = {choice.label: {
            t: Compiled(choice, model, other).working for t, other in others.items()
        } for choice in CHOICES}  # fmt: skip

    losses = {name: run.losses for name, run in runs.items()}
    last = min(20, updates)
    means = {name: sum(x[-last:]) / last for name, x in losses.items()}
    rows = [(f"loss, mean of the last {last} updates (nats)", "{:.4f}", means)]
    rows += [(f"accuracy, {setting.tests * size} held-out sequences", "{:.1%}", rates)]
    for when, (cosine, error) in (("initial", before), ("trained", after)):
        rows += [(f"cosine to BPTT, {when} weights", "{:.4f}", {ONLINE: cosine, REVERSE: 1})]
        rows += [(f"relative error, {when} weights", "{:.4f}", {ONLINE: error, REVERSE: 0})]
    for length in (task.length, 10 * task.length):
        sizes = {name: memory[name][length] / 1e6 for name in runs}
        rows += [(f"working memory, T = {length} (MB)", "{:.3f}", sizes)]
    rows += [("time of an update (ms)", "{:.1f}", {n: 1e3 * s for n, s in seconds.items()})]
    words = [(label, *map(form.format, values.values())) for label, form, values in rows]
    print("\n".join(["", *aligned([("", ONLINE, REVERSE), *words]), ""]))
    save_figure(draw_demo, options.out / "demo.png", task, losses, memory)
    return 0


def _gru(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    """Small update gates: units start with a memory of about 20 steps."""
    cell = nn.GRUCell(inputs, units)
    set_bias(cell.Wz, jnp.full_like(cell.Wz.weight.value["bias"], -3))
    return cell


def _train(runs: dict[str, Run], updates: int) -> dict[str, float]:
    """Train in lockstep; returns the median seconds of an update."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}

    def advance() -> str:
        for name, run in runs.items():
            seconds[name].append(run.timed_advance())
        return ", ".join(f"{name} {run.losses[-1]:.3f}" for name, run in runs.items())

    with stage("compiling the updates"):
        advance()
    bar = progress_bar(updates, done=1)
    for _ in range(1, updates):
        bar.set_postfix_str(advance(), refresh=False)
        bar.update(1)
    bar.close()
    return {name: statistics.median(s[1:] or s) for name, s in seconds.items()}
