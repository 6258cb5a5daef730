"""The layers of docs/design.md, held by reading every import and name under `src/braintrace`.

A check takes a path inside the package and the file's text, and returns its complaints. Each is
run on every file, and on snippets that break it.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "braintrace"

CORE = {"errors", "program", "ops", "graph"}
LEARNING = CORE | {"report", "rules", "engine", "online", "frontend", "learner"}
MODULES = ("data", "nir", "rl", "show", "tasks", "wiring")
# Room -> the rooms it may import besides itself. `init` is the package's own `__init__.py`.
MAY_IMPORT = {
    "version": set(),
    "files": {"errors"},
    "precision": set(),
    "errors": set(),
    "published": set(),
    "program": set(),
    "ops": {"errors", "published", "program"},
    "nn": {"precision", "errors", "published", "ops"},
    "graph": {"errors", "published", "program", "ops"},
    "kernel": {"program"},
    "report": {"errors", "files", "graph"},
    "engine": CORE | {"kernel"},
    "rules": {"errors", "ops", "graph", "engine"},
    "export": {"errors", "files", "program"},
    "online": CORE | {"report", "rules", "engine", "export"},
    "frontend": CORE | {"precision", "published", "report"},
    "torch": CORE | {"report", "rules", "export", "online"},
    "checkpoint": {"errors", "files", "program", "frontend", "version"},
    "learner": LEARNING | {"export", "precision", "published", "checkpoint"},
    "verify": LEARNING | {"precision", "nn", "version"},
    "lab": set(),
    "lab.table": set(),
    "lab.nir": {"precision", "errors", "nn"},
    "lab.show": {"precision", "errors", "online", "learner"},
    "lab.data": {"errors"},
    "lab.rl": set(),
    "lab.wiring": {"errors"},
    "lab.tasks": {"errors", "lab.data"},
    "lab.comparison": LEARNING | {"files", "precision", "lab.table", "lab.tasks", "version"},
    "lab.cli": LEARNING
    | {"checkpoint", "files", "nn", "verify", "version", "init"}
    | {"lab.table", "lab.show", "lab.tasks", "lab.comparison"},
    "compat": LEARNING | {"precision", "checkpoint", "nn"},
    # What users import: the package itself, and modules of the laboratory under short names.
    "init": {"version"},
    "main": {"lab.cli"},
    **{name: {f"lab.{name}"} for name in MODULES},
}
# The floors: the laboratory uses the library, the compatibility layer both; never the reverse.
FLOORS = ("library", "lab", "compat")
DOORS = {"init", "main", *MODULES}
# What tests/oracle may import. A rewriting of the step and the comparison are not what it judges.
ORACLE_MAY_IMPORT = (
    "braintrace.oracle",  # relative imports
    *("braintrace.program", "braintrace.ops", "braintrace.verify"),
    *(f"braintrace.graph.{name}" for name in ("Kinds", "folded_equations", "replaced")),
)
MAY_IMPORT_BRAINSTATE = {
    "frontend",
    "checkpoint",
    "learner",
    "nn",
    "lab.nir",
    "lab.show",
    "verify",
    "lab.comparison",
    "lab.cli",
    "compat",
}
OPTIONAL = ("flax", "equinox", "nir", "spyx")
JAX_INTERNALS = ("jax._src", "jax.core", "jax.extend", "jax.interpreters")
# Names a room may not say. The lookarounds let ordinary words through: convert, exploration.
UNSPEAKABLE = {
    "ops": re.compile(r"rtrl|pp_?prop", re.I),
    "rules": re.compile(r"matmul|conv(?!e)|(?<!exp)lora|embedding", re.I),
}
DATE = re.compile(r"\b(19|20)\d\d-\d\d-\d\d\b")
ISSUE = re.compile(r"#\d+\b")


def room_of(parts: Sequence[str]) -> str:
    """The room of a file or module; the laboratory has rooms of its own."""
    name = parts[0].removesuffix(".py").strip("_")
    inner = parts[1].removesuffix(".py").strip("_") if len(parts) > 1 else "init"
    return name if name != "lab" or inner == "init" else f"lab.{inner}"


def room(path: str) -> str:
    return room_of(PurePosixPath(path).parts)


def floor(room: str) -> str:
    head = room.partition(".")[0]
    return head if head in FLOORS else "library"


def imported(path: str, source: str) -> Iterator[str]:
    """Absolute dotted names; `from a import b` counts as `a.b`."""
    package = ("braintrace", *PurePosixPath(path).parent.parts)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                head = package[: len(package) + 1 - level] if level else ()
                parts = (*head, module) if module else head
                yield from (".".join((*parts, name.name)) for name in names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def words(source: str) -> Iterator[tuple[bool, str]]:
    """Every token's text, and whether it is a comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        yield token.type == tokenize.COMMENT, token.string


