"""Step functions that do more than call the learner: nothing the analysis has not seen is exact."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import braintrace

from .reference import assert_close, normal, squares

XS = normal(5, 6, 2)


class Net(brainstate.nn.Module):
    """A leaky layer; `enc`, `out` and the state `fb` are for step functions only."""

    def __init__(self):
        super().__init__()
        self.enc = brainstate.ParamState(normal(1, 2, 2))
        self.w = brainstate.ParamState(normal(2, 2, 2))
        self.out = brainstate.ParamState(normal(3, 2, 2))
        self.fb = brainstate.ShortTermState(jnp.zeros(2))
        self.gain = 1.0

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(2))

    def reset_state(self, batch_size=None, **kwargs):
        self.h.value, self.fb.value, self.gain = jnp.zeros(2), jnp.zeros(2), 1.0

    def update(self, x):
        y = braintrace.matmul(self.gain * x, self.w.value)
        self.h.value = 0.7 * self.h.value + jnp.tanh(y)
        return self.h.value


def compiled(rule="d_rtrl", **options):
    return braintrace.compile(Net(), rule, XS[0], **options)


def gradients(learner, step, **options):
    learner.reset()
    found = learner.etrace_grad(XS, step_fn=lambda x: step(learner, x), reduction="sum", **options)
    return {path[0]: g for path, g in found.items()}


def truth(learner, step):
    learner.reset()
    model = learner.model4compile
    return {p[0]: g for p, g in braintrace.verify.bptt_grad(model, step, XS).items()}


def model_of(net):
    return net if isinstance(net, Net) else net.model4compile


# ------------------------------------------------------------------------ the two that were wrong


def encoded(net, x):
    return squares(net(x @ model_of(net).enc.value) @ model_of(net).out.value)


def fed_back(net, x):
    fb = model_of(net).fb
    y = net(x + fb.value)
    fb.value = jnp.tanh(y)
    return squares(y)


def of_the_step_alone(model):
    """The gradient of `encoded` by the encoder, each step's input alone depending on it."""

    def loss(enc):
        total, h = 0.0, jnp.zeros(2)
        for x in XS:
            x = x @ enc
            h = 0.7 * lax.stop_gradient(h) + jnp.tanh(x @ model.w.value)
            total += squares(h @ model.out.value)
        return total

    return jax.grad(loss)(model.enc.value)


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_an_encoder_in_step_fn_is_named_and_the_same_for_every_block_size(rule):
    learner = compiled(rule)
    before = learner.report.parameters["enc",]
    assert (before.how, before.exact) == ("none", False) and "`update` does not use it" in str(
        before
    )
    want = truth(learner, encoded)
    for size in (None, 1, 4):
        found = gradients(learner, encoded, block_size=size)
        assert_close(found["enc"], of_the_step_alone(learner.model4compile))
        assert_close((found["w"], found["out"]), (want["w"], want["out"]))
    report = learner.report.parameters
    assert (report["enc",].how, report["enc",].exact) == ("within-step", False)
    assert report["enc",].dropped[0].text == "enc -> the learner's input -> later steps, in step_fn"
    assert "test_outside.py" in report["enc",].dropped[0].line
    assert (report["out",].how, report["out",].exact) == ("within-step", True)
    assert report["w",].exact
    assert np.abs(want["enc"] - found["enc"]).max() > 0.1


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_feedback_through_a_state_of_step_fn_is_named(rule):
    learner = compiled(rule)
    assert learner.report.parameters["w",].exact
    found = [gradients(learner, fed_back, block_size=size)["w"] for size in (None, 1, 4)]
    assert_close(found[1:], [found[0]] * 2)
    assert np.abs(found[0] - truth(learner, fed_back)["w"]).max() > 0.1
    entry = learner.report.parameters["w",]
    assert (entry.how, entry.exact) == ("trace", False)
    assert entry.dropped[0].text == "the learner's results -> fb -> later steps, in step_fn"


@pytest.mark.parametrize("step, weight", [(encoded, "enc"), (fed_back, "w")])
@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_strict_refuses_what_step_fn_does_outside_the_call(rule, step, weight):
    learner = compiled(rule, strict=True)
    drivers = [
        lambda: gradients(learner, step),
        lambda: gradients(learner, step, block_size=1),
        lambda: learner.etrace_train(
            XS, step_fn=lambda x: step(learner, x), optimizer=optax.sgd(0.1)
        ),
    ]
    for run in drivers:
        with pytest.raises(braintrace.CompilationError, match=f"{weight}: (.|\\n)*in step_fn"):
            run()
    frozen = {p: s for p, s in learner.param_states.items() if p != ("enc",)}
    if step is encoded:  # a weight that is not learned may be used anywhere
        assert set(gradients(learner, step, weights=frozen)) == {"w", "out"}


# ------------------------------------------------------------------------- what is exact, what not


def after(net, x):
    return squares(net(x) @ model_of(net).out.value)


def detached(net, x):
    fb = model_of(net).fb
    y = net(x + fb.value)
    fb.value = lax.stop_gradient(jnp.tanh(y))
    return squares(y)


