"""Every rule as random programs are judged with it, and what a right gradient of it is.

Of every rule: parameters that its report calls exact have the gradient of BPTT; a program is
refused in four parts or runs; a refused call changes no state. Beyond that, one of three claims:

    BPTT    all parameters have the gradient of BPTT: RTRL, and one window over the sequence, unless
            the step function does more than call the learner
    twin    another rule of the table that has the same gradient, by definition
    steps   the gradient in blocks of any size is the one step by step
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import operators
from programs import N_OUT, T, numbers, sequences

import braintrace as bt


@dataclass(frozen=True)
class Judged:
    """A rule with its options."""

    make: Callable[[Any], Any]  # from a model to a learner, before it is compiled
    bptt: bool = False
    twin: str | None = None
    chunk: int | None = None  # steps per window
    extra: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # of the target
    attach: Callable[[Any], None] | None = None  # what the compiled learner still needs
    steps: bool = True  # has blocks of any size
    share: int = 1  # how often it is drawn


def learner_of(rule: str, model: Any, learner: Any = None) -> Any:
    """A compiled learner, a new one or compiled again; it recognises plain operators in use."""
    judged = TABLE[rule]
    learner = operators.prepared(judged.make(model)) if learner is None else learner
    learner.compile_graph(sequences()[0][0])
    if judged.attach is not None:
        judged.attach(learner)
    return learner


def step_of(rule: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step function that also passes what the rule takes with a call."""
    extra = TABLE[rule].extra
    if not extra:
        return step

    def with_extra(net: Any, x: Any, target: Any) -> Any:
        given = {k: f(target) for k, f in extra.items()}
        return step(lambda *args: net(*args, **given), x, target)

    return with_extra


def _osttp(model: Any) -> Any:
    probe = operators.prepared(bt.OSTLRecurrent(model))
    probe.compile_graph(sequences()[0][0])
    groups = probe.graph.hidden_groups
    units = [g.varshape[-1] if g.varshape else 1 for g in groups]
    return bt.OSTTP(model, [numbers(f"B{k}", N_OUT, n) for k, n in enumerate(units)])


def _synthesizer(learner: Any) -> None:
    learner.attach_synthesizer(bt.SyntheticGradient(learner.group_signal_shapes()))


def _with(cls: Any, **options: Any) -> Callable[[Any], Any]:
    return functools.partial(cls, **options)


def _window(cls: Any, **options: Any) -> Judged:
    return Judged(_with(cls, vjp_method="multi-step", **options), bptt=True, chunk=T, steps=False)


_TARGET = {"y_target": lambda y: y}
_MODULATOR = {"modulator": jnp.sum}
TABLE: dict[str, Judged] = {
    "window": Judged(
        _with(bt.D_RTRL, vjp_method="multi-step"), bptt=True, chunk=T, steps=False, share=3
    ),
    "window pp_prop": _window(bt.pp_prop, decay_or_rank=0.9),
    "window snap": _window(bt.SnAp, n=2),
    "window rtrl": _window(bt.RTRL),
    "windows of 2": Judged(_with(bt.D_RTRL, vjp_method="multi-step"), chunk=2, steps=False),
    "rtrl": Judged(bt.RTRL, bptt=True, share=3),
    "d_rtrl": Judged(bt.D_RTRL, share=4),
    "pp_prop": Judged(_with(bt.pp_prop, decay_or_rank=0.9), share=2),
    "pp_prop by ranks": Judged(_with(bt.pp_prop, decay_or_rank=(3, 0.8))),
    "eprop": Judged(bt.EProp, twin="d_rtrl"),
    "eprop filtered": Judged(_with(bt.EProp, kappa_filter_decay=0.6)),
    "eprop eligibility": Judged(_with(bt.EProp, filtered="eligibility", kappa_filter_decay=0.6)),
    "eprop rates": Judged(_with(bt.EProp, filtered="eligibility", c_reg=0.5)),
    "eprop random": Judged(_with(bt.EProp, feedback="random", random_feedback_key=1)),
    "rflo": Judged(_with(bt.RFLO, leak=0.7, random_feedback_key=1)),
    "ostl_recurrent": Judged(bt.OSTLRecurrent, twin="snap 1"),
    "ostl_feedforward": Judged(_with(bt.OSTLFeedforward, decay_or_rank=0.9), twin="pp_prop"),
    "ottt": Judged(_with(bt.OTTT, leak=0.8)),
    "otpe": Judged(_with(bt.OTPE, leak=0.7)),
    "otpe approx": Judged(_with(bt.OTPE, leak=0.7, mode="approx")),
    "osttp": Judged(_osttp, extra=_TARGET),
    "snap 1": Judged(_with(bt.SnAp, n=1)),
    "snap 2": Judged(_with(bt.SnAp, n=2), share=2),
    "snap 3": Judged(_with(bt.SnAp, n=3)),
    "three_factor": Judged(bt.ThreeFactor, extra=_MODULATOR),
    "r_stdp": Judged(
        _with(bt.Learner, rule=bt.rules.r_stdp(lambda h: abs(h[..., 0]))), extra=_MODULATOR
    ),
    "reward_eprop": Judged(_with(bt.Learner, rule=bt.rules.reward_eprop()), extra=_MODULATOR),
    "rolling": Judged(_with(bt.Learner, rule=bt.rules.rolling(window=T)), bptt=True, steps=False),
    "decolle": Judged(_with(bt.DECOLLE, n_target=N_OUT), extra=_TARGET),
    "stllr": Judged(_with(bt.STLLR, leak_pre=0.7, leak_post=0.6, alpha_post=-0.5)),
    "tess": Judged(_with(bt.Learner, rule=bt.rules.tess(N_OUT)), extra=_TARGET),
    "dni": Judged(bt.DNI, chunk=2, attach=_synthesizer, steps=False),
    "rtrl paths": Judged(_with(bt.RTRL, paths=1)),
    "uoro": Judged(bt.UORO),
    "kf_rtrl": Judged(bt.KFRTRL),
    "no_trace": Judged(bt.NoTrace),
}
DRAWN = tuple(name for name, judged in TABLE.items() for _ in range(judged.share))
# In a window a step function sees results only, so that it cannot do more.
AROUND = tuple(name for name in DRAWN if TABLE[name].chunk is None)
