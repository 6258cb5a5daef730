"""Filters between units and what reads them: the step whose D-RTRL is e-prop.

With z the output of a unit, eps the trace of a weight and L = dL_t/dz_t within the step, e-prop is

    e_t = (dz/dh) eps_t,    ebar_t = kappa ebar_{t-1} + e_t,    gradient = sum_t L_t ebar_t

That is D-RTRL of a step in which the operators that read z, and do not feed back, read in its place

    stop(z) + r',    r' = kappa r + (z - stop(z))

r is zero at all times and has a derivative all the same, which is ebar. The values of the step, and
with them the gradient of the read-out's own weight, stay what they were.

A regularisation of firing rates, c/2 sum (f - f*)^2 with f' = k f + (1 - k) z, is a state f of the
step that nothing reads, and a penalty c (stop(f') - f*) f', whose derivative is in every gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import not_supported, value_error
from ..program import Atom, Const, Equation, Program, Var, shape_of, trace
from ._graph import Graph
from ._leaky import decay_equations, decay_of, leaky_readouts
from ._reach import bits_of, reach
from ._sites import Site
from ._step import Leaf, Step

READOUT = "readout"
_BY_NUMBER = "or give the decay: kappa_filter_decay=0.95"


class RateLoss(NamedTuple):
    """c_reg / 2 sum (f - f_target)^2 of firing rates f' = kappa_reg f + (1 - kappa_reg) z."""

    c_reg: float
    f_target: float
    kappa_reg: float


def with_filters(
    graph: Graph,
    consts: Sequence[Any],
    decays: Sequence[float] | str,
    rate: RateLoss | None = None,
    layers: bool = False,
) -> Step:
    """The analysed step with such a filter before every operator that reads units.

    Args:
        graph: the step, analysed without filters.
        consts: values of its constants.
        decays: of a chain of filters, or 'readout': that of the leaky read-out in the step.
        rate: the regularisation of the firing rates of what is read, if there is one.
        layers: only before operators that lead to a state, which a read-out does not.

    Raises:
        ValueError: no operator reads the units, or the read-out's decay is not one number.
    """
    step = graph.step
    readers = _readers(graph, layers)
    first: list[Equation] = []
    chain: list[Atom | float]
    if decays == READOUT:
        first, chain = _of_readout(graph, consts, readers)
    else:
        chain = [float(k) for k in decays]
    read = dict.fromkeys(s.x for s in readers)
    made = {x: _filter(x, chain) for x in read}
    rates = {} if rate is None else {x: _rate(x, rate) for x in read}
    program = step.program
    equations, readers_of = list(first), {s.equation: s for s in readers}
    waiting = dict(made)
    for eqn in program.equations:
        if eqn in readers_of:
            s = readers_of[eqn]
            if s.x in waiting:
                equations += waiting.pop(s.x).equations
                equations += rates[s.x].equations if rates else ()
            k, new = s.operator.primitive.x_invar_index, made[s.x].outputs[0]
            inputs = tuple(new if i == k else a for i, a in enumerate(eqn.inputs))
            equations.append(replace(eqn, inputs=inputs))
        elif eqn not in first:
            equations.append(eqn)
    entries = [v for f in made.values() for v in f.inputs]
    exits = [v for f in made.values() for v in f.outputs[1:]]
    entries += [f.inputs[0] for f in rates.values()]
    exits += [f.outputs[0] for f in rates.values()]
    # A step of 5 inputs and 4 outputs with one filter gets input 5 and output 4, a leaf of the
    # hidden states; penalties, if there are any, stay the last two outputs.
    start, end = len(program.inputs), len(program.outputs) - 2 * step.penalised
    names = [("filter", i) for i in range(len(entries) - len(rates))]
    names += [("rate", i) for i in range(len(rates))]
    leaves = tuple(Leaf(name, 0, start + i, end + i) for i, name in enumerate(names))
    penalties = program.outputs[end:]
    if rates:
        added, penalties = _penalties([f.outputs[1] for f in rates.values()], penalties)
        equations += added
    outputs = (*program.outputs[:end], *exits, *penalties)
    wider = Program(program.consts, (*program.inputs, *entries), tuple(equations), outputs)
    return replace(
        step,
        program=wider,
        hidden=(*step.hidden, *leaves),
        filters=len(leaves) - len(rates),
        rates=len(rates),
        penalised=step.penalised or bool(rates),
    )


def _readers(graph: Graph, layers: bool) -> list[Site]:
    """The operators that read states and do not feed back: read-outs, and between `layers`."""
    step = graph.step
    states = [v for leaf in step.hidden for v in (step.entry(leaf), step.exit(leaf))]
    carries = reach(step.program, {v: 1 for v in states if isinstance(v, Var)})
    sites = [s for s in graph.sites if s.equation not in graph.links.cut_entries]
    readers = [s for s in sites if s.x is not None and bits_of(s.x, carries)]
    if layers:
        leading = {r.site.equation for r in graph.relations if r.hidden_groups}
        readers = [s for s in readers if s.equation in leading]
        if not readers:
            raise value_error(
                "filtered='layers', and no layer reads the units of another.",
                why="the filter stands for what a layer remembers of the units that it reads",
                do="use d_rtrl, which leaves nothing of that out here",
            )
    if inside := [s for s in readers if s.levels]:
        raise not_supported(
            "e-prop's filter before an operator in the body of a loop or a branch.",
            where=inside[0].equation.where(),
            why="the filter counts steps, and the body does not run once a step",
            do="move the read-out out of it",
        )
    if not readers:
        raise value_error(
            "e-prop's filter has no place: no read-out reads the units.",
            why="the eligibility trace is filtered where an operator with a trained weight, that "
            "does not feed back, reads what a unit puts out",
            do="read out with a trained weight, as in z @ W; or leave out filtered='eligibility'",
        )
    return readers


