"""`braintrace explain`: the certificate of a model in a file."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from ..._errors import dotted, message
from ...learner import compile
from ...rules import LearningRule
from ..comparison._rules import BASELINES, IMMEDIATE, Options, parse
from ._parser import Ended
from ._source import Failure, Mistake, load_module, make_model

EXAMPLE = "example_input"


def run(options: argparse.Namespace) -> int:
    """Print the report of the model; returns the exit status."""
    name, rule_options = read_rule(options.rule)
    module, word = load_module(options.model)
    inputs, model = read_inputs(options, module), make_model(module, word)
    try:
        learner = compile(model, name, *inputs, batch_size=options.batch_size, **rule_options)
    except Exception as error:
        shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in map(jnp.asarray, inputs))
        what = f"the model does not compile with {name} on inputs {shapes}."
        do = "see above; --input and --batch-size set the arguments of a step"
        raise Failure(what, error, str(module.__file__), do) from error
    report = learner.report
    if options.verbose or options.level > 1:
        report.show(level=options.level)
    report.draw()
    print(f"\n{report.summary}")
    for reason in dict.fromkeys(str(p.silent) for p in report.parameters.values() if p.silent):
        names = [dotted(path) for path, p in report.parameters.items() if str(p.silent) == reason]
        print(f"{', '.join(names)}: {reason}.")
    if not options.verbose:
        print("What the gradients leave out, with lines: --verbose.")
    if options.html is not None:
        try:
            options.html.parent.mkdir(parents=True, exist_ok=True)
            report.to_html(options.html)
        except OSError as error:
            what, do = f"{options.html} cannot be written.", "name another file: --html FILE"
            raise Ended(message(what, why=str(error), do=do)) from error
        print(f"Page: {options.html}")
    return 0


def read_inputs(options: argparse.Namespace, module: ModuleType) -> tuple[Any, ...]:
    """The arguments of a step."""
    if options.input:
        try:
            dtype = jnp.dtype(options.input_dtype)
        except TypeError:
            raise Mistake(
                f"--input-dtype {options.input_dtype} is not an array type.",
                why="the inputs of a step are arrays of it",
                do="pass float32, int32, bool, ...",
            ) from None
        return tuple(jnp.zeros(shape, dtype) for shape in options.input)
    example = getattr(module, EXAMPLE, None)
    if callable(example):
        try:
            example = example()
        except Exception as error:
            do = "fix it, or pass --input SHAPE"
            raise Failure(f"{EXAMPLE}() failed.", error, str(module.__file__), do) from error
    if example is None:
        raise Mistake(
            "there is no input.",
            why="a model is traced on the arguments of one step",
            do=f"pass its shape, --input 16,3, or put `{EXAMPLE} = ...` into {module.__file__}",
        )
    return example if isinstance(example, tuple) else (example,)


def read_rule(text: str) -> tuple[str | LearningRule, Options]:
    """The name and the options of a rule with traces; a mixture as a value."""
    try:
        (choice,) = parse([text])
        if choice.name in BASELINES and choice.name != IMMEDIATE:
            raise ValueError(f"{choice.name} has no traces: there is nothing to explain.")
    except ValueError as error:
        raise Mistake(f"--rule {text}.", str(error), "see braintrace compare --list") from None
    if choice.value is not None:
        return choice.value, {}
    windows = {} if choice.window is None else {"vjp_method": "multi-step"}
    return choice.name, choice.options | windows
