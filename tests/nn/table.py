"""The table of docs/cells.md: what the certificate says of every cell, and what is measured."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from registry import BATCH, ENTRIES

import braintrace as bt
from braintrace._errors import dotted
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison
from braintrace.verify._sequence import restored

T = 12
TIGHT = 1e-9
WAY = re.compile(r"(.+) -> (.+) -> (.+) across steps")
HEADER = ("cell", "equation", "states", "trace", "within step", "exact", "left out", "check", "cos")

INTRO = r"""# Cells and layers

Every layer and cell of `braintrace.nn`, and how D_RTRL trains it. The tests compare this
page with the code.

- *equation*: one step; a state on the right-hand side is that of the previous step. $[x, h]$ is
  concatenation, $\sigma$ the logistic function, $\phi$ and $g$ are activations, products of
  vectors are element-wise. In spiking cells $R$ is the reset, $\Theta$ the spike with its surrogate
  derivative, and $z$ the spikes of the previous step. Biases are omitted.
- *trace*: parameters with an eligibility trace. *within step*: parameters that get only their
  gradient within the step, which is exact for a read-out.
- *exact*: parameters whose online gradient, summed over the steps, equals that of back-propagation
  through time (BPTT), according to the certificate (`learner.report`). *left out*: the paths from
  step to step that D_RTRL drops. `SnAp`, `RTRL` and windows keep them.
- *check*: the largest relative error of a parameter's gradient against BPTT, over twelve steps and
  two samples in float64: of D_RTRL where everything is exact, of RTRL elsewhere.
- *cos*: cosine of D_RTRL's gradient with that of BPTT in the same run, at the initial weights. This
  is one tiny problem: [the comparison](compare.md) shows the effect on learning.

Layers without a state (*states* is empty) are tested in leaky units,
$h = 0.9 h + \mathrm{layer}(x)$. A layer is exact if its output reaches states only element by
element. Neurons and synapses of `brainpy.state` work unchanged, with units, and are
compared with the same references.
"""


class Leaky(brainstate.nn.Module):
    """Units that integrate what a layer returns."""

    def __init__(self, layer: Any, shape: tuple[int, ...]):
        super().__init__()
        self.layer, self.shape = layer, shape

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        self.leaky = brainstate.HiddenState(jnp.zeros(self.shape))

    def update(self, x: Any) -> Any:
        self.leaky.value = 0.9 * self.leaky.value + self.layer(x)
        return self.leaky.value


@dataclass(frozen=True, slots=True)
class Measured:
    """The states, certificate and gradients (by path) of a cell."""

    states: tuple[str, ...]
    parameters: dict
    bptt: dict
    d_rtrl: dict
    rtrl: dict | None  # where D_RTRL is not exact


def step_fn(net: Any, x: Any, targets: Any) -> Any:
    outs = jax.tree.leaves(net(x))
    return sum(jnp.sum((out - t) ** 2) for out, t in zip(outs, targets, strict=True))


def outputs(model: Any, x: Any) -> list:
    """The shapes of what a model returns."""
    run = brainstate.transform.StatefulFunction(lambda x: model(x))
    return jax.tree.leaves(run.make_jaxpr(x).get_out_shapes(x)[0])


def sequence(rng: np.random.Generator, x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, int(x.max()) + 1, (T, *x.shape)), x.dtype)
    return x * jnp.asarray(rng.normal(size=(T, *x.shape)))


def learned(rule: Any, model: Any, sequences: Any) -> tuple[dict, dict]:
    """The certificate and the summed gradient, step by step: in one block no trace is built."""
    learner = rule(model)
    learner.compile_graph(sequences[0][0])
    with restored(model):
        grads = learner.etrace_grad(
            *sequences,
            step_fn=lambda *slices: step_fn(learner, *slices),
            block_size=1,
            reduction="sum",
        )
    return learner.report.parameters, dict(grads)


@cache
def measured(name: str) -> Measured:
    rng = np.random.default_rng(0)
    with brainstate.environ.context(dt=1.0 * u.ms):
        brainstate.random.seed(0)
        model, x = ENTRIES[name].make()
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        states = tuple(dotted(path) for path in model.states(brainstate.HiddenState))
        if not states:
            model = Leaky(model, outputs(model, x)[0].shape)
            brainstate.nn.init_all_states(model, batch_size=BATCH)
        xs = sequence(rng, x)
        sequences = xs, [jnp.asarray(rng.normal(size=(T, *o.shape))) for o in outputs(model, x)]
        truth = bptt_grad(model, step_fn, *sequences)
        parameters, d_rtrl = learned(bt.D_RTRL, model, sequences)
        exact = all(p.exact for p in parameters.values())
        rtrl = None if exact else learned(bt.RTRL, model, sequences)[1]
    return Measured(states, parameters, truth, d_rtrl, rtrl)


def cosine(a: dict, b: dict) -> float:
    flat = [
        np.concatenate([np.ravel(leaf) for p in b for leaf in jax.tree.leaves(g[p])])
        for g in (a, b)
    ]
    return float(flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1]))


def error(found: Measured) -> float:
    """Of the gradient that the table calls exact."""
    grads = found.d_rtrl if found.rtrl is None else found.rtrl
    return comparison(grads, found.bptt).max_error


def short(name: str) -> str:
    """A parameter or state without the wrapper, and without the `weight` of a layer."""
    return re.sub(r"(?<=.)\.weight$", "", name.removeprefix("layer.")).replace("leaky", "h")


def listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def left_out(parameters: Any) -> str:
    """The dropped paths; those with the same start are joined."""
    ways: dict[str, tuple[list, list]] = {}
    other = []
    for text in dict.fromkeys(d.text for p in parameters for d in p.dropped):
        if found := WAY.fullmatch(text):
            start, through, end = ([short(n) for n in part.split(", ")] for part in found.groups())
            steps = ways.setdefault(start[0], ([], []))
            steps[0].extend(through)
            steps[1].extend(end)
        else:
            other.append(text)
    found = [f"`{start}` → {listed(a)} → {listed(b)}" for start, (a, b) in ways.items()]
    return "; ".join([*found, *other])


def row(name: str) -> str:
    found = measured(name)
    parameters = found.parameters.values()
    names = lambda which: listed(short(dotted(p.path)) for p in parameters if which(p))
    exact = [p.exact for p in parameters]
    checked, size = "D_RTRL" if found.rtrl is None else "RTRL", error(found)
    cells = (
        f"`{name}`",
        ENTRIES[name].equation,
        listed(found.states),
        names(lambda p: p.how == "trace"),
        names(lambda p: p.how == "within-step"),
        "all" if all(exact) else names(lambda p: p.exact) or "none",
        left_out(parameters),
        f"{checked} < {TIGHT:.0e}".replace("e-0", "e-") if size < TIGHT else f"{size:.0e}",
        "1" if all(exact) else f"{cosine(found.d_rtrl, found.bptt):.2f}",
    )
    return line(cells)


def line(cells: Any) -> str:
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |"


def page(rows: Any) -> str:
    return "\n".join([INTRO, line(HEADER), "|---" * len(HEADER) + "|", *rows, ""])
