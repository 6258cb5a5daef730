"""The drawing of the graph, opened in a browser."""

from dataclasses import replace

import brainstate
import jax.numpy as jnp
import pytest

import braintrace
from braintrace.graph._arrival import Silent
from braintrace.graph._certificate import Dropped, ParameterReport, Way
from braintrace.report._picture import Use, draw
from braintrace.report._svg import page as page_of

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;{}"


class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(3, 4)
        self.readout = braintrace.nn.Linear(4, 2)

    def update(self, x):
        return self.readout(self.cell(x))


def parameter(name, how, states=(), dropped=()):
    return ParameterReport(
        (name,), how, not dropped, tuple(dropped), (), tuple(states), ((9,),), 72
    )


def stacked(n, name="layer{}.weight"):
    """The picture of n layers with a weight each, then a read-out, a plain and an idle one."""
    h = [(f"layer{i}", "h") for i in range(n)]
    w = [(name.format(i),) for i in range(n)]
    line = "some/folder/model.py:{} (Model.update)"
    found, uses = {}, []
    for i in range(n):
        ways = [
            Way(h[i], w[i], (h[i],)),
            *([Way(h[i], w[i + 1], (h[i + 1],))] if i < n - 1 else []),
        ]
        dropped = [Dropped(f"{way.source} -> {way.via}", line.format(i), way) for way in ways]
        found[w[i]] = parameter(w[i][0], "trace", [h[i]], dropped)
        uses.append(Use("etp_mm", line.format(i), (w[i],), (i,)))
    found["readout",] = parameter("readout", "within-step")
    uses.append(Use("etp_mm", None, (("readout",),), ()))
    found["gain",] = parameter(
        "gain", "within-step", (), [Dropped("gain", None, Way(("gain",), None, (h[0],)))]
    )
    found["spare",] = parameter("spare", "none")
    found["mute",] = replace(
        parameter("mute", "within-step"), silent=Silent((h[0],), ("rtrl",) * 2)
    )
    return draw(found, [(i, (h[i],)) for i in range(n)], uses)


@pytest.fixture(scope="session")
def report():
    return braintrace.compile(Network(), "d_rtrl", jnp.zeros(3)).report


RECTS = """(root, selector) => [...root.querySelectorAll(selector)].filter(
    (e) => e.getClientRects().length
).map((e) => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom, e.textContent];
})"""


def rects(page, selector, root=".braintrace-picture"):
    return page.locator(root).evaluate(f"(root) => ({RECTS})(root, {selector!r})")


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def node(page, name):
    return page.locator(f'.node[aria-label^="{name}:"]:visible')


def lit(page):
    return page.locator(".node.on:visible").evaluate_all(
        "(all) => all.map((e) => e.ariaLabel.split(':')[0])"
    )


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("layers", [3, 200])
def test_texts_lie_in_their_boxes_and_apart(opened, layers, width):
    page = opened(page_of(stacked(layers)), width=width)
    texts, boxes = rects(page, "svg text"), rects(page, ".node")
    assert len(boxes) >= 3 * layers + 5 and all(right > left for left, _, right, _, _ in texts)
    (area,) = rects(page, "svg")
    for left, top, right, bottom, _ in boxes:
        assert area[0] <= left and right <= area[2] and area[1] <= top and bottom <= area[3]
    outside = page.locator(".node:visible").evaluate_all(
        """(nodes) => nodes.filter((n) => {
            const box = n.querySelector(".box").getBoundingClientRect();
            return [...n.querySelectorAll("text")].some((t) => {
                const r = t.getBoundingClientRect();
                return r.left < box.left || r.right > box.right || r.top < box.top - 1
                    || r.bottom > box.bottom + 1;
            });
        }).map((n) => n.textContent)"""
    )
    assert outside == []
    texts.sort(key=lambda r: r[1])
    for i, a in enumerate(texts):
        near = texts[i + 1 : i + 40]  # sorted by height: others are further down
        assert [b for b in near if overlap(a, b)] == []


