"""What a user can get wrong with a step, each with its message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import (
    CompilationError,
    check_takes,
    dotted,
    message,
    not_supported,
    type_error,
    value_error,
    warn,
)
from ..graph import (
    NO_FORWARD,
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Graph,
    ParameterReport,
    Step,
    bits_of,
    reach,
)
from ..program import Program, PyTree, deep_equations, is_traced, leaked, line_of
from ..rules import LearningRule
from ._blocks import nbytes
from ._tree import Layout

_USE_ANOTHER_RULE = (
    "use rtrl (exact, memory parameters x states), change the model, or leave out strict=True: in "
    "one window over the whole sequence nothing is left out"
)
_USE_LESS_MEMORY = (
    "use d_rtrl, snap with a small n or windows, make the batch smaller, or raise memory_limit"
)
_USE_OUTSIDE = (
    "let a product of a weight reach a state unit by unit, outside of a while_loop and with the "
    "weight made of parameters alone"
)
_MARKED = {
    "dot_general": "braintrace.nn.Linear or braintrace.matmul(x, w) for the plain product",
    "conv_general_dilated": "braintrace.nn.Conv2d or braintrace.conv for the plain convolution",
    "gather": "braintrace.nn.Embedding or braintrace.embedding for the plain indexing",
}
_HINTS = {
    DiagnosticKind.RELATION_EXCLUDED_NO_PARAMSTATE: "keep the weight in a brainstate.ParamState",
    DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL: "let the operator's output reach a hidden state",
    DiagnosticKind.RELATION_EXCLUDED_SHAPE_MISMATCH: (
        "let the operator's output reach a state unit by unit: no product of matrices and no sum "
        "over units between them; or use RTRL or windows"
    ),
    DiagnosticKind.RELATION_EXCLUDED_TIME_VARYING_WEIGHT: (
        "compute the operator's weight from parameters alone, and multiply inputs or outputs by "
        "what varies"
    ),
}
_NO_OPERATOR = (DiagnosticKind.PARAMETER_UNUSED, DiagnosticKind.RELATION_EXCLUDED_NO_OPERATOR)


@dataclass(frozen=True, slots=True)
class Wording:
    """How a front end speaks of a step with nothing to learn online: messages and advice."""

    no_state: str
    no_relation: str
    no_operator: str
    use_an_operator: str
    recognise: str


_FOR_FUNCTIONS = Wording(
    no_state=message(
        "the step has no floating state.",
        why="online learning follows states from step to step",
        do="return the recurrent arrays as the new state: step(params, state, x) -> (state, out)",
    ),
    no_relation="no parameter reaches a state through an operator that is followed.",
    no_operator="the step uses no operator of braintrace",
    use_an_operator="write braintrace.matmul(x, w) (or another operator of braintrace) instead of "
    "x @ w for the weights to be trained online",
    recognise="leave out marked_only=True: then plain JAX is recognised, see "
    "docs/how-to/bring-your-own-cell.md",
)


def check_exact(
    parameters: Iterable[ParameterReport], rule: str, do: str = _USE_ANOTHER_RULE
) -> None:
    """Refuse parameters whose gradient leaves something out; `do` is what the user can do."""
    bad = [p for p in parameters if not p.exact]
    if bad:
        raise CompilationError(
            message(
                f"strict=True, and {rule} does not learn {len(bad)} parameter(s) exactly.",
                where=next((d.line for p in bad for d in p.dropped if d.line), None),
                why="\n         ".join(line for p in bad for line in str(p).splitlines()),
                do=do,
            )
        )


def check_moving(parameters: Iterable[ParameterReport], rule: str, how: str) -> None:
    """Refuse updates within a sequence where the gradient is exact for constant weights only."""
    bad = [p for p in parameters if p.while_constant]
    if bad:
        raise CompilationError(
            message(
                f"strict=True, and {rule} learns {len(bad)} parameter(s) exactly only while the "
                f"weights are constant; {how} changes them at every update.",
                where=next((op for p in bad for op in p.operators), None),
                why="their traces are those of a weight that is computed from them, pulled back at "
                "the present parameters: " + "; ".join(str(p).splitlines()[0] for p in bad),
                do="use rtrl, whose traces are those of parameters; update after whole sequences "
                "(grad); make the weight a linear or an element-wise function of one parameter; or "
                "leave out strict=True",
            )
        )


def check_memory(
    limit: int | None, graph: Graph, traces: PyTree, rule: str, do: str = _USE_LESS_MEMORY
) -> None:
    """Refuse traces that need more bytes than allowed, before any is allocated."""
    total = nbytes(traces)
    if limit is None or total <= limit:
        return
    step = graph.step
    weights, states = (
        sum(step.entry(leaf).size for leaf in kind) for kind in (step.params, step.hidden)
    )
    raise not_supported(
        f"{rule} would store {total:,} bytes of traces.",
        why=f"it follows {weights:,} parameter elements to up to {states:,} state elements; "
        f"memory_limit is {limit:,} bytes",
        do=do,
    )


def check_relations(
    graph: Graph,
    rule: LearningRule,
    windows: bool,
    unmarked: bool,
    words: Wording = _FOR_FUNCTIONS,
) -> None:
    """Refuse a step that has nothing to learn online.

    Args:
        graph: the analysed step.
        rule: the rule that learns it.
        windows: whether the gradient is that of windows of several steps.
        unmarked: whether plain JAX was recognised.
        words: those of the front end.
    """
    if not graph.step.hidden:
        raise CompilationError(words.no_state)
    influenced = any(graph.influenced)
    # Reverse mode within a window or a step needs no operator that is followed across it.
    reverse = windows or rule.config.trace_factorization == "none"
    _check_forward(graph, rule, not (graph.relations or reverse))
    if graph.relations or (influenced and (rule.record.per_parameter or reverse)):
        return
    use_an_operator = _USE_OUTSIDE if unmarked else words.use_an_operator
    hints = {**_HINTS, **dict.fromkeys(_NO_OPERATOR, use_an_operator)}
    records = [d for d in graph.records if d.primitive or d.kind in hints]
    advice = list(dict.fromkeys(hints[d.kind] for d in records if d.kind in hints))
    plain = lambda eqn: any(bits_of(a, graph.links.plain) for a in eqn.inputs)
    equations = (e for e in deep_equations(graph.step.program) if e.name in _MARKED and plain(e))
    eqn = next(equations, None)
    where = None if eqn is None else eqn.where()
    if eqn is not None and not unmarked:
        advice = [f"use {_MARKED[eqn.name]}" + (f" at {where}" if where else "")]
    if influenced:
        exact = "the rule 'rtrl', which accepts the model (memory parameters x states)"
        others = [exact] if unmarked else [words.recognise, exact]
        advice = [*(advice or [use_an_operator]), *(f"or {other}" for other in others)]
    raise CompilationError(
        message(
            words.no_relation,
            where=where,
            why="; ".join(d.message.rstrip(".") for d in records)
            or ("no state depends on a parameter" if unmarked else words.no_operator),
            do="; ".join(advice) or use_an_operator,
        )
    )


def _check_forward(graph: Graph, rule: LearningRule, nothing_left: bool) -> None:
    """Refuse a backward rule that is not linear, for a rule that follows everything it meets."""
    cuts = graph.influence.cuts
    eqn = next((c.equation for c in cuts if c.reason == NO_FORWARD), None)
    if eqn is not None and (rule.record.complete or nothing_left):
        raise not_supported(
            f"{eqn.name} has no forward derivative.",
            where=eqn.where(),
            why="a trace is moved by the forward derivative of the step, which a custom backward "
            "rule has only if it is linear in the cotangent",
            do="write what is computed here with functions that JAX can differentiate forward "
            "(custom_jvp instead of custom_vjp), put it under stop_gradient, or use windows "
            "(the rule no_trace), which need reverse mode only",
        )


_KEYS = (
    "a key per step is an input: step(params, state, x, key), init(params, state, x, key) and "
    "grad(loss)(params, carry, (xs, jax.random.split(key, len(xs))))"
)


def check_loss(loss: Callable[..., PyTree]) -> None:
    """Refuse a loss that is no function."""
    if not callable(loss):
        raise type_error(
            f"the loss has type {type(loss).__name__}.",
            why="it is a function loss(out, *targets), of one step",
            do="pass a function, lambda out, y: jnp.mean((out - y) ** 2)",
        )


def checked_loss(loss: Callable[..., PyTree], has_aux: bool) -> Callable[..., Any]:
    """The user's loss as a function to `(loss, aux)`."""
    check_loss(loss)

    def checked(out: PyTree, *targets: PyTree) -> tuple[jax.Array, PyTree]:
        check_takes(
            loss,
            ["the output", *["a target"] * len(targets)],
            "it is loss(out, *targets), of one step",
            "pass one sequence of targets for each: grad(loss)(params, carry, xs, ys)",
            "loss",
            where=line_of(loss),
        )
        value, aux = loss_of(loss(out, *targets), has_aux, "loss")
        check_one_loss("loss", jnp.shape(value), ())
        return value, aux

    return checked


