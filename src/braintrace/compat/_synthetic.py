"""Synthetic gradients: a guess of what later losses say about the states, and its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax import lax

from .._errors import message, value_error
from ..engine import Values, evaluate_plain
from ..graph import Graph, HiddenGroup
from ..learner import MultiStepData, unwrap
from ..program import PyTree

Array = jax.Array


class SyntheticGradient:
    """One affine map per hidden group, from its states to the gradient of later losses by them.

    Args:
        group_shapes: (*varshape, num_state) of every group, by its index.
        hidden_width: accepted; the maps are affine.
        scale: standard deviation of the initial matrices; 0 gives no signal until trained.
        seed: of the initial matrices.
    """

    def __init__(
        self,
        group_shapes: Mapping[int, Sequence[int]],
        hidden_width: int | None = None,
        scale: float = 0.0,
        seed: int = 0,
    ):
        self.group_shapes = {k: tuple(shape) for k, shape in group_shapes.items()}
        self.hidden_width, self.scale = hidden_width, scale
        key = jax.random.PRNGKey(seed)
        self.states: dict[str, dict[int, brainstate.ParamState]] = {"w": {}, "b": {}}
        for k, shape in self.group_shapes.items():
            n = _width(shape)
            w = scale * jax.random.normal(jax.random.fold_in(key, k), (n, n))
            self.states["w"][k] = brainstate.ParamState(w)
            self.states["b"][k] = brainstate.ParamState(jnp.zeros(n, w.dtype))

    def param_values(self) -> dict[str, dict[int, Array]]:
        """The arrays of all maps: {'w': {group: matrix}, 'b': {group: vector}}."""
        return {name: {k: s.value for k, s in of.items()} for name, of in self.states.items()}

    def states_dict(self) -> dict[str, brainstate.ParamState]:
        """The parameters of all maps by name."""
        return {f"{name}.{k}": s for name, of in self.states.items() for k, s in of.items()}

    def apply(self, values: Mapping[str, Any], group_hiddens: Mapping[int, Array]) -> dict:
        """The guessed gradient by the states of every group.

        Args:
            values: arrays like those of `param_values`.
            group_hiddens: states by group, (*varshape, num_state).
        """
        out = {}
        for k, h in group_hiddens.items():
            n = _width(self.group_shapes[k])
            flat = h.reshape((*h.shape[:-2], n)) if h.ndim > 1 else h.reshape((n,))
            out[k] = (flat @ values["w"][k] + values["b"][k]).astype(h.dtype).reshape(h.shape)
        return out


def _width(shape: Sequence[int]) -> int:
    return shape[-1] * (shape[-2] if len(shape) > 1 else 1)


def no_synthesizer() -> RuntimeError:
    """The error of a learner without one."""
    return RuntimeError(
        message(
            "DNI has no synthesizer.",
            why="it predicts the gradient of later losses with respect to the states",
            do="learner.attach_synthesizer(braintrace.SyntheticGradient("
            "learner.group_signal_shapes()))",
        )
    )


def run_window(
    graph: Graph, values: Values, timed: Sequence[bool], length: int
) -> tuple[list[Array], Values]:
    """Results of the steps of a window, stacked, and the values after it.

    `timed` says which arguments have a leading axis of steps.
    """

    def step(states, arrays):
        rest = iter(arrays)
        args = tuple(next(rest) if t else a for a, t in zip(values.args, timed, strict=True))
        now = replace(values, args=args, hidden=states[0], others=states[1])
        outs = evaluate_plain(graph, now)
        kinds = (graph.step.hidden, graph.step.others)
        new = tuple(tuple(outs[leaf.output] for leaf in k) for k in kinds)
        return new, outs[: graph.step.n_outs]

    start = (tuple(values.hidden), tuple(values.others))
    arrays = [a for a, t in zip(values.args, timed, strict=True) if t]
    (hidden, others), outs = lax.scan(step, start, arrays, length)
    return outs, replace(values, hidden=hidden, others=others)


def guessed(
    groups: Sequence[HiddenGroup], synthesizer: SyntheticGradient, theta: PyTree, hidden: PyTree
) -> tuple[Array, ...]:
    """The guessed gradient by every hidden leaf."""
    states = {g.index: g.concat_hidden([hidden[i] for i in g.leaves]) for g in groups}
    guesses = synthesizer.apply(theta, states)
    out: list[Array] = [jnp.zeros_like(h) for h in hidden]
    for g in groups:
        for i, array in zip(g.leaves, g.split_hidden(guesses[g.index]), strict=True):
            out[i] = array
    return tuple(out)


def _squares(outputs: PyTree) -> Array:
    return sum((jnp.sum(jnp.abs(a) ** 2) for a in jax.tree.leaves(outputs)), jnp.zeros(()))


def train_synthetic_gradient(
    learner: Any,
    inputs: PyTree,
    *,
    chunk_size: int = 1,
    loss_fn: Callable[[Any], Array] | None = None,
    optimizer: Any = None,
    lr: float = 1e-2,
    epochs: int = 1,
    reset: bool = True,
    batch_size: int | None = None,
) -> list[float]:
    """Train the synthesizer of a learner on sequences, the model's parameters being as they are.

    For every window the guess at its entry learns the gradient of the window's loss by the states
    there, with the guess at its exit for all that comes later. At the end of the sequence the
    guess learns to be zero.

    Args:
        learner: a compiled `DNI` with a synthesizer.
        inputs: array, or tuple of arrays, (T, ...): the model's arguments step by step.
        chunk_size: steps per window; T is a multiple of it.
        loss_fn: `outputs of a window -> scalar`; default the sum of their squares.
        optimizer: an optax GradientTransformation; default plain gradient descent.
        lr: step size of the default.
        epochs: how often the sequence is run through.
        reset: whether to reset the model before every epoch.
        batch_size: for the reset.

    Returns:
        The mean squared error of the guesses in every epoch.

    Raises:
        RuntimeError: the learner has no synthesizer.
        ValueError: T is not a multiple of `chunk_size`.
    """
    if learner.synthesizer is None:
        raise no_synthesizer()
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    length = jax.tree.leaves(arguments)[0].shape[0]
    if chunk_size < 1 or length % chunk_size:
        raise value_error(
            f"chunk_size={chunk_size} for {length} steps.",
            why="the sequence is cut into windows of equal length",
            do="pass a positive divisor of the number of steps",
        )
    synthesizer, loss_of = learner.synthesizer, _squares if loss_fn is None else loss_fn
    theta = synthesizer.param_values()
    own = None if optimizer is None else optimizer.init(theta)

    @jax.jit
    def learn(theta, own, hidden, target):
        loss, grads = jax.value_and_grad(_error)(
            theta, synthesizer, learner.graph.hidden_groups, hidden, target
        )
        change = jax.tree.map(lambda g: -lr * g, grads)
        if optimizer is not None:
            change, own = optimizer.update(grads, own, theta)
        return jax.tree.map(lambda p, c: p + c, theta, change), own, loss

    compiled: dict[Graph, Any] = {}
    out = []
    for _ in range(epochs):
        if reset:
            learner.reset(batch_size)
        losses = []
        hidden: PyTree = ()
        for start in range(0, length, chunk_size):
            window = jax.tree.map(itemgetter(slice(start, start + chunk_size)), arguments)
            call = unwrap((tuple(MultiStepData(a) for a in window), {}))
            prepared = learner._prepared_own(*call.step)
            info, graph = prepared.info, prepared.plan.graph
            if graph not in compiled:
                loss_at = partial(_loss_at, loss_of, info.out_tree)
                target_of = partial(_target, graph, (call.timed, call.length), synthesizer, loss_at)
                compiled[graph] = jax.jit(target_of)
            *states, fixed = info.read()
            values = Values(info.consts, (*call.leaves, *fixed), *states)
            last, target = compiled[graph](theta, values)
            theta, own, loss = learn(theta, own, states[1], target)
            losses.append(loss)
            info.write({"hidden": last.hidden, "others": last.others})
            hidden = last.hidden
        theta, own, loss = learn(theta, own, hidden, jax.tree.map(jnp.zeros_like, hidden))
        losses.append(loss)
        out.append(float(jnp.mean(jnp.stack(losses))))
    for name, of in synthesizer.states.items():
        for k, state in of.items():
            state.value = theta[name][k]
    return out


def _loss_at(loss_of: Callable[[PyTree], Any], tree: Any, outs: Sequence[Any]) -> Any:
    return loss_of(jax.tree.unflatten(tree, outs))


def _target(graph, window, synthesizer, loss_at, theta, values) -> tuple[Values, Any]:
    """The values after a window, and what its loss and the guess at its end say about its entry."""

    def later(hidden):
        timed, length = window
        fixed = (False,) * (len(values.args) - len(timed))
        outs, last = run_window(graph, replace(values, hidden=hidden), (*timed, *fixed), length)
        constant = lax.stop_gradient(last.hidden)
        pairs = zip(guessed(graph.groups, synthesizer, theta, constant), last.hidden, strict=True)
        return loss_at(outs) + sum((jnp.sum(g * h) for g, h in pairs), jnp.zeros(())), last

    target, last = jax.grad(later, has_aux=True)(tuple(values.hidden))
    return last, target


def _error(theta, synthesizer, groups, hidden, target) -> Array:
    pairs = zip(guessed(groups, synthesizer, theta, hidden), target, strict=True)
    return sum((jnp.mean((g - t) ** 2) for g, t in pairs), jnp.zeros(()))
