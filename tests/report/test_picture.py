"""The drawing of a compiled graph: what it shows, as data, as a page and in a terminal."""

import io
import json
import re
from html.parser import HTMLParser

import brainstate
import jax.numpy as jnp
import pytest

import braintrace
from braintrace.graph._certificate import Dropped, ParameterReport, Way
from braintrace.report._layout import NARROW, WIDE, place
from braintrace.report._picture import Column, Standing, Use, draw
from braintrace.report._skeleton import skeleton
from braintrace.report._svg import page
from braintrace.report._tree import tree

EVIL = '<script>alert("x")</script>&\'"'


class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(2, 3)
        self.readout = braintrace.nn.Linear(3, 2)
        self.gain = brainstate.ParamState(jnp.ones(2))
        self.spare = brainstate.ParamState(jnp.zeros(3))

    def update(self, x):
        return self.readout(self.cell(x)) * self.gain.value


@pytest.fixture(scope="module")
def report():
    return braintrace.compile(Network(), "d_rtrl", jnp.zeros(2)).report


@pytest.fixture(scope="module")
def exact():
    return braintrace.compile(Network(), "rtrl", jnp.zeros(2)).report


def named(picture):
    """Links by the names of their boxes; an operator has that of its first parameter."""
    name = {n.key: n.lines[0] for n in picture.nodes}
    for e in picture.edges:
        if e.source.startswith("p") and e.source != "plain" and e.target.startswith("o"):
            name[e.target] = f"op {name[e.source]}"
    return {
        (name[e.source], name[e.target], e.left_out): {name[k] for k in e.parameters}
        for e in picture.edges
    }


WZ, WR, WH = "cell.Wz.weight", "cell.Wr.weight", "cell.Wh.weight"


def test_picture_of_a_gru_shows_traces_the_step_and_what_is_left_out(report):
    links = named(report.picture)
    kept = {(a, b) for a, b, left_out in links if not left_out}
    assert kept == {
        *((w, f"op {w}") for w in (WZ, WR, WH, "readout.weight")),
        (f"op {WZ}", "cell.h"),
        (f"op {WH}", "cell.h"),
        (f"op {WR}", "within the step"),
        ("op readout.weight", "within the step"),
        ("gain", "plain computation"),
        ("plain computation", "within the step"),
    }
    left_out = {(a, b) for a, b, left_out in links if left_out}
    assert left_out == {*(("cell.h", f"op {w}") for w in (WZ, WR, WH)), (f"op {WR}", f"op {WH}")}
    assert links["cell.h", f"op {WZ}", True] == {WZ, WH}  # whose gradients miss it
    assert WR in links[f"op {WH}", "cell.h", False]  # the way goes on there


def test_picture_takes_standings_from_the_certificate(report, exact):
    standing = {n.lines[0]: n.standing for n in report.picture.nodes if n.standing}
    assert standing == {
        WZ: Standing.APPROXIMATE,
        WR: Standing.SHORT,
        WH: Standing.APPROXIMATE,
        "readout.weight": Standing.STEP,
        "gain": Standing.STEP,
        "spare": Standing.UNTOUCHED,
    }
    assert report.picture.counts[Standing.APPROXIMATE] == 2
    assert {n.standing for n in exact.picture.nodes if n.lines[0] in (WZ, WR, WH)} == {
        Standing.EXACT
    }
    assert not any(e.left_out for e in exact.picture.edges)
    assert (f"op {WR}", "cell.h", False) in named(exact.picture)
    texts = {n.lines[0]: n.text for n in report.picture.nodes}
    assert texts[WR] == str(report.parameters["cell", "Wr", "weight"])


def test_ways_of_the_certificate_say_what_its_words_say(report):
    used = [p for p in report.parameters.values() if p.how != "none"]
    ways = [d for p in used for d in p.dropped]
    assert ways and all(d.way is not None for d in ways)
    for d in ways:
        parts = [d.way.source, *([d.way.via] if d.way.via else [])]
        chain = [".".join(p) for p in parts] + [", ".join(".".join(t) for t in d.way.targets)]
        assert d.text.startswith(" -> ".join(chain))


def parameter(name, how="trace", states=(), dropped=(), exact=None):
    exact = not dropped if exact is None else exact
    return ParameterReport((name,), how, exact, tuple(dropped), (), tuple(states), (), 0)


