"""Tables and figures of docs/compare.md and docs/compare/ from the kept records in docs/results."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from compare import PARTS

from braintrace import CompareResult
from braintrace.lab.cli._names import STREAMS, TASKS
from braintrace.lab.comparison._figure import COLOURS, draw, new_figure
from braintrace.lab.comparison._result import Row, short_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import svg

MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CELLS = {"rnn": "vanilla RNN", "gru": "GRU", "lru": "LRU", "alif": "LIF (adaptive)"}
OPTIMIZERS = ("sgd", "rmsprop", "adam")
SUMMARY = {  # rows of the summary by the start of a label
    "bptt": "BPTT",
    "tbptt": "tbptt",
    "auto": "auto",
    "rolling:window=8": "rolling, 8",
    "no_trace": "no trace",
    "d_rtrl": "D_RTRL",
    "d_rtrl:window=8": "D_RTRL, windows of 8",
    "ostl_recurrent": "SnAp-1",
    "pp_prop": "pp_prop, 0.95",
    "eprop:kappa_filter_decay=0.5": "e-prop",
    "rflo": "RFLO",
}
OTHERS = {  # of the second table
    "bptt": "BPTT",
    "no_trace": "no trace",
    "d_rtrl": "D_RTRL",
    "kf_rtrl": "KF-RTRL",
    "otpe": "OTPE",
    "ottt": "OTTT",
    "stllr": "STLLR",
    "ostl_feedforward": "OSTL, feed-forward",
    "uoro": "UORO",
}
STREAM_RULES = (
    "rolling:window=8",
    "no_trace",
    "d_rtrl",
    "pp_prop:decay_or_rank=0.5",
    "pp_prop:decay_or_rank=0.9",
    "pp_prop:decay_or_rank=0.99",
)
Table = list[list[str]]


def markdown(cells: Table) -> str:
    head, *rows = cells
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: list[float], form: str, scale: float = 1) -> str:
    """Mean ± standard deviation over seeds."""
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return f"diverges ({sum(not math.isfinite(v) for v in values)} of {len(values)})"
    values = [scale * v for v in values]
    return f"{form.format(statistics.mean(values))} ± {form.format(statistics.stdev(values))}"


def scores(result: CompareResult, row: Row) -> str:
    return spread([s.score for s in row.seeds], result.metric.form, result.metric.scale)


def mean_loss(losses: list[float]) -> float:
    """Of a stream; parts of a curve have the same length."""
    return math.fsum(losses) / len(losses)


class Records:
    """The records of all parts that there are."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.parts = {
            path.parent.name: {} for path in sorted(folder.glob("*/compare_*.json"))
        }  # by part, then by task
        for part, results in self.parts.items():
            for path in sorted((folder / part).glob("compare_*.json")):
                result = CompareResult.load(path)
                results[result.name] = result
        self.tasks = {name: self.parts[name][name] for name in TASKS if name in self.parts}

    def tables(self) -> dict[str, str]:
        """The text of every table by its name in the page."""
        made = {name: task_table(result) for name, result in self.tasks.items()}
        made |= {"summary": self._summary(SUMMARY), "others": self._summary(OTHERS)}
        made["times"] = self._times()
        made |= {name: task_table(r) for name, r in self.parts.get("rewards", {}).items()}
        if "element-wise" in self.parts:
            made["element-wise"] = self._element_wise()
        cells = [cell for cell in CELLS if f"streams-{cell}" in self.parts]
        for task in STREAMS if cells else ():
            made[task] = self._stream(task, cells)
        if cells:
            made["referee"] = self._referee(cells)
            made["counts"] = self._counts(cells)
        if (depth := self.folder / "depth.json").is_file():
            made |= depth_tables(json.loads(depth.read_text("utf-8")))
        for name, result in self.parts.get("example", {}).items():
            made[name] = f"```text\n{result.table()}\n```\n"
        return made

    def _summary(self, columns: dict[str, str]) -> str:
        there = {r.label for result in self.tasks.values() for r in result.rows} | {"tbptt"}
        columns = {label: about for label, about in columns.items() if label in there}
        cells: Table = [["task, cell", "score", *columns.values()]]
        for name, result in self.tasks.items():
            line = [f"`{name}`, {result.settings.model.split(' of ')[0]}", result.metric.name]
            for label in columns:
                own = [r for r in result.rows if r.label == label or
                       (label == "tbptt" and r.rule == "tbptt")]  # fmt: skip
                line.append(scores(result, own[0]) if own else "–")
            cells.append(line)
        return markdown(cells)

    def _element_wise(self) -> str:
        cells: Table = [["task", "metric", "bptt", "d_rtrl", "bptt, work", "d_rtrl, work"]]
        results = self.parts["element-wise"]
        for name in (name for name in TASKS if name in results):
            result = results[name]
            rows = [next(r for r in result.rows if r.label == x) for x in ("bptt", "d_rtrl")]
            work = [short_bytes(row.working_bytes) for row in rows]
            cells.append(
                [f"`{name}`", result.metric.name, *(scores(result, r) for r in rows), *work]
            )
        return markdown(cells)

    def _stream(self, task: str, cells: list[str]) -> str:
        lines: Table = [["cell", "rule", *OPTIMIZERS]]
        for cell in cells:
            result = self.parts[f"streams-{cell}"][task]
            for label in dict.fromkeys(bare(row) for row in result.rows):
                line = [CELLS[cell], label]
                for optimizer in OPTIMIZERS:
                    row = row_of(result, label, optimizer)
                    line.append(stream_cell(result, row) if row else "–")
                lines.append(line)
        return markdown(lines)

    def _referee(self, cells: list[str]) -> str:
        """No trace with RMSprop beside RTRL with RMSprop, and each with its best optimizer."""
        rules = ("no_trace", "rolling:window=8", "d_rtrl", "rtrl")
        pairs: list[tuple[str, str | None]] = [(rule, "rmsprop") for rule in rules]
        pairs += [("no_trace", None), ("rtrl", None)]
        head = [f"{rule}, {optimizer or 'best'}" for rule, optimizer in pairs]
        lines: Table = [["task", "cell", *head]]
        for task in STREAMS:
            for cell in cells:
                result = self.parts[f"streams-{cell}"][task]
                line = [f"`{task}`", CELLS[cell]]
                for rule, optimizer in pairs:
                    row = row_of(result, rule, optimizer)
                    text = stream_cell(result, row) if row else "–"
                    line.append(text + (f", {row.optimizer}" if row and not optimizer else ""))
                lines.append(line)
        return markdown(lines)

    def _counts(self, cells: list[str]) -> str:
        """How often a rule is better or worse than another with RMSprop, where any learns."""
        cases = [
            self.parts[f"streams-{cell}"][task]
            for task in STREAMS
            for cell in cells
            if task != "delayed" or cell == "lru"  # the others stay at chance level
        ]
        lines: Table = [["rule", "other", "better", "within their spread", "worse"]]
        for rule, other in product(STREAM_RULES, ("rtrl", "no_trace")):
            if rule != other:
                counts = Counter(_better(case, rule, other) for case in cases)
                lines.append([rule, other, *(str(counts[sign]) for sign in (1, 0, -1))])
        return markdown(lines)

    def _times(self) -> str:
        """CPU times of all parts; of some, what a run of the part on two cores took."""
        seconds: dict[str, int] = json.loads((self.folder / "seconds.json").read_text("utf-8"))
        runs = json.loads((self.folder / "two_cores.json").read_text("utf-8"))
        cells: Table = [["part", "CPU time (min)", "on two cores (s)", "their CPU time (s)"]]
        for part, took in seconds.items():
            minutes = f"{took / 60:.0f}" if took > 90 else f"{took / 60:.1f}"
            run = runs.get(part, {"wall": "–", "cpu": "–"})
            cells.append([f"`{part}`", minutes, str(run["wall"]), str(run["cpu"])])
        cells.append(["all", f"{sum(seconds.values()) / 60:.0f}", "–", "–"])
        return markdown(cells)


