"""The results of a comparison: rows, as a table, a figure or a file; and back from the file."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..._errors import value_error
from .._table import aligned
from ..tasks import Measure
from ._output import save_record
from ._rules import Options

WIDTH = 80
SCORE = "score: on the test split, mean ± standard deviation over seeds"
REACH = """; reach: updates
to {threshold} on the validation split, mean over the seeds that get there
(their number, if not all)"""
NOTES = """;
cos: cosine to BPTT of the parameters that states depend on, at initial and
at trained weights; work: temporary bytes of a gradient; stored: bytes that
stay from step to step; ms: of an update, the gradient alone"""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cosine and relative error to BPTT: of parameters that states depend on, and of all."""

    cosine: float
    error: float
    cosine_all: float
    error_all: float


@dataclass(frozen=True, slots=True)
class Seed:
    """One training run: test score, validation scores at the updates `at`, losses of updates."""

    seed: int
    score: float
    at: list[int]
    scores: list[float]
    losses: list[float]
    initial: Agreement
    trained: Agreement

    @property
    def diverged_at(self) -> int | None:
        """The first update, from 1, whose loss is not finite."""
        return next((n for n, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)


@dataclass(slots=True)
class Row:
    """The results of a rule and an optimizer so far."""

    label: str
    rule: str
    options: Options
    window: int | None = None
    block: int | None = None
    optimizer: str = "adam"
    rate: float = math.nan
    validation: dict[str, float] = field(default_factory=dict)  # final, of the first seed, by rate
    refused: str | None = None
    working_bytes: float = math.nan
    stored_bytes: int = 0
    milliseconds: float = math.nan
    seeds: list[Seed] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """The mean test score."""
        return _mean([seed.score for seed in self.seeds])


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained, and how long."""

    model: str
    batch: int
    updates: int
    update_every: int
    seeds: int
    optimizers: tuple[str, ...]
    rates: tuple[float, ...]
    held_out: int
    points: int
    rounds: int


@dataclass(slots=True)
class CompareResult:
    """What `braintrace.compare` returns.

    Attributes:
        name: of the task.
        title: of the task, in a few words.
        length: steps of a sequence.
        metric: what the score is called and how it is printed.
        settings: what was trained, and how long.
        rows: one per rule and optimizer: `label`, `mean` of the test scores, `rate`,
            `working_bytes`, `stored_bytes`, `milliseconds`; `refused`, the reason if there is one;
            and per seed in `seeds` its test `score`, the validation `scores` at the updates `at`,
            `losses`, and the agreement with BPTT at `initial` and `trained` weights.
        threshold: the score that `reach` counts updates to; None is half way from chance level
            to the best row.
        finished: False if it was interrupted.
        streaming: whether networks learned while they were scored; curves are losses then.
    """

    name: str
    title: str
    length: int
    metric: Measure
    settings: Settings
    rows: list[Row]
    threshold: float | None = None
    finished: bool = False
    streaming: bool = False

    def __str__(self) -> str:
        return self.table()

    @property
    def heading(self) -> str:
        """Name and title of the task."""
        return self.name if self.title == self.name else f"{self.name}: {self.title}"

    @property
    def goal(self) -> float:
        """The score that `reach` counts updates to."""
        if self.threshold is not None:
            return self.threshold
        best, last = math.nan, [s.scores[-1] for row in self.rows for s in row.seeds if s.scores]
        for score in last:
            best = score if self.metric.better(score, best) else best
        return (self.metric.chance + best) / 2

    def reach(self, row: Row) -> list[int | None]:
        """Per seed, the updates until the validation score is past `goal`; None if it never is."""
        if self.streaming or math.isnan(self.goal):
            return [None] * len(row.seeds)
        past = lambda score: score == self.goal or self.metric.better(score, self.goal)
        return [
            next((at for at, score in zip(s.at, s.scores, strict=True) if past(score)), None)
            for s in row.seeds
        ]

    def table(self) -> str:
        """Title, one line per row, and what the columns mean."""
        s, metric = self.settings, self.metric
        steps = "step" if s.update_every == 1 else f"{s.update_every} steps"
        every = "" if s.update_every == self.length else f", one every {steps}"
        seeds = f"{s.seeds} seed{'s' * (s.seeds > 1)}"
        sizes = f"T = {self.length}, batches of {s.batch}, {s.updates} updates{every}, {seeds}"
        about = f"{s.model}, {sizes}"
        lines = [self.heading, *textwrap.wrap(about, WIDTH), metric.chance_level]
        several = len(s.rates) > 1
        if several:
            rates = ", ".join(f"{rate:g}" for rate in s.rates)
            by = "lowest loss" if self.streaming else "best"
            chosen = f"learning rates {rates}: the {by} of the first seed on validation"
            lines += textwrap.wrap(chosen, WIDTH)
        if not self.finished:
            lines.append("INTERRUPTED: results so far")
        three = "{:.3f}".format
        columns: dict[str, Callable[[Row], str]] = {
            "rule": lambda row: row.label,
            metric.name: lambda row: _spread([x.score for x in row.seeds], metric.text),
            **({"loss": _loss} if self.streaming else {"reach": self._reached}),
            "cos": lambda row: _over([x.initial.cosine for x in row.seeds], three),
            "end": lambda row: _over([x.trained.cosine for x in row.seeds], three),
            "work": lambda row: short_bytes(row.working_bytes),
            "stored": lambda row: short_bytes(row.stored_bytes),
            "ms": lambda row: _number(row.milliseconds),
        }
        if several:
            columns["rate"] = lambda row: f"{row.rate:g}"
        ran = [row for row in self.rows if row.refused is None]
        cells = [[column(row) for column in columns.values()] for row in ran]
        head, *lined = aligned([list(columns), *cells])
        if len(head) > WIDTH:
            head, *lined = aligned([list(columns), *cells], gap=" ")
        line_of = dict(zip(map(id, ran), lined, strict=True))
        rows = [head]
        for row in self.rows:
            if row.refused is not None:
                reason = f"{row.label}: refused, {row.refused.splitlines()[0]}"
                rows.append(textwrap.shorten(reason, WIDTH, placeholder="…"))
            else:
                part = "" if len(row.seeds) == s.seeds else f"  ({len(row.seeds)} of {seeds})"
                rows.append(line_of[id(row)] + part)
        for row in self.rows:
            if update := min(filter(None, (seed.diverged_at for seed in row.seeds)), default=None):
                broken = f"{row.label}: the loss is not finite from update {update} on: NaN in the"
                rows += ["", *textwrap.wrap(f"{broken} data, or too high a learning rate.", WIDTH)]
        reach = "" if self.streaming else REACH.format(threshold=metric.text(self.goal))
        stream = ", while learning;\nloss: mean over this stream" * self.streaming
        notes = f"{SCORE}{stream}{reach}{NOTES}"
        return "\n".join([*lines, "", *rows, "", notes])

    def _reached(self, row: Row) -> str:
        counts = [count for count in self.reach(row) if count is not None]
        if not counts:
            return "-"
        part = "" if len(counts) == len(row.seeds) else f" ({len(counts)})"
        return f"{_mean(counts):.0f}{part}"

    def save(self, path: str | Path) -> None:
        """Write a JSON file, with the versions and the machine."""
        metric = self.metric
        task = {"name": self.name, "title": self.title, "length": self.length,
                "metric": metric.name, "scale": metric.scale, "form": metric.form,
                "higher_is_better": metric.higher_is_better, "chance": metric.chance,
                "threshold": self.threshold, "streaming": self.streaming}  # fmt: skip
        save_record(Path(path), {
            "finished": self.finished,
            "task": task,
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in self.rows],
        })  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> CompareResult:
        """Read such a file, for a table or a figure, or for more rows."""
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            task, s = dict(content["task"]), content["settings"]
            values: Any = {f.name: s[f.name] for f in fields(Settings)}
            values |= {name: tuple(values[name]) for name in ("optimizers", "rates")}
            settings = Settings(**values)
            keys = ("form", "scale", "higher_is_better", "chance")
            metric = Measure(name=task["metric"], **{key: task[key] for key in keys})
            rows = [_row(row) for row in content["rows"]]
            head = (task["name"], task["title"], task["length"])
            ends = (task["threshold"], content["finished"], task["streaming"])
            return cls(*head, metric, settings, rows, *ends)
        except (ValueError, KeyError, TypeError) as error:
            raise value_error(
                f"{path} is not a result of this version of braintrace.compare.",
                why=f"{type(error).__name__}: {error}",
                do="compare again, into another file",
            ) from error

    def figure(self) -> Any:
        """Curves, scores and memory of every row, a figure of matplotlib."""
        from ._figure import draw

        return draw(self)


def _row(content: dict[str, Any]) -> Row:
    """A row of a file; null is nan."""
    number = lambda value: math.nan if value is None else value
    seeds = []
    for seed in content.pop("seeds"):
        seed |= {when: Agreement(*map(number, seed[when].values()))
                 for when in ("initial", "trained")}  # fmt: skip
        seed |= {key: [number(v) for v in seed[key]] for key in ("scores", "losses")}
        seeds.append(Seed(**{**seed, "score": number(seed["score"])}))
    for key in ("rate", "working_bytes", "milliseconds"):
        content[key] = number(content[key])
    content["validation"] = {k: number(v) for k, v in content["validation"].items()}
    return Row(**content, seeds=seeds)


def _loss(row: Row) -> str:
    """The mean loss of a stream."""
    return _over([_mean(seed.losses) for seed in row.seeds], _number)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def _over(values: list[float], form: Callable[[float], str]) -> str:
    return form(_mean(values)) if values else "-"


def _spread(values: list[float], form: Callable[[float], str]) -> str:
    """The mean, and the standard deviation where there are several."""
    if len(values) < 2:
        return _over(values, form)
    finite = all(map(math.isfinite, values))
    return f"{form(_mean(values))}±{form(statistics.stdev(values)) if finite else '-'}"


def _number(value: float) -> str:
    """Three digits that count."""
    if not math.isfinite(value):
        return "-"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(digits, 0), 4)}f}"


def short_bytes(value: float) -> str:
    """Bytes in three digits, with a unit."""
    if not math.isfinite(value):
        return "-"
    power = sum(value >= 999.5 * 1000**n for n in range(3))
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G')[power]}"
