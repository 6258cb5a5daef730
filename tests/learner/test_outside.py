"""Step functions that do more than call the learner: all of it is the step, and is certified."""

import brainstate
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


def encoded(net, x):
    return squares(net(x @ model_of(net).enc.value) @ model_of(net).out.value)


def fed_back(net, x):
    fb = model_of(net).fb
    y = net(x + fb.value)
    fb.value = jnp.tanh(y)
    return squares(y)


@pytest.mark.parametrize("step, weight", [(encoded, "enc"), (fed_back, "w")])
def test_what_is_around_the_call_is_exact_with_rtrl(step, weight):
    learner = compiled("rtrl")
    want = truth(learner, step)
    for size in (None, 1, 4):
        assert_close(gradients(learner, step, block_size=size), want)
        assert learner.report.parameters[weight,].exact
        assert learner.last_run.in_blocks


@pytest.mark.parametrize("rule", ["d_rtrl", "snap"])
def test_an_encoder_that_is_an_operator_has_a_trace_where_the_rule_follows_it(rule):
    learner = compiled(rule, **({"n": 3} if rule == "snap" else {}))
    step = lambda net, x: squares(net(braintrace.matmul(x, model_of(net).enc.value)))
    found, want = gradients(learner, step), truth(learner, step)
    entry = learner.report.parameters["enc",]
    assert (entry.how == "trace", entry.exact) == ((rule == "snap"),) * 2
    error = np.abs(want["enc"] - found["enc"]).max()
    assert error < 1e-9 if rule == "snap" else error > 0.1
    assert_close(found["w"], want["w"])


def test_what_d_rtrl_leaves_out_of_an_encoder_is_named():
    learner = compiled()
    assert learner.report.parameters["enc",].how == "none"
    want = truth(learner, encoded)
    for size in (None, 1, 4):
        found = gradients(learner, encoded, block_size=size)
        assert_close((found["w"], found["out"]), (want["w"], want["out"]))
    report = learner.report.parameters
    assert (report["enc",].how, report["enc",].exact) == ("within-step", False)
    assert "test_outside.py" in str(report["enc",])
    assert (report["out",].how, report["out",].exact) == ("within-step", True)
    assert report["w",].exact
    assert np.abs(want["enc"] - found["enc"]).max() > 0.1


@pytest.mark.parametrize("step, weight", [(encoded, "enc"), (fed_back, "w")])
def test_strict_refuses_a_step_function_that_is_not_learned_exactly(step, weight):
    learner = compiled(strict=True)
    drivers = [
        lambda: gradients(learner, step),
        lambda: gradients(learner, step, block_size=1),
        lambda: learner.etrace_train(
            XS, step_fn=lambda x: step(learner, x), optimizer=optax.sgd(0.1)
        ),
    ]
    for run in drivers:
        with pytest.raises(braintrace.CompilationError, match=f"{weight}: .*not exact"):
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


def chained(net, x):
    return squares(net(net(x)))


def twice(net, x):
    return squares(net(x)) + squares(net(2 * x))


def scanned(net, x):
    outs = brainstate.transform.for_loop(lambda x: net(x), jnp.stack([x, 2 * x]))
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
    twice: "",
    scanned: "",
    smooth: "",
    leaking: "",
    restarted: "",
    rewound: "",
    chained: "w",
    read_before: "w",
    running_mean: "w out",
    scanned_encoder: "enc",
    attribute: "enc",
}


def test_sum_of_losses_in_a_state_changes_no_gradient():
    """Nor does the report know that no loss reads it."""
    learner = compiled()
    want, found = truth(learner, metric), gradients(learner, metric)
    assert_close(found, want)
    assert [name for name, p in learner.report.parameters.items() if not p.exact] == [("w",)]


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


def test_a_call_inside_a_derivative_is_a_part_of_the_step():
    learner = compiled()
    want = truth(learner, differentiated)
    assert_close(gradients(learner, differentiated)["w"], want["w"])


@pytest.mark.parametrize("what", ["reset", "traces", "count"])
def test_what_belongs_to_the_learner_is_refused_in_its_step(what):
    learner = compiled()

    def step(x):
        if what == "reset":
            learner.reset_state()
        loss = squares(learner(x))
        if what == "traces":
            loss += sum(jnp.sum(a) for t in learner.etraces.values() for a in t.value.values())
        return loss + (learner.running_index.value if what == "count" else 0.0)

    with pytest.raises(TypeError, match=r"(?s)the learner's own states.*do:"):
        learner.etrace_grad(XS, step_fn=step)
    learner.etrace_grad(XS, step_fn=lambda x: squares(learner(x)))  # it is as it was


def test_a_weight_that_is_no_part_of_the_model_is_reported_and_learned():
    learner, enc = compiled("rtrl", strict=True), brainstate.ParamState(normal(8, 2, 2))
    step = lambda net, x: squares(net(x @ enc.value))
    weights = {("enc of mine",): enc, **learner.param_states}
    found = learner.etrace_grad(
        XS, step_fn=lambda x: step(learner, x), weights=weights, reduction="sum"
    )
    assert learner.report.parameters["enc of mine",].exact
    learner.reset()
    total = lambda: brainstate.transform.for_loop(
        lambda x: step(learner.model4compile, x), XS
    ).sum()
    assert_close(found["enc of mine",], brainstate.transform.grad(total, enc)())
    assert "enc of mine" not in str(compiled("rtrl").report)


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
        with pytest.raises(braintrace.CompilationError, match=r"enc: within-step.*not exact"):
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