KINDS = {"lru": "LRU", "mingru": "minGRU", "mamba": "Mamba-2", "gru": "GRU"}  # of stacks
IN_STACKS = {"bptt": "BPTT", "d_rtrl": "D-RTRL", "eprop": "eprop, layers", "auto": "auto"}


def depth_tables(content: dict[str, Any]) -> dict[str, str]:
    """What a choice reaches on stacks: cosines, and scores."""
    order = lambda row: (list(KINDS).index(row["kind"]), row["layers"], row.get("length", 0))
    cells: Table = [
        ["stack", "steps", "D-RTRL", "choice", "memory of both", "time of both", "its rule"]
    ]
    for row in sorted(content["cosines"], key=order):
        cosines, times = ([f"{v:.3f}" for v in row["cosines"]], [f"{v:.1f}" for v in row["time"]])
        sizes = ", ".join(map(short_bytes, row["bytes"]))
        name = f"{KINDS[row['kind']]}, {row['layers']} layers"
        cells.append(
            [name, str(row["length"]), *cosines, sizes, ", ".join(times), f"`{row['chosen']}`"]
        )
    tables = {"depth-cosines": markdown(cells)}
    if not content["scores"]:
        return tables
    head = [
        "stack",
        "task",
        "updates, rates",
        "score",
        *IN_STACKS.values(),
        "cosine of D-RTRL, auto",
        "at the end",
    ]
    cells = [[*head, "rule of auto"]]
    cases: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in sorted(content["scores"], key=order):
        cases.setdefault((row["kind"], row["layers"], row["task"]), {})[row["rule"]] = row
    for (kind, layers, task), rows in cases.items():
        first = next(iter(rows.values()))
        how = f"{first['updates']}, {', '.join(f'{rate:g}' for rate in first['rates'])}"
        line = [f"{KINDS[kind]}, {layers} layers", f"`{task}`", how, first["metric"]]
        form, scale = ("{:.3f}", 1) if task == "text" else ("{:.1f}", 100)
        for rule in IN_STACKS:
            line.append(spread(rows[rule]["scores"], form, scale) if rule in rows else "–")
        for when in ("cosines", "trained"):
            each = [f"{statistics.mean(rows[r][when]):.3f}" if r in rows else "–"
                    for r in ("d_rtrl", "auto")]  # fmt: skip
            line.append(", ".join(each))
        cells.append([*line, f"`{rows['auto']['chosen']}`" if "auto" in rows else "–"])
    return {**tables, "depth-scores": markdown(cells)}


