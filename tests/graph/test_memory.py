"""The memory of the analysis: reported, and refused where the machine has less."""

import jax.numpy as jnp
import pytest

import braintrace
from braintrace.graph import _memory


def step(w, h, x):
    # The samples meet, so that none can stand for the others.
    h = 0.9 * h + jnp.tanh(x @ w) + 0.1 * h.mean(0)
    return h, h


def learner(units):
    w, h = jnp.ones((2, units)), jnp.zeros((3, units))
    net = braintrace.online(step, "d_rtrl")
    net.init(w, h, jnp.ones((3, 2)))
    return net


def test_memory_of_the_analysis_is_in_the_report():
    small, large = (learner(n).report for n in (4, 40))
    assert 0 < small.analysis_bytes < large.analysis_bytes <= 20 * small.analysis_bytes
    assert large.analysis_bytes > 8 * 3 * 40  # a set of one source per element of the state
    text = f"Memory of the analysis: {small.analysis_bytes:,} bytes"
    assert text in small.to_str(3) and text not in small.to_str(2)


def test_more_memory_than_the_machine_has_is_refused(monkeypatch):
    monkeypatch.setattr(_memory, "available", lambda: 1000)
    with pytest.raises(braintrace.NotSupportedError) as error:
        learner(40)
    text = str(error.value)
    assert "takes more than 0.000" in text and "GB of memory are left" in text
    assert "why:" in text and "do:" in text


def test_memory_of_the_machine_is_known_where_the_system_says_it(monkeypatch):
    free = _memory.available()
    assert free is None or free > 2**20
    monkeypatch.setattr(_memory, "open", lambda *args: (_ for _ in ()).throw(OSError()), False)
    assert _memory.available() is None
    assert learner(4).report.analysis_bytes > 0
