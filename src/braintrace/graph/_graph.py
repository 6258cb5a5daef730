"""From a step to the graph of its learning problem: one pass through the analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import value_error
from ..ops import Structure
from ..program import (
    Equation,
    Program,
    cannot_be_mapped,
    deep_equations,
    evaluate,
    inner_equations,
    is_traced,
    opened,
    quiet,
    reads_named_axis,
)
from ._affine import explicit
from ._apart import taken_apart
from ._channels import meet, stays_apart
from ._coordinates import coordinates, slopes
from ._diagnostics import CompilationRecord
from ._expand import expanded
from ._explain import (
    excluded,
    group_records,
    included,
    plain_parameters,
    untrained,
    wrapped,
)
from ._fold import fold_step
from ._groups import Followed, HiddenGroup, find_groups
from ._influence import EVERYTHING, MOST_SLOTS, Influence, influence
from ._links import Links, find_links, influenced
from ._memory import measured
from ._operands import computing, operand_atoms, operands
from ._pattern import (
    Pattern,
    Places,
    TapPattern,
    close,
    matrix,
    mixing_probes,
    state_pattern,
    tap_pattern,
)
from ._policy import ControlFlowPolicy, close_bodies
from ._recognise import packed, recognise
from ._relations import HiddenParamOpRelation, PathClassification
from ._samples import Samples, samples_are_apart, thin
from ._sets import NotAlike, facts_of
from ._sites import Site, find_sites, flow_of
from ._slots import MOST_ENTRIES, Slots, slots
from ._step import MOST_COUPLED, Component, Leaf, Path, Step
from ._tangent import Tangent, tangent_program
from ._while import bind_reversible


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """Who reads whom by a tangent program with some of its equations cut."""

    influence: Influence
    pattern: Pattern
    taps: tuple[TapPattern, ...]
    components: tuple[Component, ...]

    @property
    def cut(self) -> frozenset[Equation]:
        """Equations of the tangent program whose tangent is dropped."""
        return frozenset(c.equation for c in self.influence.cuts)


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """Everything the engine needs to know about a step; the result of `analyse`."""

    step: Step
    tangent: Tangent
    views: tuple[View, ...]  # of the analysed samples; the first cuts what mixes units
    view_of: tuple[int, ...]  # which of them a relation follows
    tapped: tuple[int, ...]  # and the site of each
    sites: tuple[Site, ...]
    groups: tuple[HiddenGroup, ...]
    relations: tuple[HiddenParamOpRelation, ...]
    weights: Program  # the operands of the relations, from the parameters
    links: Links
    opens: Mapping[Equation, frozenset[int]]  # control flow around operators, by relation
    whiles: Mapping[Equation, frozenset[int]]  # around a `while`, not being one
    custom: Mapping[Equation, frozenset[int]]  # around a custom reverse rule
    influenced: tuple[tuple[int, ...], ...]  # hidden leaves each parameter leaf reaches, ever
    shares_trace: tuple[int, ...]  # per hidden leaf a mask of those it shares a trace with
    crossings: int | None
    records: tuple[CompilationRecord, ...]
    memory: int  # bytes that the analysis took
    owned: frozenset[int] | None = None  # the parameter leaves that it is for, None for all
    parts: tuple[Graph, ...] = ()  # of a mixture of rules, the graph of each
    whole: tuple[Graph, ...] = ()  # and what it would be if its rule were alone

    def owning(self, leaves: frozenset[int]) -> Graph:
        """The graph for some parameter leaves alone: the operators that use one of them.

        What is cut, and which states share a trace, stays as it is.
        """
        uses = lambda r: any(leaves.intersection(of) for of in r.site.leaves.values())
        own = [i for i, r in enumerate(self.relations) if uses(r)]
        relations = tuple(replace(self.relations[i], index=n) for n, i in enumerate(own))
        at = [a for r in relations for a in operand_atoms(r.site)]
        return replace(
            self,
            relations=relations,
            view_of=tuple(self.view_of[i] for i in own),
            tapped=tuple(self.tapped[i] for i in own),
            weights=computing(self.step.program, at),
            opens=_opens(self.step.program, self.sites, relations),
            owned=leaves,
        )

    def owns(self, leaf: int) -> bool:
        """Whether it is for this parameter leaf."""
        return self.owned is None or leaf in self.owned

    @property
    def inner(self) -> dict[Equation, frozenset[int]]:
        """The equations of control flow around operators or a `while`."""
        return {**self.whiles, **self.opens}

    def samples_are_apart(self, consts: Sequence[Any]) -> bool:
        """Whether axis 0 counts samples that never meet, on any path."""
        return samples_are_apart(self.step, consts, self.sites, self.relations)

    @property
    def effects(self) -> bool:
        """Whether the step has side effects."""
        return any(e.effects for e in deep_equations(self.step.program))

    @property
    def structures(self) -> list[Structure]:
        """Of the sparse operators in the step."""
        params = (e.params.get("structure") for e in deep_equations(self.step.program))
        return list(dict.fromkeys(s for s in params if isinstance(s, Structure)))

    @property
    def unmapped(self) -> bool:
        """Whether the step calls Python in a way that cannot be mapped over time."""
        return any(map(cannot_be_mapped, self.step.program.equations))

    @property
    def joins_calls(self) -> bool:
        """Whether the step joins what a `vmap` with a name around it maps, like `psum`."""
        equations = list(deep_equations(self.step.program))
        inner = (e for eqn in equations for e in inner_equations(eqn))
        return any(map(reads_named_axis, equations)) or any(map(reads_named_axis, inner))

    @property
    def influence(self) -> Influence:
        return self.views[0].influence

    @property
    def pattern(self) -> Pattern:
        return self.views[0].pattern

    def operands(self, consts: Sequence[Any], params: Sequence[Any]) -> list[dict[str, Any]]:
        """Effective weights of every relation, a function of the parameters.

        An operand that is not trained and varies counts as zero: dy/dw does not read it.
        """
        inputs: list[Any] = [None] * len(self.step.program.inputs)
        # A loop takes all of its inputs, also those that the operand does not depend on.
        taken = {a for eqn in self.weights.equations for a in eqn.inputs}
        for i, v in enumerate(self.step.program.inputs):
            if v in taken and not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended):
                inputs[i] = jnp.full(v.shape, jnp.nan if v.is_inexact else 0, v.dtype)
        for leaf, value in zip(self.step.params, params, strict=True):
            inputs[leaf.position] = value
        flat = iter(evaluate(self.weights, consts, inputs, bind_reversible))
        out = []
        for r in self.relations:
            values = [next(flat) for _ in operand_atoms(r.site)]
            trained = operands(r.site, values)
            shapes = {k: r.operator.operands[i] for k, i in r.operator.positions.items()}
            zeros = {k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items() if k not in trained}
            out.append(r.operator.effective({**trained, **zeros}))
        return out

    def slopes(self, consts: Sequence[Any], params: Sequence[Any]) -> list[dict[str, Any]]:
        """Per relation, the slopes of weights that are element-wise functions of one parameter."""
        return slopes(self.operands, [r.mapped for r in self.relations], consts, params)


def analyse(
    step: Step,
    consts: Sequence[Any],
    states: Callable[[Path], Any] = lambda path: None,
    extra: Sequence[CompilationRecord] = (),
    crossings: int | None = None,
    most_entries: int = MOST_ENTRIES,
    policy: ControlFlowPolicy | None = None,
    fold: bool = True,
    unmarked: bool = False,
    couple_axis: int | None = None,
) -> Graph:
    """The groups, relations and recurrent entries of a step.

    Args:
        step: the step, from a front end.
        consts: values of the program's constants; a tracer counts as varying from call to call.
        states: from a path to whatever object the front end has for it.
        extra: records of the front end.
        crossings: how many operators or mixing equations a trace is followed through; None keeps
            only paths that cross none.
        most_entries: how many entries the D of one relation may have.
        policy: which control flow around operators stays closed.
        fold: whether a varying factor of a weight becomes part of its operator.
        unmarked: whether plain JAX that uses a trained value counts as an operator.
        couple_axis: an axis of states along which elements are one unit: D has a block per unit.

    Raises:
        NotSupportedError: the analysis would take more memory than the machine has.
    """
    prepared = prepare(step, consts, policy, fold, unmarked)
    limits = (crossings, most_entries, couple_axis)
    return follow(prepared, consts, states, extra, *limits)


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """A step with its operators recognised: what the analyses for all rules have in common."""

    step: Step
    sites: tuple[Site, ...]
    trained: tuple[Site, ...]
    unmarked: bool


def prepare(
    step: Step,
    consts: Sequence[Any],
    policy: ControlFlowPolicy | None = None,
    fold: bool = True,
    unmarked: bool = False,
) -> Prepared:
    """Find the operators of a step; arguments as for `analyse`."""
    carried = [(step.entry(leaf), step.exit(leaf)) for leaf in (*step.hidden, *step.others)]
    if (divided := explicit(step.program, step.n_outs, carried)) is not None:
        step = replace(step, program=divided, penalised=True)
    unsteady = sum(1 << i for i, c in enumerate(consts) if is_traced(c))
    if unmarked:
        step = recognise(taken_apart(expanded(step, consts)), unsteady, fold)
    flow = flow_of(step, unsteady)
    sites = find_sites(step, flow)
    if fold and (folded := fold_step(step, flow, sites)) is not step:
        step = folded
        sites = find_sites(step, flow_of(step, unsteady))
    trained = close_bodies(policy, step, [s for s in sites if s.trained])
    return Prepared(step, tuple(sites), tuple(trained), unmarked)


def follow(
    prepared: Prepared,
    consts: Sequence[Any],
    states: Callable[[Path], Any] = lambda path: None,
    extra: Sequence[CompilationRecord] = (),
    crossings: int | None = None,
    most_entries: int = MOST_ENTRIES,
    couple_axis: int | None = None,
) -> Graph:
    """The graph of a step whose operators were found; arguments as for `analyse`."""
    step = replace(prepared.step, couple_axis=couple_axis)
    sites, trained, unmarked = prepared.sites, prepared.trained, prepared.unmarked
    with measured() as memory:
        tangents, paths = _paths(step, consts, trained, crossings, most_entries)
        if unmarked and (parts := _split_up(step, tangents[0], paths.apart)):
            hidden = tuple(parts.get(i, leaf) for i, leaf in enumerate(step.hidden))
            step = replace(step, hidden=hidden)
            tangents, paths = _paths(step, consts, trained, crossings, most_entries)
    _check_coupled(step, tangents[-1].components)
    tangent, view, offsets = tangents[-1], paths.views[0], paths.places.offsets
    components = tangent.components
    followed = Followed(
        step, tuple(trained), tangent, view.influence, view.pattern, crossings is not None
    )
    groups = find_groups(followed, paths.apart.pattern, states)
    links = find_links(step, trained, groups)
    records = [*extra, *untrained(sites), *wrapped(step, sites), *plain_parameters(step, links)]
    relations: list[HiddenParamOpRelation] = []
    tapped: list[int] = []
    view_of: list[int] = []
    for i, (site, (own, which)) in enumerate(zip(trained, paths.slots, strict=True)):
        if own is None:
            taps = {*tangent.tap_sources(i)}
            reasons = [c.reason for c in view.influence.cuts if c.sources & taps]
            records.append(excluded(step, site, links, reasons))
            continue
        relation = _relation(step, site, own, groups, offsets, links, len(relations), states)
        relations.append(relation)
        tapped.append(i)
        view_of.append(which)
        records += included(relation, crossings is None)
    records += group_records(groups)

    graph = Graph(
        step=step,
        tangent=tangent,
        views=tuple(paths.views),
        view_of=tuple(view_of),
        tapped=tuple(tapped),
        sites=tuple(trained),
        groups=groups,
        relations=tuple(relations),
        weights=computing(step.program, [a for r in relations for a in operand_atoms(r.site)]),
        links=links,
        opens=_opens(step.program, trained, relations),
        whiles=_around_whiles(step.program),
        custom=opened(step.program, quiet),
        influenced=influenced(step, links),
        shares_trace=_sharing(len(step.hidden), relations, components, offsets),
        crossings=crossings,
        records=tuple(records),
        memory=memory.peak,
    )
    mapped = coordinates(step, graph.operands, [r.keys for r in relations])
    pairs = zip(relations, mapped, strict=True)
    return replace(graph, relations=tuple(replace(r, mapped=of) for r, of in pairs))


def _check_coupled(step: Step, components: Sequence[Component]) -> None:
    if step.couple_axis is None or any(c.coupled is not None for c in components):
        return
    shapes = ", ".join(f"{leaf.name} {step.entry(leaf).shape}" for leaf in step.hidden)
    raise value_error(
        f"couple_axis={step.couple_axis} is no axis of a state.",
        where=shapes,
        why="elements along it count as one unit: it is an axis of 2 to "
        f"{MOST_COUPLED} elements of a state that has others",
        do="pass the axis of the compartments, or leave couple_axis out",
    )


def _split_up(step: Step, tangent: Tangent, view: View) -> dict[int, Leaf]:
    """The states that are packed into one array, where that makes neighbours of one unit's."""
    pairs = [[tangent.components[c].leaf for c in pair] for *pair, _ in view.pattern.dropped]
    lost = {a for a, b in pairs if a == b}
    return {i: leaf for i, leaf in packed(step).items() if i in lost} if lost else {}


