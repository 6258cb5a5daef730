"""Records of the compiler's decisions, in words."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import dotted
from ..program import deep_equations
from ._diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from ._groups import HiddenGroup
from ._links import Links
from ._moves import NO_FORWARD
from ._reach import indices_of
from ._relations import HiddenParamOpRelation, PathClassification
from ._sets import TOO_MANY
from ._sites import Site, wraps_operator
from ._step import Path, Step

Kind, Level = DiagnosticKind, DiagnosticLevel
_FOLLOWED = "the rule 'rtrl' follows it from step to step"


def _paths(step: Step, site: Site) -> list[Path]:
    return [step.params[i].path for v in site.leaves.values() for i in v]


def untrained(sites: Sequence[Site]) -> list[CompilationRecord]:
    out = []
    for s in sites:
        name, what = s.equation.name, f"{s.equation.name} at {s.equation.where()}"
        kind, level = Kind.TRAINABLE_INVAR_NOT_PARAMSTATE, Level.INFO
        idle = [k for k, leaves in s.leaves.items() if not leaves]
        messages = [f"operand '{k}' of {what} is not a parameter." for k in idle]
        if not s.trained:
            kind, level = Kind.RELATION_EXCLUDED_NO_PARAMSTATE, Level.WARNING
            messages = [f"{what} consumes no parameter; it counts as plain computation."]
        out += [CompilationRecord(kind, level, text, name) for text in messages]
    return out


def wrapped(step: Step, sites: Sequence[Site]) -> list[CompilationRecord]:
    """Functions with their own derivative around an operator that are no operator themselves."""
    operators = {s.equation for s in sites}
    return [
        CompilationRecord(
            Kind.PRIMITIVE_INSIDE_CONTROL_FLOW,
            Level.WARNING,
            f"the operator inside {eqn.name} at {eqn.where()} has no eligibility trace: the "
            "function around it has several results, or more than one operand that does not depend "
            "on parameters alone. Its weight keeps the exact gradient within the step.",
            primitive=eqn.name,
        )
        for eqn in deep_equations(step.program)
        if wraps_operator(eqn) and eqn not in operators
    ]


def excluded(
    step: Step, site: Site, links: Links, reasons: Sequence[str] = ()
) -> CompilationRecord:
    """Why an operator has no trace; `reasons` are those of what is cut behind it."""
    path, eqn = _paths(step, site)[0], site.equation
    reached = tuple(step.hidden[k].path for k in indices_of(links.through[eqn]))
    context, level = None, Level.WARNING
    if site.closed is not None:
        kind = Kind.PRIMITIVE_INSIDE_CONTROL_FLOW
        why = f"the {site.closed.name} around it is closed by the ControlFlowPolicy"
    elif not site.steady:
        kind = Kind.RELATION_EXCLUDED_TIME_VARYING_WEIGHT
        why = (
            "its operand is computed from states or inputs as well, so it changes within a sequence"
        )
    elif not links.through[eqn]:
        kind, level = Kind.RELATION_EXCLUDED_NON_TEMPORAL, Level.INFO
        why = (
            "its output reaches no hidden state along a derivative; the gradient within the step "
            "is all there is"
        )
    elif not links.direct[eqn]:
        kind = Kind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT
        by = links.blockers[eqn]
        names = [dotted(_paths(step, b)[0]) for b in by]
        why = f"its output reaches a hidden state only through {', '.join(names)}"
        context = {
            "blocking_primitives": tuple(b.equation.name for b in by),
            "blocking_weight_paths": tuple(_paths(step, b)[0] for b in by),
        }
    else:
        kind = Kind.RELATION_EXCLUDED_SHAPE_MISMATCH
        why = "what lies between its output and the hidden state mixes units"
        if NO_FORWARD in reasons:
            why = f"between its output and the hidden state {NO_FORWARD}"
        elif reasons and all(reason.endswith(TOO_MANY) for reason in reasons):
            why = f"between its output and the hidden state {', '.join(reasons)} to be followed"
    followed = f"; {_FOLLOWED}" if reached and NO_FORWARD not in reasons else ""
    text = (
        f"{dotted(path)} ({eqn.name} at {eqn.where()}) has no eligibility trace: {why}. "
        f"It keeps its exact gradient within the step{followed}."
    )
    return CompilationRecord(kind, level, text, eqn.name, path, reached, context)


def included(relation: HiddenParamOpRelation, apart: bool) -> list[CompilationRecord]:
    eqn, path = relation.site.equation, relation.weight_path
    states = relation.connected_hidden_paths
    context = {
        "hidden_group_indices": tuple(g.index for g in relation.hidden_groups),
        "path_classification": dict(relation.path_classification),
    }
    what = f"{dotted(path)} ({eqn.name})"
    text = f"{what} is traced to {', '.join(map(dotted, states))}{_price(relation)}."
    kind = Kind.RELATION_INCLUDED
    out = [CompilationRecord(kind, Level.INFO, text, eqn.name, path, states, context)]
    if apart and {*relation.path_classification.values()} - {PathClassification.ALL_DIRECT}:
        text = (
            f"{what} also reaches a hidden state through another operator; that part counts within "
            "the step only."
        )
        kind = Kind.RELATION_PARTIAL_PATH
        out.append(CompilationRecord(kind, Level.WARNING, text, eqn.name, path, states))
    return out


def _price(relation: HiddenParamOpRelation) -> str:
    """Says that a trace follows more than the variables of one unit (a delay, a ring)."""
    usual = max(g.num_state for g in relation.hidden_groups)
    width = relation.slots.width
    if width <= 2 * usual:  # a complex variable counts twice
        return ""
    return f", {width} state elements per output element: its memory and time grow with them"


def plain_parameters(step: Step, links: Links) -> list[CompilationRecord]:
    """Parameters that reach a state otherwise than as an operator's weight."""
    out: dict[Path, CompilationRecord] = {}
    for i, p in enumerate(step.params):
        states = tuple(step.hidden[k].path for k in indices_of(step.reached(links.plain, i)))
        use = links.plain_use.get(step.entry(p))
        where = f" at {use.where()}" if use is not None and use.where() else ""
        text = (
            f"{dotted(p.path)} reaches {', '.join(map(dotted, states))} by plain "
            f"computation{where}, through no ETP operator; that part has its exact gradient within "
            f"the step, no memory; {_FOLLOWED}."
        )
        kind = Kind.RELATION_EXCLUDED_NO_OPERATOR
        if states:
            record = CompilationRecord(kind, Level.WARNING, text, None, p.path, states)
            out.setdefault(p.path, record)
    return list(out.values())


def group_records(groups: Sequence[HiddenGroup]) -> list[CompilationRecord]:
    return [
        CompilationRecord(
            Kind.HIDDEN_GROUP_MERGED,
            Level.INFO,
            f"states {g.name} form one group with {g.num_state} variables per unit.",
            hidden_paths=g.hidden_paths,
        )
        for g in groups
        if len(g.leaves) > 1
    ]
