"""Random layered recurrent networks in which every dependency D-RTRL drops can be cut by hand.

A network is a tuple of layers `(width, leak, recurrent, source, depth, feedback, norm, couple,
skip)`:

    h' = tanh(leak h + 0.3 roll(h) + tail)
    tail = ff(source) + recurrent(h) + feedback(above) + skip

with operators for `ff`, `feedback` and an 'operator' recurrence; a 'plain' recurrence is `h @ w`.
`depth` 2 puts one operator behind another; `norm` is a layer norm of the 'tail' or of the whole
'recurrence'; `source` and `skip` read the 'new' or 'old' state of the layer below.

The oracle needs no Jacobian, trace or jaxpr: it differentiates the unrolled network with
`stop_gradient` around what is dropped (design.md, 'The law').
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
from jax import lax
from programs import Choose, numbers

import braintrace as bt
from interpret import interpreted

T, N_IN, N_OUT = 4, 2, 3
Cut = frozenset[str]
WHOLE: Cut = frozenset()


class Layer(NamedTuple):
    """How one layer computes its new state."""

    width: int = 3
    leak: float = 0.0
    recurrent: str = ""  # '', 'operator', 'plain'
    source: str = "new"  # of the layer below; 'new', 'old'
    depth: int = 1
    feedback: bool = False
    norm: str = ""  # '', 'tail', 'recurrence'
    couple: bool = False  # needs a leak: a neighbour alone would be a move
    skip: bool = False  # needs a layer below of the same width


def network(choose: Choose) -> tuple[Layer, ...]:
    """A random network."""
    out: list[Layer] = []
    count = choose((1, 2, 2, 3))
    for i in range(count):
        leak = choose((0.7, 0.0, 0.7))
        width = choose((3, 4))
        out.append(
            Layer(
                width=width,
                leak=leak,
                recurrent=choose(("", "", "operator", "plain")),
                source=choose(("new", "old")),
                depth=choose((1, 1, 1, 2)),
                feedback=i < count - 1 and choose((False, True, False)),
                norm=choose(("", "", "", "tail", "recurrence")),
                couple=leak > 0 and choose((False, False, False, True)),
                skip=i > 0 and out[-1].width == width and choose((False, True)),
            )
        )
    return tuple(out)


def random_network(seed: int) -> tuple[Layer, ...]:
    return network(random.Random(seed).choice)


def spec_of(net: Sequence[Layer]) -> tuple[tuple, ...]:
    """A network as plain tuples, to print and to replay."""
    return tuple(tuple(layer) for layer in net)


def of(spec: Sequence[Any]) -> tuple[Layer, ...]:
    """Layers from plain tuples."""
    return tuple(Layer(*layer) for layer in spec)


def weights(net: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name."""
    out: dict[str, tuple[int, ...]] = {"out": (net[-1].width, N_OUT)}
    for i, layer in enumerate(net):
        below = net[i - 1].width if i else N_IN
        out[f"ff{i}"] = (below, layer.width)
        if layer.depth == 2:
            out[f"deep{i}"] = (layer.width, layer.width)
        if layer.recurrent:
            out[f"{layer.recurrent}{i}"] = (layer.width, layer.width)
        if layer.feedback:
            out[f"back{i}"] = (net[i + 1].width, layer.width)
    return out


def step(
    net: Sequence[Layer], w: dict[str, Any], old: Sequence[Any], x: Any, cut: Cut = WHOLE
) -> tuple[list[Any], Any]:
    """New states and output; a dependency in `cut` passes its value but no derivative."""
    hold = lambda name, v: lax.stop_gradient(v) if name in cut else v
    operator = lambda name, v: bt.matmul(hold(name, v), w[name])
    new: list[Any] = []
    for i, layer in enumerate(net):
        h = old[i]
        below = x if i == 0 else new[i - 1] if layer.source == "new" else old[i - 1]
        tail = operator(f"ff{i}", below)
        if layer.depth == 2:
            tail = operator(f"deep{i}", jnp.sin(tail))
        if layer.recurrent == "operator":
            tail = tail + operator(f"operator{i}", h)
        if layer.recurrent == "plain":
            tail = tail + hold(f"plain{i}", h @ w[f"plain{i}"])
        if layer.feedback:
            tail = tail + operator(f"back{i}", old[i + 1])
        if layer.norm == "tail":
            tail = _norm(tail, lambda v, i=i: hold(f"norm{i}", v))
        if layer.skip:
            tail = tail + 0.5 * jnp.sin(below)
        y = layer.leak * h + tail if layer.leak else tail
        if layer.couple:
            y = y + hold(f"couple{i}", 0.3 * jnp.roll(h, 1))
        if layer.norm == "recurrence":
            y = _norm(y, lambda v, i=i: hold(f"norm{i}", v))
        new.append(jnp.tanh(y))
    out = operator("out", new[-1]) + 0.3 * sum(h[:N_OUT] for h in (*new, *old))
    return new, out


def _norm(y: Any, hold: Callable[[Any], Any]) -> Any:
    return (y - hold(y.mean())) / jnp.sqrt(hold(y.var()) + 0.1)


