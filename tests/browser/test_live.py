"""The page that learns while one watches: its numbers are those of Python, and its error falls."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "live"))
import build  # noqa: E402

TEXT = (DOCS / "live.html").read_text("utf-8")
SHOWN, PERIOD, ASKED = 120, 24, 8


def path():
    t = np.arange(SHOWN * PERIOD)
    x = 0.6 * np.sin(0.05 * t) + 0.3 * np.sin(0.13 * t)
    y = 0.5 * np.cos(0.041 * t) - 0.3 * np.sin(0.09 * t)
    return np.stack([x, y], 1).astype(np.float32)


def losses(rule):
    """What the learner of a rule does in Python: it learns at the last steps of each period."""
    net, params, carry = build.start(rule)
    train = net.train(build.loss, build.OPTIMIZER)
    shown = path()[::PERIOD]
    xs = np.zeros((SHOWN, PERIOD, build.INPUTS), np.float32)
    xs[:, 0] = np.concatenate([shown, np.ones((SHOWN, 1))], 1)
    ys = np.repeat(shown[:, None], ASKED, 1)

    def period(before, told):
        params, opt, carry = before
        x, y = told
        carry, _ = net.scan(params, carry, x[:-ASKED])
        params, opt, carry, found = train(params, opt, carry, x[-ASKED:], y)
        return (params, opt, carry), found

    start = params, build.OPTIMIZER.init(params), carry
    return np.asarray(jax.jit(lambda s: jax.lax.scan(period, s, (xs, ys)))(start)[1]).reshape(-1)


@pytest.mark.parametrize("rule", ["d_rtrl", "no_trace"])
def test_numbers_are_those_of_python(opened, rule):
    page = opened(TEXT)
    page.wait_for_selector("body[data-ready]")
    points = path().astype(float).tolist()
    found = page.evaluate("([path, rule]) => recorded(path, rule)", [points, rule])
    compared = 50 * ASKED  # Adam amplifies what is rounded differently, ever more
    assert np.abs(np.array(found) - losses(rule))[:compared].max() < 1e-4


def test_five_seconds_show_what_traces_are_for(opened):
    """While nobody points: the error of the fifth second, with and without them, and at first."""
    page = opened(TEXT)
    page.wait_for_selector("body[data-ready]")
    with_traces, without = (
        np.array(page.evaluate("rule => watched(5, rule)", rule)).reshape(5, -1).mean(1)
        for rule in ("d_rtrl", "no_trace")
    )
    assert with_traces[-1] < 0.3 * without[-1]
    assert with_traces[1] < 0.4 * without[1]  # it shows after two
    assert with_traces[-1] < 0.15 * with_traces[0] < without[0]


def test_error_falls_with_traces_only(opened):
    page = opened(TEXT)
    page.wait_for_selector("body[data-ready]")
    points = path().astype(float).tolist()
    last = {}
    for rule in ("d_rtrl", "no_trace", "frozen"):
        found = page.evaluate("([path, rule]) => recorded(path, rule)", [points, rule])
        last[rule] = np.mean(found[-160:])
    assert last["d_rtrl"] < 0.3 * min(last["no_trace"], last["frozen"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_and_switches(opened, scheme, width):
    page = opened(TEXT, scheme=scheme, width=width, touch=width < 500)
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("[data-rule=no_trace]")
    assert page.get_attribute("[data-rule=no_trace]", "aria-pressed") == "true"
    page.wait_for_function("document.getElementById('mean').textContent.startsWith('error')")