def _paths(
    step: Step,
    consts: Sequence[Any],
    trained: Sequence[Site],
    crossings: int | None,
    most_entries: int,
) -> tuple[list[Tangent], _Paths]:
    tangents = [tangent_program(step, consts, trained)]
    if crossings is not None:
        tangents.append(tangent_program(step, consts, trained, crossing=True))
    return tangents, _Paths(tangents, consts, trained, crossings, most_entries)


class _Paths:
    """The views of a step and the slots of its operators, by a few samples of a batch if possible.

    `apart` is the view in which what mixes is cut, `slots` are per operator its slots (None: no
    state is reached) and the number of their view.
    """

    # What is followed, for `h' = 0.9 * h + mean(h) + x @ w` with two units and one sample of many:
    #
    #     apart       h' reads h at its own place, the mean is cut: D-RTRL, w has one slot
    #     views[0]    the same, or with `crossings` the mean and operators are followed: D is full,
    #                 and `reached` grows by one crossing at a time
    #     views[1]    made only if something of up to 64 elements is cut behind an operator:
    #                 followed there for operators whose output elements never meet (`_channels`);
    #                 those of w do meet in the mean, so w stays with views[0]
    #
    # All of this on the samples of `thin`; if one of its proofs fails on the way (`NotAlike`: the
    # samples differ in what they read), everything is done again with the whole batch.
    def __init__(
        self,
        tangents: Sequence[Tangent],
        consts: Sequence[Any],
        sites: Sequence[Site],
        crossings: int | None,
        most_entries: int,
    ):
        self.tangents, self.consts, self.sites = tangents, consts, sites
        self.crossings, self.most_entries = crossings, most_entries
        inside = any(site.levels for site in sites)
        self.samples: list[Samples | None] = [None if inside else thin(t) for t in tangents]
        try:
            if None in self.samples:
                raise NotAlike
            self.follow()
        except NotAlike:
            self.samples = [None] * len(tangents)
            self.follow()

    def follow(self) -> None:
        self.apart = self.view(0, None)
        self.views = [self.apart if self.crossings is None else self.view(1, EVERYTHING)]
        samples, self.tangent = self.samples[-1], self.tangents[-1]
        components = (self.tangent if samples is None else samples.tangent).components
        self.places = Places(components, self.apart.influence.offsets)
        self.slots = [self.slots_of(i, site) for i, site in enumerate(self.sites)]

    def view(self, k: int, follow: float | None) -> View:
        """Cut what mixes, or `follow` sums and products of so many elements."""
        samples = self.samples[k]
        tangent = self.tangents[k] if samples is None else samples.tangent
        components, parts = tangent.components, None if samples is None else samples.parts
        offends = partial(mixing_probes, components) if follow is None else None
        facts = facts_of(tangent.program.inputs, self.consts)
        time_axes = [s.time_axes for s in self.sites]
        reads = influence(tangent, time_axes, facts, offends, follow, parts)
        taps = [
            tap_pattern(reads, components, tangent.tap_sources(i), site.iterations is not None)
            for i, site in enumerate(self.sites)
        ]
        pattern = state_pattern(reads, components, follow is not None)
        if samples is not None:
            samples.check(pattern, taps)
            reads = samples.of_whole(reads)
        return View(reads, pattern, tuple(taps), components)

    def slots_of(self, i: int, site: Site) -> tuple[Slots | None, int]:
        if not site.steady or site.closed is not None:
            return None, 0
        samples, operator = self.samples[-1], site.operator
        y_shape, copies = operator.y.shape, 1
        if samples is not None:
            y_shape, copies = samples.tangent.taps[i][0].shape, samples.copies(i)
        reached, which = self.reached(i, prod(y_shape)), 0
        if self.crossings is None and self.may_widen(i, reached):
            if len(self.views) == 1:
                self.views.append(self.view(0, MOST_SLOTS))
            wider = self.wider(i, prod(y_shape), copies, bool(reached.nnz))
            if wider is not None:
                reached, which = wider, 1
        view, tangent = self.views[which], self.tangent
        dtype = jnp.result_type(*(v.dtype for v in (*tangent.entries, *tangent.taps[i])))
        same_axes = operator.primitive.rules.spread is None
        how = (y_shape, same_axes, dtype, self.most_entries, copies)
        own = slots(view.taps[i], reached, view.pattern, self.places, *how)
        return (own if own is None or samples is None else samples.widened(own, i)), which

    def may_widen(self, i: int, reached: Any) -> bool:
        """Whether sums or products of a few elements are cut behind an operator, after which its
        output elements need not meet."""
        influence = self.apart.influence
        cuts = [influence.cuts[k] for k in sorted(frozenset().union(*influence.lost))]
        cuts = [c for c in cuts if c.reads <= MOST_SLOTS]
        first = int(influence.offsets[self.tangent.tap_sources(i)[0]])
        return bool(cuts) and not (reached.nnz and meet(cuts, reached, first))

    def wider(self, i: int, n_y: int, copies: int, traced: bool) -> Any:
        """What each output element reaches if sums within a channel are followed.

        None if that is not possible, or leaves something out, or if nothing is cut anyway.
        """
        apart, view = self.views
        n = self.places.n
        step, direct = matrix(view.pattern.edges, (n, n)), matrix(view.taps[i].all_edges, (n, n_y))
        reached = stays_apart(step, direct, self.sites[i], traced, copies)
        if reached is None:
            return None
        mine = {*self.places.component[reached.nonzero()[0]].tolist(), *self.tangent.tap_sources(i)}
        # Only worth it where something on the way was cut before and nothing is cut now: a mean
        # over a layer behind the sum over a channel would leave the trace inexact all the same.
        cut, cut_here = (any(c.sources & mine for c in v.influence.cuts) for v in (apart, view))
        return reached if cut and not cut_here else None

    def reached(self, i: int, n_y: int) -> Any:
        """Which state elements each output element is followed to."""
        n, apart, view = self.places.n, self.apart, self.views[0]
        # SnAp(2) of two units, h' = tanh(h @ W + x @ w), W and w trained. As 2 x 2 patterns of who
        # reads whom; `kept`, the paths that cross no operator, is empty, as h' reads h through W:
        #
        #     apart.taps     y0 -> h0, y1 -> h1       reached = [[1, 0], [0, 1]]: SnAp(1)
        #     step           h0, h1 <- h0, h1         of the view that follows operators
        #     step @ reached [[1, 1], [1, 1]]         one crossing more: SnAp(2) is dense
        #
        # `close` goes on along `kept` for free after every crossing.
        kept = matrix(apart.pattern.kept, (n, n))
        reached = close(kept, matrix(apart.taps[i].all_edges, (n, n_y)))
        if self.crossings is None:
            return reached
        step, direct = matrix(view.pattern.kept, (n, n)), matrix(view.taps[i].all_edges, (n, n_y))
        for _ in range(self.crossings):
            more = close(kept, (step @ reached + direct + reached).astype(bool))
            if more.nnz == reached.nnz:
                break
            reached = more
        return reached


