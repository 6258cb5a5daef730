"""A graph of NIR as a network: nodes as layers, edges as sums of what comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import brainstate
import jax
import numpy as np

from ..._errors import not_supported, type_error, value_error
from ...nn import Conv1d, Conv2d, Linear
from ._layers import POOLS, Delays, Pool, Threshold
from ._neurons import HARD, KINDS, Neurons, seconds

Array = jax.Array
Edges = list[tuple[str, str]]
Shape = tuple[int, ...]
_KNOWN = (
    *("Linear", "Affine", "Conv1d", "Conv2d", "Flatten", "Delay", "Threshold"),
    *POOLS,
    *KINDS,
)
_PASSED = ("Input", "Output", "Identity")
DEEPEST = 50  # graphs in graphs


class Network(brainstate.nn.Module):
    """A network from `from_nir`, with a layer for every node.

    The input of a node is the sum over its edges. An edge that closes a loop carries what the
    neurons returned in the last step; that of a threshold is computed from neurons before it.

    Attributes:
        layers: the layers by the names of their nodes.
        dt: length of a step in the file's unit of time.
        in_size: shape of an input.
        out_size: shape of an output.
    """

    def __init__(
        self,
        layers: Mapping[str, brainstate.nn.Module],
        order: Sequence[tuple[str, tuple[tuple[str, bool], ...]]],
        entry: str,
        exit: str,
        dt: float,
    ):
        super().__init__()
        self.layers, self.dt = dict(layers), dt
        self.order, self.entry, self.exit = tuple(order), entry, exit

    def update(self, x: Array) -> Array:
        """Advance one step; returns what arrives at the output."""
        closing = dict.fromkeys(s for _, sources in self.order for s, past in sources if past)
        last = {name: self._last(name) for name in closing}  # before any state is advanced
        values = {self.entry: x}
        for name, sources in self.order:
            total = _total([last[s] if past else values[s] for s, past in sources])
            values[name] = total if name == self.exit else self.layers[name](total)
        return values[self.exit]

    def _last(self, name: str) -> Array:
        """The output of a node in the last step."""
        layer: Any = self.layers[name]
        if isinstance(layer, Neurons):
            return layer.last()
        return layer(_total([self._last(source) for source, _ in dict(self.order)[name]]))


def _total(arriving: Sequence[Array]) -> Array:
    return sum(arriving[1:], start=arriving[0])


def from_nir(
    graph: Any,
    dt: Any = None,
    *,
    reset: str = HARD,
    surrogate: str | Callable[[Array], Array] = "triangle",
) -> Network:
    """Make a network that can be trained from a NIR graph.

    Linear, Affine, Conv1d and Conv2d become layers of `braintrace.nn`, whose weights are
    parameters; IF, LIF, CubaLIF, LI and CubaLI become `Neurons`; Delay, SumPool2d, AvgPool2d,
    Threshold and Flatten have no weights. Graphs inside are inlined.

    Args:
        graph: a `nir.NIRGraph` with one input and one output, e.g. of `nir.read(path)`.
        dt: length of a step in the file's unit of time, or with a unit, then in seconds; default
            that of `brainstate.environ`.
        reset: of spiking neurons whose node has no `reset` in its metadata, see `Neurons`; NIR
            defines 'hard'.
        surrogate: derivative of a spike, see `braintrace.nn.surrogate`.

    Returns:
        The network.

    Raises:
        NotSupportedError: nodes that have no layer here; all are named.
        ValueError: numbers or shapes do not fit, or a loop has no neurons.
        TypeError: no graph.

    Example:
        >>> import jax.numpy as jnp, nir, numpy as np, braintrace
        >>> ones = np.ones(4)
        >>> lif = nir.LIF(tau=0.02 * ones, r=20 * ones, v_leak=0 * ones, v_threshold=ones)
        >>> graph = nir.NIRGraph.from_list(nir.Linear(np.ones((4, 3))), lif)
        >>> network = braintrace.nir.from_nir(graph, dt=1e-3)
        >>> learner = braintrace.compile(network, "d_rtrl", jnp.zeros(3))
        >>> learner(jnp.ones(3)).shape
        (4,)
    """
    if not hasattr(graph, "nodes") or not hasattr(graph, "edges"):
        raise type_error(
            f"from_nir takes a graph, not {type(graph).__name__}.",
            why="files are read by nir",
            do="pass nir.read(path)",
        )
    time = seconds(dt)
    nodes, edges = _inlined(graph, "")
    refused = [
        f"{name!r} ({type(node).__name__})"
        for name, node in nodes.items()
        if type(node).__name__ not in (*_KNOWN, *_PASSED)
    ]
    if refused:
        raise not_supported(
            f"the graph has nodes that have no layer here: {', '.join(refused)}.",
            why=f"these can be read: {', '.join(_KNOWN)}",
            do="replace them before they are exported, or read the other nodes by themselves",
        )
    entry, exit = _only(nodes, edges, "Input"), _only(nodes, edges, "Output")
    for name in [n for n, node in nodes.items() if type(node).__name__ in _PASSED]:
        if name not in (entry, exit):
            _bypass(name, nodes, edges)
    order = _ordered(nodes, edges, entry, exit)
    _check_closed(nodes, dict(order), entry)
    shapes = {entry: _size(nodes[entry].input_type["input"])}
    layers: dict[str, brainstate.nn.Module] = {}
    for name, sources in order:
        # Neurons in a loop come later than what reads their last output.
        arriving = {s: shapes[s] if s in shapes else _own_shape(nodes[s]) for s, _ in sources}
        if len(set(arriving.values())) != 1:
            raise value_error(
                f"what arrives at node {name!r} has the shapes {arriving}.",
                why="the values of all edges to a node are added",
                do="connect nodes of one shape",
            )
        shapes[name] = next(iter(arriving.values()))
        if name != exit:
            layers[name] = _layer(name, nodes[name], shapes[name], time, reset, surrogate)
            shapes[name] = layers[name].out_size
    network = Network(layers, order, entry, exit, time)
    network.in_size, network.out_size = shapes[entry], shapes[exit]
    return network


def _layer(name: str, node: Any, shape: Shape, dt: float, reset: str, surrogate: Any) -> Any:
    kind, dtype = type(node).__name__, brainstate.environ.dftype()
    if kind in POOLS:
        return Pool(name, node, shape)
    if kind == "Delay":
        return Delays(name, node, shape, dt)
    if kind == "Threshold":
        return Threshold(name, node, shape, surrogate)
    if kind in KINDS:
        own = node.metadata.get("reset", reset)
        return Neurons(name, node, shape, dt, own, surrogate)
    if kind == "Flatten":
        axes = int(node.start_dim), int(node.end_dim)
        return brainstate.nn.Flatten(*axes, in_size=shape)
    weight, bias = np.asarray(node.weight, dtype), getattr(node, "bias", None)
    b_init = None if bias is None else np.asarray(bias, dtype)
    if not all(np.isfinite(a).all() for a in (weight, b_init) if a is not None):
        raise value_error(
            f"node {name!r} ({kind}) has a weight or bias that is not finite.",
            why="everything that is computed from it would be NaN",
            do="correct the file",
        )
    if kind in ("Linear", "Affine"):
        if weight.ndim != 2 or weight.shape[1:] != shape:
            raise _unfit(name, node, shape)
        return Linear(shape, weight.shape[:1], weight.T, b_init)
    if weight.ndim != len(shape) + 1 or weight.shape[1] * int(node.groups) != shape[0]:
        raise _unfit(name, node, shape)
    plain = lambda a: tuple(int(n) for n in np.ravel(a))
    padding = node.padding if isinstance(node.padding, str) else plain(node.padding)
    layer = (Conv1d if kind == "Conv1d" else Conv2d)(
        shape,
        weight.shape[0],
        weight.shape[2:],
        plain(node.stride),
        padding if isinstance(padding, str) or len(padding) > 1 else padding * 2,
        rhs_dilation=plain(node.dilation),
        groups=int(node.groups),
        w_init=np.moveaxis(weight, (0, 1), (-1, -2)),
        b_init=None if b_init is None or not b_init.any() else b_init,
        channel_first=True,
    )
    typed = node.output_type["output"]
    if typed is not None and _size(typed) != layer.out_size:
        raise value_error(
            f"node {name!r} ({kind}) returns {layer.out_size}, its type is {_size(typed)}.",
            why="padding and stride are understood in another way",
            do="write its padding as numbers",
        )
    return layer


def _own_shape(node: Any) -> Shape:
    """The shape of neurons, or of thresholds."""
    return _size(np.shape(node.threshold if type(node).__name__ == "Threshold" else node.r))


def _size(shape: Any) -> Shape:
    return tuple(int(n) for n in shape)


def _unfit(name: str, node: Any, shape: Shape) -> ValueError:
    kind, weight = type(node).__name__, node.weight.shape
    return value_error(
        f"node {name!r} ({kind}) has a weight {weight}, its input is {shape}.",
        why="weights are (out, in) for one axis, or (out, in / groups, *kernel) for channels and "
        "space",
        do="connect it to nodes of that shape, or insert a Flatten",
    )


def _inlined(graph: Any, prefix: str, around: tuple[int, ...] = ()) -> tuple[dict[str, Any], Edges]:
    """Nodes and edges, those of graphs inside among them, with the graph's name before theirs."""
    if id(graph) in around or len(around) > DEEPEST:
        why = "it contains itself" if id(graph) in around else f"graphs may be {DEEPEST} deep"
        raise value_error(
            f"the graph {prefix[:80]!r} cannot be inlined.", why=why, do="flatten the graph"
        )
    nodes: dict[str, Any] = {}
    edges: Edges = []
    ends: dict[str, tuple[str, str]] = {}  # where edges to and from a node go
    for name, node in graph.nodes.items():
        full = prefix + name
        if not hasattr(node, "nodes"):
            nodes[full], ends[name] = node, (full, full)
            continue
        inside, between = _inlined(node, f"{full}.", (*around, id(graph)))
        own = {n: inside[n] for n in (f"{full}.{inner}" for inner in node.nodes) if n in inside}
        ends[name] = _only(own, between, "Input"), _only(own, between, "Output")
        nodes |= inside
        edges += between
    if missing := [name for edge in graph.edges for name in edge if name not in ends]:
        raise value_error(
            f"there is an edge to or from {missing[0]!r}.",
            where=f"the graph {prefix!r}" if prefix else None,
            why=f"its nodes are {', '.join(map(repr, list(ends)[:20]))}",
            do="correct the file",
        )
    return nodes, edges + [(ends[a][1], ends[b][0]) for a, b in graph.edges]


