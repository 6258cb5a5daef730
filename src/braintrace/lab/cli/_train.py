"""`braintrace train`: one network on one task, with checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import brainstate

from ..._errors import message
from ..._files import only_run
from ..comparison._gradient import REFUSALS
from ..comparison._output import save_figure, save_json, x64
from ..comparison._progress import progress_bar, stage
from ..comparison._rules import BASELINES, IMMEDIATE, Choice, parse
from ..tasks import MAKE, SequenceTask
from ._figures import draw_train
from ._parser import Ended
from ._session import (
    SETTINGS,
    Session,
    Settings,
    mesh_of,
    new_settings,
    resumed_settings,
    stop_signals,
)
from ._source import Failure, Mistake, load_module

Hook = Callable[[int, dict[str, float]], None]
CHECKPOINT, RECORD, FIGURE = "train.ckpt", "train.json", "train.png"


class Stopped(Exception):
    """The user's function has called `sys.exit`."""


class Diverged(Ended):
    """A loss that is not finite ends the run; the message says what to do."""


def run(options: argparse.Namespace) -> int:
    """Train; returns the exit status: 128 and its number if a signal stopped the run."""
    with unread_output():
        return _run(options, _hook(options.on_update))


def _hook(text: str | None) -> Hook:
    """The user's function of `FILE:NAME`, which does nothing if there is none."""
    if text is None:
        return lambda step, metrics: None
    module, name = load_module(text)
    function = getattr(module, name, None)
    if not callable(function):
        raise Mistake(
            f"{module.__file__} has no function {name}.",
            why="it is called as NAME(step, metrics) after every update",
            do=f"define it, or name one of {', '.join(k for k in vars(module) if k[0] != '_')}",
        )

    def call(step: int, metrics: dict[str, float]) -> None:
        try:
            function(step, metrics)
        except SystemExit as stop:
            raise Stopped(f"{text} ended the run: sys.exit({stop.code!r})") from stop
        except Exception as error:
            do = "fix this line; --resume continues the run"
            raise Failure(f"{text} raised an error.", error, str(module.__file__), do) from error

    return call


def _run(options: argparse.Namespace, hook: Hook) -> int:
    folder = options.out or Path("out") / f"train_{options.task}"
    error = options.parser.error
    with contextlib.ExitStack() as running:
        try:
            if options.resume:
                settings = resumed_settings(options, folder, x64())
            else:
                _check_new(folder)
                settings = new_settings(options, x64())
            task, choice = MAKE[settings.task](settings.length), _choice(settings)
            mesh = mesh_of(options)
            running.enter_context(only_run(folder))
            if not options.resume:
                _check_new(folder)  # nobody was quicker
            record = _finished(settings, folder) if options.resume else None
        except ValueError as mistake:
            error(str(mistake))
        except OSError as failure:
            print(f"{folder} cannot be written: {failure}", file=sys.stderr)
            return 1
        if record is not None:
            done = f"all {settings.updates} updates of the run in {folder} are done"
            print(f"Nothing to do: {done}. More --updates would continue it.")
            print(_result(task, record, folder))
            return 0
        running.enter_context(brainstate.random.seed_context(settings.seed))
        try:
            session = Session(settings, task, choice, mesh)
            if (folder / CHECKPOINT).exists():
                session.load_run(folder / CHECKPOINT)
            elif options.resume:
                print(f"No checkpoint in {folder} yet: from the start.", file=sys.stderr)
        except REFUSALS as refusal:
            print(refusal, file=sys.stderr)
            return 1
        if session.done > settings.updates:
            error(
                f"--updates {settings.updates}: the run in {folder} has made {session.done} "
                "updates. Ask for more, or leave out --updates."
            )
        try:
            return _train(session, folder, options.checkpoint_every, hook)
        except Stopped as stop:
            _save(session, folder)
            print(f"{stop}, after update {session.done} of {settings.updates}", file=sys.stderr)
            print(_continued(session, folder), file=sys.stderr)
            return 1
        except OSError as failure:
            print(f"{folder} cannot be written: {failure}", file=sys.stderr)
            return 1


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """Let a run write its files when nobody reads what it prints, as in `... | head -1`."""
    real = sys.stdout
    sys.stdout = _Unread(real)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = real


class _Unread:
    """A stream whose words are lost when its reader has gone."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if anybody is there to read."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        """Flush, if anybody is there to read."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._lose()

    def _lose(self) -> None:
        with open(os.devnull, "w") as nothing:  # what is buffered goes there, now and at exit
            os.dup2(nothing.fileno(), self._stream.fileno())


