"""The demo runs from end to end, and its task needs memory."""

import builtins
import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.lab.cli import main
from braintrace.lab.cli._demo import CHOICES
from braintrace.lab.cli._network import Network
from braintrace.lab.comparison._gradient import Compiled, agreement
from braintrace.lab.comparison._model import pure_model
from braintrace.lab.comparison._sequences import sequences_of
from braintrace.lab.tasks import Recall

ROWS = (
    "loss, mean of the last 3 updates (nats)",
    "accuracy, 32 held-out sequences",
    "cosine to BPTT, initial weights",
    "relative error, initial weights",
    "cosine to BPTT, trained weights",
    "relative error, trained weights",
    "working memory, T = 20 (MB)",
    "working memory, T = 200 (MB)",
    "time of an update (ms)",
)
TASK = Recall(symbols=4, length=12, cue=2, asked=3)


def hide(monkeypatch, *packages):
    """Make imports of these packages fail as if they were not installed."""
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


def numbers(table, label):
    line = next(line for line in table.splitlines() if line.startswith(label))
    return [float(n) for n in re.findall(r"\s(-?\d+\.\d+)", line)]


def test_demo_prints_the_table_and_writes_the_figure(tmp_path, capsys):
    assert main(["demo", "--quick", "--updates", "3", "--seed", "1", "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert [label for label in ROWS if len(numbers(table, label)) != 2] == []
    cosine, itself = numbers(table, "cosine to BPTT, initial weights")
    assert 0.9 < cosine <= itself == 1
    short, long = (numbers(table, f"working memory, T = {t} (MB)") for t in (20, 200))
    assert long[0] < 2 * short[0]  # ten times the steps: the states before each are stored
    assert long[1] > 5 * short[1]
    image = (tmp_path / "demo.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000


def test_demo_without_extras_says_what_to_install(tmp_path, capsys, monkeypatch):
    hide(monkeypatch, "matplotlib", "tqdm")
    assert main(["demo", "--quick", "--updates", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "cosine to BPTT" in shown.out
    assert re.search(r"^compiling the updates… \d+\.\d s\nupdate 2/2  D-RTRL", shown.err, re.M)
    assert "pip install 'braintrace-online[plot]'" in shown.err
    assert not list(tmp_path.iterdir())


def test_demo_without_optax_says_what_to_install(tmp_path, capsys, monkeypatch):
    hide(monkeypatch, "optax")
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--quick", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "Adam needs optax: pip install 'braintrace-online[tasks]'" in capsys.readouterr().err


def test_task_shows_the_label_only_in_the_cue():
    key = jax.random.key(0)
    xs, targets = TASK.batch(key, 6)
    labels = targets[-1]
    assert (targets == labels).all() and xs.shape == (12, 6, TASK.inputs)
    symbols, marks, asks = xs[..., :-2], xs[..., -2], xs[..., -1]
    np.testing.assert_array_equal(symbols[:2].argmax(-1), jnp.stack([labels] * 2))
    np.testing.assert_array_equal(marks[:, 0], [1.0] * 2 + [0.0] * 10)
    np.testing.assert_array_equal(asks[:, 0], [0.0] * 9 + [1.0] * 3)
    np.testing.assert_array_equal(asks[:, 0], TASK.mask)


def test_task_needs_memory():
    # All a memoryless classifier sees at the answer is one shown symbol. Whatever it is, the
    # labels are uniform: the best answer to every symbol is right with the probability of chance.
    xs, targets = TASK.batch(jax.random.key(1), 20_000)
    labels = targets[-1]
    shown = xs[-1, :, :-2].argmax(-1)
    joint = np.zeros((4, 4))
    np.add.at(joint, (np.asarray(shown), np.asarray(labels)), 1 / len(labels))
    assert abs(joint.max(axis=1).sum() - TASK.chance) < 0.02


def test_task_batches_differ_by_key():
    batches = [TASK.batch(key, 8)[0] for key in jax.random.split(jax.random.key(0), 4)]
    assert all((a != b).any() for a, b in pairwise(batches))


def test_gradients_agree_over_a_single_step():
    # There is nothing to remember, so nothing to approximate.
    task = Recall(symbols=3, length=1, cue=1, asked=1)
    sequences = sequences_of(task, 2)
    model = pure_model(Network("gru", task, 4, seed=0), 2, sequences.x)
    batch = sequences.draw(jax.random.key(0))
    gradients = (Compiled(choice, model, sequences) for choice in CHOICES)
    (a, loss_a), (b, loss_b) = (gradient(model.params, batch) for gradient in gradients)
    cosine, error = agreement(a, b, list(b))
    assert abs(cosine - 1) < 1e-12 and error < 1e-12 and abs(loss_a - loss_b) < 1e-12
