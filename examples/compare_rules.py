"""Which rule for my network on my task? A network and a task of your own, compared in one call.

The task: noise, in it one pulse of either sign at the start, and at the end of 24 steps the
question which sign it had. The network is a layer of leaky units whose leaks are learned. Every
rule starts from the same weights and sees the same batches; its learning rate is chosen on a
validation split, and its score is that of a test split. BPTT and D-RTRL, which is exact here, learn
the task; windows of four steps and no trace do not. From a shell, with files:

    braintrace compare --model examples/compare_rules.py:Net --task examples/compare_rules.py:Sign
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp

import braintrace


class Net(brainstate.nn.Module):
    def __init__(self, units=8):
        super().__init__()
        self.w = brainstate.ParamState(brainstate.random.normal(0, 1, (1, units)))
        self.leak = brainstate.ParamState(jnp.ones(units))
        self.readout = braintrace.nn.Linear(units, 2)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.leak.value.shape)))

    def update(self, x):  # plain JAX: operators are recognised
        a = jax.nn.sigmoid(self.leak.value)
        self.h.value = a * self.h.value + jnp.tanh(x @ self.w.value)
        return self.readout(self.h.value)


class Sign:
    title, chance, higher_is_better = "the sign of a pulse 23 steps ago", 0.5, True
    metric, scale, form = "accuracy (%)", 100, "{:.1f}"

    mask = jnp.arange(24) == 23  # the last step counts

    def batch(self, key, size):
        label = jnp.arange(size) % 2
        xs = 0.2 * jax.random.normal(key, (24, size, 1))
        return xs.at[0].add(2 * label[:, None] - 1), jnp.broadcast_to(label, (24, size))

    def validation(self, size):
        return self.batch(jax.random.key(10_001), size)

    def test(self, size):
        return self.batch(jax.random.key(10_002), size)

    def loss(self, output, target):
        return -jnp.take_along_axis(jax.nn.log_softmax(output), target[:, None], axis=1).mean()

    def score(self, outputs, targets):
        return (outputs[-1].argmax(-1) == targets[-1]).mean()


def main(small):
    rules = ["bptt", "no_trace", "d_rtrl", "rolling:window=4"]
    sizes = {"seeds": 1, "updates": 3, "batch": 4, "rounds": 1} if small else {"updates": 300}
    rates = [0.01] if small else [0.003, 0.01, 0.03]
    result = braintrace.compare(Net, Sign(), rules[:3] if small else rules, rates=rates, **sizes)
    print(result)
    scores = {row.label: row.mean for row in result.rows}
    assert small or scores["d_rtrl"] > 0.75 > scores["no_trace"], scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny and short, for tests")
    main(parser.parse_args().small)
