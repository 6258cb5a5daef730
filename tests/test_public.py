"""The public surface: names, where they say they live, and docstrings whose examples run."""

import doctest
import inspect
import subprocess
import sys
import warnings

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
import braintrace.data
import braintrace.nir
import braintrace.nn
import braintrace.show
import braintrace.tasks
import braintrace.verify

MODULES = (
    *(braintrace, braintrace.data, braintrace.nn, braintrace.nir),
    *(braintrace.show, braintrace.tasks, braintrace.verify),
)
HOMES = {m.__name__: m for m in MODULES}


def public(module):
    """Classes and functions a module re-exports."""
    names = getattr(module, "__all__", None) or vars(module)
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if callable(value)}


OBJECTS = [
    pytest.param(home, name, value, id=f"{home}.{name}")
    for home, module in HOMES.items()
    for name, value in public(module).items()
]


@pytest.mark.parametrize("home, name, value", OBJECTS)
def test_public_object_has_a_docstring_and_says_where_it_lives(home, name, value):
    doc = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    assert doc and doc.strip()
    first = doc.strip().splitlines()[0]
    assert first.endswith((".", ":")), first
    assert value.__module__ == home


def examples(value, name):
    """The examples in a docstring, and in those of a class's methods."""
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value), exclude_empty=True)
    found = finder.find(value, name, module=False, globs={"__name__": "__main__"})
    return [test for test in found if test.examples]


WITH_EXAMPLES = [case for case in OBJECTS if examples(case.values[2], case.values[1])]
CLASSES = [case for case in OBJECTS if inspect.isclass(case.values[2])]


@pytest.mark.parametrize("home, name, value", WITH_EXAMPLES)
def test_public_docstring_examples_run(home, name, value):
    for test in examples(value, name):
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        out = []
        runner.run(test, out=out.append)
        assert runner.tries and not runner.failures, "".join(out)


def test_there_are_examples_and_classes():
    assert len(WITH_EXAMPLES) > 40 and len(CLASSES) > 60


@pytest.mark.parametrize("home, name, value", CLASSES)
def test_public_class_documents_its_public_methods(home, name, value):
    missing = [
        key
        for key, member in vars(value).items()
        if not key.startswith("_")
        and inspect.isfunction(member)
        and key not in ("tree_flatten", "tree_unflatten")
        and not inspect.getdoc(member)
    ]
    assert not missing


# What the two published versions of the interface offer; nothing of it may go.
NAMES = """
    __version__ __version_info__ nn compile matmul element_wise conv sparse_matmul lora_matmul
    grouped_matmul embedding einsum ETPPrimitive register_primitive SingleStepData MultiStepData
    ETraceAlgorithm ETraceVjpAlgorithm EligibilityTrace ParamDimVjpAlgorithm D_RTRL
    IODimVjpAlgorithm pp_prop ES_D_RTRL EProp OSTLRecurrent OSTLFeedforward OTTT OTPE OSTTP
    PresynapticTrace KappaFilter FixedRandomFeedback SnAp UORO RandomProjectionVjpAlgorithm
    ThreeFactor DNI SyntheticGradient train_synthetic_gradient ETraceConfig SequenceDriverMixin
    ETraceVmap ETraceGraphExecutor ETraceVjpGraphExecutor ETraceGraph compile_etrace_graph
    HiddenGroup find_hidden_groups_from_minfo find_hidden_groups_from_module HiddenParamOpRelation
    find_hidden_param_op_relations_from_minfo find_hidden_param_op_relations_from_module ModuleInfo
    extract_module_info HiddenPerturbation add_hidden_perturbation_from_minfo
    add_hidden_perturbation_in_module CompilationRecord DiagnosticKind DiagnosticLevel
    CompilationReport ControlFlowPolicy GradExpon NonFiniteError NotSupportedError CompilationError
""".split()
MORE = """
    online Online choose Choice Record
    Carry rules verify show Checkpoint RTRL KFRTRL RFLO DECOLLE STLLR NoTrace Dropped
    ParameterReport PathClassification Silent Advice RuleCost Suggestion Learner ModuleLearner
    nir
    compare CompareResult tasks data rl wiring
""".split()


def test_public_names_are_the_known_ones_and_ours():
    assert sorted(braintrace.__all__) == sorted([*NAMES, *MORE])