def _train(session: Session, folder: Path, every: int, hook: Hook) -> int:
    s, task, first = session.settings, session.task, session.done
    print(f"{s.task}: {task.title}")
    updates = f"{s.updates} updates" + (f", on from {first}" if first else "")
    sizes = f"{s.cell} of {s.units} units, T = {task.length}, batches of {s.batch}"
    print(f"{s.rule}, {sizes}, {updates}")
    seconds: list[float] = []
    with stop_signals() as stopped:
        if first < s.updates:
            try:
                with stage("compiling"):
                    _advance(session, seconds, hook)
            except REFUSALS as error:
                print(error, file=sys.stderr)  # the rule cannot learn from a loss alone
                return 1
            _save(session, folder)  # early: it shows whether the folder can be written
        bar = progress_bar(s.updates, done=session.done, every=2 * s.score_every)
        while session.done < s.updates and not stopped:
            _advance(session, seconds, hook)
            bar.set_postfix_str(_progress(session), refresh=False)
            bar.update(1)
            if session.done % every == 0:
                _save(session, folder)
        bar.close()
        _save(session, folder)
        if stopped:
            print(f"Stopped after update {session.done} of {s.updates}: {folder / CHECKPOINT}")
            print(_continued(session, folder))
            return 128 + stopped[0]
    _finish(session, folder, statistics.fmean(seconds[1:] or [math.nan]))
    return 0


def _advance(session: Session, seconds: list[float], hook: Hook) -> None:
    """One update and its time; with its held-out score where one is due."""
    s = session.settings
    if session.done == 0:
        session.score()
    seconds.append(session.timed_advance())
    metrics = {"loss": float(session.losses[-1])}
    if not math.isfinite(metrics["loss"]):
        raise Diverged(
            message(
                f"the loss of update {session.done} is not finite.",
                why="NaN in the data, or weights that grew until it overflowed, with --lr "
                f"{s.lr:g}; further updates would make them NaN, and the last checkpoint with them",
                do="start again with a lower --lr, and another folder by --out",
            )
        )
    if session.done % s.score_every == 0 or session.done == s.updates:
        measure = session.task.measure
        metrics[measure.name] = measure.scale * session.score()
    hook(session.done, metrics)


def _progress(session: Session) -> str:
    """The last score, with its update if that is an earlier one, and the loss of this one."""
    at = "" if session.at[-1] == session.done else f" at {session.at[-1]}"
    measure = session.task.measure
    return f"{measure.name} {measure.text(session.scores[-1])}{at}, loss {session.losses[-1]:.4f}"


def _save(session: Session, folder: Path) -> None:
    """Settings first: a checkpoint is never without them."""
    save_json(folder / SETTINGS, asdict(session.settings))
    session.save_run(folder / CHECKPOINT)


def _continued(session: Session, folder: Path) -> str:
    """How to go on with a run."""
    task = session.settings.task
    default = folder == Path("out") / f"train_{task}"
    out = "" if default else f" --out {shlex.quote(str(folder))}"
    return f"To continue: braintrace train {task}{out} --resume"


def _finish(session: Session, folder: Path, seconds: float) -> None:
    task = session.task
    record = {
        "settings": asdict(session.settings),
        "metric": task.measure.name,
        "scale": task.measure.scale,
        "chance": task.chance,
        "seconds_per_update": seconds,
        "losses": session.losses,
        "at": session.at,
        "scores": session.scores,
    }
    save_figure(draw_train, folder / FIGURE, session)
    save_json(folder / RECORD, record)  # last: a run with a record is finished
    print(f"Checkpoint: {folder / CHECKPOINT}")
    print(f"Record: {folder / RECORD}")
    print(_result(task, record, folder))


def _result(task: SequenceTask, record: dict[str, Any], folder: Path) -> str:
    score, loss = (
        math.nan if x is None else x for x in (record["scores"][-1], record["losses"][-1])
    )
    measure = task.measure
    return (
        f"Result: held-out {measure.name} {measure.text(score)} "
        f"({task.chance_level}), loss {loss:.4f}, saved in {folder}"
    )


def _finished(settings: Settings, folder: Path) -> dict[str, Any] | None:
    """The record of a run whose updates are all done, None if there is something to do."""
    path = folder / RECORD
    if not path.is_file() or not (folder / CHECKPOINT).is_file():
        return None
    try:
        record = json.loads(path.read_text("utf-8"))
        return record if record["settings"] == asdict(settings) else None
    except (ValueError, KeyError, TypeError) as error:
        do = "Remove it: --resume writes it again."
        raise ValueError(f"{path} is damaged: {error!r}. {do}") from error


def _check_new(folder: Path) -> None:
    """Refuse to write over another run."""
    files = [name for name in (SETTINGS, CHECKPOINT) if (folder / name).exists()]
    if files:
        raise ValueError(
            f"there is a run in {folder} already ({', '.join(files)}). Add --resume to continue "
            "it, or name another folder with --out."
        )


def _choice(settings: Settings) -> Choice:
    choices = parse([settings.rule])
    if len(choices) != 1:
        raise ValueError(f"--rule takes one rule, {settings.rule!r} are {len(choices)}.")
    if choices[0].name in BASELINES and choices[0].name != IMMEDIATE:
        raise ValueError(
            f"{choices[0].name} is not an online rule. One window over the whole sequence is BPTT: "
            f"--rule d_rtrl:window={settings.length}"
        )
    return choices[0]