def rooms_imported(path: str, source: str) -> set[str]:
    ours = [name.split(".") for name in imported(path, source) if within(name, "braintrace")]
    # A name that is no room comes from the package's own `__init__.py`.
    rooms = {room_of(parts[1:]) if len(parts) > 1 else "init" for parts in ours}
    return {name if name in MAY_IMPORT else "init" for name in rooms} - {room(path)}


def check_rooms(path: str, source: str) -> list[str]:
    here = room(path)
    if here not in MAY_IMPORT:
        return [f"unknown room {here}"]
    beyond = rooms_imported(path, source) - MAY_IMPORT[here]
    return [f"{here} may not import {other}" for other in sorted(beyond)]


def check_floors(path: str, source: str) -> list[str]:
    """Whatever `MAY_IMPORT` says: a floor sees itself and those below it."""
    here = room(path)
    if here in DOORS:
        return []
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    late = {str(text).split("braintrace.")[1] for text in texts if "braintrace.compat" in str(text)}
    if late and floor(here) != "compat" and here != "published":  # by import_module
        return [f"{here} may not import {name}" for name in sorted(late)]
    above = FLOORS[FLOORS.index(floor(here)) + 1 :]
    others = {*rooms_imported(path, source)}
    return [f"{here} may not import {name}" for name in sorted(others) if floor(name) in above]


def check_brainstate(path: str, source: str) -> list[str]:
    if room(path) in MAY_IMPORT_BRAINSTATE:
        return []
    return [name for name in imported(path, source) if within(name, "brainstate")]


def check_optional(path: str, source: str) -> list[str]:
    """Libraries of models are imported where one of their modules is at hand, not before."""
    first = "\n".join(ast.unparse(node) for node in ast.parse(source).body if _imports(node))
    return [name for name in imported(path, first) if within(name, *OPTIONAL)]


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def check_torch(path: str, source: str) -> list[str]:
    """PyTorch is imported by its own room, and nothing imports that."""
    if room(path) == "torch":
        return []
    return [n for n in imported(path, source) if within(n, "torch", "braintrace.torch")]


def check_jax_internals(path: str, source: str) -> list[str]:
    if path == "program/_jax.py":
        return []
    nodes = ast.walk(ast.parse(source))
    spelled = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    return [name for name in (*imported(path, source), *spelled) if within(name, *JAX_INTERNALS)]


def check_names(path: str, source: str) -> list[str]:
    if (unspeakable := UNSPEAKABLE.get(room(path))) is None:
        return []
    said = [path, *(text for comment, text in words(source) if not comment)]
    return [match.group() for text in said for match in unspeakable.finditer(text)]


def check_history(path: str, source: str) -> list[str]:
    comments = [text for comment, text in words(source) if comment]
    issues = [match.group() for text in comments for match in ISSUE.finditer(text)]
    return issues + [match.group() for match in DATE.finditer(source)]


def check_closures(path: str, source: str) -> list[str]:
    """What a function in a function takes along is its closure or a record, not a default."""
    functions = (ast.FunctionDef, ast.Lambda)
    outer = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    inner = {n for f in outer for n in ast.walk(f) if n is not f and isinstance(n, functions)}
    defaults = [d for f in inner for d in (*f.args.defaults, *f.args.kw_defaults) if d is not None]
    names = (n for d in defaults for n in ast.walk(d) if isinstance(n, ast.Name))
    return [f"line {n.lineno}: {n.id}" for n in names if not n.id.isupper()]