@pytest.mark.parametrize("width", [1280, 400])
def test_page_scrolls_only_where_the_drawing_is(opened, report, width):
    page = opened(report.to_html(), width=width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    last = page.locator(".node:visible").last
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    for part in (".summary", ".legend", ".panel", "details"):
        assert page.locator(part).is_visible()


def test_pointing_at_a_weight_shows_its_way_and_its_words(opened, report):
    page = opened(report.to_html())
    panel = page.locator(".panel pre")
    node(page, "cell.Wr.weight").hover()
    assert panel.text_content() == str(report.parameters["cell", "Wr", "weight"])
    assert lit(page) == ["cell.Wr.weight", "etp_mv", "etp_mv", "cell.h", "within the step"]
    faded = node(page, "readout.weight").evaluate("(e) => +getComputedStyle(e).opacity")
    assert faded < 0.5
    page.mouse.move(5, 5)
    assert lit(page) == [] and panel.text_content() == ""


def test_click_keeps_it_and_escape_lets_it_go(opened, report):
    page = opened(report.to_html())
    wz = node(page, "cell.Wz.weight")
    wz.click()
    before = lit(page)
    assert wz.get_attribute("aria-pressed") == "true" and "cell.Wz.weight" in before
    node(page, "readout.weight").hover()
    assert lit(page) == before
    page.keyboard.press("Escape")
    assert lit(page) == [] and wz.get_attribute("aria-pressed") == "false"
    wz.click()
    node(page, "readout.weight").click()  # another one is kept instead
    assert "readout.weight" in lit(page) and wz.get_attribute("aria-pressed") == "false"
    page.locator("svg:visible").click(position={"x": 3, "y": 3})
    assert lit(page) == []


def test_keyboard_reaches_every_box(opened, report):
    page = opened(report.to_html())
    count = page.locator(".node:visible").count()
    reached = []
    for _ in range(count + 1):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.ariaLabel"))
    labels = page.locator(".node:visible").evaluate_all("(all) => all.map((e) => e.ariaLabel)")
    assert reached[-count:] == labels
    assert labels[-1].split(":")[0] in lit(page)  # what has the focus is shown
    page.keyboard.press("Enter")
    last = page.locator(".node:visible").last
    assert last.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Space")
    assert last.get_attribute("aria-pressed") == "false"


CONTRAST = """(root) => {
    const numbers = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const luminance = (c) => {
        const [r, g, b] = numbers(c).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (a, b) => {
        const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
    };
    const style = (e) => getComputedStyle(e);
    const page = style(root).backgroundColor;
    const out = [];
    for (const t of root.querySelectorAll(".node text")) {
        const box = style(t.parentNode.querySelector(".box")).fill;
        out.push([t.textContent, ratio(style(t).fill, box)]);
    }
    for (const t of root.querySelectorAll(".head"))
        out.push([t.textContent, ratio(style(t).fill, page)]);
    for (const t of root.querySelectorAll(".summary, .legend li, .legend b, summary"))
        out.push([t.textContent, ratio(style(t).color, page)]);
    for (const p of root.querySelectorAll(".edge path.line"))
        out.push(["edge", 1.5 + ratio(style(p).stroke, page)]);  // lines need 3 only
    return [page, style(document.body).backgroundColor, out];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(opened, scheme):
    page = opened(page_of(stacked(3)), scheme=scheme)
    ground, body, found = page.locator(".braintrace-picture").evaluate(CONTRAST)
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")
    assert scheme == "light" or body == ground
    assert len(found) > 40 and [x for x in found if x[1] < 4.5] == []


def test_two_drawings_in_one_page_do_not_meet(opened, report):
    text = f"<!doctype html><meta charset=utf-8>{report._repr_html_()}{report._repr_html_()}"
    page = opened(text)
    first, second = (page.locator(".braintrace-picture").nth(i) for i in (0, 1))
    assert first.get_attribute("id") != second.get_attribute("id")
    second.locator(".node:visible").nth(1).click()
    assert second.locator(".node.on:visible").count() == 5
    assert first.locator(".node.on").count() == 0
    assert first.locator(".panel pre").text_content() == ""
    assert second.locator(".panel pre").text_content().startswith("cell.Wr.weight: within-step")


def test_search_finds_parameters(opened):
    page = opened(page_of(stacked(40)))
    search = page.locator(".search")
    search.fill("LAYER37.")
    assert "layer37.weight" in lit(page) and "layer3.weight" not in lit(page)
    box = node(page, "layer37.weight").bounding_box()
    assert 0 <= box["y"] and box["y"] + box["height"] <= 800  # it is brought into sight,
    assert search.bounding_box()["y"] >= 0  # and what is typed stays there
    search.fill("")
    assert lit(page) == []
    assert not opened(page_of(stacked(2))).locator(".search").is_visible()


def test_without_scripts_the_drawing_and_its_words_are_there(opened, report):
    page = opened(report.to_html(), scripts=False)
    assert page.locator("svg .node:visible").count() == 10
    assert not page.locator(".panel").is_visible() and not page.locator(".search").is_visible()
    page.locator("summary").click()
    words = page.locator("details pre").first
    assert words.is_visible() and words.text_content().startswith("cell.Wz.weight: trace")


def test_names_are_text_whatever_they_are(opened):
    page = opened(page_of(stacked(2, EVIL)))
    page.locator(".node:visible").first.click()
    assert page.locator(".panel pre").text_content().startswith(EVIL.format(0))
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_drawing_names_rule_and_model_and_the_step_is_no_state(opened, report, width):
    page = opened(report.to_html(), width=width)
    assert page.locator(".title").text_content() == "d_rtrl of Network"
    assert page.title() == "d_rtrl of Network · braintrace"
    tops = {text: top for _, top, _, _, text in rects(page, ".head")}
    assert list(tops) == ["parameters", "operators", "states", "no state"]
    (state,) = [r for r in rects(page, ".node") if r[4].startswith("cell.h")]
    (step,) = [r for r in rects(page, ".node") if r[4].startswith("within")]
    assert state[3] < tops["no state"] < step[1]


@pytest.mark.parametrize("width", [390, 360])
def test_phone_shows_all_columns_and_a_tap_explains(opened, report, width):
    page = opened(report.to_html(), width=width, height=740, touch=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    scroll = page.locator(".scroll")
    assert scroll.evaluate("(e) => e.scrollWidth <= e.clientWidth")  # nothing is beyond the edge
    sizes = page.locator("svg:visible text").evaluate_all(
        "(all) => all.map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 10.5
    wr, panel = node(page, "cell.Wr.weight"), page.locator(".panel pre")
    wr.tap()
    words = str(report.parameters["cell", "Wr", "weight"])
    assert panel.text_content() == words and wr.get_attribute("aria-pressed") == "true"
    box = page.locator(".panel").bounding_box()
    assert box["y"] + box["height"] <= 740  # it is in sight
    node(page, "readout.weight").tap()
    assert panel.text_content() == str(report.parameters["readout", "weight"])
    node(page, "readout.weight").tap()
    assert panel.text_content() == "" and lit(page) == []
