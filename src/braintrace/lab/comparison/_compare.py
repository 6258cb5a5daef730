"""Several rules on one task: from the same weights and batches, scores and costs of each."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import value_error
from ..._online import Gradients, choose_for
from ...rules import LearningRule, check_count, rule_value
from ..tasks import Task
from ._gradient import (
    REFUSALS,
    Compiled,
    Job,
    agreement,
    judged,
    matching_window,
    method_of,
    time_in_turns,
    weighed,
)
from ._model import Params, builder, name_of
from ._progress import Bar, Quiet, progress_bar, stage
from ._result import Agreement, CompareResult, Row, Seed, Settings
from ._rules import AUTO, BASELINES, BPTT, IMMEDIATE, TRUNCATED, Choice, choices_of
from ._sequences import Batch, Sequences, samples_of, sequences_of
from ._training import OPTIMIZERS, Optimizer, Run, Stream, by_sequence, scorer

RULES = ("bptt", "tbptt", "no_trace", "d_rtrl", "pp_prop")
RATES = (1e-3, 3e-3, 1e-2)


def compare(
    model: Any,
    task: Task,
    rules: Iterable[str | LearningRule] = RULES,
    *,
    seeds: int = 3,
    updates: int | None = None,
    batch: int = 32,
    update_every: int | None = None,
    optimizers: str | Sequence[str] = "adam",
    rates: float | Sequence[float] = RATES,
    threshold: float | None = None,
    add_to: CompareResult | str | Path | None = None,
    held_out: int = 512,
    points: int = 20,
    rounds: int = 9,
    progress: bool = False,
    save_to: str | Path | None = None,
) -> CompareResult:
    """Train a network with several rules on a task, and measure what each costs.

    All rows start from the same weights and see the same batches; the same seeds give the same
    curves, bit for bit. The learning rate of a row is the one with the best score of the first
    seed on the validation split (for a streaming task, the lowest mean loss); the score is that of
    the test split, after the last update.

    Args:
        model: a class or function that makes the network of a seed: a brainstate or nnx module, or
            `(step, params, state)` as for `braintrace.online`. It is called with those of `seed`,
            `key` and `batch_size` that it takes. Or a brainstate module, whose weights all seeds
            start from.
        task: sequences, a loss and a score, see `braintrace.tasks.Task`.
        rules: words such as 'd_rtrl' or 'pp_prop:decay_or_rank=0.9', baselines ('bptt', 'tbptt',
            'rolling:window=8', 'no_trace'), or values of `braintrace.rules`.
        seeds: how many, from 0 on.
        updates: weight updates of a run, default 1000, at least (the last batch is not cut short);
            a streaming task has its own number.
        batch: sequences of an update.
        update_every: steps between two updates, a divisor of the length; default that of the task,
            or one update per sequence.
        optimizers: of 'adam', 'rmsprop' and 'sgd'; several make a row each.
        rates: learning rates to choose from.
        threshold: a score whose first time is reported; default that of the task, or half way from
            chance level to the best row.
        add_to: an earlier result or its file; its rows stay, and are not trained again.
        held_out: sequences of each held-out split, at most.
        points: how often the validation score is taken.
        rounds: how often each gradient is timed.
        progress: whether to show progress on standard error.
        save_to: a file that the result so far is written to after every training run, so that
            whatever ends the program costs one run; `add_to` goes on from it.

    Returns:
        The result: `rows`, `table()`, `figure()`, `save(path)`. A rule that cannot learn this model
        is a row with the reason. Ctrl-C ends with the results so far.

    Raises:
        TypeError: the model or the task is none.
        ValueError: unknown rules or optimizers, sizes that do not fit, or an earlier result of
            other settings.

    Example:
        >>> import braintrace
        >>> task = braintrace.tasks.Adding(8)
        >>> result = braintrace.compare(
        ...     lambda: braintrace.nn.MinGRUCell(2, 1), task, ['bptt', 'd_rtrl'],
        ...     seeds=1, updates=2, batch=4, held_out=8, rates=0.01, rounds=1)
        >>> [row.label for row in result.rows]
        ['bptt', 'd_rtrl']
    """
    counts = {"seeds": seeds, "batch": batch, "held_out": held_out, "points": points}
    counts |= {"rounds": rounds, "updates": 1 if updates is None else updates}
    for name, count in counts.items():
        check_count(name, count, {"batch": "sequences", "held_out": "sequences"}.get(name, name))
    sequences = sequences_of(task, batch)
    every = sequences.update_every if update_every is None else update_every
    names = (optimizers,) if isinstance(optimizers, str) else tuple(optimizers)
    steps = (rates,) if isinstance(rates, int | float) else tuple(rates)
    _check_sizes(sequences, every, names, steps)
    updates = _updates(sequences, every, updates)
    settings = Settings(
        *(name_of(model), batch, updates, every, seeds, names, steps, held_out, points, rounds)
    )
    goal = sequences.threshold if threshold is None else threshold
    head = (sequences.name, sequences.title, sequences.length, sequences.metric, settings)
    result = CompareResult(*head, [], goal, streaming=sequences.streaming)
    choices = choices_of(rules)
    if add_to is not None:
        earlier = add_to if isinstance(add_to, CompareResult) else CompareResult.load(add_to)
        _check_same(result, earlier)
        whole = lambda row: row.refused is not None or len(row.seeds) == seeds
        result.rows += filter(whole, earlier.rows)
    file = None if save_to is None else Path(save_to)
    return Comparison(model, sequences, result, progress, file).run(choices)


@dataclass(frozen=True, slots=True)
class Trained:
    """A training run: parameters and score after it, what it is chosen by, and its curves."""

    params: Params
    score: float
    choice: float
    at: list[int]
    scores: list[float]
    losses: list[float]


class Comparison:
    """One call of `compare`: what all rows share, and the result so far."""

    def __init__(
        self,
        model: Any,
        task: Sequences,
        result: CompareResult,
        progress: bool,
        file: Path | None = None,
    ):
        self.file = file
        self.task, self.result, self.settings = task, result, result.settings
        self.bar = progress_bar if progress else Quiet
        self.stage = stage if progress else lambda what: nullcontext()
        one = lambda size: jax.tree.map(lambda a: jnp.zeros((size, *a.shape[1:]), a.dtype), task.x)
        self.build = builder(model, one)
        self.model = self.build(0, self.settings.batch)
        self.recurrent = self.model.recurrent(task.x) or list(self.model.params)
        self.gradients: dict[str, Compiled] = {}  # by label of the rule
        self.streams: dict[str, Stream] = {}  # by label of the row

    def run(self, choices: list[Choice]) -> CompareResult:
        """Train everything that has no row yet; Ctrl-C ends it with the results so far."""
        result, s = self.result, self.settings
        try:
            self.optimizers = {name: Optimizer(name) for name in s.optimizers}
            pairs = [pair for pair in self._prepare(choices) if pair[0].refused is None]
            with self.stage(f"{self.task.name}, timing the gradients"):
                self._share()
                self._time(pairs)
            runs = len(pairs) * (s.seeds + len(s.rates) - 1)
            bar = self.bar(max(1, s.updates * runs), self.task.name)
            for seed in range(s.seeds):
                for row, choice in pairs:
                    if row.refused is None:
                        with _refusals(row):
                            self._train(row, choice, seed, bar)
                        if self.file is not None:
                            result.save(self.file)
            bar.close()
            result.finished = True
        except KeyboardInterrupt:
            print(file=sys.stderr)
        return result

    # --------------------------------------------------------------------------- preparation

    def _compiled(self, choice: Choice) -> Compiled:
        if choice.label not in self.gradients:
            gradient = Compiled(choice, self.model, self.task)
            gradient.compile()
            self.gradients[choice.label] = gradient
        return self.gradients[choice.label]

    def _prepare(self, choices: list[Choice]) -> list[tuple[Row, Choice]]:
        """A row for every rule and optimizer that has none, with its compiled gradient."""
        names, rows = self.settings.optimizers, self.result.rows
        old, new = {row.label for row in rows}, []
        bar = self.bar(max(1, len(choices)), f"{self.task.name}, compiling")
        self._compiled(Choice(BPTT, BPTT, {}))
        named = lambda choice, name: choice.label + f" {name}" * (len(names) > 1)
        for choice in choices:
            bar.set_postfix_str(choice.label)
            bar.update(1)
            if all(named(choice, name) in old for name in names):
                continue
            costs: dict[str, Any] = {}
            try:
                if choice.name == TRUNCATED and choice.window is None:
                    choice = self._matched()
                if choice.name == AUTO:
                    choice = self._chosen(choice)
                gradient = self._compiled(choice)
                costs = {"working_bytes": gradient.working, "stored_bytes": gradient.stored}
            except REFUSALS as error:
                costs = {"refused": str(error) or type(error).__name__}
            block = None if choice.name in BASELINES else choice.block
            for name in names:
                if (label := named(choice, name)) not in old:
                    how = (choice.name, choice.options, choice.window, block, name)
                    new.append((Row(label, *how, **costs), choice))
        bar.close()
        rows += [row for row, _ in new]
        return new

    def _matched(self) -> Choice:
        """Truncated BPTT that takes about as much memory as D_RTRL does."""
        length = self.task.length
        limits = {1: Choice(IMMEDIATE, IMMEDIATE, {}), length: Choice(BPTT, BPTT, {})}

        def at(window: int) -> Choice:
            return Choice(f"{TRUNCATED}:window={window}", TRUNCATED, {}, window)

        wanted = self._compiled(Choice("d_rtrl", "d_rtrl", {})).working
        working = lambda window: self._compiled(limits.get(window) or at(window)).working
        return at(matching_window(working, wanted, length))

    def _chosen(self, choice: Choice) -> Choice:
        """The rule of each parameter that `choose` takes for the first batch of training."""
        task, model = self.task, self.model
        batch = task.draw(jax.random.fold_in(jax.random.key(0), 0))
        xs, targets = judged(model, task, model.params, batch)
        counted = task.mask if task.judge is None else jnp.ones_like(task.mask)
        mask = counted / task.mask.sum()
        loss = lambda out, target, weight: weighed(weight, task.loss(out, target))
        problem = (model.step, model.params, model.state, (xs,), (targets, mask))
        stream = self.settings.update_every < task.length
        within = None if "memory" in choice.options else ("d_rtrl", ())
        gradients = Gradients(keep_traces=stream, block_size=choice.block)
        how = {"stream": stream, "within": within, "how": gradients, **choice.options}
        found = choose_for(*problem, loss, **how)
        rule, options = found.rule, {**choice.options, "chosen": found.summary}
        (name, how), *others = rule.values()
        if others:
            value = rule_value(rule, {})
            return replace(choice, options=options, window=value.window, value=value)
        window = how.pop("window", None)
        value = rule_value(name, how, window)
        return replace(choice, options=options, window=window, value=value)

    def _share(self) -> None:
        """The held-out sequences of validation, and the batch that gradients are compared on."""
        s, task = self.settings, self.task
        self.validation = task.split("validation", s.batch if task.streaming else s.held_out)
        if task.streaming and samples_of(self.validation) != s.batch:
            raise value_error(
                f"{task.name}.validation({s.batch}) returns {samples_of(self.validation)} streams.",
                why="a network reads as many streams at once as it is built for",
                do="return as many as asked for, or compare with a smaller batch",
            )
        # Repeated if there are too few.
        index = jnp.arange(s.batch) % samples_of(self.validation)
        take = lambda a: jnp.take(a, index, axis=1)
        self.fixed: Batch = jax.tree.map(take, self.validation)
        if not task.streaming:
            self.score = scorer(self.build, task, self.validation)

    def _time(self, pairs: list[tuple[Row, Choice]]) -> None:
        """The median time of a gradient, in milliseconds per update."""
        share = self.settings.update_every / self.task.length
        jobs: list[Job] = [(self.gradients[c.label], self.fixed, []) for _, c in pairs]
        time_in_turns(jobs, self.settings.rounds)
        for (row, _), (_, _, seconds) in zip(pairs, jobs, strict=True):
            row.milliseconds = 1e3 * statistics.median(seconds) * share

    def _agreement(self, gradient: Compiled, params: Params) -> Agreement:
        """How close a gradient is to BPTT's at these weights, on the fixed batch."""
        own, bptt = (g(params, self.fixed)[0] for g in (gradient, self.gradients[BPTT]))
        parts = (self.recurrent, list(params))
        return Agreement(*(x for names in parts for x in agreement(own, bptt, names)))

    # ------------------------------------------------------------------------------ training

    def _train(self, row: Row, choice: Choice, seed: int, bar: Bar) -> None:
        """One row from the weights of a seed; the first seed chooses the learning rate."""
        train = self._stream if self.task.streaming else self._run
        rates = self.settings.rates if math.isnan(row.rate) else (row.rate,)
        runs = {rate: train(row, choice, seed, rate, bar) for rate in rates}
        if math.isnan(row.rate):
            row.validation = {f"{rate:g}": run.choice for rate, run in runs.items()}
            row.rate = rates[0]
            for rate, run in runs.items():
                if self._better(run.choice, runs[row.rate].choice):
                    row.rate = rate
        trained, gradient = runs[row.rate], self.gradients[choice.label]
        if self.task.streaming:
            trained = self._stream(row, choice, seed, row.rate, None)
        gradient.reset()
        initial = self._agreement(gradient, self.build(seed, self.settings.batch).params)
        ended = self._agreement(gradient, trained.params)
        score = trained.score if self.task.streaming else self.test(trained.params)
        curve = (trained.at, trained.scores, trained.losses)
        row.seeds.append(Seed(seed, score, *curve, initial, ended))

    def _better(self, a: float, b: float) -> bool:
        """Whether a score is better than another, of a stream whether a loss is lower."""
        metric = self.result.metric
        if self.task.streaming:
            metric = replace(metric, higher_is_better=False)
        return metric.better(a, b)

    @cached_property
    def test(self) -> Callable[[Params], float]:
        """The score of the test split, which is made after the first run."""
        return scorer(self.build, self.task, self.task.split("test", self.settings.held_out))

    def _run(self, row: Row, choice: Choice, seed: int, rate: float, bar: Bar) -> Trained:
        """One training run, with validation scores on the way."""
        s, metric = self.settings, self.result.metric
        params = self.build(seed, s.batch).params
        optimizer = self.optimizers[row.optimizer]
        key = jax.random.key(seed)
        draw = lambda n: self.task.draw(jax.random.fold_in(key, n))
        advance = self._advance(row, choice, optimizer, rate)
        run = Run(advance, params, optimizer.init(params), draw, self.score)
        at = np.linspace(0, s.updates, s.points + 1).round().astype(int).tolist()
        run.score()
        for start, end in pairwise(sorted(set(at))):
            while run.done < end:
                run.advance()
            text = f"{metric.name} {metric.text(run.score())}, seed {seed}, {row.label}"
            bar.set_postfix_str(text, refresh=False)
            bar.update(end - start)
        losses = [float(loss) for loss in run.losses]
        return Trained(run.weights, run.scores[-1], run.scores[-1], run.at, run.scores, losses)

    def _stream(self, row: Row, choice: Choice, seed: int, rate: float, bar: Bar | None) -> Trained:
        """Learn while reading a split: validation, or the test where there is no bar."""
        s, optimizer = self.settings, self.optimizers[row.optimizer]
        params = self.build(seed, s.batch).params
        xs, targets = self.validation if bar else self.task.split("test", s.batch)
        run = self._updates(row, choice, optimizer)
        params, _, losses, outputs = run(params, optimizer.init(params), (xs, targets), rate)
        score = float(self.task.score(outputs, targets))
        at = np.linspace(0, s.updates, s.points + 1).round().astype(int)
        every = np.asarray(losses)
        means = [float(part.mean()) for part in np.split(every, at[1:-1])]
        if bar:
            bar.set_postfix_str(f"seed {seed}, {row.label}", refresh=False)
            bar.update(s.updates)
        return Trained(params, score, float(every.mean()), at[1:].tolist(), means, every.tolist())

    def _advance(self, row: Row, choice: Choice, optimizer: Optimizer, rate: float) -> Any:
        """What makes the updates of a batch."""
        if self.settings.update_every == self.task.length:
            gradient = self.gradients[choice.label]
            gradient.reset()
            return by_sequence(gradient, optimizer, rate)
        run = self._updates(row, choice, optimizer)
        return lambda params, moments, batch: run(params, moments, batch, rate)[:3]

    def _updates(self, row: Row, choice: Choice, optimizer: Optimizer) -> Stream:
        """Updates while a sequence runs."""
        every = self.settings.update_every
        if row.label not in self.streams:
            how = (self.model, self.task.loss, self.task.length, every)
            self.streams[row.label] = Stream(method_of(choice, *how), self.task, optimizer, every)
        stream = self.streams[row.label]
        stream.reset()
        return stream