class Network(brainstate.nn.Module):
    """A network as a model, in the middle of its life."""

    def __init__(self, net: Sequence[Layer]):
        super().__init__()
        self.net = net
        for k, s in weights(net).items():
            setattr(self, k, brainstate.ParamState(numbers(f"{k}", *s, scale=0.8)))
        self.h = [brainstate.HiddenState(numbers(f"h{i}", l.width)) for i, l in enumerate(net)]

    def update(self, x: Any) -> Any:
        w = {k: getattr(self, k).value for k in weights(self.net)}
        new, out = step(self.net, w, [h.value for h in self.h], x)
        for state, v in zip(self.h, new, strict=True):
            state.value = v
        return out


def sequences() -> tuple[jax.Array, jax.Array]:
    return numbers("inputs", T, N_IN, scale=1.0), numbers("aims", T, N_OUT, scale=1.0)


# ------------------------------------------------------------------------------------------ oracle


def droppable(net: Sequence[Layer]) -> Cut:
    """All dependencies that D-RTRL may drop before the present step."""
    out = {k for k in weights(net) if k not in ("ff0", "out")}
    out |= {f"norm{i}" for i, layer in enumerate(net) if layer.norm}
    return frozenset(out | {f"couple{i}" for i, layer in enumerate(net) if layer.couple})


def recurrent(net: Sequence[Layer]) -> list[tuple[list[int], Cut]]:
    """Groups of layers, each with the operators through which it comes back to its own component.

    Layers are one group where the new state of one reads the old state of another unit by unit.
    """
    n, have = len(net), weights(net)
    reads: list[set[int]] = []  # old states that a new state depends on
    enters: dict[str, set[int]] = {}  # old states that enter an operator
    for i, layer in enumerate(net):
        below = set() if i == 0 else reads[i - 1] if layer.source == "new" else {i - 1}
        enters[f"ff{i}"] = enters[f"deep{i}"] = below
        enters[f"operator{i}"], enters[f"back{i}"] = {i}, {i + 1}
        own = {i} if layer.leak or layer.recurrent else set()
        reads.append(below | own | ({i + 1} if layer.feedback else set()))

    label, kept = list(range(n)), []
    for i, layer in enumerate(net):
        below = set() if not layer.skip else kept[i - 1] if layer.source == "new" else {i - 1}
        kept.append(below | ({i} if layer.leak else set()))
        for j in below:
            label = [label[i] if v == label[j] else v for v in label]
    groups = [[i for i in range(n) if label[i] == g] for g in sorted(set(label))]
    home = {i: g for g, members in enumerate(groups) for i in members}
    path = [[any(j in reads[i] for i in b for j in a) or a is b for b in groups] for a in groups]
    for k in range(len(groups)):
        for a in range(len(groups)):
            for b in range(len(groups)):
                path[a][b] |= path[a][k] and path[k][b]

    out = []
    for g, members in enumerate(groups):
        ids = set()
        for name, states in enters.items():
            if name not in have:
                continue
            fed = {int(name[-1])}  # the layer of the operator, and those that read its new state
            for i in range(int(name[-1]) + 1, n):
                if net[i].source == "new" and i - 1 in fed:
                    fed.add(i)
            if states & set(members) and any(path[g][home[i]] and path[home[i]][g] for i in fed):
                ids.add(name)
        out.append((members, frozenset(ids)))
    return out


def law(net: Sequence[Layer], dropped: Cut, w: dict[str, Any], h: list, xs: Any, aims: Any) -> Any:
    """The gradient of D-RTRL, single-step, with these dependencies dropped; none is BPTT.

    For the loss of step t: reverse mode within the step, and through the entry states in the
    network that is cut at every step before t, and at t in the recurrent entries only.
    """
    groups = recurrent(net)

    def loss(w, h, x, aim, cut=WHOLE):
        return 0.5 * jnp.sum((step(net, w, h, x, cut)[1] - aim) ** 2)

    def surrogate(w):
        total, now, detached = 0.0, h, lax.stop_gradient(w)
        for x, aim in zip(xs, aims, strict=True):
            entry = lax.stop_gradient(now)
            total += loss(w, entry, x, aim)
            for members, cut in groups:
                slope = jax.grad(loss, 1)(detached, entry, x, aim, cut & dropped)
                total += sum(jnp.vdot(slope[i], now[i]) for i in members)
            now = step(net, w, now, x, dropped)[0]
        return total

    return jax.grad(surrogate)(w)


def by_hand(
    model: Network, dropped: Cut, run: Callable[..., Any] = interpreted
) -> dict[tuple, Any]:
    """`law` on a model as it is; keys as `bptt_grad`'s."""
    w = {k: getattr(model, k).value for k in weights(model.net)}
    start = [s.value for s in model.h]
    oracle = lambda: law(model.net, dropped, w, start, *sequences())
    found = run(oracle, lower=False)
    return {(k,): g for k, g in found.items()}


def smaller(net: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """Simpler networks."""
    if len(net) > 1:
        yield (*net[:-2], net[-2]._replace(feedback=False))
        yield (net[1]._replace(skip=False), *net[2:])
    plain = Layer()
    for i, layer in enumerate(net):
        for name in Layer._fields[1:]:
            if getattr(layer, name) != getattr(plain, name):
                simple = layer._replace(**{name: getattr(plain, name)})
                simple = simple._replace(couple=simple.couple and bool(simple.leak))
                yield (*net[:i], simple, *net[i + 1 :])
