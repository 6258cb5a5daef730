"""The demo: one network, trained online and by BPTT on the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brainstate
import jax

from ._gradients import Network, agreement, bptt, online
from ._memory import working_bytes
from ._missing import draw_or_say
from ._plot import draw
from ._progress import stage
from ._task import Recall
from ._train import accuracy, train, updater

NAMES = ONLINE, REVERSE = "D-RTRL", "BPTT"


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of a run; memory is compiled for `factors` times the task's length."""

    task: Recall
    units: int
    batch: int
    tests: int
    factors: tuple[float, ...]


FULL = Setting(Recall(8, 100), 32, 32, tests=32, factors=(0.1, 0.3, 1, 3, 10))
QUICK = Setting(Recall(4, 20, cue=2, answer=2), 8, 8, tests=4, factors=(1, 10))


def run(setting: Setting, *, updates: int, seed: int, out: Path) -> None:
    """Train, print the table and write `demo.png` into `out`."""
    task, size = setting.task, setting.batch
    networks = {name: _network(setting, seed) for name in NAMES}
    gradients = {
        ONLINE: online(networks[ONLINE], task, size),
        REVERSE: bptt(networks[REVERSE], task, size),
    }
    train_key, test_key = jax.random.split(jax.random.key(seed))
    tests = jax.random.split(test_key, setting.tests)
    print(
        f"Delayed recall of 1 in {task.symbols} symbols over {task.length} steps "
        f"(chance level {task.chance:.1%}),\nGRU of {setting.units} units, batches of {size}."
    )

    compiled: dict[str, Any] = {name: brainstate.transform.jit(g) for name, g in gradients.items()}

    def compare() -> tuple[float, float]:
        batch = task.batch(tests[0], size)
        return agreement(compiled[ONLINE](*batch)[0], compiled[REVERSE](*batch)[0])

    with stage("compiling both gradients"):
        before = compare()
    programs = {name: updater(networks[name], gradients[name], task, size) for name in NAMES}
    losses, seconds = train(networks, programs, jax.random.split(train_key, updates))
    with stage("held-out accuracy"):
        rates = {name: accuracy(networks[name], task, tests, size) for name in NAMES}
    for path, state in networks[REVERSE].weights.items():
        state.value = networks[ONLINE].weights[path].value
    after = compare()

    lengths = [round(factor * task.length) for factor in setting.factors]
    with stage(f"memory of sequences of {lengths[0]} to {lengths[-1]} steps"):
        memory = {
            name: {length: working_bytes(gradients[name], task, length, size) for length in lengths}
            for name in NAMES
        }

    rows = [(f"loss, mean of the last {_last(updates)} updates (nats)", "{:.4f}", _means(losses))]
    rows += [(f"accuracy, {setting.tests * size} held-out sequences", "{:.1%}", rates)]
    for when, (cosine, error) in (("initial", before), ("trained", after)):
        rows += [(f"cosine to BPTT, {when} weights", "{:.4f}", {ONLINE: cosine, REVERSE: 1})]
        rows += [(f"relative error, {when} weights", "{:.4f}", {ONLINE: error, REVERSE: 0})]
    for length in (task.length, 10 * task.length):
        sizes = {name: memory[name][length] / 1e6 for name in NAMES}
        rows += [(f"working memory, T = {length} (MB)", "{:.3f}", sizes)]
    rows += [("time of an update (ms)", "{:.1f}", {n: 1e3 * s for n, s in seconds.items()})]
    print(_table(rows))

    draw_or_say(draw, out / "demo.png", task, losses, memory)


def _network(setting: Setting, seed: int) -> Network:
    with brainstate.random.seed_context(seed):
        return Network(setting.task.channels, setting.units, setting.task.symbols)


def _last(updates: int) -> int:
    return min(20, updates)


def _means(losses: dict[str, list[float]]) -> dict[str, float]:
    return {name: sum(x[-_last(len(x)) :]) / _last(len(x)) for name, x in losses.items()}


def _table(rows: list[tuple[str, str, dict[str, float]]]) -> str:
    width = max(len(label) for label, _, _ in rows)
    lines = ["", " " * width + "".join(f"{name:>12}" for name in NAMES)]
    for label, form, values in rows:
        lines.append(f"{label:{width}}" + "".join(f"{form.format(values[n]):>12}" for n in NAMES))
    return "\n".join([*lines, ""])