@pytest.mark.parametrize("name", NAMES)
def test_public_name_exists(name):
    assert getattr(braintrace, name) is not None


def test_star_import_gives_the_public_names_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from braintrace import *", namespace := {})
    assert {*braintrace.__all__} == {*namespace} - {"__builtins__"}


def test_dir_lists_what_is_not_there_for_compatibility():
    assert len(dir(braintrace)) <= 60
    assert {*dir(braintrace)} < {*braintrace.__all__}
    hidden = {*braintrace.__all__} - {*dir(braintrace)}
    assert hidden < {*NAMES, *MORE} and {"D_RTRL", "ETraceGraph", "GradExpon"} < hidden
    assert {"compile", "online", "matmul", "compare"} < {*dir(braintrace)}


ONLINE = """
import sys
import jax.numpy as jnp
import braintrace
def step(params, h, x):
    h = jnp.tanh(0.9 * h + braintrace.matmul(x, params))
    return h, h
net = braintrace.online(step, braintrace.rules.d_rtrl())
params, xs = jnp.ones((3, 4)), jnp.ones((10, 3))
carry = net.init(params, jnp.zeros(4), xs[0])
grads, _ = net.grad(lambda out: (out**2).sum())(params, carry, xs)
assert grads.shape == (3, 4) and net.report.parameters
try:
    braintrace.Online_
except AttributeError:
    pass
rooms = ("lab", "compat", "learner", "frontend", "nn")
others = ("brainstate", *(f"braintrace.{room}" for room in rooms))
loaded = [m for m in sys.modules if m.startswith(others)]
assert not loaded, loaded
"""


COMPILED = """
import sys
import jax.numpy as jnp
import braintrace
cell = braintrace.nn.GRUCell(3, 4)
learner = braintrace.compile(cell, braintrace.rules.d_rtrl(), jnp.zeros(3))
grads = learner.etrace_grad(jnp.ones((5, 3)), step_fn=lambda x: learner(x).sum())
learner.reset()
assert grads and learner.report.parameters and learner.memory
loaded = [m for m in sys.modules if m.startswith(("braintrace.lab", "braintrace.compat"))]
assert not loaded, loaded
assert not isinstance(learner, braintrace.D_RTRL) and "braintrace.compat" in sys.modules
"""


LAZY = """
import pickle, sys, threading
import braintrace
assert braintrace.__version_info__ and not hasattr(braintrace, "__wrapped__")
assert "jax" not in sys.modules
seen = []
use = lambda: seen.append(braintrace.compile)
threads = [threading.Thread(target=use) for _ in range(4)]  # at once, while it is imported
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(seen) == 4 and len(set(seen)) == 1 and seen[0].__module__ == "braintrace"
assert braintrace.learner.compile is vars(braintrace)["compile"]  # from now on without a detour
assert pickle.dumps(braintrace.D_RTRL).count(b"learner") == 0
assert pickle.loads(b"cbraintrace\\nD_RTRL\\n.") is braintrace.D_RTRL
"""


@pytest.mark.parametrize(
    "first",
    [
        LAZY,
        ONLINE,
        COMPILED,
        "from braintrace import *\nassert nn.GRUCell and compile",
        "import braintrace.nn\nassert braintrace.compile and braintrace.verify.compare",
        "import jax, braintrace; jax.config.update('jax_enable_x64', True)\n"
        "braintrace.matmul; assert jax.config.jax_enable_x64",
        *(
            "import jax; jax.config.update('jax_enable_x64', True)\n"
            f"import braintrace.{package}; assert jax.config.jax_enable_x64"
            for package in ("nn", "nir", "frontend", "learner", "show", "verify", "compat")
        ),
    ],
)
def test_public_names_come_with_their_first_use(first):
    found = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