@contextmanager
def _refusals(row: Row) -> Iterator[None]:
    """Write a refusal into the row."""
    try:
        yield
    except REFUSALS as error:
        row.refused = str(error) or type(error).__name__


def _check_sizes(
    task: Sequences, every: int, optimizers: Sequence[str], rates: Sequence[float]
) -> None:
    length = task.length
    if task.judge is not None and every != length:
        raise value_error(
            f"update_every={every} for {task.name}, whose trials have {length} steps.",
            why="what a trial was worth is known at its end",
            do="leave it out for one update per trial",
        )
    if every < 1 or length % every:
        raise value_error(
            f"update_every={every} for sequences of {length} steps.",
            why="a sequence is cut into equal parts, with an update after each",
            do=f"pass a divisor of {length}, or leave it out for one update per sequence",
        )
    if not optimizers or not rates or not all(rate > 0 for rate in rates):
        raise value_error(
            f"optimizers={tuple(optimizers)}, rates={tuple(rates)}.",
            why="a row has an optimizer and a positive learning rate",
            do=f"pass some of {', '.join(OPTIMIZERS)}, and positive numbers",
        )


def _updates(task: Sequences, every: int, updates: int | None) -> int:
    each = task.length // every  # of a batch
    if not task.streaming:
        return -(-(updates or 1000) // each) * each
    if updates is not None:
        raise value_error(
            f"updates={updates} for {task.name}.",
            why="a network learns from one pass over a stream",
            do="leave it out; the length of the stream and update_every decide",
        )
    return each


def _check_same(new: CompareResult, old: CompareResult) -> None:
    """Refuse rows of other settings in one table."""
    pairs = {"task": (new.title, old.title), "length": (new.length, old.length)}
    pairs |= {
        name: (getattr(new.settings, name), getattr(old.settings, name))
        for name in Settings.__slots__
    }
    wrong = [f"{name} is {a} and was {b}" for name, (a, b) in pairs.items() if a != b]
    if wrong:
        raise value_error(
            f"the earlier result has other settings: {'; '.join(wrong)}.",
            why="rows of one table start from the same weights and see the same batches",
            do="compare with the settings of the earlier result, or without it",
        )
