"""`braintrace explain`: the certificate of a model in a file."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax.numpy as jnp

from .._errors import dotted, message
from ..learner import compile
from ._source import Failure, Mistake, divided, failed, found, loaded, made
from .compare._rules import BASELINES, IMMEDIATE, parse

EXAMPLE = "example_input"


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the report of the model; a mistake in the options ends with status 2.

    Returns:
        The exit status.
    """
    importable = list(sys.path)
    try:
        name, rules = _rule(options.rule)
        path, word = divided(options.model)
        module = loaded(path, word)
        thing, arguments = found(module, word)
        inputs = _inputs(options, module)
        model = made(thing, arguments, word, path)
        report = _compiled(model, name, inputs, options.batch_size, rules, path).report
    except Mistake as error:
        print(error, file=sys.stderr)
        return 2
    except Failure as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        sys.path[:] = importable
    if options.verbose or options.level > 1:
        report.show(level=options.level)
    report.draw()
    counts, total = report.counts, len(report.parameters)
    exact = total - counts["inexact"]
    are = "is exact (equals BPTT)" if exact == 1 else "are exact (equal BPTT)"
    print(f"\n{exact} of {total} parameters {are} under {name}.")
    for words in dict.fromkeys(str(p.silent) for p in report.parameters.values() if p.silent):
        names = [dotted(path) for path, p in report.parameters.items() if str(p.silent) == words]
        print(f"{', '.join(names)}: {words}.")
    if not options.verbose:
        print("What the gradients leave out, with lines: --verbose.")
    if options.html is not None:
        try:
            options.html.parent.mkdir(parents=True, exist_ok=True)
            report.to_html(options.html)
        except OSError as error:
            what = f"{options.html} cannot be written."
            print(
                message(what, why=str(error), do="name another file: --html FILE"), file=sys.stderr
            )
            return 1
        print(f"Page: {options.html}")
    return 0


def _compiled(
    model: Any, name: str, inputs: tuple, batch_size: int | None, rules: dict[str, Any], path: str
) -> Any:
    try:
        return compile(model, name, *inputs, batch_size=batch_size, **rules)
    except Exception as error:
        shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in map(jnp.asarray, inputs))
        what = f"the model does not compile with {name} on inputs {shapes}."
        raise failed(what, error, path, "see above; --input and --batch-size say what enters "
                     "a step") from error  # fmt: skip


def _inputs(options: argparse.Namespace, module: Any) -> tuple[Any, ...]:
    """The arguments of a step."""
    if options.input:
        try:
            dtype = jnp.dtype(options.input_dtype)
        except TypeError:
            raise Mistake(
                message(
                    f"--input-dtype {options.input_dtype} is no type of an array.",
                    why="the inputs of a step are made of it",
                    do="pass float32, int32, bool, ...",
                )
            ) from None
        return tuple(jnp.zeros(shape, dtype) for shape in options.input)
    example = getattr(module, EXAMPLE, None)
    if callable(example):
        try:
            example = example()
        except Exception as error:
            raise failed(f"{EXAMPLE}() failed.", error, module.__file__, "mend it, or pass "
                         "--input SHAPE") from error  # fmt: skip
    if example is None:
        raise Mistake(
            message(
                "no input is known.",
                why="a model is traced on what enters one step",
                do=f"pass its shape, --input 16,3, or put `{EXAMPLE} = ...` into {module.__file__}",
            )
        )
    return example if isinstance(example, tuple) else (example,)


def _rule(text: str) -> tuple[str, dict[str, Any]]:
    try:
        (choice,) = parse([text])
        if choice.name in BASELINES and choice.name != IMMEDIATE:
            raise ValueError(f"{choice.name} keeps no traces: there is nothing to explain.")
    except ValueError as error:
        raise Mistake(
            message(f"--rule {text}.", why=str(error), do="see braintrace compare --list")
        ) from None
    return choice.name, choice.options