def _only(nodes: Mapping[str, Any], edges: Edges, kind: str) -> str:
    names = [name for name, node in nodes.items() if type(node).__name__ == kind]
    place = 1 if kind == "Input" else 0
    outer = [n for n in names if all(edge[place] != n for edge in edges)]
    if len(outer) != 1:
        raise not_supported(
            f"the graph has {len(outer)} {kind} nodes{': ' if outer else ''}{', '.join(outer)}.",
            why="a step of a network here takes one array and returns one",
            do=f"make a graph with one {kind}",
        )
    return outer[0]


def _bypass(name: str, nodes: dict[str, Any], edges: Edges) -> None:
    """Remove a node that only passes on what it gets."""
    before, after = [a for a, b in edges if b == name], [b for a, b in edges if a == name]
    places = [i for i, (_, b) in enumerate(edges) if b == name]
    at = places[0] if places else len(edges)
    edges[at:at] = [(a, b) for a in before for b in after]
    edges[:] = [edge for edge in edges if name not in edge]
    del nodes[name]


def _check_closed(
    nodes: Mapping[str, Any], sources: Mapping[str, tuple[tuple[str, bool], ...]], entry: str
) -> None:
    """Refuse a threshold that closes a loop if its last output is not known from neurons alone."""

    def visit(name: str, around: tuple[str, ...]) -> None:
        kind = "Input" if name == entry else type(nodes[name]).__name__
        if kind in KINDS:
            return
        if kind in ("Input", "Delay") or name in around:
            raise value_error(
                f"the threshold {(*around, name)[0]!r} closes a loop; it reads {name!r} ({kind}).",
                why="its output of the last step is computed from the neurons before it",
                do="put neurons between them",
            )
        for source, _ in sources[name]:
            visit(source, (*around, name))

    closing = {s for each in sources.values() for s, past in each if past}
    for name in sorted(closing):
        if type(nodes[name]).__name__ == "Threshold":
            visit(name, ())