def stream_values(result: CompareResult, row: Row) -> list[float]:
    """Of every seed: the score, or the negative loss; more is better."""
    if result.metric.name.startswith("recovered"):
        return [-mean_loss(seed.losses) for seed in row.seeds]
    sign = 1 if result.metric.higher_is_better else -1
    return [sign * seed.score for seed in row.seeds]


def _better(result: CompareResult, rule: str, other: str) -> int:
    """1 or -1 if the means are further apart than the sum of the standard deviations, else 0."""
    rows = [row_of(result, label, "rmsprop") for label in (rule, other)]
    one, two = (stream_values(result, row) for row in rows if row)
    apart = statistics.mean(one) - statistics.mean(two)
    if not abs(apart) > statistics.stdev(one) + statistics.stdev(two):
        return 0
    return 1 if apart > 0 else -1


def task_table(result: CompareResult) -> str:
    """One row per rule; reasons of those that were refused."""
    s, m = result.settings, result.metric
    rates = ", ".join(f"{rate:g}" for rate in s.rates)
    text = (
        f"{result.title}: {s.model}, T = {result.length}, batches of {s.batch}, {s.updates} "
        f"updates, {s.seeds} seeds, rates {rates}; {m.chance_level}; "
        f"`reach`: {m.text(result.goal)}.\n\n"
    )
    cells: Table = [["rule", m.name, "reach", "cos", "end", "work", "stored", "ms", "rate"]]
    refused = []
    for row in result.rows:
        if row.refused is not None:
            refused.append(f"`{row.label}` ({row.refused.splitlines()[0].rstrip('.')})")
            continue
        cos = [f"{statistics.mean(getattr(s, when).cosine for s in row.seeds):.3f}"
               for when in ("initial", "trained")]  # fmt: skip
        size = [short_bytes(row.working_bytes), short_bytes(row.stored_bytes)]
        time = "–" if math.isnan(row.milliseconds) else f"{row.milliseconds:.3g}"
        end = [*cos, *size, time, f"{row.rate:g}"]
        cells.append([row.label, scores(result, row), result._reached(row), *end])
    text += markdown(cells)
    if refused:
        text += f"\nRefused: {'; '.join(refused)}.\n"
    part = PARTS.get(result.name, PARTS["rewards"])
    wanted = dict.fromkeys(w for rows in part.rows for w in rows.rules.split())
    there = {row.label for row in result.rows} | {row.rule for row in result.rows}
    if missing := [f"`{word}`" for word in wanted if word not in there]:
        text += f"\nNot measured: {', '.join(missing)}.\n"
    return text


def bare(row: Row) -> str:
    return row.label.removesuffix(f" {row.optimizer}")


def row_of(result: CompareResult, label: str, optimizer: str | None) -> Row | None:
    """The row of a rule and an optimizer, or of the optimizer with the lowest validation loss."""
    rows = [row for row in result.rows if bare(row) == label and row.seeds]
    if optimizer:
        return next((row for row in rows if row.optimizer == optimizer), None)
    chosen = lambda row: row.validation[f"{row.rate:g}"]
    finite = [row for row in rows if math.isfinite(chosen(row))]
    return min(finite, key=chosen) if finite else None


