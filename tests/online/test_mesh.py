"""Learners on several devices: gradients, placements, and what the compiled program sends.

One process with eight devices computes everything (`mesh_program`), and each test looks at a part.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import braintrace
from thinned import ALL

PROGRAM = Path(__file__).with_name("mesh_program.py")
PARTS = ("gradients", "large", "learner", "refusals")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Computed by the first worker that asks; the others wait for its file."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    found = shared / "mesh.json"
    try:
        (shared / "mesh.lock").touch(exist_ok=False)
    except FileExistsError:
        for _ in range(3000):
            if found.exists():
                break
            time.sleep(0.1)
    else:
        text = computed()
        part = found.with_suffix(".part")
        part.write_text(text)
        part.rename(found)
    return json.loads(found.read_text())


def computed():
    source = Path(braintrace.__file__).parents[1]
    env = os.environ | {
        "PYTHONPATH": str(source),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }
    parts = (*PARTS, "sparse", "placements") if ALL else PARTS
    run = subprocess.run(
        [sys.executable, str(PROGRAM), *parts], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout.splitlines()[-1]


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "rtrl", "mixture"])
def test_gradients_do_not_depend_on_the_devices(results, rule):
    assert results["gradients"][rule]["error"] < 1e-9


def test_traces_are_split_over_samples_and_units(results):
    places = {rule: results["gradients"][rule]["places"] for rule in ("d_rtrl", "pp_prop", "rtrl")}
    state, gradient, *traces = places["d_rtrl"]
    assert (state, gradient) == ("P('data', 'model')", "P(None, 'model')")
    assert set(traces) == {"P('data', None, 'model')"}
    assert {"P('data', 'model')", "P('data',)"} <= set(places["pp_prop"])  # of units, of inputs
    assert set(places["rtrl"][2:]) == {"P(None, None, 'data')", "P(None, None, None, 'data')"}


def test_formulas_of_the_page_are_those_of_the_program(results):
    r = results["gradients"]
    assert r["trace"] == r["trace by formula"]
    assert ["all-gather", r["gather by formula"]] in r["sent"]
    # The states of a block are gathered or moved. Gradients are reduced, those of element-wise
    # weights in parts.
    state, gradient = r["gather by formula"], r["gradient by formula"]
    most = {"all-gather": 2 * state, "all-to-all": 2 * state, "all-reduce": 2 * gradient}
    assert all(size <= most[kind] for kind, size in r["sent"])


def test_of_split_samples_only_gradients_are_sent(results):
    r = results["large"]
    (kind, size), *others = r["sent"]
    assert kind == "all-reduce" and not others
    assert size == r["gradient"] + r["losses"]


def test_temporary_memory_is_split_with_the_samples(results):
    one, eight = results["large"]["temporary"]
    assert eight <= one / 5


def test_learner_is_placed_and_trains_alike(results):
    r = results["learner"]
    *errors, same = r["training"]
    assert max(errors) < 1e-9 and same
    assert r["first"]["etraces.Wz.weight+Wz.weight[1]"] == [
        "P('data', 'model')",
        "P('data', None, 'model')",
    ]
    assert r["first"]["model4compile.Wr.weight"] == ["P('model',)", "P(None, 'model')"]
    assert r["moments"] == ["P('model',)", "P()", "P(None, 'model')"]


def test_placements_survive(results):
    r = results["learner"]
    assert r["load"] and r["reset"] and r["resized"] == [True, [4, 8]]
    assert r["other mesh"] == [True, 4]


def test_what_is_whole_stays_so_and_compiles_once(results):
    same, moments, *programs = results["learner"]["own"]
    assert same and moments == ["P()", "P()"]
    assert programs[0] > 0 and programs[-1] == 0


def test_report_names_weights_that_are_not_split(results):
    count, first = results["learner"]["whole"]
    assert count == 6  # weights and biases of the second layer
    assert first == "layers.1.Wz.weight is whole on each of the 8 devices of axis 'model'."


def test_number_of_samples_that_does_not_fit_is_refused(results):
    assert "7 samples over the 4 devices of axis 'data'" in results["learner"]["7 samples"]


REFUSED = {
    "explicit arrays": "NotSupportedError: arrays along explicit axes of a mesh",
    "set_mesh": "NotSupportedError: a learner with a mesh inside of a jax.set_mesh",
    "checked shard_map": "pass check_vma=False to jax.shard_map",
    "mesh in shard_map": "NotSupportedError: a learner with a mesh inside of shard_map",
    "no samples": "batch='data', and the step has no axis of samples",
    "5 samples": "5 samples over the 2 devices of axis 'data'",
    "7 units": "no weight can be split over the 4 devices of axis 'model': a, w, u",
    "vmap": "NotSupportedError: vmap=True with a mesh",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_why_and_what_to_do(results, name):
    text = results["refusals"][name]
    assert REFUSED[name] in text and "why:" in text and "do:" in text


if ALL:

    def test_synapses_are_split(results):
        r = results["sparse"]
        assert r["error"] < 1e-9 and r["most"] < r["trace"]

    def test_arrays_of_the_user_stay_where_they_are(results):
        assert results["placements"]["own"] == ["P('model',)", "P(None, 'model')"] * 2

    def test_explicit_axes_and_shard_map(results):
        assert results["placements"]["explicit"] < 1e-9
        assert results["placements"]["shard_map"] < 1e-9

    def test_page_runs_on_eight_devices(results):
        assert results["placements"]["page"] == 8

    def test_command_trains_alike(results):
        one, eight = results["placements"]["train"]
        assert len(one) == 2 and one == pytest.approx(eight, rel=1e-6)


# ----------------------------------------------------------------------------------- arguments


def step(params, h, x):
    h = jnp.tanh(h + x @ params)
    return h, h


ARGUMENTS = [
    ({"batch": "data"}, ValueError, "batch='data' without a mesh"),
    ({"mesh": 8, "batch": "data"}, TypeError, "the mesh has type int"),
    ({"batch": "samples"}, ValueError, r"no axis 'samples'(.|\n)*its axes are 'data', 'model'"),
    ({}, ValueError, "name an axis for batch or units"),
    ({"batch": "data", "units": "data"}, ValueError, "its own axis of the mesh"),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), ARGUMENTS)
def test_arguments_are_checked(arguments, kind, text):
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with_mesh = arguments if "without" in text else {"mesh": mesh} | arguments
    with pytest.raises(kind, match=text):
        braintrace.online(step, **with_mesh)


def test_learner_needs_a_mesh_to_be_spread():
    learner = braintrace.compile(braintrace.nn.GRUCell(2, 3), "d_rtrl", jnp.ones(2))
    with pytest.raises(TypeError, match="the mesh is None"):
        learner.shard(None)
