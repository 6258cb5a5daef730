"""Training and judging: what all rules of a task share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._gradients import agreement
from ._gradient import Compiled, Grads
from ._judge import Judge, assign
from ._network import Network
from ._optimizer import adam
from ._result import Agreement, Plan, Row, Seed


def network(plan: Plan, seed: int) -> Network:
    """The network of a seed, the same for every rule."""
    with brainstate.random.seed_context(seed):
        task = plan.task
        return Network(plan.cell, task.inputs, plan.units, task.outputs, task.length)


class Bench:
    """What all rules share: batches, optimiser, held-out sequences, and BPTT to compare with."""

    def __init__(self, plan: Plan, bptt: Compiled):
        self.plan, self.task, self.bptt = plan, plan.task, bptt
        self.draw = jax.jit(lambda key: plan.task.batch(key, plan.batch))
        self.start, self.step = adam(plan.rate)
        self.score = Judge(network(plan, 0), plan.task, plan.tests)
        # Gradients are compared on held-out sequences, where there are enough of them.
        self.fixed = tuple(_resized(a, plan.batch) for a in self.score.held_out)

    def prepare(self) -> None:
        """Compile what training shares, so that the clock of its bar counts training."""
        weights = {path: s.value for path, s in network(self.plan, 0).weights.items()}
        self.score(weights)
        self.step(weights, self.start(weights), weights)
        self.draw(jax.random.key(0))

    def agreement(self, gradient: Compiled, weights: Grads) -> Agreement:
        """How close a gradient is to BPTT's at these weights, on the fixed batch."""
        both = []
        for each in (gradient, self.bptt):
            assign(each.network, weights)
            both.append(each(*self.fixed)[0])
        cell = [{path: g for path, g in grads.items() if path[0] == "cell"} for grads in both]
        return Agreement(*agreement(*cell), *agreement(*both))

    def train(self, gradient: Compiled, row: Row, seed: int, bar: Any) -> None:
        """Train one rule from the weights of a seed on its batches."""
        plan, measure = self.plan, self.task.measure
        weights = {path: s.value for path, s in network(plan, seed).weights.items()}
        moments = self.start(weights)
        at = [0, *np.linspace(0, plan.updates, plan.points + 1)[1:].round().astype(int).tolist()]
        at = sorted(set(at))
        keys = jax.random.split(jax.random.key(seed), plan.updates)
        losses: list[Any] = []
        with brainstate.random.seed_context(seed):
            initial = self.agreement(gradient, weights)
            scores = [self.score(weights)]
            for begin, end in pairwise(at):
                for key in keys[begin:end]:
                    assign(gradient.network, weights)
                    grads, loss = gradient(*self.draw(key))
                    weights, moments = self.step(weights, moments, grads)
                    losses.append(loss)
                scores.append(self.score(weights))
                text = f"{measure.name} {measure.text(scores[-1])}, seed {seed}, {row.label}"
                bar.set_postfix_str(text, refresh=False)
                bar.update(end - begin)
            trained = self.agreement(gradient, weights)
        found = [float(loss) for loss in losses]
        row.seeds.append(Seed(seed, scores[-1], at, scores, found, initial, trained))


def _resized(a: Any, size: int) -> Any:
    """The first samples; again from the start if there are too few."""
    return jnp.take(a, jnp.arange(size) % a.shape[1], axis=1)
