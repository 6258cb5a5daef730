"""Every test runs in float64. Programs run once or twice, so compiling them must be quick."""

import atexit
import gc
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # On a GPU: a factor merged into a convolution is rounded to float32 (docs/how-to/gpu.md).
    "--xla_disable_hlo_passes=cudnn-fused-convolution-rewriter",
]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # newer ones do not have it
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])

sys.path.insert(0, str(Path(__file__).parent))  # for interpret.py and thinned.py

import brainstate  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src import api  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

import thinned  # noqa: E402

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would round float32 products
jax.config.update("jax_traceback_in_locations_limit", 0)  # in programs that nobody reads

# Every program that JAX lowers has an MLIR context of its own, 3 ms and 1.2 MB of dialects for
# programs of a few equations. In a process of tests they share one, but for those that are lowered
# while another one is.
own_context = mlir.make_ir_context
shared_context = own_context()


def context_of_a_program():
    return shared_context if mlir.ir.Context.current is None else own_context()


mlir.make_ir_context = context_of_a_program
atexit.unregister(api.clean_up)  # takes all programs apart, for seconds, before the process ends

# Tracing makes many objects and little garbage: look for it less often.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def alone():
    """As in a user's own process: 32 bits, seeded, no setting left behind."""
    before = brainstate.environ.all()
    brainstate.environ.set(precision=32)
    with brainstate.random.seed_context(0):
        yield
    for name in brainstate.environ.all().keys() - before.keys():
        brainstate.environ.pop(name)
    brainstate.environ.set(**before)


def pytest_collection_finish():
    """What is imported by now stays: the search for garbage leaves it out."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """So do the compiled programs of a file that is done."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config, items):
    """Leave out what only repeats, unless a test is asked for by name; put the rest in order."""
    if any("::" in argument for argument in config.args):
        return
    kept = thinned.kept(items, named=any(word.endswith(".py") for word in config.args))
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = thinned.ordered(kept)


SPENT = []  # on each fixture that several tests share, while a case runs
COSTS = os.environ.get("BRAINTRACE_COSTS")  # `make costs`: a folder for what cases take


def record(name: str, seconds: float) -> None:
    with open(Path(COSTS) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps([name, round(seconds, 3)]) + "\n")


def processor_time() -> float:
    """Of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    if not COSTS or not thinned.shared(fixturedef):
        return (yield)
    before, inner = processor_time(), len(SPENT)
    try:
        return (yield)
    finally:
        own = processor_time() - before - sum(SPENT[inner:])
        SPENT.append(own)
        record(thinned.fixture_name(fixturedef), own)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """The processor time of every case, without the fixtures that it shares with others."""
    if not COSTS:
        return (yield)
    before = processor_time()
    SPENT.clear()
    try:
        return (yield)
    finally:
        record(item.nodeid, processor_time() - before - sum(SPENT))
