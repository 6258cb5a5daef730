"""What the library refuses or leaves out, each with a short program that shows it.

The outcome of a record is what its code prints, or the error it raises. `test_limits.py` runs
every record and compares `docs/limits.md` with the outcomes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

PREAMBLE = '''
import brainstate
import jax
import jax.numpy as jnp
from jax import lax

import braintrace
from braintrace import matmul

x = jnp.asarray([1.0, -0.5])


class Cell(brainstate.nn.Module):
    """Three units, an input weight, a recurrent weight, and the step of the example."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.w = brainstate.ParamState(jnp.linspace(-1.0, 1.0, 6).reshape(2, 3))
        self.u = brainstate.ParamState(0.1 * jnp.eye(3))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x):
        self.h.value = self.step(x, self.h.value, self.w.value, self.u.value)
        return self.h.value


def learn(step, rule="d_rtrl", **options):
    return braintrace.compile(Cell(step), rule, x, **options)


def leaky(x, h, w, u):
    return 0.9 * h + jnp.tanh(matmul(x, w))


def recurrent(x, h, w, u):
    return 0.9 * h + jnp.tanh(matmul(x, w) + matmul(h, u))


def certify(learner, name):
    print(learner.report.parameters[name,])
'''


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: its title, the code that shows it, whether it raises, what to do.

    `instead` is optional code for the same purpose that prints an exact certificate.
    """

    title: str
    code: str
    raises: bool
    do: str
    instead: str = ""


def refused(title: str, code: str, do: str, instead: str = "") -> Limit:
    return Limit(title, _plain(code), True, do, _plain(instead))


def left_out(title: str, code: str, do: str, instead: str = "") -> Limit:
    return Limit(title, _plain(code), False, do, _plain(instead))


def _plain(code: str) -> str:
    return textwrap.dedent(code).strip()


REFUSED = [
    refused(
        "An operator inside a `while_loop`",
        """
        def step(x, h, w, u):
            more = lambda c: (c[0] + 1, c[1] + matmul(x, w))
            return 0.9 * h + lax.while_loop(lambda c: c[0] < 3, more, (0, jnp.zeros(3)))[1]


        learn(step)
        """,
        "Use `lax.scan` or `fori_loop` with a fixed number of iterations. A state may pass through "
        "a `while_loop`; a trained operator may not be inside one.",
        """
        def step(x, h, w, u):
            return 0.9 * h + lax.fori_loop(0, 3, lambda i, y: y + matmul(x, w), jnp.zeros(3))


        certify(learn(step), "w")
        """,
    ),
    refused(
        "No operator",
        """
        learn(lambda x, h, w, u: 0.9 * h + jnp.tanh(x @ w))
        """,
        "Use an operator for at least one weight: `matmul(x, w)`.",
    ),
    refused(
        "A step that writes a parameter",
        """
        class Writing(Cell):
            def update(self, x):
                self.w.value = 0.99 * self.w.value
                return super().update(x)


        braintrace.compile(Writing(leaky), "d_rtrl", x)
        """,
        "Apply weight decay in the optimizer. A value that the step itself changes is a state.",
    ),
    refused(
        "A trace that depends on a callback",
        """
        from jax.experimental import io_callback


        def step(x, h, w, u):
            gain = io_callback(lambda: jnp.ones(3), jnp.zeros(3))
            return 0.9 * h + gain * matmul(x, w)


        learn(step)
        """,
        "Call it outside `update` and pass the value as an input.",
    ),
    refused(
        "A backward rule that is not linear",
        """
        @jax.custom_vjp
        def clipped(y):
            return jnp.tanh(y)


        clipped.defvjp(lambda y: (jnp.tanh(y), y), lambda y, c: (jnp.clip(c, -1, 1),))
        learn(lambda x, h, w, u: 0.9 * h + clipped(matmul(x, w)))
        """,
        "Clip the gradients afterwards, or write the derivative as a `jax.custom_jvp`. "
        "Windows, which are reverse mode, use the rule as it is; so may the output of the step.",
    ),
    refused(
        "Traces larger than `memory_limit`",
        """
        learn(recurrent, "rtrl", memory_limit=100)
        """,
        "Use a rule with smaller traces, or raise the limit; the default of RTRL and SnAp is 4 "
        "GiB.",
    ),
    refused(
        "A pattern that spreads over too many units",
        """
        step = lambda x, h, w, u: 0.9 * jnp.roll(h, 1) + matmul(x, w)
        learn(step, snap_max_jacobian_elements=8)
        """,
        "A weight onto a rotating state affects every unit, which is exact up to this limit. Raise "
        "the limit if there is enough memory.",
    ),
    refused(
        "Windows of a rule whose signal is no derivative",
        """
        learn(leaky, "three_factor", vjp_method="multi-step")
        """,
        "`three_factor`, `r_stdp`, `reward_eprop`, `osttp`, `decolle`, `stllr` and `tess` have no "
        "windows: reverse mode inside a window cannot use their signal.",
    ),
    refused(
        "KFRTRL and control flow",
        """
        def step(x, h, w, u):
            y = lax.cond(x[0] > 0, lambda: matmul(x, w), lambda: jnp.zeros(3))
            return 0.9 * h + y


        learn(step, "kf_rtrl")
        """,
        "All other rules support operators in branches and scans. KFRTRL also requires operators "
        "that are linear in their input.",
    ),
    refused(
        "UORO and complex numbers",
        """
        class Complex(Cell):
            def init_state(self, batch_size=None, **kwargs):
                self.h = brainstate.HiddenState(jnp.zeros(3, complex))


        braintrace.compile(Complex(leaky), "uoro", x)(x)
        """,
        "Use another rule, or two real states.",
    ),
    refused(
        "A model that changes its structure",
        """
        model = Cell(leaky)
        learner = braintrace.compile(model, "d_rtrl", x)
        model.step = lambda x, h, w, u: 0.9 * h + x @ w
        learner(x)
        """,
        "Build a new learner. Changes that do not affect the structure (a time step, a gain) take "
        "effect at the next call.",
    ),
]

LEFT_OUT = [
    left_out(
        "Recurrent weights",
        """
        certify(learn(recurrent), "w")
        """,
        "Use windows (`vjp_method='multi-step'`), `snap` or `rtrl`, or accept the approximation.",
    ),
    left_out(
        "A weight behind a weight",
        """
        certify(learn(lambda x, h, w, u: 0.9 * h + matmul(jnp.tanh(matmul(x, w)), u)), "w")
        """,
        "`w` affects the state only through `u`. Use windows, `snap` or `rtrl`.",
    ),
    left_out(
        "Plain weights",
        """
        certify(learn(lambda x, h, w, u: 0.9 * h + jnp.tanh(matmul(x, w) + h @ u)), "u")
        """,
        "Use `matmul(h, u)`; then `u` has a trace.",
    ),
    left_out(
        "Weights computed from states",
        """
        certify(learn(lambda x, h, w, u: 0.9 * h + matmul(x, w * jnp.tanh(h)) + matmul(x, w)), "w")
        """,
        "If possible, apply the factor to the result of the operator. RTRL is exact for both.",
        """
        certify(learn(lambda x, h, w, u: 0.9 * h + matmul(x, w) * (1 + jnp.tanh(h))), "w")
        """,
    ),
    left_out(
        "Weights with a time-varying factor, under rules that filter the input",
        """
        def step(x, h, w, u):
            return 0.9 * h + matmul(x, w) + matmul(x, w * (x > 0)[:, None])


        certify(learn(step, "pp_prop", decay_or_rank=0.9), "w")
        """,
        "A filtered input and a filtered tail cannot represent a weight whose factor changes per "
        "element: `pp_prop`, `ottt`, `otpe` in its approximate mode, `stllr` and `kf_rtrl` train "
        "it within the step. Rules with a per-weight trace support factors that do not depend on "
        "states: a mask, a gain computed from the input, an expert selected by an index. (They do "
        "not support selecting columns of a weight: any output could then read any column.)",
        """
        def step(x, h, w, u):
            return 0.9 * h + matmul(x, w) + matmul(x, w * (x > 0)[:, None])


        certify(learn(step), "w")
        """,
    ),
    left_out(
        "Norms and means over units",
        """
        def step(x, h, w, u):
            new = 0.9 * h + matmul(x, w)
            return new - new.mean()


        certify(learn(step), "w")
        """,
        "Normalise the input, the weights, or the output of the step; a sum over the synapses of "
        "one neuron is kept. Here the mean can be subtracted from the weights:",
        """
        def step(x, h, w, u):
            return 0.9 * h + matmul(x, w - w.mean(1, keepdims=True))


        certify(learn(step), "w")
        """,
    ),
    left_out(
        "A permutation that depends on data",
        """
        certify(learn(lambda x, h, w, u: 0.9 * h[jnp.argsort(h)] + matmul(x, w)), "w")
        """,
        "Any unit may move to any position, which a trace with one entry per weight cannot "
        "represent. RTRL can; fixed permutations are supported by all rules:",
        """
        certify(learn(lambda x, h, w, u: 0.9 * h[jnp.asarray([2, 0, 1])] + matmul(x, w)), "w")
        """,
    ),
    left_out(
        "A neighbour of the same shape",
        """
        class Two(Cell):
            def init_state(self, batch_size=None, **kwargs):
                self.h = brainstate.HiddenState(jnp.zeros(3))
                self.g = brainstate.HiddenState(jnp.zeros(3))

            def update(self, x):
                self.g.value = 0.5 * self.g.value + matmul(x, self.w.value)
                self.h.value = 0.6 * self.h.value + jnp.roll(self.g.value, 1)
                return self.h.value


        certify(braintrace.compile(Two(leaky), "d_rtrl", x), "w")
        """,
        "The kept part of the Jacobian is chosen per shape of the states: next to a unit's own "
        "position, neighbours of the same shape are dropped. Give `g` another shape, or store it "
        "in the order of `h`. Where the neighbours are the compartments of one unit, a state of "
        "shape (neurons, compartments), the rule `d_rtrl(couple_axis=-1)` has a block of the "
        "Jacobian per unit and leaves nothing out; "
        "its traces are as many times as large as a unit has compartments (64 at most).",
    ),
    left_out(
        "A sum over many elements of a channel",
        """
        class Memory(Cell):
            def init_state(self, batch_size=None, **kwargs):
                self.s = brainstate.HiddenState(jnp.zeros((100, 3)))

            def update(self, x):
                drive = matmul(x, self.w.value) - 0.1 * self.s.value.mean(0)
                self.s.value = 0.9 * self.s.value + drive
                return self.s.value


        certify(braintrace.compile(Memory(leaky), "d_rtrl", x), "w")
        """,
        "A sum over elements that belong to one column of `w`, as in a delta rule or a short "
        "convolution, is supported for up to 64 elements per column, since each element adds a row "
        "and a column to `D`. With fewer elements it is exact:",
        """
        class Memory(Cell):
            def init_state(self, batch_size=None, **kwargs):
                self.s = brainstate.HiddenState(jnp.zeros((10, 3)))

            def update(self, x):
                drive = matmul(x, self.w.value) - 0.1 * self.s.value.mean(0)
                self.s.value = 0.9 * self.s.value + drive
                return self.s.value


        certify(braintrace.compile(Memory(leaky), "d_rtrl", x), "w")
        """,
    ),
    left_out(
        "The key side of a delta rule",
        """
        class Delta(Cell):
            def init_state(self, batch_size=None, **kwargs):
                self.s = brainstate.HiddenState(jnp.zeros((3, 2)))

            def update(self, x):
                k = jnp.tanh(matmul(x, self.w.value))
                self.s.value = self.s.value + k[:, None] * (x - k @ self.s.value)
                return self.s.value


        certify(braintrace.compile(Delta(leaky), "d_rtrl", x), "w")
        """,
        "Every element of the key affects every row of the memory, so the columns of `w` interact. "
        "Weights of the values and the rates are exact. Use windows, `snap` or `rtrl`.",
    ),
    left_out(
        "The states of the next layer",
        """
        class Layers(Cell):
            def init_state(self, batch_size=None, **kwargs):
                self.h = brainstate.HiddenState(jnp.zeros(3))
                self.r = brainstate.HiddenState(jnp.zeros(3))

            def update(self, x):
                self.h.value = leaky(x, self.h.value, self.w.value, None)
                self.r.value = 0.8 * self.r.value + matmul(self.h.value, self.u.value)
                return self.r.value


        certify(braintrace.compile(Layers(leaky), "d_rtrl", x), "w")
        """,
        "The effect of `w` on the second layer in earlier steps goes through `u` and is dropped; "
        "its effect within the current step is included. Windows keep these paths inside the "
        "window.",
    ),
]

OTHER = [
    left_out(
        "The gradient with respect to an entry state is zero",
        """
        learner = learn(leaky)


        def loss(h):
            learner.model4compile.h.value = h
            return learner(x).sum()


        print(brainstate.transform.grad(loss, argnums=0)(jnp.zeros(3)))
        """,
        "No gradient is propagated between learner calls, which keeps memory constant. "
        "Differentiate the model itself if you need this gradient.",
    ),
    left_out(
        "Low-rank and normalised weights that change within a sequence",
        """
        def low_rank(x, h, w, u):
            return 0.9 * h + matmul(x, w[:, :1] @ u[:1])


        certify(learn(low_rank), "w")
        """,
        "Their traces are those of the weight that is computed, pulled back at the present "
        "parameters. For updates within a sequence use `rtrl`, whose traces are those of the "
        "parameters, or update after whole sequences; a linear or element-wise function of one "
        "parameter is followed exactly.",
    ),
    left_out(
        "Rules without blocks",
        """
        for rule in ("d_rtrl", "eprop", "snap", "rtrl", "uoro", "kf_rtrl"):
            print(f"{rule:8} blocks: {not learn(leaky, rule).rule.one_by_one}")
        """,
        "They are evaluated step by step: the same results, without the speed of blocks. The same "
        "holds for DNI, and for OTPE with `trace_clip_abs`.",
    ),
]

SECTIONS = {
    "Refused": ("The compiler raises an error that says where, why, and what to do.", REFUSED),
    "Left out": (
        "The model compiles, and the certificate lists the paths missing from the gradient. "
        "`strict=True` turns these into errors.",
        LEFT_OUT,
    ),
    "Other behaviour": ("Neither an error nor an approximation, but possibly unexpected.", OTHER),
}
