"""One step: as it is, with recurrent entries cut, or with zeros added to its new states.

Random feedback is other operands in the reverse pass through an operator than forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..graph import Graph, bind_reversible, bits_of, reach, seed_of, site_names
from ..ops import ETPPrimitive
from ..program import Apply, Equation, Var, bind, bind_quietly, prune, run
from ._detached import variants_of
from ._joined import Joined, products_joined
from ._loops import kernels_allowed
from ._rule import ExitCotangents, Feedback
from ._values import Values

Array = jax.Array


def inputs_of(graph: Graph, values: Values) -> list[Array]:
    """The program's flat inputs."""
    return graph.step.arguments(values.args, values.params, values.hidden, values.others)


def after_step(graph: Graph, values: Values, outs: list[Array]) -> tuple[list[Array], Values]:
    """The results among the program's outputs, and the values with the new states."""
    step = graph.step
    hidden, others = (tuple(outs[leaf.output] for leaf in k) for k in (step.hidden, step.others))
    return outs[: step.n_outs], replace(values, hidden=hidden, others=others)


def evaluate_plain(graph: Graph, values: Values) -> list[Array]:
    """The program's outputs, with a reverse mode through every `while`."""
    apply: Apply = lambda eqn, operands, feed: (bind_reversible(eqn, operands), {})
    return run(graph.step.program, values.consts, inputs_of(graph, values), apply, graph.whiles)[0]


def new_hidden(
    graph: Graph, values: Values, taps: Mapping[int, Array] | None = None
) -> list[Array]:
    """The new hidden states as a function that can be differentiated forward.

    `taps` are added to the operators' outputs, by relation; operators are not in control flow then.
    """
    index_of = {r.site.equation: r.index for r in graph.relations} if taps else {}

    def apply(eqn: Equation, operands: list[Array], feed: Any) -> tuple[list[Array], dict]:
        outs = bind_quietly(eqn, operands)
        return ([outs[0] + taps[index_of[eqn]]] if taps and eqn in index_of else outs), {}

    # Pruned: the output of the step may have no forward derivative.
    program = prune(graph.step.program, [graph.step.exit(leaf) for leaf in graph.step.hidden])
    return run(program, values.consts, inputs_of(graph, values), apply, graph.custom)[0]


def evaluate_window(
    graph: Graph,
    values: Values,
    taps: Mapping[int, Array],
    ys: Mapping[int, Array],
    backs: Backs | None = None,
) -> list[Array]:
    """The program's outputs, nothing cut; operators as in `evaluate_single`."""
    program, constant = graph.step.program, [graph.step.entry(leaf) for leaf in graph.step.params]
    # Of a joined product all weights are tapped; random operands belong to each by itself.
    sites = [r.site for r in graph.relations if r.index in taps and all(r.site.leaves.values())]
    tapped = [] if backs else [site.equation for site in sites]
    joined = products_joined(program.equations, {*program.consts, *constant}, tapped)
    program = replace(program, equations=tuple(joined.equations))
    apply = _applied(graph, taps, (ys, {}), backs, joined)
    inputs = inputs_of(graph, values)
    return run(program, values.consts, inputs, apply, graph.inner, dict(taps))[0]


def evaluate_single(
    graph: Graph,
    values: Values,
    taps: Mapping[int, Array],
    computed: Computed,
    exits: Sequence[Array] | None,
    exit_cotangents: ExitCotangents | None = None,
    backs: Backs | None = None,
) -> list[Array]:
    """The program's outputs with recurrent entries cut, or with `exits` added to the new states.

    Args:
        graph: the analysed step.
        values: its arrays.
        taps: added to the operators' outputs, by relation; tapped weights have no gradient here.
        computed: outputs of operators that were computed before, by the number of the site, and
            new states, by the number of the leaf.
        exits: zeros to add to the new states as others see them; None for none.
        exit_cotangents: which cotangents they get.
        backs: operands for the reverse pass through operators.
    """
    apply = _applied(graph, taps, computed, backs, Joined([]))
    variants = variants_of(graph, apply, exits, exit_cotangents)
    return variants.start(values.consts, inputs_of(graph, values), dict(taps))


# Per operator the random operands, and whether they are added to its own.
Backs = Mapping[Equation, Mapping[int, tuple[Array, bool]]]
Computed = tuple[Mapping[int, Array], Mapping[int, Array]]
# What the derivative of a new state needs of its value is nothing.
_LINEAR = {"add", "sub", "mul", "neg", "real", "imag"}


def stored_exits(graph: Graph) -> dict[int, Var]:
    """New states, by the number of the leaf, that a kernel had better store than XLA recompute.

    The results of all steps read them, as operands of matrix products usually: they are stored
    anyway, and to compute them from the states before reads these and all that enters.
    """
    step = graph.step
    if not kernels_allowed():
        return {}
    linear = {o for e in step.program.equations if e.name in _LINEAR for o in e.outputs}
    return {i: step.exit(l) for i, l in enumerate(step.hidden) if step.exit(l) in linear}