def _opens(
    program: Program, sites: Sequence[Site], relations: Sequence[HiddenParamOpRelation]
) -> dict[Equation, frozenset[int]]:
    """Control flow around operators, with the numbers of the relations inside."""
    numbers = {s.equation: -1 for s in sites} | {r.site.equation: r.index for r in relations}
    return opened(program, numbers.get)


def _around_whiles(program: Program) -> dict[Equation, frozenset[int]]:
    """Where `bind_reversible` finds the outermost `while`s; it takes those inside along."""
    around = opened(program, lambda e: -1 if e.name == "while" else None)
    return {eqn: numbers for eqn, numbers in around.items() if eqn.name != "while"}


def _sharing(
    n: int,
    relations: Sequence[HiddenParamOpRelation],
    components: Sequence[Component],
    offsets: np.ndarray,
) -> tuple[int, ...]:
    """Masks of the leaves that share a trace with each leaf: pairwise, not transitive."""
    shared = [1 << i for i in range(n)]
    for r in relations:
        leaves = {components[c].leaf for c in r.slots.components(offsets)}
        mask = sum(1 << i for i in leaves)
        for i in leaves:
            shared[i] |= mask
    return tuple(shared)


def _relation(
    step: Step,
    site: Site,
    followed: Slots,
    groups: Sequence[HiddenGroup],
    offsets: np.ndarray,
    links: Links,
    index: int,
    states: Callable[[Path], Any],
) -> HiddenParamOpRelation:
    components = set(followed.components(offsets))
    touched = tuple(g for g in groups if components & set(g.components))
    mask = links.direct[site.equation]
    whole = links.through[site.equation]
    paths, classes = [], {}
    for g in touched:
        for k, path in zip(g.leaves, g.hidden_paths, strict=True):
            if (mask | whole) >> k & 1:
                paths.append(path)
                through_others = any(
                    links.through[b.equation] >> k & 1 for b in links.blockers[site.equation]
                )
                kinds = PathClassification
                direct = kinds.MIXED if through_others else kinds.ALL_DIRECT
                classes[path] = direct if mask >> k & 1 else kinds.ALL_THROUGH_OTHER_ETP
    trained = {k: v for k, v in site.leaves.items() if v}
    derived = site.operator.primitive.rules.effective and site.operator.plain
    keys = tuple(site.operator.shapes) if derived else tuple(trained)
    return HiddenParamOpRelation(
        index=index,
        site=site,
        slots=followed,
        keys=keys,
        hidden_groups=touched,
        connected_hidden_paths=tuple(paths),
        trainable_paths={k: step.params[v[0]].path for k, v in trained.items()},
        trainable_leaf_indices={k: step.params[v[0]].index for k, v in trained.items()},
        path_classification=classes,
        trainable_param_states={k: states(step.params[v[0]].path) for k, v in trained.items()},
    )
