"""A character model that learns while it reads, in 32 places of a text at once.

The text is Python's own help, read twice. At every step each of 32 readers guesses its next
character, and every eight steps the weights move. States and traces run through: the text is not
cut into sequences. You see the bits per character fall from 6 to 2.3, on text that was held out
too, and what the model writes by itself afterwards.
"""

import argparse
import re
from collections import Counter

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace


def help_text():
    """The topics of Python's help, each paragraph once: numbers below 64, and their characters."""
    from pydoc_data.topics import topics

    paragraphs = (p for name in sorted(topics) for p in topics[name].split("\n\n"))
    text = "\n".join(dict.fromkeys(re.sub(r"\s+", " ", p).strip() for p in paragraphs))
    alphabet = "".join(c for c, _ in Counter(text).most_common(63)) + "\N{REPLACEMENT CHARACTER}"
    number = {c: n for n, c in enumerate(alphabet)}
    return np.array([number.get(c, 63) for c in text]), alphabet


def streams(numbers, batch):
    """The text as one column per reader, (steps, batch)."""
    steps = len(numbers) // batch
    return jnp.asarray(numbers[: steps * batch].reshape(batch, steps).T)


class Network(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(64, units)
        self.readout = braintrace.nn.Linear(units, 64)

    def update(self, character):
        return self.readout(self.cell(jax.nn.one_hot(character, 64)))


def main(small):
    units, batch, section, passes = (8, 2, 16, 1) if small else (128, 32, 1024, 2)
    numbers, alphabet = help_text()
    cut = int(0.95 * len(numbers))
    read, held_out = streams(numbers[:cut], batch), streams(numbers[cut:], batch)
    if small:
        read, held_out = read[:65], held_out[:20]
    brainstate.random.seed(0)
    learner = braintrace.compile(Network(units), "d_rtrl", read[0], batch_size=batch)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    learner.init_optimizer(optimizer)

    def bits(character, following):
        told = optax.softmax_cross_entropy_with_integer_labels(learner(character), following)
        return told.mean() / jnp.log(2)

    @brainstate.transform.jit
    def learn(xs, ys):
        return learner.etrace_train(xs, ys, step_fn=bits, optimizer=optimizer, update_every=8)

    @brainstate.transform.jit
    def test():
        learner.reset()
        return brainstate.transform.for_loop(bits, held_out[:-1], held_out[1:])[10:].mean()

    @brainstate.transform.jit
    def write():
        def step(character, _):
            new = brainstate.random.categorical(learner(character) / 0.7).astype(character.dtype)
            return new, new

        learner.reset()
        return brainstate.transform.scan(step, held_out[0], jnp.arange(300))[1]

    first = float(test())
    print(f"{cut:,} characters to read; held-out text before: {first:.2f} bits per character")
    for number in range(passes):
        learner.reset()
        for start in range(0, len(read) - section, section):
            xs, ys = read[start : start + section], read[start + 1 : start + section + 1]
            print(f"pass {number}, step {start:6d}: {learn(xs, ys).mean():.2f} bits per character")
    last = float(test())
    print(f"held-out text afterwards: {last:.2f} bits per character")
    for reader in write().T[:2]:
        print("---", "".join(alphabet[n] for n in reader), sep="\n")
    assert small or last < 2.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
