"""The table of rules, and what is read from it. `BRAINTRACE_WRITE=1` writes the documents anew."""

import inspect
import os
import re
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import rules
from braintrace.compat._compile import RULES
from braintrace.compat._rule_learner import arguments_in
from braintrace.rules import ROWS

ROOT = Path(__file__).parents[2]
XS = jax.random.normal(jax.random.PRNGKey(0), (5, 2, 3))
YS = jax.random.normal(jax.random.PRNGKey(1), (5, 2, 2))


def published(row):
    """A rule's classes, as documents name them."""
    return ", ".join(f"`{n}`" for n in ("pp_prop", "ES_D_RTRL") if row.name == "pp_prop") or (
        f"`{row.learner or row.name}`"
    )


def family_rows():
    return [f'| {published(r)} | `"{r.name}"` | {r.trace} | {r.signal} |' for r in ROWS]


def source_rows():
    return [f"| {published(r)} | {r.source} |" for r in ROWS if r.source]


@pytest.mark.parametrize(
    "page, head, rows",
    [
        (
            "docs/rules.md",
            "| rule | name | trace | learning signal |\n|---|---|---|---|\n",
            family_rows(),
        ),
        ("docs/rules.md", "| rule | source |\n|---|---|\n", source_rows()),
    ],
)
def test_documents_have_the_table(page, head, rows):
    text = (ROOT / page).read_text("utf-8")
    before, _, rest = text.partition(head)
    listed = re.match(r"(?:\|.*\n)*", rest).group()
    if os.environ.get("BRAINTRACE_WRITE") == "1":
        new = before + head + "\n".join(rows) + "\n" + rest[len(listed) :]
        (ROOT / page).write_text(new, "utf-8")
        listed = "\n".join(rows) + "\n"
    assert listed.splitlines() == rows, f"{page} is old: BRAINTRACE_WRITE=1 writes it"


def test_the_equations_have_every_rule_and_say_which_refuse_windows():
    text = (ROOT / "docs" / "rules.md").read_text("utf-8")
    _, _, table = text.partition("| rule | trace | step | window |\n|---|---|---|---|\n")
    refused = {}
    for line in re.match(r"(?:\|.*\n)*", table).group().splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        refused[re.match(r"`(\w+)", cells[0]).group(1)] = cells[-1] == "refused"
    assert set(refused) == {r.learner or r.name for r in ROWS}
    options = {"pp_prop": [0.9], "osttp": [[jnp.ones((2, 4))]], "decolle": [2], "tess": [2],
               "r_stdp": [abs]}  # fmt: skip
    for row in ROWS:
        if row.make is not None:
            leak = {"leak": 0.5} if row.name in ("ottt", "otpe") else {}
            value = row.make(*options.get(row.name, ()), **leak)
            assert (value.no_windows is not None) == refused[row.learner or row.name], row.name


NUMBERS = (
    "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "twenty-one", "twenty-two",
)  # fmt: skip


def test_the_readme_counts_the_rules():
    text = (ROOT / "README.md").read_text("utf-8")
    named, relatives = re.search(
        r"\(real-time recurrent learning, (.*) and ([\w-]+) relatives\)", text
    ).groups()
    others = len(ROWS) - 1 - len(named.split(", "))  # RTRL itself, and those it names
    assert relatives == NUMBERS[others - 16]


def test_the_papers_equations_have_every_rule():
    text = (ROOT / "docs" / "rules.md").read_text("utf-8")
    _, _, table = text.partition("| rule | in the letters of its paper | here |\n|---|---|---|\n")
    listed = re.findall(r"^\| `(\w+)` \|", re.match(r"(?:\|.*\n)*", table).group(), re.M)
    assert listed == [r.learner or r.name for r in ROWS if r.source]


@pytest.mark.parametrize("row", [r for r in ROWS if r.make], ids=lambda r: r.name)
def test_every_option_is_documented_and_its_class_has_it(row):
    options = inspect.signature(row.make).parameters
    assert set(arguments_in(inspect.getdoc(row.make))) == set(options)
    if row.learner is None:  # not among the published classes
        return
    cls = getattr(braintrace, row.learner)
    assert RULES[row.name] is cls and all(RULES[a] is cls for a in row.aliases)
    arguments = inspect.signature(cls.__init__).parameters
    for name, option in options.items():
        if name == "most_entries":
            name = "snap_max_jacobian_elements"
        assert name in arguments
        assert arguments[name].default in (option.default, None)
    documented = next(c.__doc__ for c in cls.__mro__ if "Args:" in (c.__doc__ or ""))
    assert [*arguments_in(documented)] == [*arguments][1:]


# ------------------------------------------------------------------- rules as values, by compile


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = braintrace.nn.GRUCell(3, 4), braintrace.nn.Linear(4, 2)

    def update(self, x):
        return self.out(self.cell(x))


def gradient(rule, options, extra, **how):
    with brainstate.random.seed_context(0):
        learner = braintrace.compile(Net(), rule, XS[0], batch_size=2, **options, **how)

    def loss(x, y):
        return ((learner(x, **{k: f(y) for k, f in extra.items()}) - y) ** 2).sum()

    return learner, learner.etrace_grad(XS, YS, step_fn=loss, reduction="sum")


B = [jnp.asarray(np.random.RandomState(0).randn(2, 4))]
TARGET = {"y_target": lambda y: y}
VALUES = {
    "pp_prop": ({"decay_or_rank": (0.5, 0.8)}, {}),
    "snap": ({"n": 2}, {}),
    "rtrl": ({}, {}),
    "uoro": ({"projection_key": 3}, {}),
    "kf_rtrl": ({}, {}),
    "otpe": ({"leak": 0.8, "trace_clip_abs": 0.1}, {}),
    "three_factor": ({}, {"modulator": lambda y: y.sum()}),
    "r_stdp": ({"post": lambda state: state[..., 0]}, {"modulator": lambda y: y.sum()}),
    "reward_eprop": ({}, {"modulator": lambda y: y.sum()}),
    "osttp": ({"B_list": B}, TARGET),
    "decolle": ({"n_target": 2, "key": 1}, TARGET),
    "tess": ({"n_target": 2}, TARGET),
}


@pytest.mark.parametrize("name", VALUES)
def test_compile_takes_a_rule_that_is_a_value(name):
    options, extra = VALUES[name]
    value = getattr(rules, name)(**options)
    learner, grads = gradient(value, {}, extra)
    same, want = gradient(name, options, extra)
    assert type(learner) is braintrace.Learner and isinstance(same, braintrace.Learner)
    assert learner.config == same.config and learner.takes == same.takes
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_value_has_its_options_already():
    with pytest.raises(TypeError, match=r"unknown option.*leak"):
        braintrace.compile(Net(), rules.ottt(leak=0.5), XS[0], batch_size=2, leak=0.4)
    learner = braintrace.compile(
        Net(), rules.ottt(leak=0.5), XS[0], batch_size=2, vjp_method="multi-step"
    )
    assert (learner.title, learner.vjp_method) == ("ottt", "multi-step")
