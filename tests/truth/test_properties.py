"""Random step functions: no dependence is overlooked, and the gradient is the defining one."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from models import Net, step_fn

import braintrace as bt
from braintrace.program import bind
from braintrace.verify._compare import comparison
from braintrace.verify._sequence import vector
from gradients import online_grad
from oracle import Structure, dense, rule_on, run_step
from thinned import examples

N, STEPS = 4, 4
MASK = jnp.array([1.0, 0.0, 1.0, 1.0])
ORDER = np.array([2, 0, 3, 1])

# An expression is a function of the environment `v` (states and operator outputs, all of size 4).
LEAVES = {name: lambda v, name=name: v[name] for name in ("a", "b", "c", "y", "z")}
UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "half": lambda e: 0.5 * e,
    "mask": lambda e: e * MASK,
    "roll": lambda e: jnp.roll(e, 1),
    "flip": lambda e: e[::-1],
    "swap": lambda e: jnp.concatenate([e[2:], e[:2]]),
    "transpose": lambda e: e.reshape(2, 2).T.reshape(N),
    "shift": lambda e: jnp.pad(e, (1, 0))[:N],
    "take": lambda e: e[ORDER],
    "set": lambda e: e.at[1].set(0.3),
    "repeat": lambda e: jnp.repeat(e[1:3], 2),
    "stack": lambda e: jnp.stack([e[:2], e[2:]], axis=1).reshape(N),
    "loop": lambda e: lax.fori_loop(0, 2, lambda i, c: jnp.sin(c), e),
    "centre": lambda e: e - e.mean(),
    "cumsum": lambda e: 0.3 * jnp.cumsum(e),
    "detach": lax.stop_gradient,
}
BINARY = {
    "add": lambda d, e: d + e,
    "mul": lambda d, e: d * e,
    "where": lambda d, e: jnp.where(MASK > 0, d, e),
    "max": jnp.maximum,
    "join": lambda d, e: jnp.concatenate([d[:2], e[2:]]),
    "write": lambda d, e: d.at[1:3].set(e[:2]),
    "dot": lambda d, e: d + e.sum() * 0.2,
}

leaves = st.sampled_from(sorted(LEAVES))
states = st.sampled_from(["a", "b", "c"])
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), inner),
        st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
    ),
    max_leaves=4,
)


def value(tree, v):
    match tree:
        case str():
            return LEAVES[tree](v)
        case (name, inner):
            return UNARY[name](value(inner, v))
        case (name, left, right):
            return BINARY[name](value(left, v), value(right, v))


def model_of(into, entries, exits):
    """States a, b (4,) and c (2, 2); y = x W, z = entry U, where the entry reads states."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.6 * rng.normal(size=shape))
    params = {"w": draw(3, N), "u": draw(N, N), "b": draw(N)}

    def update(m, x):
        v = {"a": m.a.value, "b": m.b.value, "c": m.c.value.reshape(N)}
        v["y"] = bt.matmul(x, m.w.value, m.b.value)
        v["z"] = bt.matmul(jnp.tanh(value(entries, v | {"z": v["y"]})), m.u.value)
        new = [value(tree, v) for tree in exits]
        new[into] = 0.5 * new[into] + v["y"]
        m.a.value, m.b.value = new[0], new[1]
        m.c.value = new[2].reshape(2, 2)
        return jnp.tanh(new[0] - new[1] * new[2] + 0.3 * v["z"])

    model = Net(update, params, {"a": draw(N), "b": draw(N), "c": draw(2, 2)})
    return model, jnp.asarray(rng.normal(size=(STEPS, 3))), jnp.asarray(rng.normal(size=(STEPS, N)))


def exact_jacobians(step, h, args):
    """dh'/d(h, y...) with the operators' outputs as inputs of their own, nothing else cut."""
    place = {o.equation: i for i, o in enumerate(step.operators)}
    theta = jnp.concatenate([s.value.ravel() for s in step.params])

    def new(h, taps):
        def apply(eqn, values):
            outs = bind(eqn, values)
            return [lax.stop_gradient(outs[0]) + taps[place[eqn]]] if eqn in place else outs

        zeros = [jnp.zeros(o.y.size) for o in step.traced]
        return run_step(step, theta, h, zeros, [], args, apply)[1]

    taps = [jnp.zeros(o.y.shape) for o in step.operators]
    by_h, by_taps = jax.jit(jax.jacrev(new, (0, 1)))(h, taps)
    return np.concatenate([by_h, *by_taps], axis=1)


def claimed(found, n_exits):
    """The pairs an influence map allows: those it lists, and whole sources it recorded as cut."""
    total = int(found.offsets[-1])
    allowed = np.zeros((n_exits, total), bool)
    start = 0
    for rows, lost in zip(found.rows, found.lost, strict=True):
        for e, row in enumerate(rows):
            allowed[start + e, row[row >= 0]] = True
        for source in {s for k in lost for s in found.cuts[k].sources}:
            allowed[
                start : start + len(rows), found.offsets[source] : found.offsets[source + 1]
            ] = True
        start += len(rows)
    return allowed


@settings(
    max_examples=examples(8),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2), expressions, st.tuples(expressions, expressions, expressions))
def test_random_steps_are_sound_and_exact(into, entries, exits):
    model, xs, targets = model_of(into, entries, exits)
    learner = bt.D_RTRL(model)
    learner.compile_graph(xs[0])

    step = Structure(model, step_fn, (xs[0], targets[0]))
    paths = [leaf.path for leaf in learner.graph.module_info.step.hidden]
    assert [s.path for s in step.hidden] == paths
    assert len(step.operators) == len(learner.graph.analysis.sites)
    jacobian = exact_jacobians(step, vector([s.value for s in step.hidden]), [xs[0], targets[0]])
    allowed = claimed(learner.graph.analysis.influence, len(jacobian))
    assert not np.any((jacobian != 0) & ~allowed), "a dependence was overlooked"

    truth = rule_on(dense(model, step_fn, xs, targets), "d_rtrl")
    result = comparison(online_grad(learner, step_fn, xs, targets), truth)
    assert result.max_error <= 1e-9, f"\n{result}"
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(result.gradients))
