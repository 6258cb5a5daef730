"""`braintrace plan`: what each rule would cost and make exact, for a model in a file."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import brainstate
import numpy as np

from ..._online import Problem, advise, choose_for, planned
from ...frontend import extract_module_info
from ...learner import compile
from ...report import Advice, factor, size
from ...rules import LearningRule, rule_value
from ..comparison._model import named_step
from ._explain import read_inputs, read_rule
from ._source import Failure, Mistake, load_module, make_value

_CONVENTION = (
    "write a function without arguments that returns (step, params, state, *inputs), with a step "
    "step(params, state, *inputs) -> (state, out); see braintrace plan --help"
)


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    rule = _rule(options.rule)
    module, word = load_module(options.model)
    if options.data is not None:
        return _measure(options, module, word)
    advice = _advice(options, module, word, rule).within(options.memory)
    advice = advice if options.length is None else advice.over(options.length)
    advice = advice.measured() if options.measure else advice
    print(advice)
    print(f"\n{_recommendation(advice)}")
    return 0


def _measure(options: argparse.Namespace, module: ModuleType, word: str) -> int:
    """Print the choice for the batch of a file."""
    _check_no_arguments(module, word)
    xs, ys = _batch(options.data, options.length)
    step, params, state, groups = _step_of(options, module, word, xs)
    loss = getattr(module, "loss", None)
    if not callable(loss):
        raise Mistake(
            f"there is no loss in {module.__file__}.",
            why="the gradients that are compared are those of loss(out, y), of one step",
            do="write one, def loss(out, y): return jnp.mean((out - y) ** 2)",
        )
    limits: dict[str, Any] = {"memory": options.memory, "time": options.time}
    limits |= {"groups": groups, "progress": sys.stderr.isatty()}
    try:
        choice = choose_for(step, params, state, xs, ys, loss, **limits)
    except Exception as error:
        do = "see above; --memory and --time are what it may take"
        raise Failure(f"no rule for {word}.", error, str(module.__file__), do) from error
    print(choice)
    if options.save is not None:
        choice.save(options.save)
        print(f"Saved: {options.save}")
    return 0


def _step_of(
    options: argparse.Namespace, module: ModuleType, word: str, xs: np.ndarray
) -> tuple[Any, ...]:
    """A step with parameters and a state; of a module, and the names of its parameters."""
    kinds = (brainstate.nn.Module, *_nnx())
    value = make_value(module, word, (*kinds, tuple))
    first, *rest = value if isinstance(value, tuple) and value else (value,)
    if isinstance(first, kinds):
        return named_step(first, options.batch_size or xs.shape[1], xs[0])
    if callable(first) and len(rest) >= 2:
        return first, *rest[:2], ()
    raise Mistake(
        f"{word} has type {type(value).__name__}.",
        why="a batch is measured on a step with parameters and a state, or on a module",
        do=_CONVENTION,
    )


def _batch(path: Path, length: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a file, of the first steps."""
    try:
        with np.load(path) as file:
            missing = [name for name in ("xs", "ys") if name not in file]
            if not missing:
                xs, ys = file["xs"], file["ys"]
                if length is None or length <= len(xs):
                    return xs[:length], ys[:length]
            why = f"it has {len(xs)} steps, not {length}" if not missing else ""
            why = why or f"it has the arrays {', '.join(file) or 'none'}"
    except (OSError, ValueError) as error:
        why = str(error)
    raise Mistake(
        f"{path} has no batch.",
        why=why,
        do="write one: numpy.savez(file, xs=xs, ys=ys), each with a leading axis of time",
    )


def _rule(text: str) -> LearningRule:
    name, options = read_rule(text)
    try:
        return rule_value(name, {k: v for k, v in options.items() if k != "vjp_method"})
    except (TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise Mistake(f"--rule {text}.", why, "name a rule of braintrace.rules") from None


def _advice(
    options: argparse.Namespace, module: ModuleType, word: str, rule: LearningRule
) -> Advice:
    _check_no_arguments(module, word)
    value = make_value(module, word, (brainstate.nn.Module, *_nnx(), tuple))
    first, *rest = value if isinstance(value, tuple) and value else (value,)
    find: Callable[[], Advice]
    if isinstance(first, (brainstate.nn.Module, *_nnx())):
        inputs = tuple(rest) or read_inputs(options, module)
        find = lambda: _of_module(first, inputs, rule, options)
    elif callable(first) and len(rest) >= 2:
        find = lambda: planned(first, rule, *rest).advice
    else:
        kind = type(value).__name__
        if isinstance(value, tuple):
            kind = f"tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
        raise Mistake(
            f"{word} has type {kind}.",
            why="a plan needs a step with parameters, a state and inputs, or a module",
            do=_CONVENTION,
        )
    try:
        return find()
    except Exception as error:
        do = "see above; --batch-size gives states a batch axis, --unmarked recognises plain JAX"
        what = f"{word} cannot be analysed for {rule}."
        raise Failure(what, error, str(module.__file__), do) from error


def _of_module(
    model: Any, inputs: tuple[Any, ...], rule: LearningRule, options: argparse.Namespace
) -> Advice:
    """Of a brainstate module nothing but the states is allocated."""
    if not isinstance(model, brainstate.nn.Module):
        return compile(model, rule, *inputs).report.advice
    brainstate.nn.init_all_states(model, batch_size=options.batch_size)
    info = extract_module_info(model, *inputs)
    return advise(Problem(info.step, tuple(info.consts), None, options.unmarked), rule)


def _check_no_arguments(module: ModuleType, word: str) -> None:
    """Refuse a step function or a cell by itself: argument orders are not guessed."""
    value = getattr(module, word, None)
    if not callable(value) or isinstance(value, (type, brainstate.nn.Module, *_nnx())):
        return
    needed = [
        p.name
        for p in inspect.signature(value).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise Mistake(
            f"{word} takes the arguments {', '.join(needed)}.",
            why="which of them are parameters, state and inputs is not guessed",
            do=_CONVENTION,
        )


def _nnx() -> tuple[type, ...]:
    """The class of nnx modules, if the file has imported flax."""
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Module,)


def _recommendation(advice: Advice) -> str:
    best, present = advice.best, advice.rules[0]
    within = "" if advice.memory_limit is None else f" within {size(advice.memory_limit)}"
    if best is None:
        return f"Recommended: no rule of these fits{within}; pp_prop has the smallest traces."
    exact = f"{len(best.exact or ())} of {advice.total} parameters exact"
    if best is present:
        return f"Recommended: {best.call}, {exact}; no other rule makes more of them exact{within}."
    about = "" if best.measured else "about "
    time = f"{about}{factor(best.time)} times the time of {present.call}"
    return f"Recommended{within}: {best.call}, {exact}, {size(best.bytes)}, {time}."
