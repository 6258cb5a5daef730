"""Cells of `braintrace.nn` as learners in C, beside the same learners in JAX."""

import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u
from compiled import build, difference, run
from networks import DRAWING, RULES

import braintrace
from braintrace.export import Role
from braintrace.export._export import c_names
from braintrace.learner._export import _update

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from registry import BATCH, ENTRIES

SINGLE = {"vjp_method": "single-step"}  # UORO takes windows otherwise
ALL_RULES = {**RULES, **DRAWING, "uoro": {**DRAWING["uoro"], **SINGLE}}
CASES = [(name, rule) for name in ENTRIES for rule in ALL_RULES]
MODULATED = {"three_factor"}
OPTIMIZER = optax.adam(1e-3)


class Leaky(brainstate.nn.Module):
    """Units that integrate what a layer returns."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer, self.shape = layer, shape

    def init_state(self, batch_size=None, **kwargs):
        self.leaky = brainstate.HiddenState(jnp.zeros(self.shape, brainstate.environ.dftype()))

    def update(self, x):
        self.leaky.value = 0.9 * self.leaky.value + self.layer(x)
        return self.leaky.value


def outputs(model, x):
    traced = brainstate.transform.StatefulFunction(lambda x: model(x))
    return jax.tree.leaves(traced.make_jaxpr(x).get_out_shapes(x)[0])


def made(name, steps, dtype):
    """A cell with its states, and sequences of inputs and targets."""
    rng = np.random.default_rng(0)
    model, x = ENTRIES[name].make()
    if not jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(dtype)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    if not model.states(brainstate.HiddenState):
        model = Leaky(model, outputs(model, x)[0].shape)
        brainstate.nn.init_all_states(model, batch_size=BATCH)
    if jnp.issubdtype(x.dtype, jnp.integer):
        xs = jnp.asarray(rng.integers(0, int(x.max()) + 1, (steps, *x.shape)), x.dtype)
    else:
        xs = x * jnp.asarray(rng.normal(size=(steps, *x.shape)), dtype)
    ys = rng.normal(size=(steps, *outputs(model, x)[0].shape))
    return model, xs, jnp.asarray(ys, dtype)


def loss(out, y):
    return sum(jnp.mean((o - y) ** 2) for o in jax.tree.leaves(out))


class Cell:
    """A cell that learns by a rule, exported."""

    def __init__(self, name, rule, path, steps, dtype):
        precision = {np.float32: 32, np.float64: 64}[dtype]
        self.around = lambda: brainstate.environ.context(dt=1.0 * u.ms, precision=precision)
        with self.around():
            brainstate.random.seed(0)
            self.model, self.xs, self.ys = made(name, steps, dtype)
            more = ALL_RULES[rule]
            learner = braintrace.compile(self.model, rule, self.xs[0], batch_size=BATCH, **more)
            modulator = np.full(steps, 0.7, dtype)
            self.extra = {"modulator": modulator} if rule in MODULATED else {}
            self.first = {k: v[0] for k, v in self.extra.items()}
            told = self.xs[0], self.ys[0]
            how = dict(loss=loss, optimizer=OPTIMIZER)
            self.done = learner.export_c(*told, path=path, extra=self.first, **how)
            self.learner = learner
        self.told = {"x": self.xs, "target": self.ys, **self.extra}

    def errors_after_updates(self, compiler):
        """The largest differences of losses and of weights, after all updates."""
        found = run(self.done, build(self.done, compiler), self.told)
        losses, weights = self.truth()
        saved = self.done.unpack(found.saved[0])
        errors = [difference(found.losses, losses)]
        for slot in self.done.code.kept:
            if slot.role is Role.PARAMETER:
                same = [w for w in weights if w.shape == slot.value.shape]
                errors.append(min(difference(saved[slot.name], w) for w in same))
        assert len(errors) > 1 and np.ptp(losses) > 0
        return max(errors)

    def truth(self):
        """Losses and weights as `train` makes them, once."""
        if not hasattr(self, "_truth"):
            learner, names = self.learner, list(self.extra)
            told = lambda values: dict(zip(names, values, strict=True))
            step = lambda x, y, *m: loss(learner(x, **told(m)), y)
            with self.around():
                sequences = self.xs, self.ys, *self.extra.values()
                how = dict(optimizer=OPTIMIZER, update_every=1, reduction="sum")
                losses = learner.etrace_train(*sequences, step_fn=step, **how)
            values = [s.value for s in self.learner.param_states.values()]
            self._truth = losses, jax.tree.leaves(values)
        return self._truth

    def error_of_steps(self, compiler):
        """The largest difference after one step from equal arrays, of all steps."""
        if not hasattr(self, "_steps"):
            with self.around():
                told = self.xs[0], (self.ys[0],), loss, OPTIMIZER, self.first
                self._steps = steps_of(_update(self.learner, *told), self.done, self.told)
        return error_of_steps(self.done, build(self.done, compiler), self.told, *self._steps)


def kept_of(update):
    return [leaf for leaf in update.leaves if leaf.role not in (Role.INPUT, Role.TARGET)]


def named(leaves, values, names):
    """The kept arrays by their names in C."""
    found = dict(zip(c_names([leaf.path for leaf in leaves]), values, strict=True))
    return {name: np.asarray(found[name]) for name in names}


def steps_of(update, done, told):
    """Saved bytes before every step, and (outputs, loss, kept arrays) after it, by JAX."""
    call, n = jax.jit(update.function), len(update.outputs)
    kept, names = kept_of(update), [slot.name for slot in done.code.kept]
    values = [leaf.value for leaf in kept]
    paths = [leaf.path for leaf in update.leaves if leaf.role in (Role.INPUT, Role.TARGET)]
    starts, truths = [], []
    for t in range(len(told["x"])):
        starts.append(done.pack(named(kept, values, names)))
        results = call(*values, *(told[path][t] for path in paths))
        values = results[n + 1 :]
        truths.append((results[:n], results[n], named(kept, values, names)))
    return starts, truths


def error_of_steps(done, program, told, starts, truths):
    """The largest difference of outputs, losses and kept arrays after single steps."""
    found = run(done, program, told, starts)
    errors = []
    for t, (outs, value, after) in enumerate(truths):
        errors += [difference(a, b) for a, b in zip(found.outputs[t], outs, strict=True)]
        errors.append(difference(found.losses[t], value))
        saved = done.unpack(found.saved[t])
        errors += [difference(saved[key], after[key]) for key in saved]
    return max(errors)