def check_acyclic(links: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(links).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def check_oracle(path: str, source: str) -> list[str]:
    """The oracle of the rules must not share what it judges: it reads programs, and no more."""
    ours = [name for name in imported(path, source) if within(name, "braintrace")]
    return [name for name in ours if not within(name, *ORACLE_MAY_IMPORT)]


CHECKS = (
    *(check_rooms, check_floors, check_brainstate, check_optional),
    *(check_torch, check_jax_internals, check_names, check_history, check_closures),
)
FILES = {
    file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8")
    for file in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("check", CHECKS)
def test_package_keeps(check):
    complaints = {path: check(path, source) for path, source in FILES.items()}
    assert {path: found for path, found in complaints.items() if found} == {}


def test_oracle_is_independent_of_the_engine():
    files = sorted((Path(__file__).parent / "oracle").glob("*.py"))
    assert files
    for file in files:
        assert check_oracle(f"oracle/{file.name}", file.read_text("utf-8")) == []


def test_rooms_do_not_import_in_circles():
    links: dict[str, set[str]] = {}
    for path, source in FILES.items():
        links.setdefault(room(path), set()).update(rooms_imported(path, source))
    assert check_acyclic(links) == []


BROKEN = [
    (check_rooms, "utils/_x.py", ""),
    (check_rooms, "_helpers.py", ""),
    (check_rooms, "_errors.py", "from . import program"),
    (check_rooms, "program/_x.py", "from ..ops import Op"),
    (check_rooms, "ops/_x.py", "from ..graph import Relation"),
    (check_rooms, "ops/__init__.py", "from ..rules import Rule"),
    (check_rooms, "nn/_x.py", "from braintrace.graph._walk import walk"),
    (check_rooms, "graph/_x.py", "import braintrace.engine"),
    (check_rooms, "graph/_x.py", "from braintrace import Learner"),
    (check_rooms, "graph/_x.py", "from ..report import CompilationReport"),
    (check_rooms, "report/_x.py", "from ..lab.show import record"),
    (check_rooms, "lab/tasks/_x.py", "from ..comparison import compare"),
    (check_floors, "learner/_x.py", "from ..lab.tasks import Task"),
    (check_floors, "graph/_x.py", "import braintrace.lab"),
    (check_floors, "rules/_x.py", "def late():\n    from ..compat import views"),
    (check_floors, "lab/cli/_x.py", "from ...compat import views"),
    (check_floors, "graph/_x.py", "import_module('braintrace.compat._views')"),
    (check_rooms, "graph/deep/_x.py", "from ...rules import Rule"),
    (check_rooms, "rules/_x.py", "from ..program import walk"),
    (check_rooms, "engine/_x.py", "def late():\n    from ..rules import Rule"),
    (check_rooms, "engine/_x.py", "from .. import frontend"),
    (check_rooms, "frontend/_x.py", "from ..rules import Rule"),
    (check_rooms, "learner/_x.py", "from .. import nn"),
    (check_rooms, "verify/_x.py", "from ..lab.cli import main"),
    (check_rooms, "lab/show/_x.py", "from ...engine import run_block"),
    (check_rooms, "__init__.py", "from .lab.cli import main as main"),
    (check_rooms, "__init__.py", "from .nn import Linear"),
    (check_brainstate, "graph/_x.py", "import brainstate"),
    (check_brainstate, "rules/_x.py", "from brainstate.transform import jit"),
    (check_brainstate, "engine/_x.py", "import brainstate.nn as nn"),
    (check_brainstate, "ops/_x.py", "from brainstate import State"),
    (check_brainstate, "_online/_x.py", "import brainstate"),
    (check_rooms, "_online/_x.py", "from ..learner import compile"),
    (check_brainstate, "program/_x.py", "import brainstate"),
    (check_optional, "learner/_x.py", "from flax import nnx"),
    (check_torch, "_online/_x.py", "def late():\n    import torch.nn"),
    (check_torch, "learner/_x.py", "from ..torch import online"),
    (check_jax_internals, "graph/_x.py", "from jax._src import core"),
    (check_jax_internals, "graph/_jax.py", "from jax import core"),
    (check_jax_internals, "program/_x.py", "from jax.interpreters import ad"),
    (check_jax_internals, "ops/_x.py", "import jax.extend.core as jex"),
    (check_jax_internals, "engine/_x.py", "from jax.interpreters import ad"),
    (check_jax_internals, "engine/_x.py", "import jax\njax.core.Jaxpr"),
    (check_oracle, "oracle/_x.py", "from braintrace.engine import run"),
    (check_oracle, "oracle/_x.py", "from braintrace.graph import Kinds, analyse"),
    (check_oracle, "oracle/_x.py", "import braintrace"),
    (check_names, "ops/_rtrl.py", ""),
    (check_names, "ops/_x.py", "def D_RTRL(): ..."),
    (check_names, "ops/_x.py", "kind = 'pp_prop'"),
    (check_names, "ops/_x.py", "f'{x} PPProp'"),
    (check_names, "rules/_x.py", "jnp.matmul(a, b)"),
    (check_names, "rules/_x.py", "if op is etp_conv_p: ..."),
    (check_names, "rules/_x.py", "class LoRATrace: ..."),
    (check_names, "rules/_x.py", "'sparse_matmul'"),
    (check_names, "rules/_x.py", "from ..ops import embedding"),
    (check_history, "graph/_x.py", "x = 1  # fixed on 2025-01-01"),
    (check_history, "graph/_x.py", "'''Since 2025-01-01.'''"),
    (check_history, "graph/_x.py", "x = 1  # see #123"),
    (check_closures, "graph/_x.py", "def f(k):\n    return lambda x, k=k: x + k"),
    (check_closures, "graph/_x.py", "def f(k):\n    def g(x, *, n=k.n): ...\n    return g"),
]
KEPT = [
    (check_rooms, "ops/_y.py", "from .._errors import TraceError"),
    (check_rooms, "graph/_x.py", "from . import _y\nfrom ..ops import Op\nimport saiunit"),
    (check_rooms, "lab/cli/_x.py", "import braintrace\nfrom ... import nn, verify"),
    (check_rooms, "lab/tasks/_x.py", "from ..data import pad"),
    (check_rooms, "tasks.py", "from .lab.tasks import Task"),
    (check_floors, "lab/cli/_x.py", "import braintrace\nfrom ..tasks import Task"),
    (check_floors, "compat/_x.py", "from ..lab.tasks import Task"),
    (check_rooms, "__init__.py", "from ._version import __version__"),
    (check_rooms, "__main__.py", "from .lab.cli import main"),
    (check_brainstate, "frontend/_x.py", "import brainstate"),
    (check_brainstate, "ops/_x.py", "import brainstate_like, saiunit"),
    (check_optional, "learner/_x.py", "def of_nnx():\n    from flax import nnx"),
    (check_torch, "torch/_x.py", "import torch\nfrom torch import nn"),
    (check_jax_internals, "program/_jax.py", "from jax.extend import core"),
    (check_jax_internals, "ops/_x.py", "import jax\njax.lax.dot_general"),
    (check_oracle, "oracle/_x.py", "from ._y import z\nfrom braintrace.program import Var"),
    (check_names, "rules/_x.py", "'''By convention, exploration.'''"),
    (check_names, "graph/_x.py", "'rtrl and matmul'"),
    (check_history, "graph/_x.py", "colour = '#123456'  # item 3 of 12"),
    (check_closures, "graph/_x.py", "def f(n=N):\n    return lambda x, dim=0, many=MOST: x"),
]


@pytest.mark.parametrize(("check", "path", "source"), BROKEN)
def test_check_notices_a_break(check, path, source):
    assert check(path, source)


@pytest.mark.parametrize(("check", "path", "source"), KEPT)
def test_check_lets_good_code_pass(check, path, source):
    assert check(path, source) == []


def test_check_notices_a_circle():
    assert check_acyclic({"verify": {"nn"}, "nn": {"verify"}})
    assert check_acyclic({"verify": {"nn"}, "nn": {"graph"}}) == []
