"""The gallery of the site: what every example printed, drawn, and its program on a page.

`make gallery` runs the examples, some minutes in all, writes what they print into
`results/examples/` and draws it. Pages are made when the site is built (`site_hooks.py`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
RECORDS, PICTURES = HERE / "results" / "examples", HERE / "gallery"
REPORT = re.compile(r"^=+$.*?^=+$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Curves:
    """Lines that match: groups of numbers, x first; or y alone, where there is one group."""

    pattern: str
    x: str
    y: str
    names: tuple[str, ...] = ("",)
    log: str = ""  # "y" or "xy"

    def draw(self, axes: Any, text: str) -> None:
        found = re.findall(self.pattern, text, re.MULTILINE)
        pairs = [(str(k), row) if isinstance(row, str) else row for k, row in enumerate(found)]
        rows = [[number(n) for n in pair] for pair in pairs]
        first, *rest = zip(*rows, strict=True)
        for name, values in zip(self.names, rest, strict=True):
            axes.plot(first, values, marker="o", ms=3, label=name)
        axes.set(xlabel=self.x, ylabel=self.y)
        for axis in self.log:
            getattr(axes, f"set_{axis}scale")("log")
        if self.names[0]:
            axes.legend(frameon=False)


@dataclass(frozen=True)
class Rows:
    """Lines that match: a name, then numbers along `x`, each line a curve."""

    pattern: str
    x: str
    y: str

    def draw(self, axes: Any, text: str) -> None:
        for name, values in re.findall(self.pattern, text, re.MULTILINE):
            numbers = [number(n) for n in values.split()]
            axes.plot(range(len(numbers)), numbers, marker="o", ms=3, label=name.strip())
        axes.set(xlabel=self.x, ylabel=self.y)
        axes.legend(frameon=False)


@dataclass(frozen=True)
class Bars:
    """Lines that match: a name and numbers, of one run or of several seeds."""

    pattern: str
    y: str

    def draw(self, axes: Any, text: str) -> None:
        found = re.findall(self.pattern, text, re.MULTILINE)
        names = [name.strip() for name, _ in found]
        values = [[number(n) for n in numbers.split()] for _, numbers in found]
        means = [sum(v) / len(v) for v in values]
        axes.barh(names, means, height=0.6, color="C0", alpha=0.7)
        for k, seeds in enumerate(values):
            if len(seeds) > 1:
                axes.plot(seeds, [k] * len(seeds), "o", ms=5, mfc="white", color="k")
        axes.invert_yaxis()
        axes.set(xlabel=self.y)


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


FIGURES = {
    "first_steps": Curves(r"sequence +(\d+): error ([\d.]+)", "sequence", "squared error"),
    "gru_copying": Curves(r"batch +(\d+): .* right ([\d.]+)%", "batch", "right symbols (%)"),
    "drifting_stream": Curves(
        r"^ +(\d) +([\d.]+) +([\d.]+)$",
        "period of 4,000 steps",
        "squared error",
        ("online", "frozen"),
    ),
    "dendrites": Bars(
        r"^(cable [\w ]+): cosine to BPTT ([\d.]+)", "cosine to the gradient of BPTT"
    ),
    "cartpole": Bars(r"^([^:\n]+?) *: +([\d ]+)$", "steps of an episode, three seeds"),
    "learner_in_c": Curves(r"step +(\d+) .* loss +([\d.]+)", "step", "squared error"),
    "connectome": Curves(r"(\d+) ms: off by ([\d.]+) Hz", "ms of activity", "rates off by (Hz)"),
    "rewired_connectome": Bars(r"^(\w+): ([\d.]+)% right", "right (%), chance level 25 %"),
    "ei_sparse_network": Curves(r"update +(\d+): (\d+)% right", "update", "right trials (%)"),
    "conv_spiking_digits": Curves(r"epoch (\d+): .* ([\d.]+)% of", "epoch", "right images (%)"),
    "lora_finetune": Curves(
        r"error ([\d.]+)", "20 sequences each, another task from 6 on", "squared error"
    ),
    "character_model": Curves(
        r"step +\d+: ([\d.]+) bits", "1,024 steps each", "bits per character"
    ),
    "reward_bandit": Bars(r"^([^:\n]+): +([\d. ]+)$", "share of good choices, three seeds"),
    "reward_maze": Bars(r"^([^:\n]+?) *: +([\d. ]+)$", "share of right turns, three seeds"),
    "streaming_rl": Bars(r"^length +32, ([^:\n]+?) *: +([-\d. ]+)$", "mean return, three seeds"),
    "lif_feedforward": Curves(
        r"pass +(\d+): squared error ([\d.]+)", "pass", "squared error", log="y"
    ),
    "custom_operator": Curves(
        r"update +(\d+): error ([\d.e+-]+),", "update", "squared error", log="y"
    ),
    "custom_rule": Rows(r"^(.{9}) ((?:[\d.]+ +)+)->", "80 updates each", "squared error"),
    "compare_rules": Bars(r"^([\w:=]+) +([\d.]+)±", "accuracy (%), chance level 50 %"),
    "vmap_batch": Curves(
        r"sequence +(\d+): error \S+, leaks ([\d.]+), ([\d.]+), ([\d.]+)",
        "sequence",
        "leak",
        ("first unit", "second", "third"),
    ),
    "lru_long_memory": Curves(
        r"([\d,]+) steps: ([\d.,]+) MB online, ([\d.,]+) MB",
        "steps",
        "MB of a gradient",
        ("online", "BPTT"),
        log="xy",
    ),
    "eprop_store_recall": Bars(
        r"^(.{16})  cosine to BPTT +([\d.]+)", "cosine to the gradient of BPTT"
    ),
    "spiking_match_to_sample": Curves(r"update +(\d+): (\d+)% right", "update", "right (%)"),
    "ei_delays": Bars(r"^(\w+ delays), .*: ([\d.]+)% of", "right (%), chance level 50 %"),
    "torch_spiking_digits": Curves(r"epoch (\d+): .* ([\d.]+)% of", "epoch", "right images (%)"),
}


def examples() -> list[str]:
    """Their names, in the order in which the README of the examples lists them."""
    return re.findall(r"^\| `(\w+)\.py`", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE)


def printed(name: str) -> str:
    """What an example printed."""
    return (RECORDS / f"{name}.txt").read_text("utf-8")


def draw(name: str) -> None:
    """The picture of an example, from its record."""
    import svg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(svg.WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    FIGURES[name].draw(axes, printed(name))
    svg.write(figure, PICTURES / f"{name}.svg")


def told(name: str) -> tuple[str, str]:
    """The first sentence of an example, and the rest of what it says of itself."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text("utf-8"))) or ""
    first, _, rest = text.partition("\n")
    return first, rest.strip()


