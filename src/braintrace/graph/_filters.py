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
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import not_supported, value_error
from ..program import Atom, Const, Equation, Rewriting, Var, rewritten, write
from ._graph import Graph
from ._leaky import decay, decay_of, leaky_readouts
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
    step, program = graph.step, graph.step.program
    readers = {s.equation: s for s in _readers(graph, layers)}
    leak = _leak(graph, consts, [*readers.values()]) if decays == READOUT else None
    seen: dict[Atom, Atom] = {}  # what is read in the place of a value
    filters: list[tuple[Var, Atom]] = []  # of every state of a filter its entry and its exit
    rates: list[tuple[Var, Atom]] = []
    penalties: list[Atom] = []

    def filtered(to: Rewriting, x: Var) -> Atom:
        if leak is None:
            chain: list[Atom] = [Const(np.asarray(float(k), x.dtype)) for k in decays]
        else:
            one = lambda *values: jnp.ravel(decay(step, leak, *values))[0]
            chain = write(to, one, [*program.consts], [*program.inputs])
        entries = [Var(x.shape, x.dtype) for _ in chain]
        new, *exits = write(to, _chain, x, chain, entries)
        filters.extend(zip(entries, exits, strict=True))
        if rate is not None:
            entry = Var(x.shape, x.dtype)
            out, penalty = write(to, partial(_rate, rate), x, entry)
            rates.append((entry, out))
            penalties.append(penalty)
        return new

    def rule(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
        if eqn not in readers:
            return None
        x, at = readers[eqn].x, readers[eqn].operator.primitive.x_invar_index
        if x not in seen:
            seen[x] = filtered(to, x)
        inputs = tuple(seen[x] if i == at else a for i, a in enumerate(eqn.inputs))
        return to.put(replace(eqn, inputs=inputs))

    # A step of 5 inputs and 4 outputs with one filter gets input 5 and output 4, a leaf of the
    # hidden states; penalties, if there are any, stay the last two outputs.
    start, end = len(program.inputs), len(program.outputs) - 2 * step.penalised

    def results(to: Rewriting) -> Sequence[Atom]:
        last = program.outputs[end:]
        if penalties:
            (total,) = write(to, lambda *terms: sum(terms[1:], terms[0]), *penalties, *last[:1])
            last = (total, last[1] if last else Const(np.zeros((), total.dtype)))
        return (*program.outputs[:end], *(out for _, out in (*filters, *rates)), *last)

    wider = rewritten(program, rule, results)
    names = [("filter", i) for i in range(len(filters))]
    names += [("rate", i) for i in range(len(rates))]
    leaves = tuple(Leaf(name, 0, start + i, end + i) for i, name in enumerate(names))
    return replace(
        step,
        program=replace(wider, inputs=(*program.inputs, *(v for v, _ in (*filters, *rates)))),
        hidden=(*step.hidden, *leaves),
        filters=len(filters),
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


def _chain(x: Any, decays: Sequence[Any], states: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What a chain of filters has in the place of x, and their new states."""
    # Forward x' = x and r' = k r + 0, so states that begin at zero stay zero. Their derivatives
    # do not: dx' = dr' = k dr + dx, a filter of what the trace of x says.
    still = lax.stop_gradient(x)
    value, new = x - still, []
    for k, r in zip(decays, states, strict=True):
        value = k.astype(x.dtype) * r + value
        new.append(value)
    return still + value, new


def _rate(rate: RateLoss, x: Any, f: Any) -> tuple[Any, Any]:
    """The new firing rate of x, and its penalty."""
    numbers = (*rate, 1 - rate.kappa_reg)
    c_reg, target, keep, gain = (np.asarray(n, x.dtype) for n in numbers)
    new = keep * f + gain * x
    missed = c_reg * (lax.stop_gradient(new) - target)
    return new, (missed * new).sum()


# ------------------------------------------------------------------------- the read-out's own decay


def _leak(graph: Graph, consts: Sequence[Any], readers: Sequence[Site]) -> int:
    """The state of the leaky read-out whose decay is that of the filters."""
    found = leaky_readouts(graph.step, readers, graph.links)
    if not found:
        raise value_error(
            "kappa_filter_decay='readout', and no read-out of the step leaks.",
            why="the decay is that of a state r' = kappa r + z @ W behind the weight; with the "
            "filter before the weight, as in FilteredReadout, d_rtrl is e-prop already",
            do=f"read out with LeakyRateReadout, {_BY_NUMBER}",
        )
    values = [decay_of(graph.step, consts, k) for k in dict.fromkeys(found.values())]
    known = [v for v in values if v is not None]
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
    return next(iter(found.values()))
