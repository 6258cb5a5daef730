"""The verdict on one program: right, refused with a four-part error, wrong, crashed or hung.

Programs run in the interpreter, or the gradient of a learner is compiled by XLA and only what it is
compared with is interpreted. What is wrong then is run again by XLA alone: if that is right, and so
is the interpreter alone, rounding decides a branch of the program; if the interpreter alone is
wrong, the verdict is 'misread', a fault of the interpreter and not of the library.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import around
import jax
import layers
import numpy as np
from claims import TABLE, learner_of, step_of
from programs import Program, Spec, forward_grad, gain_in_use, sequences, step_fn

import braintrace as bt
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison, online_grad
from interpret import interpreted

TIGHT, HUGE = 1e-9, 1e8
NOISE = 1e-12  # a gradient that is nowhere larger is rounding: zero, computed in another order
ALLOWED = (ValueError, TypeError, bt.CompilationError, bt.NotSupportedError)
FOUR_PARTS = re.compile(
    r"\A(?P<what>\S[^\n]*)(\n  where: \S[^\n]*)?\n  why:   \S[^\n]*\n  do:    \S[^\n]*\Z"
)
NO_DERIVATIVE = (  # a `while` has forward mode only, a custom_vjp reverse mode only
    "Reverse-mode differentiation does not work for lax.while_loop",
    "forward-mode autodiff (jvp) to a custom_vjp",
)
RULES = ("window", "d_rtrl", "pp_prop")  # unless others are named
Run = Callable[..., Any]


def compiled(fn: Callable[[], Any], lower: bool = True) -> Any:
    """`fn()` as it is; what it does with JAX is compiled by XLA."""
    return fn()


class Hung(BaseException):
    """A program took longer than its limit; no `except Exception` catches it."""


@dataclass(frozen=True)
class Verdict:
    """`kind` is 'right', 'refused', 'wrong', 'misread', 'crashed', 'hung' or 'no truth'."""

    kind: str
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in ("wrong", "misread", "crashed", "hung")


def is_four_part(error: BaseException) -> bool:
    """Whether an error is of an allowed type and made of what, where (or not), why and do."""
    return type(error) in ALLOWED and FOUR_PARTS.match(str(error)) is not None


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `Hung` when the block computes longer; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Hung(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def truth_of(spec: Spec, model: Program, run: Run = interpreted) -> dict | None:
    """The gradient of the plain program; None where JAX has none (or it is not a number)."""
    try:
        try:
            grads = run(lambda: bptt_grad(model, step_fn, *sequences()), lower=False)
        except ValueError as error:
            if NO_DERIVATIVE[0] not in str(error):
                raise
            grads = run(lambda: forward_grad(spec), lower=False)
    except TypeError as error:
        if NO_DERIVATIVE[1] not in str(error):
            raise
        return None
    return grads if largest(grads) < HUGE else None


def largest(grads: Any) -> float:
    sizes = [float(np.abs(np.asarray(g)).max(initial=0)) for g in jax.tree.leaves(grads)]
    return float(np.max(sizes))  # not a number if one of them is not


def judge(
    spec: Spec,
    rules: tuple[str, ...] = RULES,
    run: Run = interpreted,
    seconds: float = 60,
) -> Verdict:
    """Compile and run a program with each rule; the first bad verdict, else the last one."""

    def with_each_rule(run: Run, plain: Run) -> Verdict:
        model, verdict = Program(spec), Verdict("right")
        truth = functools.cache(lambda: truth_of(spec, model, plain))
        for rule in rules:
            verdict = _judge(model, truth, rule, run, plain)
            if verdict.bad:
                break
        return verdict

    return confirmed(with_each_rule, run, seconds)


def confirmed(find: Callable[[Run, Run], Verdict], run: Run, seconds: float) -> Verdict:
    """A verdict, within a time limit; 'wrong' only if XLA says so too.

    `find` takes what runs the learner and what runs that with which it is compared.
    """
    try:
        with limit(seconds):
            verdict = find(run, interpreted)
            if verdict.kind != "wrong":
                return verdict
            again = find(compiled, compiled)
            if again.bad:
                return again
            if run is compiled and not find(interpreted, interpreted).bad:
                return Verdict("right", f"decided by rounding: {verdict.detail}")
            return Verdict("misread", f"{verdict.detail}; compiled it is {again.kind}")
    except Hung as error:
        return Verdict("hung", str(error))


def _judge(
    model: Any,
    truth: Callable[[], dict | None],
    rule: str,
    run: Run,
    plain: Run,
    step: Callable = step_fn,
    learners: dict[str, Any] | None = None,
) -> Verdict:
    """Run a model with a rule by `run`; hold it to the claims of the rule, computed by `plain`.

    Learners that are in `learners` are compiled again; new ones are put there.
    """
    learners = {} if learners is None else learners
    judged, before = TABLE[rule], {}
    bptt = judged.bptt and step is step_fn  # no rule follows states outside the learner call
    gradient = lambda rule, learner, **how: online_grad(
        learner, step_of(rule, step), *sequences(), chunk_size=TABLE[rule].chunk, **how
    )
    try:
        learner = learners[rule] = learner_of(rule, model, learners.get(rule))
        before = {p: s.value for p, s in learner.states().items()}
        grads = run(lambda: gradient(rule, learner))
        same, other = grads, ""
        if judged.twin is not None:
            other = f"that of {judged.twin}"
            twin = learner_of(judged.twin, model)
            same = plain(lambda: gradient(judged.twin, twin), lower=False)
        elif judged.steps and not bptt:
            other = "that of single steps"
            same = plain(lambda: gradient(rule, learner, block_size=1), lower=False)
    except Exception as error:
        changed = [p for p, v in before.items() if learner.states()[p].value is not v]
        if changed:
            return Verdict("crashed", f"{rule}: a failed call changed {changed}")
        if is_four_part(error):
            return Verdict("refused", str(error).splitlines()[0])
        return Verdict("crashed", f"{rule}: {describe(error)}")
    if max(largest(grads), largest(same)) < HUGE:
        if not max(errors(grads, same).values()) <= TIGHT:
            return Verdict("wrong", f"{rule}: the gradient is not {other}")
    finite = np.isfinite(largest(grads))
    claimed = {e.how for e in learner.report.parameters.values() if e.exact}
    if finite and not bptt and claimed <= {"none"}:  # nothing depends on them
        wanted = jax.tree.map(np.zeros_like, grads)
    else:
        wanted = truth()
    if wanted is None:
        return Verdict("no truth")
    if not finite:
        return Verdict("wrong", f"{rule}: not finite")
    if bptt and not max(largest(grads), largest(wanted)) < NOISE:
        result = comparison(grads, wanted)
        if not result.max_error <= TIGHT:
            return Verdict("wrong", f"{rule}: error {result.max_error:.1e}")
    if broken := overclaimed(learner.report, errors(grads, wanted)):
        return Verdict("wrong", f"{rule}: {broken}")
    return Verdict("right")


# ------------------------------------------------------------------------------------ certificates


def errors(found: dict, truth: dict) -> dict[tuple, float]:
    """Per parameter, the largest difference relative to the largest gradient of all."""
    if max(largest(found), largest(truth)) < NOISE:
        return dict.fromkeys(truth, 0.0)
    size = largest(truth) or 1.0
    return {p: largest(jax.tree.map(np.subtract, found[p], truth[p])) / size for p in truth}


def overclaimed(report: Any, wrong: dict[tuple, float]) -> str:
    """The first promise of the report that the errors of D-RTRL break; '' if none."""
    for path, entry in getattr(report, "parameters", {}).items():
        if entry.how not in ("trace", "within-step", "none") or not isinstance(entry.exact, bool):
            return f"{path} is {entry.exact!r}, {entry.how!r}"
        if entry.exact and entry.dropped:
            return f"{path} is called exact, but lists {[d.text for d in entry.dropped]}"
        if entry.trace_bytes and entry.how != "trace":
            return f"{path} has no trace of {entry.trace_bytes} bytes"
        if not all(d.text for d in entry.dropped):
            return f"{path} lists a dependency without a name"
        if entry.exact and not wrong[path] <= TIGHT:
            return f"{path} is called exact with an error of {wrong[path]:.1e}"
    return ""


def judge_around(
    spec: Spec, rule: str = "d_rtrl", run: Run = interpreted, seconds: float = 60
) -> Verdict:
    """Whether the report is honest about a step function that does more than call the learner."""
    return confirmed(lambda *runs: _judge_around(spec, rule, *runs), run, seconds)


def _judge_around(spec: Spec, rule: str, run: Run, plain: Run) -> Verdict:
    _, kinds, program = spec
    model = around.Wrapped(program)
    step, verdict, learners = around.step_around(model, kinds), Verdict("right"), {}
    try:
        for gain_in_use[0] in (0, 1) if "again" in kinds else (0,):
            truth = functools.cache(lambda: _truth_around(model, step, plain))
            verdict = _judge(model, truth, rule, run, plain, step, learners)
            if verdict.kind != "right":
                return Verdict(verdict.kind, f"around {kinds}: {verdict.detail}")
    finally:
        gain_in_use[0] = 0
    return verdict


def _truth_around(model: Any, step: Callable, run: Run) -> dict | None:
    try:
        truth = run(lambda: bptt_grad(model, step, *sequences()), lower=False)
    except (TypeError, ValueError) as error:
        if not any(text in str(error) for text in NO_DERIVATIVE):
            raise
        return None
    return truth if largest(truth) < HUGE else None


def judge_network(
    net: tuple, certificate: bool = True, run: Run = interpreted, seconds: float = 60
) -> Verdict:
    """Whether a layered network's learner is the network cut by hand, and says what it cut."""
    try:
        return confirmed(lambda *runs: _judge_network(net, certificate, *runs), run, seconds)
    except Exception as error:  # every network is legal
        return Verdict("crashed", f"network: {describe(error)}")


