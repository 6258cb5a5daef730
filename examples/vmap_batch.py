"""A model written for one sample, trained on batches: mapped learner, mapped model, explicit batch.

The model below knows no batch axis. `compile(..., vmap=True)` maps the learner over samples,
`brainstate.nn.Map` maps the model before it is compiled, and a cell with a batch axis of its own
(`batch_size=...`) is the third way. You see that all three give the same gradient, up to rounding,
and that the mapped learner finds the leaks of the teacher: 0.5, 0.8 and 0.95.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace


class Integrators(brainstate.nn.Module):
    """Three leaky integrators of two mixed inputs; leaks and mixture are learned."""

    def __init__(self, leaks):
        super().__init__()
        self.leak = brainstate.ParamState(jax.scipy.special.logit(jnp.asarray(leaks)))
        self.mixture = brainstate.ParamState(jnp.array([[0.5, 0.2, -0.3], [0.1, -0.4, 0.6]]))

    def init_state(self, batch_size=None, **kwargs):
        size = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*size, 3)))

    def update(self, x):
        leak = braintrace.element_wise(self.leak.value, jax.nn.sigmoid)
        drive = braintrace.matmul(x, self.mixture.value)
        self.h.value = leak * self.h.value + (1 - leak) * drive
        return self.h.value


TARGET, START = [0.5, 0.8, 0.95], [0.7, 0.7, 0.7]


def learners(batch):
    """The same model, three ways to a batch."""
    x = jnp.zeros((batch, 2))
    mapped = brainstate.nn.Map(Integrators(START), init_map_size=batch)
    return {
        "mapped learner": braintrace.compile(
            Integrators(START), "d_rtrl", x, batch_size=batch, vmap=True
        ),
        "mapped model": braintrace.compile(mapped, "d_rtrl", x),
        "explicit batch": braintrace.compile(Integrators(START), "d_rtrl", x, batch_size=batch),
    }


def main(small):
    steps, batch, updates = (20, 4, 30) if small else (60, 16, 300)
    made = learners(batch)
    teacher = Integrators(TARGET)
    brainstate.nn.init_all_states(teacher, batch_size=batch)
    xs = jax.random.normal(jax.random.key(0), (steps, batch, 2))
    ys = brainstate.transform.for_loop(teacher, xs)

    gradients = {}
    for name, learner in made.items():
        loss = lambda x, y, learner=learner: jnp.mean((learner(x) - y) ** 2)
        found = learner.etrace_grad(xs, ys, step_fn=loss)
        gradients[name] = jnp.concatenate([jnp.ravel(g) for _, g in sorted(found.items())])
        print(f"{name:15} {gradients[name].round(4)}")
    for name, gradient in gradients.items():
        assert jnp.allclose(gradient, gradients["explicit batch"], rtol=1e-4, atol=1e-6), name

    learner = made["mapped learner"]
    optimizer = optax.adam(2e-2)
    learner.init_optimizer(optimizer)

    @brainstate.transform.jit
    def train():
        learner.reset()
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        return learner.etrace_train(xs, ys, step_fn=loss, optimizer=optimizer, update_every=10)

    errors = []
    for i in range(updates):
        errors.append(float(train().mean()))
        if i % (updates // 10) == 0 or i == updates - 1:
            leaks = jax.nn.sigmoid(learner.param_states["leak",].value)
            told = ", ".join(f"{leak:.3f}" for leak in leaks)
            print(f"sequence {i:4d}: error {errors[-1]:.6f}, leaks {told}")
    assert errors[-1] < errors[0]
    assert small or jnp.allclose(leaks, jnp.array(TARGET), atol=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
