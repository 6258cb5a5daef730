"""`braintrace train`: what it does with its options."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import brainstate
import jax.numpy as jnp

from ..._errors import CompilationError, NotSupportedError
from .._missing import MissingExtra, draw_or_say
from .._progress import training_bar
from ..compare._record import plain
from ..compare._rules import BPTT, TRUNCATED, Choice, parse
from ..compare.tasks import TASKS, Task
from . import _settings
from ._figure import draw
from ._interrupt import Interrupt
from ._session import Session
from ._settings import Settings, chosen, resumed

CHECKPOINT, RECORD, FIGURE = "train.ckpt", "train.json", "train.png"
REFUSALS = (CompilationError, NotSupportedError, ValueError, TypeError, RuntimeError)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do what the options say; a mistake in them ends in the parser's error.

    Returns:
        The exit status; 128 and the number of the signal if one stopped the run.
    """
    folder = options.out or Path("out") / f"train_{options.task}"
    x64 = jnp.zeros(()).dtype.itemsize == 8
    try:
        if options.resume:
            settings = resumed(options, folder, x64)
        else:
            _check_new(folder)
            settings = chosen(options, x64)
        task, choice = TASKS[settings.task].make(settings.length), _choice(settings)
    except (ValueError, MissingExtra) as error:
        parser.error(str(error))
    with brainstate.random.seed_context(settings.seed):
        try:
            session = Session(settings, task, choice)
            if (folder / CHECKPOINT).exists():
                session.load(folder / CHECKPOINT)
            elif options.resume:
                print(f"No checkpoint in {folder} yet: from the beginning.", file=sys.stderr)
        except MissingExtra as error:
            parser.error(str(error))
        except REFUSALS as error:
            print(error, file=sys.stderr)
            return 1
        if session.done > settings.steps:
            parser.error(
                f"--steps {settings.steps}: the run in {folder} has made {session.done} updates. "
                "Ask for more, or leave out --steps."
            )
        try:
            return _train(session, task, folder, options.checkpoint_every)
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"{folder} cannot be written: {error}", file=sys.stderr)
            return 1


def _train(session: Session, task: Task, folder: Path, every: int) -> int:
    s, measure = session.settings, task.measure
    print(
        f"{s.task}: {task.title}. {s.rule}, {s.cell} of {s.units} units, T = {task.length}, "
        f"batches of {s.batch}, {'on from' if session.done else 'updates'} "
        f"{session.done or s.steps}."
    )
    bar = training_bar(s.steps, session.done)
    started, first = time.perf_counter(), session.done
    told = lambda score: measure.form.format(measure.scale * score)
    saved, shown = -1, told(session.scores[-1]) if session.scores else ""
    with Interrupt() as interrupt:
        while session.done < s.steps and interrupt.signal is None:
            if session.done % s.score_every == 0:
                shown = told(session.score())
            try:
                loss = session.advance()
            except REFUSALS as error:
                if session.done > first:
                    raise
                print(error, file=sys.stderr)  # the rule cannot learn from a loss alone
                return 1
            bar.set_postfix_str(f"loss {loss:.4f}, held-out {measure.name} {shown}")
            bar.update(1)
            # The first one shows early whether the folder can be written.
            if session.done % every == 0 or session.done == first + 1:
                _save(session, folder)
                saved = session.done
        bar.close()
        seconds = time.perf_counter() - started
        if interrupt.signal is None:
            session.score()
        if saved != session.done or interrupt.signal is None:
            _save(session, folder)
        if interrupt.signal is not None:
            out = (
                ""
                if folder == Path("out") / f"train_{s.task}"
                else f" --out {shlex.quote(str(folder))}"
            )
            print(f"Stopped after update {session.done} of {s.steps}: {folder / CHECKPOINT}")
            print(f"To go on: {s.command}{out} --resume")
            return 128 + interrupt.signal
    _finish(session, folder, seconds / max(session.done - first, 1))
    return 0


def _save(session: Session, folder: Path) -> None:
    """Settings first: a checkpoint is never without them."""
    _settings.write(session.settings, folder)
    session.save(folder / CHECKPOINT)


def _finish(session: Session, folder: Path, seconds: float) -> None:
    s, measure, task = session.settings, session.task.measure, session.task
    record = {
        "settings": {k: getattr(s, k) for k in s.__slots__},
        "metric": measure.name,
        "scale": measure.scale,
        "chance": task.chance,
        "seconds_per_update": seconds,
        "losses": session.losses,
        "at": session.at,
        "scores": session.scores,
    }
    _settings.put(folder / RECORD, plain(record))
    shown = [measure.form.format(measure.scale * x) for x in (session.scores[-1], task.chance)]
    print(f"{measure.name} on held-out sequences: {shown[0]} (a constant answer has {shown[1]})")
    print(f"Checkpoint: {folder / CHECKPOINT}")
    print(f"Record: {folder / RECORD}")
    draw_or_say(draw, folder / FIGURE, session)


def _check_new(folder: Path) -> None:
    """Refuse to write over another run."""
    there = [name for name in (_settings.NAME, CHECKPOINT) if (folder / name).exists()]
    if there:
        raise ValueError(
            f"there is a run in {folder} already ({', '.join(there)}). Add --resume to go on with "
            "it, or name another folder with --out."
        )


def _choice(settings: Settings) -> Choice:
    choices = parse([settings.rule])
    if len(choices) != 1:
        raise ValueError(f"--rule takes one rule, {settings.rule!r} are {len(choices)}.")
    if choices[0].name in (BPTT, TRUNCATED):
        raise ValueError(
            f"{choices[0].name} is not an online rule. One window over the whole sequence is BPTT: "
            f"--rule d_rtrl:window={settings.length}"
        )
    return choices[0]
