"""A network as a graph of NIR."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import brainstate
import numpy as np
import saiunit as u

from ..._errors import error, not_supported, value_error
from ...nn import ALIFCell, Conv1d, Conv2d, LeakyRateReadout, LeakySpikeReadout, LIFCell, Linear
from ...nn._spiking import RESETS as CELL_RESETS
from ._layers import Delays, Pool, Threshold
from ._network import Network
from ._neurons import HARD, Neurons, seconds

_SEQUENCES = (brainstate.nn.Sequential, list, tuple)


@dataclass
class _Writer:
    """The graph so far; edges go on from the node `last`."""

    nir: ModuleType
    dt: Any
    soft_reset: bool
    nodes: dict[str, Any] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    last: str = "input"

    def add(self, name: str, node: Any) -> str:
        """A node under a name that is not taken yet, with an edge from the last one."""
        self.nodes[name] = node
        self.edges.append((self.last, name))
        self.last = name
        return name

    def linear(self, name: str, weight: Any, bias: Any, unit: u.Unit) -> None:
        weight = _numbers(name, weight, unit).T
        if bias is None:
            self.add(name, self.nir.Linear(weight=weight))
        else:
            self.add(name, self.nir.Affine(weight=weight, bias=_numbers(name, bias, unit)))

    def membrane(self, name: str, decay: Any, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The parameters of a leak by forward Euler, with an input that counts in full."""
        _check_one_axis(name, shape)
        dt, left = seconds(self.dt), np.asarray(decay, np.float64)
        if not (left < 1).all():
            raise value_error(
                f"{name}: the decay of a step is 1.",
                why="the time constant is infinite in this precision, and NIR has finite ones",
                do="choose a shorter time constant, or compute in float64",
            )
        tau = np.broadcast_to(dt / (1 - left), shape).copy()
        return {"tau": tau, "r": tau / dt, "v_leak": np.zeros(shape)}

    def reset(self, name: str, reset: str) -> dict[str, str]:
        """Metadata of a spiking node."""
        if reset != HARD and not self.soft_reset:
            raise not_supported(
                f"{name}: its reset is {reset!r}.",
                why="in NIR a spike sets the membrane to v_reset; it cannot subtract the threshold",
                do="build it with reset='hard', or pass soft_reset=True to write it as metadata, "
                "which other simulators may ignore",
            )
        return {"reset": reset}


def to_nir(model: Any, dt: Any = None, *, soft_reset: bool = False) -> Any:
    """Write a network as a NIR graph that computes the same.

    Layers are `Linear`, `Conv1d`, `Conv2d`, `LIFCell`, `ALIFCell`, `LeakySpikeReadout` and
    `LeakyRateReadout` of `braintrace.nn`, `brainstate.nn.Flatten`, and networks of `from_nir`. Time
    constants are those of forward Euler: `tau = dt / (1 - decay)` and `r = tau / dt`. Voltages
    count in the unit of `V_th`. NIR has no adaptive threshold: an `ALIFCell` is two leaky
    integrators, a Threshold that reads both, and its spikes on the way back.

    Args:
        model: a layer, a `brainstate.nn.Sequential`, a network of `from_nir`, or a list of these
            in the order in which they are applied.
        dt: length of a step, a number or a time, which is written in seconds; default that of
            `brainstate.environ`.
        soft_reset: whether to write resets that subtract the threshold, as metadata.

    Returns:
        A `nir.NIRGraph`; `nir.write(path, graph)` makes a file of it.

    Raises:
        NotSupportedError: NIR has no node for some of the layers; all are named.
        ValueError: dt is not set.
        ImportError: nir is not installed.

    Example:
        >>> import brainstate, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     cell = braintrace.nn.LIFCell(3, 4, reset="hard")
        ...     graph = braintrace.nir.to_nir(cell)
        >>> list(graph.nodes)
        ['input', 'lifcell_0_w', 'lifcell_0', 'lifcell_0_u', 'output']
    """
    try:
        import nir
    except ImportError as cause:
        raise error(ImportError)(
            "to_nir needs nir.",
            why="it defines the nodes and writes the files",
            do="pip install 'braintrace-online[nir]'",
        ) from cause
    layers = list(_layers(model))
    # By the very class: a subclass may compute anything.
    named = lambda i, layer: f"layer {i} ({type(layer).__name__})"
    unknown = [named(i, a) for i, a in enumerate(layers) if type(a) not in _WRITERS]
    if unknown or not layers:
        raise not_supported(
            f"{', '.join(unknown) or 'a model without layers'} cannot be written.",
            why=f"only these have a node of NIR: {', '.join(t.__name__ for t in _WRITERS)}; a "
            "module of your own may do anything in its update",
            do="pass the layers in order as a list, to_nir([net.cell, net.readout]), and replace "
            "those that have no node",
        )
    for i, (one, other) in enumerate(pairwise(layers)):
        if None not in (one.out_size, other.in_size) and one.out_size != other.in_size:
            raise value_error(
                f"{named(i, one)} has the output {one.out_size}, {named(i + 1, other)} the input "
                f"{other.in_size}.",
                why="each layer reads what the one before it returns",
                do="pass the layers in the order in which they are applied, after a convolution "
                "brainstate.nn.Flatten(in_size=...)",
            )
    out = _Writer(nir, dt, soft_reset)
    out.nodes["input"] = nir.Input(np.array(layers[0].in_size))
    for i, layer in enumerate(layers):
        _WRITERS[type(layer)](out, f"{type(layer).__name__.lower()}_{i}", layer)
    out.add("output", nir.Output(np.array(layers[-1].out_size)))
    return nir.NIRGraph(out.nodes, out.edges)


