"""Names that a terminal would act on, or no file can hold, are escaped wherever they are shown."""

import jax.numpy as jnp
import pytest

import braintrace


@pytest.mark.parametrize("name", ["\x1b[2J", "a\ud800b", "a\r\nb", "\u202eabc"])
def test_names_are_shown_escaped(name, tmp_path, capsys):
    def step(params, h, x):
        h = jnp.tanh(0.5 * h + braintrace.matmul(x, params[name]))
        return h, h

    net = braintrace.online(step)
    net.init({name: jnp.ones((2, 3))}, jnp.zeros(3), jnp.ones(2))
    escaped = name.encode("unicode_escape").decode()
    net.report.draw(color=False)
    net.report.to_html(tmp_path / "a.html")
    for text in (capsys.readouterr().out, str(net.report), (tmp_path / "a.html").read_text()):
        assert escaped in text and name not in text


def test_other_letters_stay():
    def step(params, h, x):
        h = jnp.tanh(0.5 * h + braintrace.matmul(x, params["größe"]))
        return h, h

    net = braintrace.online(step)
    net.init({"größe": jnp.ones((2, 3))}, jnp.zeros(3), jnp.ones(2))
    assert "größe" in str(net.report)