def stream_cell(result: CompareResult, row: Row) -> str:
    """The score of a stream; the mean loss where the score is a recovery."""
    if not result.metric.name.startswith("recovered"):
        return scores(result, row)
    losses = [mean_loss(seed.losses) for seed in row.seeds]
    return spread(losses, "{:.4f}" if result.name == "adapt_sine" else "{:.3f}")


def pages(documents: Path) -> list[Path]:
    """The pages that have tables of the records."""
    more = documents / "how-to" / "choose-a-rule.md"
    return [documents / "compare.md", more, *sorted((documents / "compare").glob("*.md"))]


def page_with(page: str, tables: dict[str, str]) -> str:
    """The page with the tables between its markers."""
    return MARKED.sub(lambda m: f"{m[1]}{tables.get(m[2], '')}{m[3]}", page)


def draw_tasks(records: Records) -> Any:
    """Every rule on every task: chance level is 0 and the mean of BPTT 1."""
    figure, (left,) = new_figure((svg.WIDTH, 8), 1)
    shown = {k: v for k, v in SUMMARY.items() if k != "bptt"}
    names = list(records.tasks)[::-1]
    for index, (label, about) in enumerate(shown.items()):
        for place, name in enumerate(names):
            result = records.tasks[name]
            row = next((r for r in result.rows if r.label == label or
                        (label == "tbptt" and r.rule == "tbptt")), None)  # fmt: skip
            best = next(r for r in result.rows if r.label == "bptt").mean
            if row is None or not row.seeds:
                continue
            chance = result.metric.chance
            values = [(s.score - chance) / (best - chance) for s in row.seeds]
            y = place + 0.36 - 0.08 * index
            colour = COLOURS[index % len(COLOURS)] if index < len(COLOURS) else "#222222"
            values = [max(v, -0.1) for v in values]
            left.plot([min(values), max(values)], [y, y], color=colour, lw=1.2)
            mean = statistics.mean(values)
            left.plot(mean, y, "o", color=colour, ms=4.5, label=about if place == 0 else None)
    left.axvline(1, color="#222222", lw=1)
    left.axvline(0, color="grey", lw=1, ls=(0, (1, 3)))
    left.set_yticks(range(len(names)), [f"{n} ({records.tasks[n].settings.model.split(' of ')[0]})"
                                        for n in names])  # fmt: skip
    left.set(
        xlabel="score (0: chance level, 1: BPTT)\ndot: mean, line: all seeds", xlim=(-0.12, 1.1)
    )
    for place in range(len(names) - 1):
        left.axhline(place + 0.5, color="#DDDDDD", lw=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_streams(records: Records) -> Any:
    """No trace, D_RTRL and RTRL on the streams, with every optimizer."""
    cells = [cell for cell in CELLS if f"streams-{cell}" in records.parts]
    rules = ("no_trace", "d_rtrl", "pp_prop:decay_or_rank=0.9", "rolling:window=8", "rtrl")
    figure, axes = new_figure((svg.WIDTH, 3 * len(STREAMS)), (len(STREAMS), 1))
    for panel, task in zip(axes, STREAMS, strict=True):
        for c, cell in enumerate(cells):
            result = records.parts[f"streams-{cell}"][task]
            for r, rule in enumerate(rules):
                row = row_of(result, rule, None)
                if row is None:
                    continue
                adapts = result.metric.name.startswith("recovered")
                values = [mean_loss(s.losses) if adapts else result.metric.scale * s.score
                          for s in row.seeds]  # fmt: skip
                x = c + 0.15 * (r - 2)
                panel.plot([x] * len(values), values, "o", ms=3, mfc="none", color=COLOURS[r])
                label = rule if task == STREAMS[0] and c == 0 else None
                panel.plot([x - 0.06, x + 0.06], [statistics.mean(values)] * 2, lw=2.4,
                           color=COLOURS[r], label=label)  # fmt: skip
        panel.set_xticks(range(len(cells)), [CELLS[cell] for cell in cells])
        panel.set(title=task, ylabel="mean loss" if adapts else result.metric.name)
        panel.set_yscale("log" if adapts else "linear")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def write(documents: Path, folder: Path) -> None:
    """Tables into the pages, figures beside the records."""
    records = Records(folder)
    tables = records.tables()
    for page in pages(documents):
        page.write_text(page_with(page.read_text("utf-8"), tables), "utf-8")
    if records.tasks:
        svg.write(draw_tasks(records), folder / "tasks.svg")
    if any(part.startswith("streams-") for part in records.parts):
        svg.write(draw_streams(records), folder / "streams.svg")
    for name, result in records.parts.get("example", {}).items():
        svg.write(draw(result, svg.WIDTH), folder / "example" / f"compare_{name}.svg")