def stack(n):
    """A stack of layers, each with one weight, whose states reach all later ones."""
    h = [(f"h{i}",) for i in range(n)]
    w = [(f"w{i}",) for i in range(n)]
    parameters, uses = {}, []
    for i in range(n):
        ways = [Way(w[i], w[k], tuple(h[k:])) for k in range(i + 1, n)]
        ways += [Way(h[i], w[k], tuple(h[k:])) for k in range(i, n)]
        dropped = [Dropped(f"{way.source} -> {way.via}", None, way) for way in ways]
        parameters[w[i]] = parameter(w[i][0], states=[h[i]], dropped=dropped)
        uses.append(Use("op", "file.py:1 (f)", (w[i],), (i,)))
    return parameters, [(i, (h[i],)) for i in range(n)], uses


def test_far_links_of_a_stack_follow_from_near_ones():
    links = named(draw(*stack(5)))
    left_out = {(a, b) for a, b, left_out in links if left_out}
    own = {(f"h{i}", f"op w{i}") for i in range(5)}
    assert left_out == own | {(f"h{i}", f"op w{i + 1}") for i in range(4)}
    # The first weight is still about all that it leaves out.
    assert all("w0" in links[f"h{i}", f"op w{i + 1}", True] for i in range(4))


def test_links_within_a_circle_of_groups_are_kept():
    links = {(f"o{i}", f"g{i}", False): {"p": 1} for i in range(2)}
    circle = {(f"g{i}", f"o{k}", True): {"p": 1} for i in range(2) for k in range(2)}
    assert skeleton(links | circle) == links | circle