def _judge_network(net: tuple, certificate: bool, run: Run, plain: Run) -> Verdict:
    model = layers.Network(net)
    learner = bt.D_RTRL(model)
    learner.compile_graph(layers.sequences()[0][0])
    everything = layers.droppable(net)
    found = run(lambda: online_grad(learner, step_fn, *layers.sequences()))
    by_hand = lambda dropped: layers.by_hand(model, dropped, plain)
    cut = by_hand(everything)
    if bad := {p: e for p, e in errors(found, cut).items() if not e <= TIGHT}:
        return Verdict("wrong", f"not the network cut by hand: {bad}")
    parameters = getattr(learner.report, "parameters", None)
    if not certificate or parameters is None:
        return Verdict("right")
    truth = by_hand(layers.WHOLE)
    if broken := overclaimed(learner.report, errors(found, truth)):
        return Verdict("wrong", broken)
    for dropped in (everything, *(frozenset([name]) for name in sorted(everything))):
        for path, error in errors(by_hand(dropped), truth).items():
            if error > TIGHT and (parameters[path].exact or not parameters[path].dropped):
                return Verdict("wrong", f"{path} is silent about {sorted(dropped)}")
    return Verdict("right")


def describe(error: BaseException) -> str:
    """Type, first line, and the innermost line of braintrace."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/braintrace/" in f.filename]
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    first = (str(error).splitlines() or [""])[0][:160]
    return f"{type(error).__name__}{at}: {first}"
