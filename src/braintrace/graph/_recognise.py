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
from ..program import Atom, Equation, Program, Var, producers, prune
from ._fold import Is, Kinds, folded, kinds_of, rewritten
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
        equations: list[Equation] = []
        marked: dict[Var, Var] = {}
        for eqn in program.equations:
            if eqn in products:
                weight = products[eqn]
                equations += [eqn] if weight is None else _product(eqn, weight == 0)
            elif plain(eqn) and not eqn.bodies and _meet(eqn, kinds):
                equations += _operator(eqn, kinds.weight, marked)
            else:
                equations.append(eqn)
        outputs = list(program.outputs)
        if around and around[-1][0].name == "cond":
            eqn, this = around[-1]
            kinds_of_branch = [kinds_in((*around[:-1], (eqn, k))) for k in range(len(eqn.bodies))]
            for n, atom in enumerate(outputs):
                others = [
                    k.weight(b.program.outputs[n])
                    for k, b in zip(kinds_of_branch, eqn.bodies, strict=True)
                ]
                if isinstance(atom, Var) and others[this] and not all(others):
                    outputs[n] = _identity(eqn, atom, equations, marked)
        if equations == list(program.equations):
            return program
        changed = replace(program, equations=tuple(equations), outputs=tuple(outputs))
        return prune(_with_biases(prune(_turned_once(changed))))

    return rewritten(step, rewrite)


def _meet(eqn: Equation, kinds: Kinds) -> bool:
    """Whether something trained and constant meets something that varies."""
    return any(map(kinds.weight, eqn.inputs)) and any(map(kinds.varies, eqn.inputs))


def _uses(program: Program) -> Counter[Atom]:
    return Counter([*(a for e in program.equations for a in e.inputs), *program.outputs])


def _factors(program: Program, kinds: Kinds) -> dict[Equation, int | None]:
    """Products of an operand with a varying factor, `x @ (W * mask)`, and what computes it.

    Per product the number of that operand, None for the equations to be folded into the product.
    What cannot be folded, like the key `x @ W` of a memory that is read by its product with it, is
    left to its own operators.
    """
    producer = producers(program)
    uses = _uses(program)
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
            if alone and folded(_product(eqn, i == 0)[0], producer, kinds) is not None:
                out |= {**dict.fromkeys(cone), eqn: i}
                break
    return out


def _product(eqn: Equation, weight_first: bool) -> list[Equation]:
    """The operator that a product is, and what brings its axes into the order they had."""
    left, right = eqn.inputs
    if eqn.name == "conv_general_dilated":
        return [replace(eqn, primitive=plain_conv, params=conv_static(eqn.params))]
    primitive, static, order = dot_operator(eqn.params, left, right, weight_first)
    pair = (right, left) if weight_first else (left, right)
    product = replace(eqn, primitive=primitive, inputs=pair, params=static)
    if order == tuple(range(len(order))):
        return [product]
    (out,) = eqn.outputs
    shape = [0] * len(order)
    for i, k in enumerate(order):
        shape[k] = out.shape[i]
    y = Var(tuple(shape), out.dtype)
    turn = replace(
        eqn, primitive=lax.transpose_p, inputs=(y,), params={"permutation": order}, outputs=(out,)
    )
    return [replace(product, outputs=(y,)), turn]


def _operator(eqn: Equation, weight: Is, marked: dict[Var, Var]) -> list[Equation]:
    """What takes the place of an equation."""
    if eqn.name == "dot_general":
        return _product(eqn, not weight(eqn.inputs[1]))
    if eqn.name == "conv_general_dilated" and weight(eqn.inputs[1]):
        return _product(eqn, False)
    if eqn.name == "gather" and weight(eqn.inputs[0]):
        table, indices = eqn.inputs
        primitive, static = gather_operator(eqn.params, table, indices)
        return [replace(eqn, primitive=primitive, inputs=(indices, table), params=static)]
    before: list[Equation] = []
    inputs = [
        _identity(eqn, a, before, marked) if isinstance(a, Var) and weight(a) else a
        for a in eqn.inputs
    ]
    return [*before, replace(eqn, inputs=tuple(inputs))]


def _identity(eqn: Equation, atom: Var, before: list[Equation], marked: dict[Var, Var]) -> Var:
    """The element-wise operator of a value, at the line of an equation."""
    if atom not in marked:
        marked[atom] = Var(atom.shape, atom.dtype)
        before.append(
            Equation(etp_elemwise, (atom,), (marked[atom],), {}, eqn.source, callers=eqn.callers)
        )
    return marked[atom]


def _turned_once(program: Program) -> Program:
    """Transpositions of transpositions as one, or as none: `vmap` turns products of samples back.

        y = x @ W.T;  a = transpose y;  b = transpose a;  c = b + bias      is      c = y + bias

    So does a transposition of a slice of a transposition, as of the gates of a joint product.
    """
    # `turned[b] = (y, axes)` says that b is y with its axes in this order. Of a transposition of b
    # by `order`, axis k is axes[order[k]] of y; if that is (0, 1, ...), it is y itself.
    turned: dict[Atom, tuple[Var, tuple[int, ...]]] = {}  # what it is the transposition of
    same: dict[Atom, Atom] = {}
    equations: list[Equation] = []
    for eqn in program.equations:
        eqn = replace(eqn, inputs=tuple(same.get(a, a) for a in eqn.inputs))
        source, axes = turned.get(eqn.inputs[0], (None, ())) if eqn.inputs else (None, ())
        if eqn.name == "slice" and source is not None:
            where = {k: v and tuple(np.take(v, np.argsort(axes))) for k, v in eqn.params.items()}
            part = Var(tuple(eqn.outputs[0].shape[k] for k in np.argsort(axes)), source.dtype)
            equations.append(replace(eqn, inputs=(source,), outputs=(part,), params=where))
            turn = {"permutation": axes}
            eqn = replace(eqn, primitive=lax.transpose_p, inputs=(part,), params=turn)
            turned[eqn.outputs[0]] = part, axes
        elif eqn.name == "transpose" and isinstance(eqn.inputs[0], Var):
            (out,), order = eqn.outputs, eqn.params["permutation"]
            source = eqn.inputs[0] if source is None else source
            axes = tuple(axes[k] for k in order) if axes else tuple(order)
            turned[out] = source, axes
            if axes == tuple(range(len(axes))):
                same[out] = source
                continue
            eqn = replace(eqn, inputs=(source,), params={"permutation": axes})
        equations.append(eqn)
    outputs = tuple(same.get(o, o) for o in program.outputs)
    return replace(program, equations=tuple(equations), outputs=outputs)


def _with_biases(program: Program) -> Program:
    """Products with what is added to them, or to a sum with them, as their bias."""
    producer = producers(program)
    uses = _uses(program)

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

    # `y = x @ W;  z = h @ R;  s = y + z;  a = s + b` is `y' = x @ W + b;  z = h @ R;  a = y' + z`.
    # The new equations stand where the bias was added, behind all that they read.
    equations: list[Equation] = []
    for eqn in program.equations:
        new = None
        for at in (0, 1) if eqn.name in _SUMS else ():
            b = bias(eqn.inputs[1 - at])
            new = None if b is None else absorbed(eqn.inputs[at], b, eqn.outputs[0])
            if new is not None:
                break
        for e in new or ():
            producer[e.outputs[0]] = e
            uses[e.outputs[0]] = uses[e.outputs[0]] or 1
        equations += new or [eqn]
    return replace(program, equations=tuple(equations))


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
