"""Draws the pictures of the documents beside this file: `make pictures`."""

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
import svg
from matplotlib.figure import Figure

import braintrace
from braintrace.lab.cli._bench import Point, Result
from braintrace.lab.cli._figures import draw_bench
from braintrace.lab.comparison._rules import parse
from braintrace.report._layout import NARROW
from braintrace.report._svg import svg as drawing

HERE = Path(__file__).parent
SVG = "http://www.w3.org/2000/svg"


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


# Colours of how a parameter stands that can be read on a light and on a dark page.
KINDS = {
    "exact": "#0f9d6e",
    "step": "#4a7fe8",
    "untouched": "#80868f",
    "approximate": "#d9730d",
    "short": "#bf4fd1",
    "silent": "#e5484d",
}
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
LETTERS = {
    "head": {"font-size": "12", "opacity": "0.75"},
    "line": {"font-size": "11", "font-family": MONO},
    "note": {"font-size": "10.5"},
}


def graph(path: Path) -> None:
    names: dict = {}
    exec(compile(NETWORK, "net.py", "exec"), names)  # so that lines are those of net.py
    x = jnp.zeros((16, 3))
    report = braintrace.compile(names["Network"](), "d_rtrl", x, batch_size=16).report
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(drawing(report.picture, NARROW))
    coloured(root, "currentColor")
    root.set("font-family", "system-ui, sans-serif")
    text = ElementTree.tostring(root, "unicode")
    path.write_text(re.sub(r"(<svg[^>]*>)", r"\1" + svg.OF_A_FILE, text, count=1), "utf-8")


def coloured(element: ElementTree.Element, kind: str) -> None:
    """Colours and letters as attributes: a picture has no style for the classes of a report."""
    words = element.attrib.pop("class", "").split()
    for name in [
        k for k in element.attrib if k.split("-")[0] in ("aria", "data", "role", "tabindex")
    ]:
        del element.attrib[name]
    kind = next((KINDS[w] for w in words if w in KINDS), kind)
    tag = element.tag.removeprefix(f"{{{SVG}}}")
    if tag == "text":
        (name,) = words
        fill = kind if name == "note" else "currentColor"
        element.attrib |= {"fill": fill, **LETTERS[name]}
    elif "box" in words:
        faint = {"fill-opacity": "0.05", "stroke-opacity": "0.3"}
        element.attrib |= {"fill": "currentColor", "stroke": "currentColor", **faint}
    elif "bar" in words or "tip" in words:
        element.set("fill", kind)
    elif "line" in words:
        element.attrib |= {"fill": "none", "stroke": kind, "stroke-width": "1.6"}
    dashed = "left-out" in words
    for child in list(element):
        if child.tag.endswith("title"):
            element.remove(child)
            continue
        coloured(child, kind)
        if dashed and child.get("stroke"):
            child.set("stroke-dasharray", "5 4")


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


def connectome(path: Path) -> None:
    """Rates of the neurons that the example trains, before and after."""
    example = runpy.run_path(str(HERE.parent / "examples" / "connectome.py"))
    brainstate.environ.set(dt=1.0 * u.ms)
    network = example["Connectome"](example["random_edges"](0.01))
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros(example["CHANNELS"]))
    some = jnp.arange(0, network.n, 10)
    target = jax.random.uniform(jax.random.key(1), some.shape, minval=5, maxval=20)

    @brainstate.transform.jit
    def rates(key):
        def step(x):
            network(x)
            return network.spikes()[some]

        xs = jax.random.uniform(key, (500, example["CHANNELS"]))
        return 1000 * brainstate.transform.for_loop(step, xs).mean(0)

    before = rates(jax.random.key(2))
    example["train"](learner, some, target, 101)
    after = rates(jax.random.key(2))
    figure = Figure(figsize=(svg.WIDTH, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(target, before, "o", mfc="none", ms=4, color="0.55", label="before")
    axes.plot(target, after, "o", ms=4, color="C0", label="after")
    axes.axline((5, 5), slope=1, color="k", lw=0.5)
    axes.set(xlabel="target (Hz)", ylabel="rate (Hz)")
    axes.legend(frameon=False)
    svg.write(figure, path)
    off = lambda now: float(jnp.sqrt(jnp.mean((now - target) ** 2)))
    print(f"{network.n} neurons, {len(some)} trained: {off(before):.1f} Hz, {off(after):.1f} Hz")


def tutorial(name: str, path: Path) -> None:
    """The figure that the blocks of a tutorial draw."""
    text, names = (HERE / "tutorials" / f"{name}.md").read_text("utf-8"), {}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(code, names)
    names["figure"].set_size_inches(svg.WIDTH, 7.5)
    svg.write(names["figure"], path)


if __name__ == "__main__":
    graph(HERE / "graph.svg")
    bench(HERE / "results" / "bench.json", HERE / "bench.svg")
    show(HERE / "show.svg")
    tutorial("ei-network", HERE / "ei.svg")
    connectome(HERE / "connectome.svg")
