"""The commands and their options; what they do is imported when they run, for JAX takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ._names import CELLS, NEED_DATA, TASKS, task_table
from ._parser import (
    HIDDEN,
    OPTIMIZERS,
    Parser,
    Tasks,
    cell,
    memory,
    mesh,
    number,
    optimizer,
    positive,
    rules,
    seed,
    task,
    tasks,
)

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

UPDATES, QUICK_UPDATES = 600, 10  # of the demo
COMPARED, SEEDS = ("bptt", "tbptt", "no_trace", "d_rtrl", "pp_prop"), 3
MEASURED = ("bptt", "remat", "d_rtrl", "pp_prop")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
BENCH: dict[str, Any] = {"lengths": LENGTHS, "units": 128, "batch": 16, "repeats": 7}
QUICK_BENCH: dict[str, Any] = {"lengths": (16, 32, 64), "units": 8, "batch": 2, "repeats": 2}
RULE = "name, name:option=value,option=value, or PARAMETERS=name,PARAMETERS=name:option=value"
QUICK = "small and short, too short to learn"


def add_commands(parser: Parser) -> None:
    """Put the commands on the parser."""
    commands = parser.add_subparsers(
        prog="braintrace", dest="command", metavar="COMMAND", required=True
    )
    for add in (_demo, _train, _compare, _explain, _plan, _bench):
        add(commands)
    parser.commands = tuple(commands.choices)


def _command(commands: Commands, name: str, about: str, examples: str, end: str = "") -> Parser:
    """A parser for one command, which runs `run(options)` of the module of its name."""
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    about = about[0].upper() + about[1:]
    parser = commands.add_parser(
        name, help=about, description=f"{about}.", epilog=f"examples:\n{lines}{end}"
    )
    parser.set_defaults(parser=parser, check=None)
    return parser


def _demo(commands: Commands) -> None:
    about = "train a network online and by BPTT, and compare"
    examples = """
    braintrace demo
    braintrace demo --quick --out /tmp/demo
    """
    option = _command(commands, "demo", about, examples).add_argument
    option("--updates", type=positive, metavar="N",
           help=f"weight updates (default: {UPDATES}, with --quick {QUICK_UPDATES})")  # fmt: skip
    option("--steps", type=positive, dest="updates", **HIDDEN)
    _out(option, "demo.png")
    option("--seed", type=seed, default=0, metavar="S",
           help="of weights and batches (default: %(default)s)")  # fmt: skip
    option("--quick", action="store_true", help=QUICK)


def _train(commands: Commands) -> None:
    about = "train a network online on a task, with checkpoints"
    examples = """
    braintrace train copy
    braintrace train evidence --rule eprop:kappa_filter_decay=0.9 --updates 500
    braintrace train copy --resume    # after Ctrl-C, or with more --updates
    braintrace train copy --on-update log.py:log    # log(step, metrics)
    braintrace train copy --batch 64 --mesh data=4,model=2    # on 8 devices
    """
    option = _command(commands, "train", about, examples, f"\n\n{task_table()}").add_argument
    option("task", type=task, metavar="TASK", help="one of those below")
    option("--rule", type=rules, metavar="RULE", help=f"{RULE} (default: d_rtrl)")
    _network_and_task(option, "in all")
    option("--steps", type=positive, dest="updates", **HIDDEN)
    option("--seed", type=seed, metavar="S", help="of weights and batches (default: 0)")
    option("--out", type=Path, metavar="DIR", help="for checkpoint, record and figure "
           "(default: out/train_TASK)")  # fmt: skip
    option("--checkpoint-every", type=positive, default=100, metavar="K",
           help="updates between two checkpoints (default: %(default)s)")  # fmt: skip
    option("--devices", type=positive, metavar="N", help="devices to split the batch over: "
           "--mesh data=N")  # fmt: skip
    option("--mesh", type=mesh, metavar="AXES", help="devices to split the batch (data) and the "
           "units (model) over, such as data=4,model=2 (default: one device)")  # fmt: skip
    option("--resume", action="store_true", help="continue from the checkpoint in DIR, with the "
           "options it was started with")  # fmt: skip
    option("--on-update", metavar="FILE:NAME", help="a function of yours, called with the number "
           "of every update and its metrics, for TensorBoard, wandb, ...")  # fmt: skip


def _compare(commands: Commands) -> None:
    about = "train one network with several rules on tasks"
    examples = """
    braintrace compare --list
    braintrace compare evidence --rules bptt d_rtrl eprop rflo
    braintrace compare copy adding --rules d_rtrl d_rtrl:window=8
    braintrace compare task.py:Parity --model net.py:Net
    """
    parser = _command(commands, "compare", about, examples, f"\n\n{task_table()}")
    parser.set_defaults(check=_check_compare)
    option = parser.add_argument
    option("task", nargs="*", action=Tasks, type=tasks, default=[], metavar="TASK",
           help="one or more of those below, or all; or FILE:NAME, a task of your own: an object, "
           "or a class or function that makes one, see braintrace.tasks.Task")  # fmt: skip
    option("--task", nargs="+", action=Tasks, type=tasks, **HIDDEN)
    option("--model", metavar="FILE:NAME", help="your network instead of a cell by name: what "
           "braintrace.compare takes, a class or function that makes a module, for example; with "
           "arguments if it needs them")  # fmt: skip
    option("--rules", nargs="+", type=rules, default=list(COMPARED), metavar="RULE",
           help=f"{RULE}; all for every one (default: {' '.join(COMPARED)})")  # fmt: skip
    _network_and_task(option, "of each run", nargs="+")
    option("--optimizers", nargs="+", type=optimizer, default=["adam"], metavar="NAME",
           help=f"{', '.join(OPTIMIZERS)}; a row for each (default: adam)")  # fmt: skip
    option("--update-every", type=positive, metavar="K",
           help="steps between two updates (default: one update per sequence)")  # fmt: skip
    option("--threshold", type=float, metavar="SCORE", help="report the updates until the "
           "validation score is past it (default: half way from chance to the best)")  # fmt: skip
    option("--data", type=Path, metavar="DIR",
           help="where shd_train.h5 and shd_test.h5 are, for the task shd")  # fmt: skip
    option("--add", action="store_true", help="add rows to the record in DIR")
    option("--seeds", type=positive, metavar="N", help=f"how many, from 0 on (default: {SEEDS})")
    _out(option, "JSON and PNG files")
    option("--quick", action="store_true", help=QUICK)
    option("--list", action="store_true", help="list tasks, cells and rules, and exit")


def _check_compare(options: argparse.Namespace) -> None:
    if not options.task and not options.list:
        options.parser.error(f"name a task: {', '.join(TASKS)}, or all")
    if options.data and not {*NEED_DATA, "all"} & {*options.task}:
        options.parser.error(f"--data is for the task {' or '.join(NEED_DATA)}")


def _explain(commands: Commands) -> None:
    about = "report how every parameter of a model would be learned, and what is left out"
    examples = """
    braintrace explain net.py:Network --input 16,3 --batch-size 16
    braintrace explain 'net.py:Network(3, units=20)' --input 3 --rule snap:n=2
    braintrace explain net.py:network                # with `example_input = ...` in net.py
    braintrace explain net.py:Network --input 16,3 --batch-size 16 --html report.html
    """
    option = _command(commands, "explain", about, examples).add_argument
    option("model", metavar="FILE:NAME", help="a module, a class of one, or a function that "
           "returns one; with arguments if it needs them")  # fmt: skip
    _inputs(option)
    option("--rule", default="d_rtrl", metavar="RULE", help=f"{RULE} (default: %(default)s)")
    option("--verbose", action="store_true", help="also print the whole report: states, traces, "
           "and what is left out of every gradient")  # fmt: skip
    option("--level", type=int, choices=(1, 2, 3), default=1, metavar="N",
           help="print the whole report and warnings (2) or every decision (3)")  # fmt: skip
    option("--html", type=Path, metavar="FILE", help="also write the report as a page")


_PLANNED = """

