"""Draws graph.png, bench.svg, show.svg and ei.svg beside this file: `make pictures`."""

import json
import os
import re
import shutil
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import svg
from matplotlib.figure import Figure
from playwright.sync_api import sync_playwright

import braintrace
from braintrace.lab.cli._bench import Point, Result
from braintrace.lab.cli._figures import draw_bench
from braintrace.lab.comparison._rules import parse

HERE = Path(__file__).parent
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    return spike(*primals), 0.3 * jnp.maximum(0, 1 - jnp.abs(primals[0])) * tangents[0]


class Spiking(brainstate.nn.Module):
    """Recurrent neurons with adaptive thresholds, and a leaky read-out."""

    def __init__(self, n_in, n, n_out):
        super().__init__()
        self.n, self.n_out = n, n_out
        normal = lambda *shape: brainstate.ParamState(
            brainstate.random.normal(size=shape) / np.sqrt(shape[0])
        )
        self.input, self.recurrent, self.readout = normal(n_in, n), normal(n, n), normal(n, n_out)

    def init_state(self, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros(self.n))
        self.a = brainstate.HiddenState(jnp.zeros(self.n))
        self.z = brainstate.HiddenState(jnp.zeros(self.n))
        self.y = brainstate.HiddenState(jnp.zeros(self.n_out))

    def update(self, x):
        drive = 1.1 * braintrace.matmul(x, self.input.value)
        drive += 0.5 * braintrace.matmul(self.z.value, self.recurrent.value)
        self.a.value = 0.98 * self.a.value + self.z.value
        self.v.value = 0.92 * self.v.value + drive - self.z.value
        self.z.value = spike(self.v.value - 1 - 0.15 * self.a.value)
        self.y.value = 0.9 * self.y.value + braintrace.matmul(self.z.value, self.readout.value)
        return self.z.value, self.y.value


NETWORK = """
import brainstate
import braintrace

class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(3, 20)
        self.readout = braintrace.nn.Linear(20, 2)

    def update(self, x):  # one step
        return self.readout(self.cell(x))
"""


def graph(path: Path) -> None:
    names: dict = {}
    exec(compile(NETWORK, "net.py", "exec"), names)  # so that lines are those of net.py
    x = jnp.zeros((16, 3))
    report = braintrace.compile(names["Network"](), "d_rtrl", x, batch_size=16).report
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or "google-chrome"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1180, "height": 700}, device_scale_factor=1.5)
        page.set_content(report.to_html())
        page.locator("details").evaluate("(e) => e.remove()")
        page.locator(".braintrace-picture").screenshot(path=path)
        browser.close()


def show(path: Path) -> None:
    brainstate.random.seed(1)
    steps = 300
    learner = braintrace.compile(Spiking(20, 40, 1), "d_rtrl", jnp.zeros(20))
    xs = (brainstate.random.uniform(size=(steps, 20)) < 0.05).astype("float32")
    wave = jnp.sin(jnp.arange(steps) / 25)[:, None]
    loss = lambda x, y: jnp.mean((learner(x)[1] - y) ** 2)
    seen = braintrace.show.record(learner, xs, wave, step_fn=loss, entries=6)
    figure = Figure(figsize=(svg.WIDTH, 8.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, sharex=True)
    braintrace.show.raster(seen.states["z",], dt=1.0, psth=True, ax=top)
    braintrace.show.traces(seen, "input", dt=1.0, ax=middle)
    braintrace.show.signals(seen, "z", dt=1.0, ax=bottom)
    middle.legend(loc="upper left", frameon=False, fontsize="x-small", ncols=2)
    for axes in (top.child_axes[0], middle):
        axes.set_xlabel("")
    svg.write(figure, path)


def bench(record: Path, path: Path) -> None:
    """What `braintrace bench` measured, from its record."""
    kept = json.loads(record.read_text("utf-8"))
    settings = kept["settings"]
    lengths, points = tuple(settings["lengths"]), []
    for point in kept["points"]:
        points.append(Point(**{k: v for k, v in point.items() if k != "median"}))
    sizes = (settings[k] for k in ("units", "batch", "repeats", "memory_limit"))
    result = Result(tuple(parse(list(settings["rules"]), block=None)), lengths, *sizes, points)
    svg.write(draw_bench(result, svg.WIDTH), path)


def tutorial(name: str, path: Path) -> None:
    """The figure that the blocks of a tutorial draw."""
    text, names = (HERE / "tutorials" / f"{name}.md").read_text("utf-8"), {}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(code, names)
    names["figure"].set_size_inches(svg.WIDTH, 7.5)
    svg.write(names["figure"], path)


if __name__ == "__main__":
    graph(HERE / "graph.png")
    bench(HERE / "results" / "bench.json", HERE / "bench.svg")
    show(HERE / "show.svg")
    tutorial("ei-network", HERE / "ei.svg")