def _layers(model: Any) -> Iterator[Any]:
    if isinstance(model, _SEQUENCES):
        for layer in getattr(model, "layers", model):
            yield from _layers(layer)
    else:
        yield model


def _linear(out: _Writer, name: str, layer: Any) -> None:
    _check_one_axis(name, layer.in_size)
    weight = layer.weight.value["weight"]
    weight = weight if layer.w_mask is None else weight * layer.w_mask
    out.linear(name, weight, layer.weight.value.get("bias"), u.UNITLESS)


def _lif(out: _Writer, name: str, cell: Any) -> None:
    _check_one_axis(name, cell.in_size)
    weight = cell.W.weight.value
    out.linear(f"{name}_w", weight["weight"], weight.get("bias"), cell.unit)
    numbers = out.membrane(name, cell.alpha(), cell.out_size)
    threshold = _numbers(name, cell.V_th, cell.unit).astype(np.float64)
    reset = next(key for key, function in CELL_RESETS.items() if function is cell._reset)
    metadata = out.reset(name, reset)
    out.add(name, out.nir.LIF(**numbers, v_threshold=threshold, metadata=metadata))
    if cell.U is not None:
        out.linear(f"{name}_u", cell.U.weight.value["weight"], None, cell.unit)
        out.edges.append((f"{name}_u", name))
        out.last = name


# With z the spikes of the last step, both integrators by forward Euler with r = tau / dt:
#
#     V = α V + W x + U z - α V_th z        the reset is an input, so it must be a soft one
#     a = ρ a + z
#     z = 1 where V - beta a > V_th
def _adaptive(out: _Writer, name: str, cell: Any) -> None:
    _check_one_axis(name, cell.in_size)
    if cell._reset is not CELL_RESETS["soft"]:
        raise not_supported(
            f"{name}: its reset is 'hard'.",
            why="adaptive neurons are written as leaky integrators and a threshold, and a spike "
            "can only take something off an integrator",
            do="build it with reset='soft'",
        )
    weight = cell.W.weight.value
    out.linear(f"{name}_w", weight["weight"], weight.get("bias"), cell.unit)
    alpha = np.asarray(cell.alpha(), np.float64)
    threshold, beta = (
        _numbers(name, v, cell.unit).astype(np.float64) for v in (cell.V_th, cell.beta)
    )
    out.add(f"{name}_membrane", out.nir.LI(**out.membrane(name, alpha, cell.out_size)))
    out.add(name, out.nir.Threshold(threshold=threshold))
    back: list[tuple[str, np.ndarray]] = [("reset", np.diag(-alpha * threshold))]
    if cell.U is not None:
        back.append(("u", _numbers(name, cell.U.weight.value["weight"], cell.unit).T))
    for suffix, matrix in back:
        out.nodes[f"{name}_{suffix}"] = out.nir.Linear(weight=matrix)
        out.edges += [(name, f"{name}_{suffix}"), (f"{name}_{suffix}", f"{name}_membrane")]
    out.nodes[f"{name}_adaptation"] = out.nir.LI(**out.membrane(name, cell.rho(), cell.out_size))
    out.nodes[f"{name}_raised"] = out.nir.Linear(weight=np.diag(-beta))
    chain = (name, f"{name}_adaptation", f"{name}_raised", name)
    out.edges += list(pairwise(chain))


def _leaky(out: _Writer, name: str, cell: Any) -> None:
    _check_one_axis(name, cell.in_size)
    weight = cell.W.value
    out.linear(f"{name}_w", weight, None, u.get_unit(weight))
    out.add(name, out.nir.LI(**out.membrane(name, cell.decay, cell.out_size)))


