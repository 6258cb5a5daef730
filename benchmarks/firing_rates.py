"""Firing rates and norms of weights while spiking units learn `match`: why training may collapse.

    python benchmarks/firing_rates.py rflo d_rtrl --seeds 3      # 2,000 updates at a rate of 0.01

Prints a line per 250 updates: loss, spikes per unit and step, norms of gradient and weights.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from braintrace.lab.cli._network import Network
from braintrace.lab.comparison._gradient import Compiled
from braintrace.lab.comparison._model import pure_model
from braintrace.lab.comparison._rules import parse
from braintrace.lab.comparison._sequences import sequences_of
from braintrace.lab.tasks import Match


def spikes(model, params, xs):
    """The share of units that spike, over a batch."""

    def step(state, x):
        state = model.step(params, state, x)[0]
        return state, (state["cell.v"] > 1 + 0.5 * state["cell.a"]).mean()

    return jax.lax.scan(step, model.state, xs)[1].mean()


def main(rules, rate, updates, seeds):
    task = sequences_of(Match(144), 32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    for choice in parse(rules):
        for seed in range(seeds):
            model = pure_model(Network("alif", Match(144), 32, seed), 32, task.x)
            gradient = Compiled(choice, model, task)
            moves = jax.jit(optimizer.update)
            active = jax.jit(lambda params, xs, model=model: spikes(model, params, xs))
            params, moments = model.params, optimizer.init(model.params)
            print(f"{choice.label}, seed {seed}")
            for n in range(updates):
                batch = task.draw(jax.random.fold_in(jax.random.key(seed), n))
                grads, loss = gradient(params, batch)
                if n % 250 == 0:
                    W, U = (jnp.linalg.norm(params[f"params['cell.{k}']"]) for k in "WU")
                    size = optax.global_norm(grads)
                    words = f"loss {loss:5.3f}, rate {active(params, batch[0]):5.3f}"
                    print(f"  {n:5d}: {words}, gradient {size:6.4f}, W {W:4.1f}, U {U:4.1f}")
                change, moments = moves(grads, moments, params)
                params = optax.apply_updates(params, change)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rules", nargs="+")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    main(**vars(parser.parse_args()))
