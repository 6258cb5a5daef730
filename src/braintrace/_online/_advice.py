"""Which rule would make a parameter exact, and what it would cost, before anything is allocated.

The step is analysed for each rule: exactness is read from the certificate, bytes from the shapes of
the traces. Time counts the operations of a step, two per multiply-add, F those of the model's step.
A relation has n trace elements, y output elements and K slots, its D differs at p places, and the
trace is touched once in a block of T steps:

    forward and reverse pass             3 F
    D, from c tangents or cotangents     0.2 F c
    the traces of an operator            2 (n + n K / T + y K^2), and 4 p K^3 for the products of D
    rtrl, for each parameter element     0.8 (F + size of the parameter)
    a step, whatever it computes         80,000

Many tangents at once are matrix products, and take less time than as many forward passes; products
of small matrices take more, and so does a step of few operations. `benchmarks/advice.py` measures
the factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from .._errors import CompilationError, NotSupportedError, dotted, not_supported
from ..engine import Values, shared_passes, split_traces
from ..graph import (
    CompilationRecord,
    ControlFlowPolicy,
    Graph,
    ParameterReport,
    Path,
    Prepared,
    Step,
    Traces,
    certify,
    follow,
    prepare,
    with_filters,
)
from ..program import PyTree, evaluate, fingerprint
from ..report import Advice, RuleCost
from ..rules import (
    ETraceConfig,
    LearningRule,
    Rule,
    credit_of,
    d_rtrl,
    no_trace,
    rtrl,
    shares_of,
    snap,
)
from ._blocks import MOST_STEPS, nbytes, varying_bytes
from ._checks import Wording, check_relations
from ._measure import MOST_BYTES, seconds_per_step

Reports = Mapping[Path, ParameterReport]

MOST_ORDER = 8  # of snap
MOST_OPERATIONS = 1 << 24  # of a step: the analysis for snap follows each of them
MOST_ELEMENTS = 2048  # of the states of a sample: it follows the pairs of them
MOST_ENTRIES = 1 << 24  # of the D of one operator: a larger one takes minutes to compile
# Operations by how long they take: see above.
OF_STEP, OF_TANGENT, OF_PRODUCT, OF_INFLUENCE = 80_000.0, 0.2, 4.0, 0.8


@dataclass(frozen=True, slots=True)
class Problem:
    """A step that a rule is wanted for."""

    step: Step  # as it was traced, before any analysis
    consts: tuple[Any, ...]  # values of its constants; of everything else there are only shapes
    policy: ControlFlowPolicy | None
    unmarked: bool  # whether plain JAX is recognised
    find: Callable[[Path], Any] = lambda path: None  # the object that holds a parameter
    words: Wording | None = None  # of the front end, in messages
    whole: bool = True  # whether it has all parameters that a pattern of a mixture may name
    most_entries: int | None = None  # of a D, below the limit of the rule


def analysed(
    problem: Problem,
    rule: LearningRule,
    extra: Sequence[CompilationRecord] = (),
    windows: bool = False,
) -> tuple[Graph, list[PyTree]]:
    """The graph of a step for a rule, with `extra` records, and the shapes of its traces."""
    record, step = rule.record, problem.step
    if rule.shares:
        graph = mixed(problem, rule, extra)
    else:
        prepared = prepare(step, problem.consts, *_how(problem, rule))
        graph = _followed(problem, prepared, rule, extra)
        _check(problem, graph, rule, windows)
    # Constants are read as values: KF-RTRL tries out whether a batch has samples.
    init = lambda params: record.init(graph, Values(problem.consts, (), params, (), ()))
    params = tuple(_shape(step.entry(leaf)) for leaf in step.params)
    return graph, jax.eval_shape(init, params)


def _how(problem: Problem, rule: LearningRule) -> tuple[ControlFlowPolicy | None, bool, bool]:
    return problem.policy, rule.record.folds, problem.unmarked


def _followed(
    problem: Problem,
    prepared: Prepared,
    rule: LearningRule,
    extra: Sequence[CompilationRecord],
) -> Graph:
    """The graph of a prepared step for one rule."""
    most = min(rule.most_entries, problem.most_entries or rule.most_entries)
    limits, consts = (rule.crossings, most, rule.couple_axis), problem.consts
    if rule.config.filters is not None or rule.rate is not None:
        graph = follow(prepared, consts, problem.find, (), *limits)
        layers = rule.config.trace_filter == "layers"
        filtered = with_filters(graph, consts, rule.config.filters or (), rule.rate, layers)
        # Its operators are recognised already.
        prepared = prepare(filtered, consts, problem.policy, rule.record.folds, False)
    return follow(prepared, consts, problem.find, extra, *limits)


def _check(problem: Problem, graph: Graph, rule: LearningRule, windows: bool) -> None:
    """Refuse a step that the rule cannot learn."""
    words = () if problem.words is None else (problem.words,)
    check_relations(graph, rule, windows, problem.unmarked, *words)
    rule.check_groups(graph.groups)
    if rule.record.replay is not None and graph.effects:
        raise not_supported(
            f"a step with side effects, with {rule}.",
            why="it evaluates a step again in each of the calls that follow",
            do="leave out the side effect (a print, a callback), or use windows",
        )


def mixed(problem: Problem, rule: LearningRule, extra: Sequence[CompilationRecord] = ()) -> Graph:
    """The graph of a step for a mixture, with the graphs of its parts.

    A step is prepared once for all rules for which it is the same program, so that they share what
    is evaluated; rules with the same analysis share that too.
    """
    owned = shares_of(rule, [dotted(leaf.path) for leaf in problem.step.params], problem.whole)
    steps: dict[bool, Prepared] = {}
    graphs: dict[Any, Graph] = {}
    whole = []
    for share in rule.shares:
        own, windows = share.rule, share.window is not None
        folds = own.record.folds
        if folds not in steps:
            new = prepare(problem.step, problem.consts, *_how(problem, own))
            other = steps.get(not folds)
            steps[folds] = other if other and _same(problem, new, other) else new
        limits = (own.crossings, own.most_entries, own.couple_axis)
        key = (id(steps[folds]), *limits, own.config.filters)
        if key not in graphs:
            graphs[key] = _followed(problem, steps[folds], own, extra)
        _check(problem, graphs[key], own, windows)
        whole.append(graphs[key])
    parts = [graph.owning(leaves) for graph, leaves in zip(whole, owned, strict=True)]
    plain = [graph for graph in whole if not graph.step.filters]
    if not plain:
        first = next(iter(steps.values()))
        plain = [follow(first, problem.consts, problem.find, extra)]
    graph = replace(plain[-1], parts=tuple(parts), whole=tuple(whole))
    passes = shared_passes(graph, rule.record, rule.window is not None)
    if graph.effects and len(passes) > 1:
        one, two = (rule.shares[of[0]] for of in passes[:2])
        raise not_supported(
            f"a step with side effects, with {one} for {', '.join(one.patterns)} and {two} "
            f"for {', '.join(two.patterns)}.",
            why="these two differentiate a step in different ways, so that it runs once for each",
            do="leave out the side effect (a print, a callback), or use one of the two rules",
        )
    return graph


def _same(problem: Problem, a: Prepared, b: Prepared) -> bool:
    """Whether two preparations of a step are the same program with the same operators."""
    prints = [fingerprint(p.step.program, problem.consts) for p in (a, b)]
    return prints[0] == prints[1] and len(a.trained) == len(b.trained)


def certified(graph: Graph, rule: LearningRule, shapes: list[PyTree], windows: bool) -> Reports:
    """The report on every parameter; in a mixture by the rule that it has."""
    if not rule.shares:
        return certify(graph, traces_of(rule.record, rule.config, shapes, windows))
    rules = [s.rule.record for s in rule.shares]
    parts = zip(rule.shares, graph.parts, split_traces(rules, graph, shapes), strict=True)
    own: dict[Path, ParameterReport] = {}
    for s, part, of in parts:
        reports = certified(part, s.rule, of, s.window is not None)
        mine = {p.path for i, p in enumerate(graph.step.params) if part.owns(i)}
        own |= {path: replace(reports[path], rule=str(s)) for path in mine}
    return {leaf.path: own[leaf.path] for leaf in graph.step.params}


def traces_of(record: Rule, config: ETraceConfig, shapes: list[PyTree], windows: bool) -> Traces:
    """What a rule stores, for the report."""
    return Traces(
        shapes,
        record.per_parameter,
        record.approximates,
        record.complete,
        record.feedback is not None,
        credit_of(record, config, windows),
        record.steps_back,
    )


def advise(problem: Problem, rule: LearningRule) -> Advice:
    """What the present rule and others cost, and which parameters they make exact."""
    own = _Estimates(problem, operations_of(problem))
    reports, size, time, _ = own.of(rule)
    present = RuleCost(str(rule), rule, _exact(reports), size, time, "the present rule")
    estimates = replace(own, problem=replace(problem, most_entries=MOST_ENTRIES))
    same = lambda other: _key(other) == _key(rule)
    others = [cost for cost in _candidates(estimates) if not same(cost.rule)]
    step = problem.step
    stored = varying_bytes(step.program, {step.entry(leaf) for leaf in step.params})
    followed = frozenset[Path]().union(*(c.exact or () for c in (present, *others)))
    nothing = "in one window over the whole sequence nothing is left out"
    pass_ = _both_passes(own.forward)
    window = RuleCost("no_trace", no_trace(), followed, max(1, stored), pass_, nothing)
    *costs, window = (replace(c, time=c.time / time) for c in (present, *others, window))
    inexact = tuple(path for path, p in reports.items() if not p.exact)
    hints = dict.fromkeys(d.do for p in reports.values() for d in p.dropped if d.do)
    seconds = partial(_seconds, problem)
    return Advice(tuple(costs), inexact, len(reports), window, None, tuple(hints), seconds)


def _seconds(problem: Problem, cost: RuleCost) -> float | None:
    """How long a step takes, if its traces are not too large to be allocated for that."""
    if cost.window is None and cost.bytes > MOST_BYTES:
        return None
    return seconds_per_step(*analysed(problem, cost.rule), problem.consts, cost)


def _key(rule: LearningRule) -> tuple[str, str]:
    return rule.name, repr(rule.options)


class _Estimate(NamedTuple):
    """The reports on parameters in use, bytes, operations, and how many elements states have."""

    reports: Reports
    bytes: int
    operations: float
    elements: int


@dataclass(frozen=True, slots=True)
class _Estimates:
    """The analyses of a step for several rules, each made once."""

    problem: Problem
    forward: float
    found: dict[tuple[str, str], _Estimate] = field(default_factory=dict)

    def of(self, rule: LearningRule) -> _Estimate:
        if _key(rule) not in self.found:
            self.found[_key(rule)] = self._analysed(rule)
        return self.found[_key(rule)]

    def _analysed(self, rule: LearningRule) -> _Estimate:
        graph, shapes = analysed(self.problem, rule)
        reports = certified(graph, rule, shapes, windows=False)
        used = {path: p for path, p in reports.items() if p.how != "none"}
        operations = _time(graph, rule.record, shapes, self.forward)
        return _Estimate(used, nbytes(shapes), operations, _elements(graph))

    def cost(self, rule: LearningRule, why: str) -> RuleCost:
        try:
            found = self.of(rule)
        except (CompilationError, NotSupportedError) as error:
            return RuleCost(str(rule), rule, None, 0, math.inf, str(error).partition("\n")[0])
        return RuleCost(str(rule), rule, _exact(found.reports), found.bytes, found.operations, why)


def _elements(graph: Graph) -> int:
    """How many elements of the states are followed; of a batch that was thinned, a sample's."""
    entries, offsets = graph.tangent.entries, graph.influence.offsets.tolist()
    analysed, every = offsets[len(entries)], sum(v.size for v in entries)
    if analysed == every:
        return every
    sizes = zip(entries, offsets, offsets[1:], strict=False)
    samples = max((v.shape[0] * (b - a) // v.size for v, a, b in sizes if v.shape), default=1)
    return analysed // max(samples, 1)


def _candidates(estimates: _Estimates) -> Iterator[RuleCost]:
    """d_rtrl, snap of rising order where it makes more parameters exact, and rtrl."""
    best = estimates.cost(d_rtrl(), "it leaves out nothing of it")
    yield best
    for axis in _coupling(estimates, best):
        why = "it counts the elements along this axis as one unit"
        cost = estimates.cost(d_rtrl(couple_axis=axis), why)
        if len(cost.exact or ()) > len(best.exact or ()):
            yield cost
            best = cost
    everything = estimates.cost(rtrl(), "it follows every path")
    # Until it makes all exact that rtrl does, or takes more memory: for a two-layer network
    # snap(1) follows the recurrent weights within a unit, snap(2) those of the layer below, ...
    for n in range(1, MOST_ORDER + 1):
        if best.exact is not None and best.exact == everything.exact:
            break
        if (large := _too_large(estimates, best)) is not None:
            yield RuleCost("snap", snap(), None, 0, math.inf, f"not analysed: {large}")
            break
        near = f"it reaches its states across at most {n - 1} operator{'s' * (n != 2)}"
        cost = estimates.cost(snap(n), near)
        if cost.exact is None or len(cost.exact) > len(best.exact or ()):
            yield cost
            best = cost
        if cost.exact is None or cost.bytes >= everything.bytes:
            break
    yield everything


def _too_large(estimates: _Estimates, best: RuleCost) -> str | None:
    """Why the analysis for snap would take too long."""
    if estimates.forward > MOST_OPERATIONS:
        return f"a step has {estimates.forward:,.0f} operations, and it follows each of them"
    elements = 0 if best.exact is None else estimates.of(best.rule).elements
    if elements > MOST_ELEMENTS:
        return f"it would follow the pairs of {elements:,} elements of the states"
    return None


def _coupling(estimates: _Estimates, diagonal: RuleCost) -> list[int]:
    """The axes along which what d_rtrl leaves out would stay within a unit."""
    if diagonal.exact is None:
        return []
    axes = (d.axis for p in estimates.of(diagonal.rule).reports.values() for d in p.dropped)
    return list(dict.fromkeys(a for a in axes if a is not None))


def price(graph: Graph, record: Rule, shapes: list[PyTree], forward: float) -> float:
    """Operations of a rule, relative to those of BPTT; `forward` are those of a step."""
    return _time(graph, record, shapes, forward) / _both_passes(forward)


def _exact(reports: Reports) -> frozenset[Path]:
    return frozenset(path for path, p in reports.items() if p.exact)


# ------------------------------------------------------------------------------------ operations


def operations_of(problem: Problem) -> float:
    """Operations of one step; the body of a loop counts once."""
    program = problem.step.program
    run = lambda consts, inputs: evaluate(program, consts, inputs)
    lowered = jax.jit(run).lower(problem.consts, [_shape(v) for v in program.inputs])
    counts: Any = lowered.cost_analysis() or lowered.compile().cost_analysis()  # None on a GPU
    return max(1.0, float(counts.get("flops", 0)) + float(counts.get("transcendentals", 0)))


def _time(graph: Graph, record: Rule, shapes: list[PyTree], forward: float) -> float:
    """Operations of one step of a rule; of a mixture with a reverse pass for each of its cuts."""
    if not record.parts:
        return _operations(graph, record, shapes, forward)
    rules = [part.rule for part in record.parts]
    passes = len(shared_passes(graph, record, any(p.windowed for p in record.parts)))
    parts = zip(graph.parts, rules, split_traces(rules, graph, shapes), strict=True)
    own = sum(_operations(*of, forward) - _both_passes(forward) for of in parts)
    return _both_passes(forward) + 2 * (passes - 1) * forward + own


def _both_passes(forward: float) -> float:
    """Operations of a step and its reverse pass."""
    return OF_STEP + 3 * forward


def _operations(graph: Graph, record: Rule, shapes: list[PyTree], forward: float) -> float:
    """Operations of one step of a rule, see the equations above."""
    total = _both_passes(forward)
    if record.complete and record.approximates is not None:  # one random tangent
        return total + 2 * forward
    if record.complete:
        sizes = [graph.step.entry(leaf).size for leaf in graph.step.params]
        traced = [n for n, trace in zip(sizes, shapes, strict=True) if trace]
        return total + OF_INFLUENCE * sum(n * (forward + n) for n in traced)
    # x @ W of 128 x 128 and h @ R into the same 128 units, one slot, per sample: a trace of n =
    # 16,384 numbers each, read and multiplied with the signal once a step (2 n), written once per
    # block of MOST_STEPS; D of the space counts once for both; each colour is one more tangent.
    spaces: dict[bytes, int] = {}
    for relation, trace in zip(graph.relations, shapes, strict=True):
        s = relation.slots
        k, y = s.width, math.prod(s.shape)
        n = sum(math.prod(a.shape) for a in jax.tree.leaves(trace))
        if not n:
            continue
        places = y if s.table is None else s.table.index.size // k**2
        spaces[s.destination.tobytes()] = places * k**3 if k > 1 else 0
        total += 2 * (n + n * k / MOST_STEPS + y * k**2)
    colours = [c.n_sources + c.n_exits for c in (v.pattern.colouring for v in graph.views)]
    return total + OF_PRODUCT * sum(spaces.values()) + OF_TANGENT * forward * sum(colours)


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.shape, var.dtype)