def _conv(out: _Writer, name: str, layer: Any) -> None:
    n, pads = layer.spatial, layer.padding
    named = isinstance(pads, str)
    padding = pads.lower() if named else tuple(low for low, high in pads if low == high)
    plain = padding in ("same", "valid") if named else len(padding) == n
    if not layer.channel_first or not plain or layer.lhs_dilation != (1,) * n:
        raise not_supported(
            f"{name}: channel_first={layer.channel_first}, padding={pads}, "
            f"lhs_dilation={layer.lhs_dilation}.",
            why="convolutions of NIR have channels first, the same padding at both ends of an "
            "axis, 'same' or 'valid', and no dilated input",
            do="build the layer so",
        )
    params = layer.weight.value
    weight = params["weight"] if layer.w_mask is None else params["weight"] * layer.w_mask
    weight = np.moveaxis(_numbers(name, weight, u.UNITLESS), (-1, -2), (0, 1))
    bias = np.zeros(layer.out_channels, weight.dtype)
    if "bias" in params:
        bias = _numbers(name, params["bias"], u.UNITLESS).reshape(-1)
    one = lambda sizes: sizes[0] if n == 1 and not isinstance(sizes, str) else sizes
    node = (out.nir.Conv1d if n == 1 else out.nir.Conv2d)(
        input_shape=one(layer.in_size[1:]),
        weight=weight.copy(),
        stride=one(layer.stride),
        padding=one(padding),
        dilation=one(layer.rhs_dilation),
        groups=layer.groups,
        bias=bias,
    )
    types = node.input_type["input"], node.output_type["output"]
    typed = [tuple(int(n) for n in shape) for shape in types]
    if typed != [layer.in_size, layer.out_size]:
        raise not_supported(
            f"{name}: it maps {layer.in_size} to {layer.out_size}, its node {typed[0]} to "
            f"{typed[1]}.",
            why="nir does not support groups, kernels of unequal sides, or 'same' with a stride",
            do="avoid these, and write the padding as numbers",
        )
    out.add(name, node)


def _flatten(out: _Writer, name: str, layer: Any) -> None:
    if layer.in_size is None:
        raise not_supported(
            f"{name}: it has no in_size.",
            why="without one it flattens the batch as well, and nodes of NIR have a shape",
            do="build it with in_size=...",
        )
    size, axes = np.array(layer.in_size), (layer.start_axis, layer.end_axis)
    out.add(name, out.nir.Flatten(size, *axes))


def _network(out: _Writer, name: str, network: Network) -> None:
    if out.dt is not None and seconds(out.dt) != network.dt:
        raise value_error(
            f"{name}: its dt is {network.dt:g}, not {seconds(out.dt):g}.",
            why="its time constants are those of the file it is from",
            do="leave out dt, or pass that one",
        )
    names = {network.entry: out.last}
    fresh = lambda node: f"{name}_{node}" if node in (*out.nodes, "output") else node
    names |= {node: fresh(node) for node in network.layers}
    for node, layer in network.layers.items():
        if isinstance(layer, Neurons | Pool | Delays | Threshold):
            spiking = isinstance(layer, Neurons) and layer.spiking
            metadata = out.reset(names[node], layer.reset) if spiking else {}
            copy = type(layer.node)(**_fields(layer.node), metadata=metadata)
            out.add(names[node], copy)
        else:
            _WRITERS[type(layer)](out, names[node], layer)
        out.edges.pop()  # the network has its own
    for node, sources in network.order:
        if node == network.exit:
            if len(sources) > 1:
                raise not_supported(
                    f"{name}: its output is the sum of {', '.join(s for s, _ in sources)}.",
                    why="one node goes on",
                    do="let them end in one Linear",
                )
            out.last = names[sources[0][0]]
        else:
            out.edges += [(names[s], names[node]) for s, _ in sources]


def _fields(node: Any) -> dict[str, Any]:
    kept = ("input_type", "output_type", "metadata")
    return {k: v for k, v in vars(node).items() if k not in kept}


def _numbers(name: str, value: Any, unit: u.Unit) -> np.ndarray:
    """An array without its unit; a plain one counts in it already."""
    if not u.is_unitless(value) and not u.have_same_dim(value, unit):
        raise not_supported(
            f"{name}: it has the unit {u.get_unit(value)}.",
            why="NIR has no units",
            do="use numbers without a unit",
        )
    return np.asarray(u.get_mantissa(value) if u.is_unitless(value) else value.to_decimal(unit))


def _check_one_axis(name: str, size: tuple[int, ...]) -> None:
    if len(size) != 1:
        raise not_supported(
            f"{name}: its size is {size}.",
            why="a Linear of NIR is one matrix, for one axis",
            do="flatten what comes before it",
        )


_WRITERS: dict[type, Callable[[_Writer, str, Any], None]] = {
    Linear: _linear,
    Conv1d: _conv,
    Conv2d: _conv,
    brainstate.nn.Flatten: _flatten,
    LIFCell: _lif,
    ALIFCell: _adaptive,
    LeakySpikeReadout: _lif,
    LeakyRateReadout: _leaky,
    Network: _network,
}