NAME is one of these, or a function without arguments that returns it:
  (step, params, state, *inputs)  what braintrace.online(step).init takes, with
                                  step(params, state, *inputs) -> (state, out);
                                  of an equinox cell, for example,
                                  lambda cell, h, x: (cell(x, h),) * 2
  a brainstate module             inputs by --input, or example_input in FILE
  an nnx module                   likewise; its states are Variables
  (module, *inputs)               one of these two with its inputs

Time is an estimate: the operations of a step, relative to those of --rule.
With --data everything is measured."""


def _plan(commands: Commands) -> None:
    about = "list what each rule would cost for a model, and what it makes exact"
    examples = """
    braintrace plan net.py:model --memory 2GB
    braintrace plan net.py:model --measure
    braintrace plan net.py:Network --input 16,3 --batch-size 16 --rule snap:n=2
    braintrace plan net.py:model --memory 2GB --data batch.npz --save choice.json
    """
    option = _command(commands, "plan", about, examples, _PLANNED).add_argument
    option("model", metavar="FILE:NAME", help="the model, see below; with arguments if it needs "
           "them")  # fmt: skip
    _inputs(option)
    option("--rule", default="d_rtrl", metavar="RULE", help=f"the present rule, {RULE} "
           "(default: %(default)s)")  # fmt: skip
    option("--memory", type=memory, metavar="SIZE", help="what the traces may take, such as 2GB")
    option("--length", type=positive, metavar="T", help="steps of a sequence; adds one window over "
           "all of it as a rule; with --data, the first T steps of it")  # fmt: skip
    option("--data", type=Path, metavar="FILE.npz", help="measure on a batch, xs and ys with an "
           "axis of time, and the function loss(out, y) of FILE: the rule of each parameter whose "
           "gradient is closest to BPTT's, see braintrace.choose")  # fmt: skip
    option("--time", type=number, default=3.0, metavar="X", help="with --data, what a gradient may "
           "take, in multiples of BPTT's time (default: %(default)g)")  # fmt: skip
    option("--save", type=Path, metavar="FILE.json", help="with --data, where to write the choice "
           "and its table")  # fmt: skip
    option("--unmarked", action="store_true", help="recognise plain JAX in a brainstate module; "
           "always done for the others")  # fmt: skip
    option("--measure", action="store_true", help="run a few steps with the rules that would be "
           "recommended: their times are measured")  # fmt: skip


def _inputs(option: Callable[..., object]) -> None:
    option("--input", action="append", type=_shape, metavar="SHAPE", help="shape of an argument of "
           "a step, such as 16,3; once for each (default: example_input in FILE)")  # fmt: skip
    option("--input-dtype", default="float32", metavar="TYPE",
           help="of the inputs (default: %(default)s)")  # fmt: skip
    option("--batch-size", type=positive, metavar="B", help="batch axis of the states")


def _bench(commands: Commands) -> None:
    about = "measure time and memory of a gradient against the length of the sequence"
    examples = """
    braintrace bench
    braintrace bench --quick
    braintrace bench --units 512 --lengths 64 256 1024 --rules bptt d_rtrl
    """
    option = _command(commands, "bench", about, examples).add_argument
    words = lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value
    default = {name: f"(default: {words(value)}, with --quick {words(QUICK_BENCH[name])})"
               for name, value in BENCH.items()}  # fmt: skip
    option("--rules", nargs="+", type=rules, default=list(MEASURED), metavar="RULE",
           help=f"{RULE} (default: {' '.join(MEASURED)})")  # fmt: skip
    option("--lengths", nargs="+", type=positive, metavar="T", help=f"steps {default['lengths']}")
    option("--units", type=positive, metavar="N", help=f"units of the GRU {default['units']}")
    option("--batch", type=positive, metavar="B", help=f"sequences {default['batch']}")
    option("--repeats", type=positive, metavar="R",
           help=f"timed runs of each gradient {default['repeats']}")  # fmt: skip
    option("--memory-limit", type=number, default=4.0, metavar="GIB",
           help="a gradient that takes more working memory is left out "
           "(default: %(default)g)")  # fmt: skip
    option("--most", type=number, dest="memory_limit", **HIDDEN)
    _out(option, "bench.json and bench.png")
    option("--quick", action="store_true", help="small and short")


def _network_and_task(option: Callable[..., object], updates: str, **rates: str) -> None:
    below = "(default: see below)"
    option("--cell", type=cell, metavar="CELL", help=f"{', '.join(CELLS)} {below}")
    option("--updates", type=positive, metavar="N", help=f"weight updates {updates} {below}")
    option("--length", type=positive, metavar="T", help=f"steps of a sequence {below}")
    option("--units", type=positive, metavar="N", help=f"units of the cell {below}")
    option("--batch", type=positive, metavar="B", help=f"sequences of an update {below}")
    several = "; of several the best on the validation split" if rates else ""
    option("--lr", type=number, metavar="RATE", help=f"learning rate{several} {below}", **rates)


def _out(option: Callable[..., object], what: str) -> None:
    option("--out", type=Path, default=Path("out"), metavar="DIR",
           help=f"for {what} (default: %(default)s)")  # fmt: skip


def _shape(text: str) -> tuple[int, ...]:
    sizes = [word.strip() for word in text.strip("()").split(",") if word.strip()]
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 16,3")
    return tuple(map(int, sizes))