def _filter(x: Var, chain: Sequence[Atom | float]) -> Program:
    """The equations of a chain of filters of x: inputs are its states, outputs x' and these."""
    decays: list[Atom] = [
        Const(np.asarray(k, x.dtype)) if isinstance(k, float) else k for k in chain
    ]

    def filters(x: Any, decays: Sequence[Any], states: Sequence[Any]) -> tuple[Any, list[Any]]:
        # Forward x' = x and r' = k r + 0, so states that begin at zero stay zero. Their derivatives
        # do not: dx' = dr' = k dr + dx, a filter of what the trace of x says.
        still = lax.stop_gradient(x)
        value, new = x - still, []
        for k, r in zip(decays, states, strict=True):
            value = k.astype(x.dtype) * r + value
            new.append(value)
        return still + value, new

    program, _ = trace(filters, shape_of(x), [*map(shape_of, decays)], [shape_of(x)] * len(decays))
    states = program.inputs[1 + len(decays) :]
    known = dict(zip(program.inputs, (x, *decays), strict=False))
    equations = _renamed(program.equations, known)
    return Program((), states, equations, program.outputs)


def _rate(x: Var, rate: RateLoss) -> Program:
    """The equations of a firing rate of x: the input is f, outputs the new f and its penalty."""
    numbers = [Const(np.asarray(n, x.dtype)) for n in (1 - rate.kappa_reg, *rate)]

    def measured(x: Any, numbers: Sequence[Any], f: Any) -> tuple[Any, Any]:
        gain, c_reg, target, keep = numbers
        new = keep * f + gain * x
        missed = c_reg * (lax.stop_gradient(new) - target)
        return new, (missed * new).sum()

    program, _ = trace(measured, shape_of(x), [*map(shape_of, numbers)], shape_of(x))
    known: dict[Any, Atom] = dict(zip(program.inputs, (x, *numbers), strict=False))
    equations = _renamed(program.equations, known)
    return Program((), program.inputs[-1:], equations, program.outputs)


def _penalties(
    new: Sequence[Atom], old: Sequence[Atom]
) -> tuple[tuple[Equation, ...], tuple[Atom, ...]]:
    """The equations that add penalties to those of the step, and the two outputs after them."""
    atoms = [*new, *old[:1]]
    program, _ = trace(lambda *terms: sum(terms[1:], terms[0]), *map(shape_of, atoms))
    equations = _renamed(program.equations, dict(zip(program.inputs, atoms, strict=True)))
    (total,) = program.outputs
    total = atoms[0] if total in program.inputs else total
    return equations, (total, old[1] if old else Const(np.zeros((), total.dtype)))


def _renamed(equations: Sequence[Equation], names: dict[Any, Atom]) -> tuple[Equation, ...]:
    put = lambda e: tuple(names.get(a, a) if isinstance(a, Var) else a for a in e.inputs)
    return tuple(replace(e, inputs=put(e)) for e in equations)


# ------------------------------------------------------------------------- the read-out's own decay


def _of_readout(
    graph: Graph, consts: Sequence[Any], readers: Sequence[Site]
) -> tuple[list[Equation], list[Atom | float]]:
    """The equations that compute the decay of the leaky read-out, and the decay."""
    step = graph.step
    found = leaky_readouts(step, readers, graph.links)
    if not found:
        raise value_error(
            "kappa_filter_decay='readout', and no read-out of the step leaks.",
            why="the decay is that of a state r' = kappa r + z @ W behind the weight; with the "
            "filter before the weight, as in FilteredReadout, d_rtrl is e-prop already",
            do=f"read out with LeakyRateReadout, {_BY_NUMBER}",
        )
    values = {leak: decay_of(step, consts, leak) for leak in found.values()}
    known = [v for v in values.values() if v is not None]
    numbers = {float(a) for v in known for a in np.ravel(v)}
    if len(known) < len(values) or len(numbers) != 1:
        why = "it is trained, or not known before the step runs"
        why = f"it has {len(numbers)} values" if len(known) == len(values) else why
        raise value_error(
            "kappa_filter_decay='readout', and the read-outs have no single decay.",
            where=next(iter(found)).where(),
            why=f"{why}: one filter stands before the weight, for all outputs",
            do=f"give the read-outs one constant time constant, {_BY_NUMBER}",
        )
    equations, decay = decay_equations(step, next(iter(found.values())))
    first = lambda a: jnp.reshape(lax.slice(a, [0] * a.ndim, [1] * a.ndim), ())
    one, _ = trace(first, shape_of(decay))
    return [*equations, *_renamed(one.equations, {one.inputs[0]: decay})], [*one.outputs]