def test_operators_at_one_line_with_the_same_weights_are_one_box():
    class Loop(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = braintrace.nn.Linear(2, 2)

        def init_state(self, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros(2))

        def update(self, x):
            drive = sum(self.linear(k * x) for k in range(3))
            self.h.value = 0.5 * self.h.value + drive
            return self.h.value

    picture = braintrace.compile(Loop(), "d_rtrl", jnp.zeros(2)).report.picture
    (operator,) = [n for n in picture.nodes if n.column == Column.OPERATOR]
    assert operator.lines[0].endswith(" × 3")


def overlapping(boxes):
    return [
        (a.node.key, b.node.key)
        for a in boxes
        for b in boxes
        if a is not b
        and a.x < b.x + b.width
        and b.x < a.x + a.width
        and a.y < b.y + b.height
        and b.y < a.y + a.height
    ]


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
@pytest.mark.parametrize("make", [lambda r: r.picture, lambda r: draw(*stack(40))])
def test_boxes_lie_apart_and_inside(report, make, form):
    layout = place(make(report), form)
    assert overlapping(layout.boxes) == []
    for b in layout.boxes:
        assert 0 <= b.x and b.x + b.width <= layout.width
        assert 0 <= b.y and b.y + b.height <= layout.height
    ends = [end for c in layout.curves for end in (c.start, c.end)]
    assert len(set(ends)) == len(ends)


class Reader(HTMLParser):
    """Tags, scripts and texts of a page, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.texts, self.links = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.links += [v for k, v in attributes if k in ("src", "href", "data", "action")]

    def handle_data(self, data):
        (self.scripts if self.tags and self.tags[-1][0] == "script" else self.texts).append(data)


def test_page_escapes_names_of_the_user():
    uses = [Use(EVIL, f"{EVIL}.py:1 (f)", ((EVIL,),), (0,))]
    picture = draw({(EVIL,): parameter(EVIL, states=[(EVIL,)])}, [(0, ((EVIL,),))], uses)
    read = Reader(page(picture))
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not any("alert" in script for script in read.scripts)
    assert sum(EVIL in text for text in read.texts) >= 3
    assert all(EVIL in a["aria-label"] for _, a in read.tags if "node" in a.get("class", ""))


def test_page_needs_nothing_besides_itself(report):
    text = report.to_html()
    read = Reader(text)
    assert read.links == []
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|import\(", text)
    assert "default-src 'none'" in text
    boxes = [a for _, a in read.tags if "node" in a.get("class", "").split()]
    assert len(boxes) == 2 * len(place(report.picture).boxes)  # a wide drawing and a narrow one
    assert text == report.to_html()


def test_notebook_outputs_do_not_collide(report):
    both = report._repr_html_() + report._repr_html_()
    found = [a["id"] for _, a in Reader(both).tags if "id" in a]
    assert len(found) == 2 and len(set(found)) == 2
    assert all(json.dumps(name) in both for name in found)  # the script of each finds its own


def test_page_is_written_whole_or_not_at_all(report, tmp_path, monkeypatch):
    path = tmp_path / "graph.html"
    text = report.to_html(path)
    assert path.read_text("utf-8") == text
    assert [f.name for f in tmp_path.iterdir()] == ["graph.html"]

    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    path.write_text("before")
    with pytest.raises(OSError, match="full"):
        report.to_html(path)
    assert path.read_text() == "before"
    assert [f.name for f in tmp_path.iterdir()] == ["graph.html"]


def test_page_needs_a_folder(report, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder .*missing\n.*folder"):
        report.to_html(tmp_path / "missing" / "graph.html")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        report.to_html(tmp_path)


TREE = """\
6 parameters: 2 trace, not exact; 2 within-step, exact; 1 within-step, not exact; 1 untouched

→ cell.h  (group 0)
├── cell.Wz.weight  etp_mv at LINE  trace, not exact · 144 bytes
├── cell.Wh.weight  etp_mv at LINE  trace, not exact · 144 bytes
├┄┄ cell.Wr.weight  through cell.Wh.weight  left out
└┄┄ from here through cell.Wz.weight, cell.Wr.weight, cell.Wh.weight  left out

→ within the step  (no trace)
├── cell.Wr.weight  etp_mv at LINE  within-step, not exact
├── readout.weight  etp_mv at LINE  within-step, exact
└── gain  plain computation  within-step, exact

nowhere
└── spare  untouched

── in the gradient   ┄┄ left out
"""


def spaced(text):
    text = re.sub(r"test_picture.py:\d+ \(\S+\)", "LINE", text)
    return re.sub(r"(?<=\S) {2,}(?=\S)", "  ", text.replace("left out   ┄", "left out ┄"))


def test_tree_for_a_terminal(report):
    out = io.StringIO()
    report.draw(file=out)
    assert spaced(out.getvalue()) == spaced(TREE)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_are_for_terminals_that_want_them(report, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal, plain = Terminal(), io.StringIO()
    report.draw(file=terminal)
    report.draw(file=plain)
    assert "\x1b[33m" in terminal.getvalue() and "\x1b" not in plain.getvalue()
    assert re.sub(r"\x1b\[\d+m", "", terminal.getvalue()) == plain.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    wants_none = Terminal()
    report.draw(file=wants_none)
    assert wants_none.getvalue() == plain.getvalue()
    forced = io.StringIO()
    report.draw(file=forced, color=True)
    assert forced.getvalue() == terminal.getvalue()


def test_tree_is_ascii_where_nothing_else_can_be_written(report):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    report.draw(file=out)
    out.seek(0)
    text = out.read()
    assert "|-- cell.Wz.weight" in text and "`-- spare" in text and "|.. cell.Wr.weight" in text


def test_title_names_the_rule_and_the_model(report):
    def step(w, h, x):
        h = jnp.tanh(0.9 * h + x @ w)
        return h, h

    net = braintrace.online(step, "d_rtrl")
    net.init(jnp.ones((2, 3)), jnp.zeros(3), jnp.zeros(2))
    cell = braintrace.nn.ValinaRNNCell(2, 3, w_init=1.0)

    def network(x):
        return cell(x)

    function = braintrace.compile(network, "rflo", jnp.zeros(2))
    titles = [r.picture.title for r in (report, net.report, function.report)]
    place = "test_title_names_the_rule_and_the_model.<locals>.network"
    assert titles == ["d_rtrl of Network", "d_rtrl of step", f"rflo of {place}"]
    assert "<title>d_rtrl of Network · braintrace</title>" in report.to_html()
    assert function.graph.report.picture.title == place  # a graph has no rule


def test_empty_picture_is_drawn():
    picture = draw({}, [], [])
    assert place(picture).boxes == () and tree(picture).startswith("0 parameters")