def _ordered(
    nodes: Mapping[str, Any], edges: Edges, entry: str, exit: str
) -> list[tuple[str, tuple[tuple[str, bool], ...]]]:
    """Nodes in the order of their computation, each with its sources, and whether these are past.

    The walk goes back from the output. What it meets again while it is being computed closes a
    loop: the last step's value is taken, which neurons have.
    """
    order: list[tuple[str, tuple[tuple[str, bool], ...]]] = []
    before: dict[str, list[str]] = {}
    for start, end in edges:
        before.setdefault(end, []).append(start)
    done, path = {entry}, {exit: None}  # the nodes that are being computed, from the output on
    rest = [iter(before.get(exit, ()))]  # of each of these, sources to look at
    found: list[list[tuple[str, bool]]] = [[]]  # and those that were
    while rest:
        name = next(reversed(path))
        source = next(rest[-1], None)
        if source is None:
            rest.pop()
            order.append((name, tuple(found.pop())))
            done.add(name)
            del path[name]
            continue
        past = source in path
        if past and type(nodes[source]).__name__ not in (*KINDS, "Threshold"):
            names = list(path)
            loop = " -> ".join([source, *reversed(names[names.index(source) :])])
            raise value_error(
                f"the loop {loop} is entered at {source!r}.",
                why="a loop goes on with the output of the last step, which only neurons have",
                do="put neurons into the loop, and connect what follows to them",
            )
        found[-1].append((source, past))
        if not past and source not in done:
            path[source] = None
            rest.append(iter(before.get(source, ())))
            found.append([])
    return order