def loss_of(result: PyTree, has_aux: bool, name: str) -> tuple[jax.Array, PyTree]:
    """The loss, a real number without unit, and what else a function returned."""
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    if has_aux != pair:
        raise type_error(
            f"{name} returned {'a pair' if pair else type(result).__name__} with "
            f"has_aux={has_aux}.",
            why="with has_aux it returns (loss, aux), without it the loss alone",
            do="return (loss, aux) with has_aux=True, else the loss alone",
        )
    loss, aux = result if has_aux else (result, None)
    unit, number = getattr(loss, "unit", None), isinstance(loss, float) or hasattr(loss, "dtype")
    if unit is not None or not (number and jnp.issubdtype(jnp.result_type(loss), jnp.floating)):
        kind = getattr(loss, "dtype", type(loss).__name__)
        raise type_error(
            f"the loss is {kind if unit is None else f'a quantity in {unit}'}.",
            why="a gradient needs a real floating number without unit",
            do=f"divide by a unit, take a real part, or convert to float in {name}",
        )
    return loss, aux


def check_one_loss(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a loss that is not one number for each step."""
    if shape != expected:
        raise value_error(
            f"{name} returned a loss of shape {shape}, expected {expected}.",
            why="each step has one loss",
            do=f"reduce the loss over samples and features in {name}",
        )


def check_signature(step: Callable[..., PyTree], n_inputs: int, n_trained: int) -> None:
    """Refuse a step that does not take so many inputs, and parameters that are none."""
    check_takes(
        step,
        ["params", "state", *["an input"] * n_inputs],
        "it is step(params, state, *inputs) -> (state, out)",
        "pass the inputs of one step to init and a tuple of their sequences to scan and "
        f"grad; {_KEYS}",
        "step",
        where=line_of(step),
    )
    if not n_trained:
        raise type_error(
            "params has no floating array.",
            why="only floating arrays are trained; integers, Python numbers and functions are "
            "passed to the step as they are",
            do="make the weights floating arrays, e.g. jnp.asarray(w, float)",
        )


def check_effects(running: Callable[[], Any]) -> None:
    """Refuse a step that keeps a traced value outside of its results."""
    tracer = leaked(running)
    if tracer is not None:
        raise type_error(
            f"the step keeps a {tracer.dtype}{list(tracer.shape)} that it computes outside of "
            "its results.",
            where=line_of(tracer),
            why="its Python runs once for all steps, so a list, an attribute or a global variable "
            "gets no value of a step, and what is read from it there is a constant",
            do="return the value: (state, (out, value)), or as a part of the state if a later step "
            "reads it",
        )


def check_noise(program: Program) -> None:
    """Refuse random numbers that are the same at every step."""
    varying = reach(program, dict.fromkeys(program.inputs, 1), differentiable=False)
    for eqn in program.equations:
        if eqn.name in _NOISE and not any(bits_of(a, varying) for a in eqn.inputs):
            raise value_error(
                "the step draws the same random numbers at every step.",
                where=eqn.where(),
                why="its key is a constant, neither an input nor a state",
                do=f"{_KEYS}; or split a key that is part of the state; draw what stays the "
                "same outside of the step",
            )


_NOISE = ("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma")


def check_shared(step: Step, params: Sequence[Any], state: Sequence[Any], strict: bool) -> None:
    """Refuse arrays that are parameters and are carried as a state too: the floating leaves.

    A state that only starts as a parameter is refused by a strict learner, others warn.
    """
    weights = {step.entry(p) for p in step.params}
    for leaf, array in zip(step.stored, state, strict=True):
        carried = step.exit(leaf) in (step.entry(leaf), *weights)
        for p, weight in zip(step.params, params, strict=True):
            if carried and weight is array:
                name = dotted(leaf.path)
                raise value_error(
                    f"the parameter {dotted(p.path)} is also the state {name}.",
                    why="parameters are passed to every call, and an optimizer changes them; a "
                    "copy among the states stays what it was",
                    do=f"leave {name} out of the state, and read it from params",
                )
            if weight is array:
                where, start = dotted(p.path), dotted(leaf.path)
                what = f"the parameter {where} is also the initial state {start}."
                why = "the derivative of a learner by its carry is zero: it learns nothing from it"
                do = "init(params, lambda params: state, x) learns it; to keep it, pass a copy"
                if strict:
                    raise CompilationError(message(f"strict=True, and {what}", why=why, do=do))
                warn(what, why=why, do=do)


def state_records(step: Step) -> list[CompilationRecord]:
    """Records of states that remember nothing, or never change."""
    read = {a for e in step.program.equations for a in e.inputs}
    out = []
    for leaf in step.hidden:
        entry, name = step.entry(leaf), dotted(leaf.path)
        others = (o for i, o in enumerate(step.program.outputs) if i != leaf.output)
        if step.exit(leaf) is entry:
            text = f"state {name} never changes: it is a constant, and could be an argument."
        elif entry not in read and entry not in others:
            text = f"state {name} is never read: it remembers nothing, and could be an output."
        else:
            continue
        kind, level = DiagnosticKind.STATE_MISMATCH, DiagnosticLevel.WARNING
        out.append(CompilationRecord(kind, level, text, hidden_paths=(leaf.path,)))
    return out


def check_states(names: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> None:
    """Refuse states that leave the step with another shape or type."""
    bad = [
        f"{name} enters as {b.dtype}{list(b.shape)} and leaves as {a.dtype}{list(a.shape)}"
        for name, b, a in zip(names, before, after, strict=True)
        if (b.shape, b.dtype) != (a.shape, a.dtype)
    ]
    if bad:
        raise value_error(
            f"a state changes: {'; '.join(bad)}.",
            why="a state must keep its shape and type from step to step",
            do="give the initial state the shape and type of its new value, or convert that",
        )


def check_traces(traces: PyTree, wanted: PyTree, rule: str) -> None:
    """Refuse traces that are not those of this rule for these shapes."""
    kind = lambda a: (a.shape, jax.dtypes.canonicalize_dtype(a.dtype))
    if jax.tree.map(kind, traces) != jax.tree.map(kind, wanted):
        shown = lambda tree: jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree)
        raise value_error(
            f"the carry has the traces {shown(traces)}.",
            why=f"with these parameters, state and inputs those of {rule} are {shown(wanted)}",
            do="start with init(params, state, *inputs), for inputs of these shapes",
        )


def check_result(result: PyTree, before: Layout) -> tuple[list[PyTree], PyTree]:
    """The leaves of the new state, and the output of a step function."""
    if not isinstance(result, tuple) or len(result) != 2:
        shown = "an array" if hasattr(result, "dtype") else f"a {type(result).__name__}"
        count = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise type_error(
            f"the step returned {shown}{count}, not a pair.",
            why="it is step(params, state, *inputs) -> (state, out)",
            do="return a pair: the new state first, then the output",
        )
    state, out = result
    leaves, structure = jax.tree.flatten(state)
    if structure != before.tree:
        raise type_error(
            f"the step returned a state of the structure {structure}.",
            why=f"the old one has the structure {before.tree}",
            do="return the new state first, with the structure of the old one: (state, out)",
        )
    for i, kind, value in before.static:
        if type(leaves[i]) is not kind or leaves[i] != value:
            raise type_error(
                f"the step changed {value!r}, a leaf of the state, to {leaves[i]!r}.",
                why="only arrays can change from step to step",
                do="make it an array, or return it as it was",
            )
    return leaves, out


@contextmanager
def named_errors() -> Iterator[None]:
    """Errors of JAX about a call of a learner, in words of the learner."""
    try:
        yield
    except TypeError as cause:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(cause):
            raise
        raise not_supported(
            "a learner is differentiated in forward mode (jvp, jacfwd, hessian).",
            why="its gradient comes from cotangents, which meet the traces in reverse mode",
            do="use jax.grad or jax.vjp, or jacrev; for a directional derivative of a sum of "
            "losses, the product of its gradient with the direction",
        ) from cause
    except RuntimeError as cause:
        if "has been deleted" not in str(cause):
            raise
        raise value_error(
            f"an array of the call does not exist any more: {str(cause).partition(chr(10))[0]}",
            why="it was donated to another call, which reused its memory",
            do="go on from what that call returned, or leave out donate_argnums",
        ) from cause


def length_of(sequences: PyTree) -> int:
    """The number of steps, which all sequences share."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(sequences)]
    lengths = {shape[0] for shape in shapes if shape}
    if not shapes:
        what = "no sequence was passed.", "there is nothing to step through"
        do = "pass at least one array with a leading time axis"
    elif () in shapes:
        what = "a sequence holds a scalar.", "it has no time axis; a list is a pytree of scalars"
        do = "pass an array, jnp.asarray(xs); close over what all steps share"
    elif len(lengths) > 1:
        what = (
            f"sequences of different lengths {sorted(lengths)}.",
            "they are sliced in lockstep along axis 0",
        )
        do = "bring time to axis 0 and give all the same length"
    elif lengths == {0}:
        what = "a sequence of zero steps.", "a gradient needs at least one step"
        do = "skip empty sequences"
    else:
        return int(lengths.pop())
    raise value_error(what[0], why=what[1], do=do)


def check_mask(mask: PyTree, length: int) -> jax.Array | None:
    """A mask as floating numbers, None for none."""
    if mask is None:
        return None
    array = jnp.asarray(mask)
    if array.shape != (length,):
        raise value_error(
            f"mask has shape {array.shape}, expected ({length},).",
            why="it weighs the loss of each step",
            do="give one number per step"
            if array.shape[:1] != (length,)
            else "pass it as a target, whose steps the loss gets: grad(lambda out, y, mask: "
            "(mask * error(out, y)).sum())(params, carry, xs, ys, mask)",
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(float)
    if not is_traced(mask) and not (finite := np.isfinite(np.asarray(mask))).all():
        steps = np.flatnonzero(~finite)
        raise value_error(
            f"mask is not a finite number at {len(steps)} step(s), first at step {steps[0]}.",
            why="it weighs the loss of each step, and one NaN makes every gradient NaN",
            do="give such steps the weight 0, which leaves out whatever they compute: "
            "jnp.nan_to_num(mask, posinf=0)",
        )
    return array
