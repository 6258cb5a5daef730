"""Operators where a model has plain JAX: wherever a trained, constant operand meets a varying one.

A program in, a program out, before the sites are found:

    y = dot_general(W, x)            is        y = operator(x, W)
    z = add(y, b)                    is        z = operator(x, W, b), if only z reads y
    z = add(add(y, u), b)            is        z = add(operator(x, W, b), u), likewise
    h' = mul(a, h)                   is        a' = element_wise(a);  h' = mul(a', h)
    e = gather(table, i)             is        e = operator(i, table)

What is computed from parameters alone stays as it is: it is the weight of the operator it enters.
An equation of any other kind gets the element-wise operator on its trained operand, and so does a
value that one branch of a `cond` returns where another returns something that varies. Whether that
has a trace is for the analysis to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax import lax

from ..ops import (
    ETPPrimitive,
    conv_static,
    dot_operator,
    etp_elemwise,
    gather_operator,
    plain_conv,
    with_bias,
)
from ..program import Atom, Equation, Program, Rewriting, Var, producers, rewritten
from ._fold import Is, Kinds, folded, in_all_bodies, kinds_of
from ._reach import reach
from ._sites import Around, flow_of
from ._step import Leaf, Step

_PRODUCTS = ("dot_general", "conv_general_dilated")
_SUMS = ("add", "add_any")


def recognise(step: Step, unsteady: int, fold: bool) -> Step:
    """The step with operators for all that is trained and not marked.

    Args:
        step: the step.
        unsteady: the mask of program constants whose value may differ from call to call.
        fold: whether an operand with a varying factor will become part of its operator.
    """
    flow = flow_of(step, unsteady)
    plain = lambda eqn: not isinstance(eqn.primitive, ETPPrimitive)
    # Computed from parameters, and through no operator yet.
    bare = reach(step.program, {step.entry(p): 1 for p in step.params}, through=plain)
    kinds_in = kinds_of(step, flow, bare)

    def rewrite(program: Program, around: Around) -> Program:
        # How often a `while` runs is decided while it runs: what is in it stays plain.
        if any(outer.name == "while" for outer, _ in around):
            return program
        kinds = kinds_in(around)
        products = _factors(program, kinds) if fold else {}
        marked: dict[Atom, Atom] = {}

        def mark(to: Rewriting, atom: Atom) -> Atom:
            if atom not in marked:
                marked[atom] = to.apply(etp_elemwise, [atom], atom.shape, {})
            return marked[atom]

        def rule(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
            if eqn in products:
                weight = products[eqn]
                return None if weight is None else _product(to, eqn, weight == 0)
            if not plain(eqn) or eqn.bodies or not _meet(eqn, kinds):
                return None
            if (outs := _operator(to, eqn, kinds.weight)) is not None:
                return outs
            trained = (isinstance(a, Var) and kinds.weight(a) for a in eqn.inputs)
            inputs = [mark(to, a) if t else a for a, t in zip(eqn.inputs, trained, strict=True)]
            return to.put(replace(eqn, inputs=tuple(inputs)))

        def results(to: Rewriting) -> Sequence[Atom]:
            if not around or around[-1][0].name != "cond":
                return program.outputs
            to.at, this = around[-1]
            branches = [kinds_in((*around[:-1], (to.at, k))) for k in range(len(to.at.bodies))]
            out = []
            for atoms in zip(*(b.program.outputs for b in to.at.bodies), strict=True):
                weights = [kinds.weight(a) for kinds, a in zip(branches, atoms, strict=True)]
                apart = isinstance(atoms[this], Var) and weights[this] and not all(weights)
                out.append(mark(to, atoms[this]) if apart else atoms[this])
            return out

        new = rewritten(program, rule, results)
        return new if new is program else _with_biases(_turned_once(new))

    return in_all_bodies(step, rewrite)


def _meet(eqn: Equation, kinds: Kinds) -> bool:
    """Whether something trained and constant meets something that varies."""
    return any(map(kinds.weight, eqn.inputs)) and any(map(kinds.varies, eqn.inputs))


def _factors(program: Program, kinds: Kinds) -> dict[Equation, int | None]:
    """Products of an operand with a varying factor, `x @ (W * mask)`, and what computes it.

    Per product the number of that operand, None for the equations to be folded into the product.
    What cannot be folded, like the key `x @ W` of a memory that is read by its product with it, is
    left to its own operators.
    """
    producer = producers(program)
    uses = Counter(program.read)
    out: dict[Equation, int | None] = {}
    for eqn in program.equations:
        if eqn.name not in _PRODUCTS or any(map(kinds.weight, eqn.inputs)):
            continue
        for i in (1, 0)[: 2 if eqn.name == "dot_general" else 1]:
            atom, other = eqn.inputs[i], eqn.inputs[1 - i]
            if not kinds.trained(atom) or kinds.entered(atom) or kinds.trained(other):
                continue
            # `x @ (W * mask)`: from the operand back to what is trained and varies, here the
            # product alone. It folds into the operator if nothing else reads it (`alone`).
            cone, todo = [], [atom]
            while todo:
                value = todo.pop()
                if kinds.trained(value) and kinds.varies(value) and value in producer:
                    cone.append(producer[value])
                    todo += producer[value].inputs
            alone = all(uses[o] == 1 and not e.bodies for e in cone for o in e.outputs)
            to = Rewriting()
            to.at = eqn
            _product(to, eqn, i == 0)
            if alone and folded(to.equations[0], program, kinds) is not None:
                out |= {**dict.fromkeys(cone), eqn: i}
                break
    return out


def _product(to: Rewriting, eqn: Equation, weight_first: bool) -> Sequence[Atom]:
    """The operator that a product is, with its axes in the order they had."""
    if eqn.name == "conv_general_dilated":
        return to.put(replace(eqn, primitive=plain_conv, params=conv_static(eqn.params)))
    (left, right), (out,) = eqn.inputs, eqn.outputs
    primitive, static, order = dot_operator(eqn.params, left, right, weight_first)
    pair = (right, left) if weight_first else (left, right)
    shape = [out.shape[k] for k in np.argsort(order)]
    return [to.transpose(to.apply(primitive, pair, shape, static, out.dtype), order)]


def _operator(to: Rewriting, eqn: Equation, weight: Is) -> Sequence[Atom] | None:
    """The operator that an equation is, if there is one for it."""
    if eqn.name == "dot_general":
        return _product(to, eqn, not weight(eqn.inputs[1]))
    if eqn.name == "conv_general_dilated" and weight(eqn.inputs[1]):
        return _product(to, eqn, False)
    if eqn.name == "gather" and weight(eqn.inputs[0]):
        table, indices = eqn.inputs
        primitive, static = gather_operator(eqn.params, table, indices)
        return to.put(replace(eqn, primitive=primitive, inputs=(indices, table), params=static))
    return None


def _turned_once(program: Program) -> Program:
    """Transpositions of transpositions as one, or as none: `vmap` turns products of samples back.

        y = x @ W.T;  a = transpose y;  b = transpose a;  c = b + bias      is      c = y + bias

    So does a transposition of a slice of a transposition, as of the gates of a joint product.
    """
    # `turned[b] = (y, axes)` says that b is y with its axes in this order. Of a transposition of b
    # by `order`, axis k is axes[order[k]] of y; if that is (0, 1, ...), it is y itself.
    turned: dict[Atom, tuple[Atom, tuple[int, ...]]] = {}

    def rule(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
        if eqn.name not in ("slice", "transpose"):
            return None
        (a,) = to.read(eqn.inputs)
        source, axes = turned.get(a, (a, tuple(range(len(a.shape)))))
        if eqn.name == "transpose":
            axes = tuple(axes[k] for k in eqn.params["permutation"])
        elif source is a:
            return None
        else:
            back = np.argsort(axes)
            where = {k: v and tuple(np.take(v, back)) for k, v in eqn.params.items()}
            shape = [eqn.outputs[0].shape[k] for k in back]
            source = to.apply(lax.slice_p, [source], shape, where)
        new = to.transpose(source, axes)
        if new is not source:
            turned[new] = source, axes
        return [new]

    return rewritten(program, rule)


def _with_biases(program: Program) -> Program:
    """Products with what is added to them, or to a sum with them, as their bias."""
    producer = producers(program)
    uses = Counter(program.read)

    def for_one_use(atom: Atom) -> Equation | None:
        """The equation that computes a value, if it has one use only."""
        return producer.get(atom) if uses[atom] == 1 else None

    def bias(atom: Atom) -> Atom | None:
        """The trained array that an operand is, before it was spread over leading axes."""
        eqn = for_one_use(atom)
        if eqn is None or eqn.primitive is not etp_elemwise:
            return None
        value = eqn.inputs[0]
        while (inner := producer.get(value)) is not None:
            source, lead = inner.inputs[0], len(value.shape) - len(inner.inputs[0].shape)
            axes = tuple(range(lead, len(value.shape)))
            spread = inner.name == "broadcast_in_dim" and (
                inner.params["broadcast_dimensions"] == axes
            )
            ones = inner.name == "reshape" and value.shape[:lead] == (1,) * lead
            if not (spread or ones) or source.shape != value.shape[lead:]:
                break
            value = source
        return value

    def absorbed(atom: Atom, b: Atom, out: Var) -> list[Equation] | None:
        """What computes a sum as `out`, with `b` as the bias of a product in it."""
        eqn = for_one_use(atom)
        if eqn is None:
            return None
        if eqn.name not in _SUMS:
            static = with_bias(eqn, b)
            if static is None:
                return None
            return [replace(eqn, inputs=(*eqn.inputs, b), params=static, outputs=(out,))]
        for i, term in enumerate(eqn.inputs):
            part = Var(term.shape, term.dtype)
            before = absorbed(term, b, part)
            if before is not None:
                inputs = (*eqn.inputs[:i], part, *eqn.inputs[i + 1 :])
                return [*before, replace(eqn, inputs=inputs, outputs=(out,))]
        return None

    def rule(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
        # `y = x @ W;  z = h @ R;  s = y + z;  a = s + b` is `y' = x @ W + b;  z = h @ R;
        # a = y' + z`. The new equations stand where the bias was added, behind all that they read.
        for at in (0, 1) if eqn.name in _SUMS else ():
            b = bias(eqn.inputs[1 - at])
            new = None if b is None else absorbed(eqn.inputs[at], b, eqn.outputs[0])
            for e in new or ():
                to.put(e)
                producer[e.outputs[0]] = e
                uses[e.outputs[0]] = uses[e.outputs[0]] or 1
            if new is not None:
                return eqn.outputs
        return None

    return rewritten(program, rule)


# ------------------------------------------------------------------------------ packed states


def packed(step: Step) -> dict[int, Leaf]:
    """Hidden leaves that the step reads and writes in equal parts of an axis, as such.

    `v, i = jnp.split(state, 2, -1)` before and `jnp.concatenate([v, i], -1)` after, or `state[0]`
    and `jnp.stack`.
    """
    producer = producers(step.program)
    out = {}
    for k, leaf in enumerate(step.hidden):
        entry, made = step.entry(leaf), producer.get(step.exit(leaf))
        if leaf.channels or made is None or made.name != "concatenate":
            continue
        axis = made.params["dimension"]
        sizes = {a.shape[axis] for a in made.inputs}
        reads = [_ends(e, axis) for e in step.program.equations if entry in e.inputs]
        ends = [end for some in reads for end in some]
        if len(sizes) == 1 and ends and not any(end % max(sizes) for end in ends):
            out[k] = replace(leaf, packed=(axis, len(made.inputs)))
    return out


def _ends(eqn: Equation, axis: int) -> list[int]:
    """Where an equation cuts its operand along an axis."""
    if eqn.name == "slice":
        ends = [eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]]
        return ends if ends != [0, eqn.inputs[0].shape[axis]] else []
    return []
