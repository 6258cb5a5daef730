"""The public surface: names, where they say they live, and docstrings whose examples run."""

import doctest
import inspect

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
import braintrace.nn
import braintrace.show
import braintrace.verify

HOMES = {m.__name__: m for m in (braintrace, braintrace.nn, braintrace.show, braintrace.verify)}


def public(module):
    """Classes and functions a module re-exports."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or callable(value))
    }


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


@pytest.mark.parametrize("home, name, value", OBJECTS)
def test_public_docstring_examples_run(home, name, value):
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    globs = {"__name__": "__main__"}
    for test in finder.find(value, name, module=False, globs=globs):
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        out = []
        runner.run(test, out=out.append)
        assert not runner.failures, "".join(out)


@pytest.mark.parametrize("home, name, value", OBJECTS)
def test_public_class_documents_its_public_methods(home, name, value):
    if not inspect.isclass(value):
        return
    missing = [
        key
        for key, member in vars(value).items()
        if not key.startswith("_")
        and inspect.isfunction(member)
        and key not in ("tree_flatten", "tree_unflatten")
        and not inspect.getdoc(member)
    ]
    assert not missing


NAMES = """
    nn compile matmul element_wise conv sparse_matmul lora_matmul grouped_matmul embedding einsum
    ETPPrimitive register_primitive SingleStepData MultiStepData ETraceAlgorithm ETraceVjpAlgorithm
    EligibilityTrace ParamDimVjpAlgorithm D_RTRL IODimVjpAlgorithm pp_prop ES_D_RTRL
    SequenceDriverMixin ETraceVmap ETraceGraphExecutor ETraceVjpGraphExecutor ETraceGraph
    compile_etrace_graph HiddenGroup find_hidden_groups_from_minfo find_hidden_groups_from_module
    HiddenParamOpRelation find_hidden_param_op_relations_from_minfo
    find_hidden_param_op_relations_from_module ModuleInfo extract_module_info HiddenPerturbation
    add_hidden_perturbation_from_minfo add_hidden_perturbation_in_module CompilationRecord
    DiagnosticKind DiagnosticLevel CompilationReport GradExpon NotSupportedError CompilationError
    verify __version__ __version_info__
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_public_name_exists(name):
    assert hasattr(braintrace, name)


def test_public_layers_exist():
    for name in ("Linear", "ValinaRNNCell", "GRUCell", "LSTMCell", "LeakyRateReadout"):
        assert issubclass(getattr(braintrace.nn, name), brainstate.nn.Module)


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