def metric(net, x):
    loss = squares(net(x))
    model_of(net).fb.value += loss
    return loss


def smooth(net, x):
    before = model_of(net).h.value
    return squares(net(x) - before)


def leaking(net, x):
    y = net(x)
    model_of(net).h.value = 0.5 * y
    return squares(y)


def restarted(net, x):
    model_of(net).h.value = jnp.where(x[0] > 0, 0.0, model_of(net).h.value)
    return squares(net(x))


def rewound(net, x):
    old = model_of(net).h.value
    ahead = net(x)
    model_of(net).h.value = old
    return squares(net(2 * x)) + squares(ahead)


def forgetful(net, x):
    if net is not model_of(net):
        net.reset_state()
    return squares(net(x))


def chained(net, x):
    return squares(net(net(x)))


def twice(net, x):
    return squares(net(x)) + squares(net(2 * x))


def scanned(net, x):
    outs = brainstate.transform.for_loop(net, jnp.stack([x, 2 * x]))
    return squares(outs @ model_of(net).out.value)


def scanned_encoder(net, x):
    enc = model_of(net).enc
    return squares(brainstate.transform.for_loop(lambda x: net(x @ enc.value), jnp.stack([x, x])))


def attribute(net, x):
    model_of(net).gain = (x @ model_of(net).enc.value).sum()
    return squares(net(x))


def read_before(net, x):
    return squares(net(x + model_of(net).h.value))


def running_mean(net, x):
    fb, y = model_of(net).fb, net(x) @ model_of(net).out.value
    fb.value = 0.5 * fb.value + y
    return squares(fb.value)


def differentiated(net, x):
    slope = brainstate.transform.grad(lambda v: squares(net(v)), argnums=0)(x)
    return squares(net(x)) + lax.stop_gradient(slope).sum()


# What the gradient leaves out, per step function: of which parameters.
STEPS = {
    after: "",
    detached: "",
    metric: "",
    twice: "",
    scanned: "",
    smooth: "w",
    leaking: "w",
    restarted: "w",
    rewound: "w",
    forgetful: "w",
    chained: "w",
    read_before: "w",
    running_mean: "w out",
    scanned_encoder: "enc",
    attribute: "enc",
}


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_whatever_is_called_exact_is_exact(step):
    learner = compiled()
    want, found = truth(learner, step), gradients(learner, step)
    report = {p[0]: entry for p, entry in learner.report.parameters.items()}
    assert {name for name, entry in report.items() if not entry.exact} == set(STEPS[step].split())
    for name, entry in report.items():
        if entry.exact:
            assert_close(found[name], want[name])
        else:
            assert np.abs(found[name] - want[name]).max() > 1e-3
        assert entry.how != "none" or not np.abs(want[name]).max()


def test_a_call_inside_a_derivative_is_not_called_exact():
    learner = compiled()
    with pytest.raises(braintrace.NotSupportedError, match="differentiated once more"):
        gradients(learner, differentiated)
    assert not any(p.exact for p in learner.report.parameters.values())
    assert "inside a derivative" in str(learner.report.parameters["out",])


def test_a_weight_that_is_no_part_of_the_model_is_reported_too():
    learner, enc = compiled(strict=True), brainstate.ParamState(normal(8, 2, 2))
    step = lambda net, x: squares(net(x @ enc.value))
    weights = {"enc of mine": enc, **learner.param_states}
    with pytest.raises(braintrace.CompilationError, match="enc of mine: within-step; not exact"):
        learner.etrace_grad(XS, step_fn=lambda x: step(learner, x), weights=weights)
    assert not learner.report.parameters["enc of mine",].exact


@pytest.mark.parametrize("step, exact", [(encoded, False), (after, True)])
def test_a_mapped_learner_looks_at_its_step_function_too(step, exact):
    model = Net()
    mapped = braintrace.compile(model, "d_rtrl", XS[:3], batch_size=3, vmap=True, strict=True)
    xs = jnp.stack([XS] * 3, axis=1)

    def loss(x):
        return jnp.sum(mapped(x @ model.enc.value if step is encoded else x) @ model.out.value)

    def run():
        mapped.etrace_grad(xs, step_fn=loss)

    if exact:
        run()
        assert mapped.report.parameters["out",].how == "within-step"
    else:
        with pytest.raises(braintrace.CompilationError, match="enc -> the learner's input"):
            run()
    assert mapped.report.parameters["enc",].exact is exact


@pytest.mark.parametrize("sizes", [(None, 1), (1, None)])
def test_a_jitted_call_works_in_a_driver_and_outside(sizes):
    learner = compiled()
    call = brainstate.transform.jit(learner)
    step = lambda net, x: squares(call(x) @ net.model4compile.out.value)
    want = gradients(learner, after)
    for size in sizes:
        found = gradients(learner, step, block_size=size)
        assert_close(found, want)
        assert learner.report.parameters["w",].exact
        assert call(XS[0]).shape == (2,)