def page() -> str:
    """The gallery, as Markdown."""
    cards = []
    for name in examples():
        picture = f"![{told(name)[0]}](gallery/{name}.svg)"
        cards.append(
            f'<div markdown="1">\n{picture}\n\n[{told(name)[0]}](examples/{name}.md)\n</div>'
        )
    return "\n".join(
        [
            "# Gallery\n",
            "Every example is a complete program. Its page has the program and what it printed;",
            "pictures are drawn from that. [One table](examples.md) has all results and times.\n",
            '<div class="gallery" markdown="1">',
            *cards,
            "</div>\n",
        ]
    )


def page_of(name: str) -> str:
    """An example: what it says, its picture, what it printed, its program."""
    first, rest = told(name)
    code = (EXAMPLES / f"{name}.py").read_text("utf-8")
    code = code[code.index('"""', 3) + 3 :].strip()
    output = REPORT.sub("", printed(name)).strip("\n")
    return (
        f"# {first.rstrip('.')}\n\n{rest}\n\n![{first}](../gallery/{name}.svg)\n\n"
        f"## What it printed\n\n```text\n{output}\n```\n\n"
        f"## The program\n\nRun by `python examples/{name}.py`.\n\n```python\n{code}\n```\n\n"
        "[All examples](../gallery.md)\n"
    )


def main(names: list[str]) -> None:
    """Run examples and draw them; those that have a record are only drawn, if none is named."""
    RECORDS.mkdir(exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    for name in names or examples():
        if names or not (RECORDS / f"{name}.txt").exists():
            command = [sys.executable, str(EXAMPLES / f"{name}.py")]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            (RECORDS / f"{name}.txt").write_text(ran.stdout, "utf-8")
        draw(name)


if __name__ == "__main__":
    main(sys.argv[1:])
