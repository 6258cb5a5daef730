"""From a step to the graph of its learning problem: one pass through the analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import Equation, Program, Var, evaluate, is_inexact, is_traced, prune
from ._diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from ._groups import HiddenGroup, find_groups
from ._influence import Influence, influence
from ._pattern import Pattern, TapPattern, state_pattern, tap_pattern
from ._reach import bits_of, reach, strongly_connected
from ._relations import HiddenParamOpRelation, Site, find_sites, hidden_operators
from ._slots import Slots, slots
from ._step import Path, Step
from ._tangent import Tangent, tangent_program


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """Everything the engine needs to know about a step; made by `analyse`.

    `cut_entries[id]` tells, for the equation with that id, which hidden leaves (mask) enter it
    through a recurrent connection. `weights` computes the operands of the relations from the
    parameters.
    """

    step: Step
    tangent: Tangent
    found: Influence
    pattern: Pattern
    taps: tuple[TapPattern, ...]
    tapped: tuple[int, ...]
    groups: tuple[HiddenGroup, ...]
    relations: tuple[HiddenParamOpRelation, ...]
    weights: Program
    cut_entries: Mapping[Equation, int]
    leaf_reach: Mapping[Var, int]
    records: tuple[CompilationRecord, ...]

    @property
    def cut(self) -> frozenset[int]:
        """Equations of the tangent program whose tangent is dropped."""
        return frozenset(c.equation for c in self.found.cuts)

    def operands(self, consts: Sequence[Any], params: Sequence[Any]) -> list[dict[str, Any]]:
        """Effective weights of every relation, a function of the parameters.

        An operand that is not trained and varies counts as zero: dy/dw does not read it.
        """
        inputs: list[Any] = [None] * len(self.step.program.inputs)
        for leaf, value in zip(self.step.params, params, strict=True):
            inputs[leaf.position] = value
        flat = iter(evaluate(self.weights, consts, inputs))
        out = []
        for r in self.relations:
            shape = {k: r.operator.operands[i] for k, i in r.operator.positions.items()}
            varying = r.site.varying
            out.append(
                r.operator.effective(
                    {
                        k: jnp.zeros(s.shape, s.dtype) if k in varying else next(flat)
                        for k, s in shape.items()
                    }
                )
            )
        return out


def analyse(
    step: Step,
    consts: Sequence[Any],
    states: Callable[[Path], Any] = lambda path: None,
    extra: Sequence[CompilationRecord] = (),
) -> Graph:
    """Find groups, relations and recurrent entries of a step.

    Args:
        step: the step, from a front end.
        consts: values of the program's constants; a tracer counts as varying from call to call.
        states: from a path to whatever object the front end keeps for it.
        extra: records of the front end.
    """
    program = step.program
    unsteady = sum(1 << i for i, c in enumerate(consts) if is_traced(c))
    sites = find_sites(step, unsteady)
    trained = [s for s in sites if s.trained]
    tangent = tangent_program(step, consts, [s.equation for s in trained])
    found = influence(tangent, _known(tangent, consts))
    pattern = state_pattern(found, tangent.components)
    offsets = found.offsets[: len(tangent.components) + 1]
    groups = _with_states(find_groups(step, tangent.components, pattern, offsets), states)

    taps, first = [], len(tangent.components)
    for parts in tangent.taps:
        taps.append(tap_pattern(found, first, len(parts)))
        first += len(parts)

    links = _links(step, sites, trained, groups)
    records = [*extra, *hidden_operators(program), *_untrained(sites)]
    relations: list[HiddenParamOpRelation] = []
    tapped: list[int] = []
    for i, site in enumerate(trained):
        parts = (*tangent.entries, *tangent.taps[i])
        dtype = jnp.result_type(*(v.dtype for v in parts))
        followed = slots(taps[i], pattern, offsets, site.y.shape, dtype) if site.steady else None
        if followed is None:
            records.append(_excluded(step, site, links))
            continue
        relation = _relation(step, site, followed, groups, offsets, links, len(relations), states)
        relations.append(relation)
        tapped.append(i)
        records += _included(relation, links)
    records += _group_records(groups) + _dropped(step, tangent, found, pattern, groups)

    outputs = [
        r.site.equation.inputs[p]
        for r in relations
        for k, p in r.operator.positions.items()
        if k not in r.site.varying
    ]
    return Graph(
        step=step,
        tangent=tangent,
        found=found,
        pattern=pattern,
        taps=tuple(taps),
        tapped=tuple(tapped),
        groups=groups,
        relations=tuple(relations),
        weights=prune(program, outputs),
        cut_entries=links.cut_entries,
        leaf_reach=links.from_leaves,
        records=tuple(records),
    )


def _known(tangent: Tangent, consts: Sequence[Any]) -> dict[Var, np.ndarray]:
    out = {}
    for var, value in zip(tangent.program.inputs, consts, strict=False):
        fixed = not is_traced(value) and not is_inexact(var.dtype)
        if fixed and not jax.dtypes.issubdtype(var.dtype, jax.dtypes.extended):
            out[var] = np.asarray(value)
    return out


def _with_states(groups: tuple[HiddenGroup, ...], states: Callable) -> tuple[HiddenGroup, ...]:
    return tuple(replace(g, hidden_states=tuple(map(states, g.hidden_paths))) for g in groups)


# --------------------------------------------------------------------------- who reaches whom


@dataclass(frozen=True, eq=False, slots=True)
class _Links:
    """Reachability of one step, as masks.

    `from_leaves[v]`: hidden leaves whose entry v depends on. Per trained site: `direct` and
    `through`, the leaves its output reaches without and with crossing other trained operators,
    and `blockers`, the trained sites it feeds.
    """

    from_leaves: dict[Var, int]
    sites: list[Site]
    direct: dict[Equation, int]
    through: dict[Equation, int]
    blockers: dict[Equation, tuple[Site, ...]]
    cut_entries: dict[Equation, int]


def _links(
    step: Step, sites: Sequence[Site], trained: Sequence[Site], groups: Sequence[HiddenGroup]
) -> _Links:
    program = step.program
    entries = {step.entry(leaf): 1 << i for i, leaf in enumerate(step.hidden)}
    from_leaves = reach(program, entries)
    ys = {s.y: 1 << i for i, s in enumerate(trained)}
    operators = {s.equation for s in trained}
    from_ys = reach(program, ys)
    from_ys_direct = reach(program, ys, through=lambda e: e not in operators)

    def leaves_reached(bits: Mapping[Var, int], i: int) -> int:
        return sum(
            1 << k for k, leaf in enumerate(step.hidden) if bits_of(step.exit(leaf), bits) >> i & 1
        )

    direct = {s.equation: leaves_reached(from_ys_direct, i) for i, s in enumerate(trained)}
    through = {s.equation: leaves_reached(from_ys, i) for i, s in enumerate(trained)}
    blockers = {
        s.equation: tuple(
            o
            for o in trained
            if o is not s and any(bits_of(a, from_ys_direct) >> i & 1 for a in o.equation.inputs)
        )
        for i, s in enumerate(trained)
    }

    # Recurrent entries: a group that reaches itself again through the operator.
    members = [sum(1 << leaf for leaf in g.leaves) for g in groups]
    edges = []
    for mask in members:
        successors = 0
        for j, g in enumerate(groups):
            if any(bits_of(step.exit(step.hidden[k]), from_leaves) & mask for k in g.leaves):
                successors |= 1 << j
        edges.append(successors)
    same_loop = strongly_connected(edges)
    cut_entries: dict[Equation, int] = {}
    for s in trained:
        mask = 0
        for i, member in enumerate(members):
            fed = sum(1 << j for j, m in enumerate(members) if m & through[s.equation])
            if s.x is not None and bits_of(s.x, from_leaves) & member and fed & same_loop[i]:
                mask |= member
        if mask:
            cut_entries[s.equation] = mask
    return _Links(from_leaves, list(sites), direct, through, blockers, cut_entries)


def _relation(
    step: Step,
    site: Site,
    followed: Slots,
    groups: Sequence[HiddenGroup],
    offsets: np.ndarray,
    links: _Links,
    index: int,
    states: Callable[[Path], Any],
) -> HiddenParamOpRelation:
    elements = np.unique(followed.destination[followed.destination >= 0])
    hit = set(np.unique(np.searchsorted(offsets, elements, side="right") - 1).tolist())
    touched = tuple(g for g in groups if hit & set(g.components))
    mask = links.direct[site.equation]
    whole = links.through[site.equation]
    paths, classes = [], {}
    for g in touched:
        for k, path in zip(g.leaves, g.hidden_paths, strict=True):
            if (mask | whole) >> k & 1:
                paths.append(path)
                mixed = any(
                    links.through[b.equation] >> k & 1 for b in links.blockers[site.equation]
                )
                classes[path] = "mixed" if mixed else "all_direct"
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


# ------------------------------------------------------------------------------------- records


def _paths(step: Step, site: Site) -> list[Path]:
    return [step.params[i].path for v in site.leaves.values() for i in v]


def _name(path: Path) -> str:
    return ".".join(str(p) for p in path)


def _untrained(sites: Sequence[Site]) -> list[CompilationRecord]:
    out = []
    for s in sites:
        if not s.trained:
            out.append(
                CompilationRecord(
                    DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE,
                    DiagnosticLevel.WARNING,
                    f"{s.equation.name} at {s.equation.where()} consumes no parameter; it counts "
                    "as plain computation.",
                    primitive=s.equation.name,
                )
            )
            continue
        out += [
            CompilationRecord(
                DiagnosticKind.TRAINABLE_INVAR_NOT_PARAMSTATE,
                DiagnosticLevel.INFO,
                f"operand '{key}' of {s.equation.name} at {s.equation.where()} is not a parameter.",
                primitive=s.equation.name,
            )
            for key, leaves in s.leaves.items()
            if not leaves
        ]
    return out


def _excluded(step: Step, site: Site, links: _Links) -> CompilationRecord:
    path = _paths(step, site)[0]
    eqn = site.equation
    reached = tuple(leaf.path for k, leaf in enumerate(step.hidden) if links.through[eqn] >> k & 1)
    context = None
    level = DiagnosticLevel.WARNING
    if not site.steady:
        kind = DiagnosticKind.RELATION_EXCLUDED_TIME_VARYING_WEIGHT
        why = (
            "its operand is computed from states or inputs as well, so it changes within a sequence"
        )
    elif not links.through[eqn]:
        kind, level = DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL, DiagnosticLevel.INFO
        why = "its output reaches no hidden state; the gradient within the step is all there is"
    elif not links.direct[eqn]:
        kind = DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT
        by = links.blockers[eqn]
        names = [_name(_paths(step, b)[0]) for b in by]
        why = f"its output reaches a hidden state only through {', '.join(names)}"
        context = {
            "blocking_primitives": tuple(b.equation.name for b in by),
            "blocking_weight_paths": tuple(_paths(step, b)[0] for b in by),
        }
    else:
        kind = DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH
        why = "everything between its output and the hidden state mixes units"
    return CompilationRecord(
        kind,
        level,
        f"{_name(path)} ({eqn.name} at {eqn.where()}) has no eligibility trace: {why}. "
        "It keeps its exact gradient within the step.",
        primitive=eqn.name,
        weight_path=path,
        hidden_paths=reached,
        context=context,
    )


def _included(relation: HiddenParamOpRelation, links: _Links) -> list[CompilationRecord]:
    eqn = relation.site.equation
    path = relation.weight_path
    context = {
        "hidden_group_indices": tuple(g.index for g in relation.hidden_groups),
        "path_classification": dict(relation.path_classification),
    }
    out = [
        CompilationRecord(
            DiagnosticKind.RELATION_INCLUDED,
            DiagnosticLevel.INFO,
            f"{_name(path)} ({eqn.name}) is traced to "
            f"{', '.join(_name(p) for p in relation.connected_hidden_paths)}.",
            primitive=eqn.name,
            weight_path=path,
            hidden_paths=relation.connected_hidden_paths,
            context=context,
        )
    ]
    if "mixed" in relation.path_classification.values():
        out.append(
            CompilationRecord(
                DiagnosticKind.RELATION_PARTIAL_PATH,
                DiagnosticLevel.WARNING,
                f"{_name(path)} ({eqn.name}) also reaches a hidden state through another operator; "
                "that part counts within the step only.",
                primitive=eqn.name,
                weight_path=path,
                hidden_paths=relation.connected_hidden_paths,
            )
        )
    return out


def _group_records(groups: Sequence[HiddenGroup]) -> list[CompilationRecord]:
    return [
        CompilationRecord(
            DiagnosticKind.HIDDEN_GROUP_MERGED,
            DiagnosticLevel.INFO,
            f"states {g.name} form one group with {g.num_state} variables per unit.",
            hidden_paths=g.hidden_paths,
        )
        for g in groups
        if len(g.leaves) > 1
    ]


def _dropped(
    step: Step,
    tangent: Tangent,
    found: Influence,
    pattern: Pattern,
    groups: Sequence[HiddenGroup],
) -> list[CompilationRecord]:
    """What the kept Jacobian leaves out besides operators: mixing equations and neighbours."""
    out = []
    n = len(tangent.components)

    def leaf_path(c: int) -> Path:
        return step.hidden[tangent.components[c].leaf].path

    seen: dict[tuple, str] = {}
    for c, cuts in enumerate(found.lost):
        for cut in (found.cuts[k] for k in sorted(cuts)):
            eqn = tangent.program.equations[cut.equation]
            for source in sorted(s for s in cut.sources if s < n):
                seen.setdefault(
                    (leaf_path(source), leaf_path(c), eqn.where()),
                    f"{cut.reason} at {eqn.where()}",
                )
    for target, source in pattern.dropped:
        seen.setdefault(
            (leaf_path(source), leaf_path(target), None),
            "neighbouring units are added to the own one",
        )
    for (source, target, _), why in seen.items():
        out.append(
            CompilationRecord(
                DiagnosticKind.DEPENDENCY_DROPPED,
                DiagnosticLevel.INFO,
                f"{_name(source)} -> {_name(target)} across steps is kept without a path: {why}.",
                hidden_paths=(source, target),
            )
        )
    return out
