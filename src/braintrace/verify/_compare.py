"""How far a learner's gradient is from a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import jax
import numpy as np

from .._errors import dotted, type_error
from .._online import Online
from ..graph import ParameterReport
from ..learner import Learner, MultiStepData
from ..rules import check_choice
from ._bptt import bptt_grad
from ._finite import finite_difference_grad
from ._of_function import check_arguments, online_gradients
from ._sequence import Grads, Path, PyTree, StepFn, at, check, restored

_AGAINST = {"bptt": "back-propagation through time", "finite": "finite differences"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A learner's gradients beside a reference, per parameter.

    `errors` are |g - reference| / |reference|, `cosines` the cosines of the angle between them.
    `certificates` are what the report says of each parameter, in a few words.
    """

    against: str
    gradients: Grads
    reference: Grads
    errors: dict[Path, float]
    cosines: dict[Path, float]
    certificates: dict[Path, str] = field(default_factory=dict)

    @property
    def max_error(self) -> float:
        """The largest relative error of a parameter."""
        return max(self.errors.values(), default=0.0)

    def _numbers(self, path: Path) -> str:
        if not (_flat(self.gradients[path]).any() or _flat(self.reference[path]).any()):
            return f"{'both are zero':>19}"
        return f"{self.errors[path]:9.2e}  {self.cosines[path]:8.5f}"

    def __str__(self) -> str:
        names = {p: dotted(p) for p in self.errors}
        width = max([len("parameter"), *map(len, names.values())])
        lines = [f"{'parameter':{width}}  {'error':>9}  {'cosine':>8}   against {self.against}"]
        said = {p: f"   {text}" for p, text in self.certificates.items()}
        lines += [f"{names[p]:{width}}  {self._numbers(p)}{said.get(p, '')}" for p in names]
        return "\n".join(lines)


def compare(
    learner: Learner | Online,
    step_fn: StepFn,
    *sequences: PyTree,
    chunk_size: int | None = None,
    block_size: int | None = None,
    against: str = "bptt",
) -> Comparison:
    """Compare the summed online gradient of a sequence with a reference.

    Both run from the model's present states with zero traces; model and learner are left as they
    were. A learner of a plain function owns nothing: `compare(net, loss, params, state, xs,
    *targets)`, with `loss(out, *targets)` as for `net.grad`.

    Args:
        learner: a compiled learner, or that of `braintrace.online`.
        step_fn: `step_fn(net, *slices)` calls `net`, the learner or the model, and returns the
            scalar loss of one step. In windows it calls `net` once and sees its result only.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        chunk_size: steps per window, for a multi-step learner.
        block_size: steps per block, as for `etrace_grad`; 1 steps the traces one by one.
        against: 'bptt', or 'finite' differences.

    Returns:
        Relative error and cosine of every parameter's gradient, beside its certificate; printed, a
        small table.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.GRUCell(2, 3)
        >>> learner = braintrace.compile(cell, 'd_rtrl', jnp.zeros(2))
        >>> step = lambda net, x: (net(x) ** 2).sum()
        >>> braintrace.verify.compare(learner, step, jnp.ones((4, 2))).max_error < 1
        True
    """
    if isinstance(learner, Online):
        check_choice("against", against, _AGAINST)
        check_arguments(sequences, chunk_size)
        found, reference = online_gradients(
            learner, step_fn, *sequences, block_size=block_size, against=against
        )
        return _certified(comparison(found, reference, against), learner.report.parameters)
    if not isinstance(learner, Learner):
        raise type_error(
            f"expected a learner, got {type(learner).__name__}.",
            why="compare runs the learner and its model side by side",
            do="build one with braintrace.compile(model, rule, x0); of a learner mapped over "
            "samples (vmap=True) compare its `module`, or use batch_size without vmap",
        )
    model = learner.model4compile
    check(model, step_fn, sequences)
    check_choice("against", against, _AGAINST)
    reference_of = bptt_grad if against == "bptt" else finite_difference_grad
    reference = reference_of(model, step_fn, *sequences)
    sizes = {"chunk_size": chunk_size, "block_size": block_size}
    grads = online_grad(learner, step_fn, *sequences, **sizes)
    return _certified(comparison(grads, reference, against), learner.report.parameters)


def _certified(found: Comparison, reports: Mapping[Path, ParameterReport]) -> Comparison:
    """The same with what a report says of the parameters."""
    said = {path: _briefly(p) for path, p in reports.items() if path in found.errors}
    return replace(found, certificates=said)


def _briefly(p: ParameterReport) -> str:
    if p.silent is not None:
        said = "no gradient arrives"
    elif p.how == "none":
        said = "untouched"
    else:
        said = "exact" if p.exact else "not exact"
    return f"{said}, by {p.rule}" if p.rule else said


def online_grad(
    learner: Learner,
    step_fn: StepFn,
    *sequences: PyTree,
    chunk_size: int | None = None,
    block_size: int | None = None,
) -> Grads:
    """The learner's summed gradient from zero traces; learner and model are left as they were."""
    chunk = chunk_size or 1

    def window(*slices: PyTree) -> jax.Array:
        return _window_losses(learner, step_fn, slices)

    def step(*slices: PyTree) -> jax.Array:
        return step_fn(learner, *slices)

    with restored(learner, learner.model4compile):
        learner.reset_state()
        grads = learner.etrace_grad(
            *sequences,
            step_fn=window if chunk > 1 else step,
            chunk_size=chunk_size,
            block_size=block_size,
            reduction="sum",
        )
    return dict(grads)


def comparison(gradients: Grads, reference: Grads, against: str = "reference") -> Comparison:
    """Errors and cosines of gradients by path."""
    flat = {p: (_flat(gradients[p]), _flat(reference[p])) for p in reference}
    # A parameter whose true gradient vanishes is measured by the others' size, so that rounding
    # is no error and a wrong number is one.
    floor = 1e-6 * max((float(np.linalg.norm(b)) for _, b in flat.values()), default=0.0)
    errors, cosines = {}, {}
    for path, (a, b) in flat.items():
        size, distance = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
        errors[path] = distance / max(size, floor, 1e-300) if distance else 0.0
        norms = size * float(np.linalg.norm(a))
        cosines[path] = float(np.vdot(b, a).real) / norms if norms else float(not distance)
    return Comparison(against, gradients, reference, errors, cosines)


def _flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


class _Called(Exception):
    pass


def _window_losses(learner: Learner, step_fn: StepFn, slices: PyTree) -> jax.Array:
    """Call the learner once on all steps of a window, then `step_fn` on its results."""
    length = len(jax.tree.leaves(slices)[0])
    calls: list[tuple] = []

    def note(*args: PyTree, **kwargs: PyTree) -> NoReturn:
        calls.append((args, kwargs))
        raise _Called

    for t in range(length):
        try:
            step_fn(note, *at(slices, t))
        except _Called:
            pass
    args, kwargs = jax.tree.map(lambda *steps: jax.numpy.stack(steps), *calls)
    outs = learner(*map(MultiStepData, args), **{k: MultiStepData(v) for k, v in kwargs.items()})
    given = lambda t: lambda *args, **kwargs: at(outs, t)
    losses = [step_fn(given(t), *at(slices, t)) for t in range(length)]
    return jax.numpy.stack(losses)