# Arguments that programs pass by position, in the published order.
ORDERS = {
    "compile": "model algorithm example_inputs",
    "matmul": "x weight bias",
    "grouped_matmul": "x weight bias",
    "embedding": "indices weight",
    "einsum": "equation x weight",
    "conv": "x kernel bias",
    "sparse_matmul": "x weight",
    "lora_matmul": "x B A",
    "register_primitive": "name impl_fn",
    "ParamDimVjpAlgorithm": "model name vjp_method fast_solve trace_dtype chunked_trace "
    "control_flow config random_feedback_key snap_max_jacobian_elements",
    "IODimVjpAlgorithm": "model decay_or_rank name vjp_method fast_solve control_flow config "
    "random_feedback_key",
    "EProp": "model feedback kappa_filter_decay random_feedback_key name vjp_method fast_solve",
    "SnAp": "model n name vjp_method fast_solve snap_max_jacobian_elements",
    "OSTLRecurrent": "model name vjp_method fast_solve",
    "OSTLFeedforward": "model decay_or_rank name",
    "UORO": "model name vjp_method fast_solve control_flow projection_key projection_eps",
    "OTTT": "model mode",
    "OTPE": "model mode",
    "OSTTP": "model B_list target_timing name vjp_method fast_solve",
    "ThreeFactor": "model name vjp_method modulator fast_solve trace_dtype chunked_trace "
    "control_flow",
    "DNI": "model synthesizer name vjp_method fast_solve trace_dtype chunked_trace control_flow "
    "snap_max_jacobian_elements",
    "SyntheticGradient": "group_shapes hidden_width scale seed",
    "KappaFilter": "init_value kappa",
    "PresynapticTrace": "init_value leak",
    "FixedRandomFeedback": "n_target n_layer key init_scale",
    "GradExpon": "grad_shape tau_or_decay",
    "ETraceGraphExecutor": "model include_recurrent_mixing sparse_n snap_max_jacobian_elements "
    "control_flow",
    "ETraceVjpGraphExecutor": "model vjp_method include_recurrent_mixing sparse_n "
    "snap_max_jacobian_elements control_flow",
    "ControlFlowPolicy": "cond scan_unroll_limit while_hidden etp_in_control_flow scan_descent "
    "fixpoint_iteration_limit",
    "ETraceConfig": "trace_factorization temporal_recursion recurrence_scope learning_signal "
    "trace_filter update_schedule decay kappa sparse_n window_size",
}


@pytest.mark.parametrize("name", ORDERS)
def test_arguments_come_in_the_published_order(name):
    value = getattr(braintrace, name)
    made = value.__init__ if inspect.isclass(value) else value
    got = [p for p in inspect.signature(made).parameters if p != "self"]
    assert got[: len(ORDERS[name].split())] == ORDERS[name].split()


def test_public_layers_exist():
    for name in ("Linear", "ValinaRNNCell", "GRUCell", "LSTMCell", "LeakyRateReadout"):
        assert issubclass(getattr(braintrace.nn, name), brainstate.nn.Module)


def test_star_import_of_layers_gives_all_of_them_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from braintrace.nn import *", namespace := {})
    known = {*namespace} - {"__builtins__"}
    assert known == {*braintrace.nn.__all__} == {*public(braintrace.nn)}
    assert {"Conv1d", "Embedding", "LRUCell", "LeakyRateReadout", "surrogate"} < known


def test_version_is_a_string_and_a_tuple_of_integers():
    assert braintrace.__version__ == ".".join(map(str, braintrace.__version_info__))
    assert all(isinstance(part, int) for part in braintrace.__version_info__)


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = braintrace.no_such_name


def test_errors_are_plain_exceptions():
    assert braintrace.CompilationError.__mro__[1] is Exception
    assert braintrace.NotSupportedError.__mro__[1] is Exception


def test_rule_names_are_classes_and_their_aliases():
    assert braintrace.ES_D_RTRL is braintrace.pp_prop
    assert issubclass(braintrace.D_RTRL, braintrace.ParamDimVjpAlgorithm)
    assert issubclass(braintrace.pp_prop, braintrace.IODimVjpAlgorithm)
    assert issubclass(braintrace.EligibilityTrace, brainstate.ShortTermState)


def test_step_data_are_pytrees():
    for kind in (braintrace.SingleStepData, braintrace.MultiStepData):
        wrapped = kind({"a": jnp.ones(2), "b": jnp.zeros(3)})
        assert len(jax.tree.leaves(wrapped)) == 2
        doubled = jax.tree.map(lambda a: 2 * a, wrapped)
        assert isinstance(doubled, kind)
        assert doubled.data["a"].tolist() == [2.0, 2.0]