def _same(graph: Graph, var: Var) -> list[Equation]:
    """The equations that compute this value, as a step may write `h.real` twice."""
    equations = graph.step.program.equations
    own = next(e for e in equations if var in e.outputs)
    what = lambda e: (e.primitive, e.inputs, tuple(e.params.items()))
    return [e for e in equations if e.name == own.name and what(e) == what(own)]


def _applied(
    graph: Graph,
    taps: Mapping[int, Array],
    computed: Computed,
    backs: Backs | None,
    joined: Joined,
) -> Apply:
    """How to apply an equation: a tapped operator passes no gradient to its weights."""
    at = joined.place_of
    relation_of = {at(r.site.equation): r for r in graph.relations if r.index in taps}
    ys, new = computed
    exits = stored_exits(graph) if new else {}
    output_of = {e: h for i, h in new.items() for e in _same(graph, exits[i])}
    output_of |= {at(graph.sites[i].equation): y for i, y in ys.items()}

    def apply(eqn: Equation, operands: list[Array], feed: Any) -> tuple[list[Array], dict]:
        if eqn in joined.products:
            x = eqn.primitive.x_invar_index
            stopped = [v if i == x else lax.stop_gradient(v) for i, v in enumerate(operands)]
            return bind(eqn, stopped), {}
        r = relation_of.get(eqn)
        if r is not None and eqn is r.site.equation:
            weights = [i for k, i in r.operator.positions.items() if r.site.leaves[k]]
            operands = [lax.stop_gradient(v) if i in weights else v for i, v in enumerate(operands)]
        detour: Any = 0
        # y = x @ W with the random B in its reverse pass: x of the product is constant, and
        # `detour` = x @ B - stop_gradient(x @ B) is added, which is zero and has the derivative B
        # by x. So the cotangent c of y becomes c @ B.T before the operator, and x.T @ c for W as
        # ever.
        if backs and eqn in backs:
            others = dict(enumerate(lax.stop_gradient(operands)))
            for i, (random, adaptive) in backs[eqn].items():
                others[i] = others[i] + random if adaptive else random
            at = eqn.primitive.x_invar_index
            (detour,) = bind(eqn, [operands[i] if i == at else v for i, v in others.items()])
            detour = detour - lax.stop_gradient(detour)
            operands = [lax.stop_gradient(v) if i == at else v for i, v in enumerate(operands)]
        if eqn in output_of:
            y = _precomputed(eqn, operands, output_of[eqn])
        elif r is None and not (backs and eqn in backs):
            return bind_reversible(eqn, operands), {}
        else:
            (y,) = bind(eqn, operands)
        y = y if r is None else y + feed[r.index].astype(y.dtype)
        return [y + detour], {}

    return apply


def _precomputed(eqn: Equation, operands: list[Array], y: Array) -> Array:
    """The output `y` of an equation, computed before, with the equation's derivative."""

    @jax.custom_jvp
    def output(values, y):
        return y

    def pushed(primals, tangents):
        values, y = primals
        varying = [i for i, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]
        if not varying:
            return y, jnp.zeros_like(y)

        def of_varying(*operands):
            full = list(values)
            for i, v in zip(varying, operands, strict=True):
                full[i] = v
            return bind(eqn, full)[0]

        at, along = ([a[i] for i in varying] for a in (values, tangents[0]))
        return y, jax.jvp(of_varying, at, along)[1]

    output.defjvp(pushed, symbolic_zeros=True)
    return output(list(operands), y)


def back_operands(graph: Graph, feedback: Feedback | None) -> Backs | None:
    """Random operands for the operators between states and the loss that do not feed back."""
    if feedback is None:
        return None
    step = graph.step
    states = [v for leaf in step.hidden for v in (step.entry(leaf), step.exit(leaf))]
    carries = reach(step.program, {v: 1 for v in states if isinstance(v, Var)})
    out = {}
    for name, site in zip(site_names(graph), graph.sites, strict=True):
        eqn = site.equation
        if not isinstance(eqn.primitive, ETPPrimitive) or eqn in graph.links.cut_entries:
            continue
        if site.x is None or not bits_of(site.x, carries):
            continue
        operands = {}
        for k, at in enumerate(site.operator.positions.values()):
            shape, dtype = site.operator.operands[at].shape, site.operator.operands[at].dtype
            key = jax.random.fold_in(jax.random.fold_in(feedback.key, seed_of(name)), k)
            fan = max(1, math.prod(shape) // shape[0]) if shape else 1
            random = feedback.scale / math.sqrt(fan) * jax.random.normal(key, shape, dtype)
            operands[at] = random, feedback.adaptive
        out[eqn] = operands
    return out


def operands_pulled(
    graph: Graph, consts: Sequence[Array], params: Sequence[Array]
) -> tuple[Any, Any]:
    """The operands of every relation, and a function from their gradients to the parameters'."""

    def traced(p):
        weights = graph.operands(consts, p)
        pairs = zip(graph.relations, weights, strict=True)
        return [{k: w[k] for k in r.keys} for r, w in pairs], weights

    _, pull, weights = jax.vjp(traced, params, has_aux=True)
    return weights, lambda grads: pull(grads)[0]
