"""Streaming agents: one step at a time, no replay, on any recurrent core.

An agent is two functions, and a state between their calls:

    start(key, params, carry) -> state
    act(state, moment) -> (state, action)         learns from the last action, and takes the next

so that the same agent runs in a `jax.lax.scan` over an `Environment`, in a Python loop over an
environment of gymnasium, or under `vmap` over seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._environments import Environment, Moment

Array = jax.Array


class Agent(NamedTuple):
    """An agent, see above."""

    start: Callable[[Array, Any, Any], Any]
    act: Callable[[Any, Moment], tuple[Any, Array]]


class AgentState(NamedTuple):
    """What an agent remembers: parameters, optimizer, carries, the value of its last action."""

    key: Array
    params: Any
    opt: Any
    first: Any  # the carry at the start of an episode
    carry: Any
    value: Array
    began: Array  # whether there was an action before


def q_lambda(
    net: Any, optimizer: Any, actions: int, *, discount: float = 0.99, explore: float = 0.05
) -> Agent:
    """Q(λ) as of Watkins: the trace ends where an action is not the best one.

    Args:
        net: `braintrace.online(step, rule)` whose output is a value per action.
        optimizer: takes `error` and `fresh`: `lambda_trace` with an optimizer of optax behind it,
            `obgd` or `intentional`.
        actions: how many there are.
        discount: γ; the λ of the trace is in the optimizer.
        explore: share of random actions.
    """

    def start(key: Array, params: Any, carry: Any) -> AgentState:
        zero, no = jnp.zeros(()), jnp.array(False)
        return AgentState(key, params, optimizer.init(params), carry, carry, zero, no)

    def act(s: AgentState, now: Moment) -> tuple[AgentState, Array]:
        key, of_guess, of_choice = jax.random.split(s.key, 3)
        ended = now.terminated | now.truncated
        carry = _where(ended, s.first, s.carry)
        values = lambda p: net(p, carry, now.observation)[::-1]
        q, credit, carry = jax.vjp(values, s.params, has_aux=True)
        guess = jax.random.randint(of_guess, (), 0, actions)
        action = jnp.where(jax.random.uniform(of_choice) < explore, guess, q.argmax())
        target = now.reward + discount * jnp.where(ended, 0, q.max())
        error = jnp.where(s.began & ~now.truncated, target - s.value, 0)
        grads = credit(jax.nn.one_hot(action, actions, dtype=q.dtype))[0]
        how = {"error": error, "fresh": ended | (q[action] < q.max())}
        updates, opt = optimizer.update(grads, s.opt, s.params, **how)
        params = _added(s.params, updates)
        return AgentState(key, params, opt, s.first, carry, q[action], jnp.array(True)), action

    return Agent(start, act)


def actor_critic(
    net: Any, actor: Any, critic: Any, *, discount: float = 0.99, entropy: float = 0.01
) -> Agent:
    """Actor-critic(λ): the error of the critic's value moves both.

    Args:
        net: `braintrace.online(step, rule)` whose output is `(logits, value)`.
        actor: optimizer of the policy's gradient, see `q_lambda`.
        critic: optimizer of the value's gradient; both act on all parameters.
        discount: γ; the λ of the traces is in the optimizers.
        entropy: weight of the policy's entropy, with the sign of the error.
    """

    def start(key: Array, params: Any, carry: Any) -> AgentState:
        opt, zero, no = (actor.init(params), critic.init(params)), jnp.zeros(()), jnp.array(False)
        return AgentState(key, params, opt, carry, carry, zero, no)

    def act(s: AgentState, now: Moment) -> tuple[AgentState, Array]:
        key, of_action = jax.random.split(s.key)
        ended = now.terminated | now.truncated
        carry = _where(ended, s.first, s.carry)
        outputs = lambda p: net(p, carry, now.observation)[::-1]
        (logits, value), credit, carry = jax.vjp(outputs, s.params, has_aux=True)
        action = jax.random.categorical(of_action, logits)
        target = now.reward + discount * jnp.where(ended, 0, value)
        error = jnp.where(s.began & ~now.truncated, target - s.value, 0)

        def policy(logits: Array) -> Array:
            log = jax.nn.log_softmax(logits)
            return log[action] - entropy * jnp.sign(error) * (jnp.exp(log) * log).sum()

        of_policy = credit((jax.grad(policy)(logits), jnp.zeros_like(value)))[0]
        of_value = credit((jnp.zeros_like(logits), jnp.ones_like(value)))[0]
        how = {"error": error, "fresh": ended}
        first, opt_actor = actor.update(of_policy, s.opt[0], s.params, **how)
        second, opt_critic = critic.update(of_value, s.opt[1], s.params, **how)
        params = _added(_added(s.params, first), second)
        opt = opt_actor, opt_critic
        return AgentState(key, params, opt, s.first, carry, value, jnp.array(True)), action

    return Agent(start, act)


def run(
    agent: Agent, environment: Environment, state: Any, key: Array, steps: int
) -> tuple[Any, Moment]:
    """An agent in an environment for some steps, compiled as one loop.

    Returns:
        The agent's state, and what it got at every step.
    """
    of_reset, of_steps = jax.random.split(key)
    world, observation = environment.reset(of_reset)
    no = jnp.array(False)

    def one(loop: Any, key: Array) -> tuple[Any, Moment]:
        state, world, now = loop
        state, action = agent.act(state, now)
        world, now = environment.next(key, world, action)
        return (state, world, now), now

    start: Any = (state, world, Moment(observation, jnp.zeros(()), no, no))
    (state, *_), moments = jax.lax.scan(one, start, jax.random.split(of_steps, steps))
    return state, moments


def run_gymnasium(
    agent: Agent, environment: Any, state: Any, steps: int, seed: int = 0
) -> tuple[Any, list[float]]:
    """The same in an environment of gymnasium, step by step in Python.

    Returns:
        The agent's state, and the sum of the rewards of every episode that ended.
    """
    act = jax.jit(agent.act)
    observation, _ = environment.reset(seed=seed)
    now = Moment(jnp.asarray(observation), jnp.zeros(()), jnp.array(False), jnp.array(False))
    returns, total = [], 0.0
    for _ in range(steps):
        state, action = act(state, now)
        observation, reward, terminated, truncated, _ = environment.step(int(action))
        total += float(reward)
        if terminated or truncated:
            returns.append(total)
            total, (observation, _) = 0.0, environment.reset()
        flags = jnp.array(bool(terminated)), jnp.array(bool(truncated))
        now = Moment(jnp.asarray(observation), jnp.asarray(reward, float), *flags)
    return state, returns


def _where(condition: Array, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _added(params: Any, updates: Any) -> Any:
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
