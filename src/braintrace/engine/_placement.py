"""Where arrays lie on a mesh of devices, derived from the operators of a step.

Every axis of an array is along the samples, along the units, or along neither. For `y = x @ w` the
samples are the axis of y that no axis of w runs along (the free one, see `ops/_ties`), the units
the axis of w that runs along y:

    x (samples, in)   w (in, units)   y, h (samples, units)   trace (samples, in, units, slots)

Products with x need all of it: with the units split, states are gathered, traces never are.
Placements change no result, only where it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._errors import dotted, not_supported, type_error, value_error
from ..graph import CompilationRecord, DiagnosticKind, DiagnosticLevel, Graph, Leaf
from ..graph import HiddenParamOpRelation as Relation
from ..ops import Operator
from ..program import PyTree, Tracer, vary_by_device
from ._mixture import split_traces
from ._rule import Rule

SAMPLES, UNITS = "samples", "units"
Axes = list[str | None]  # per axis of an array


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh, and the names of its axes that samples and units are split over."""

    mesh: Mesh
    batch: str | None
    units: str | None

    def shards(self, axis: str | None) -> int:
        """Over how many devices an axis is split, SAMPLES or UNITS."""
        name = {SAMPLES: self.batch, UNITS: self.units}.get(axis or "")
        return 1 if name is None else self.mesh.shape[name]

    @property
    def parts(self) -> int:
        """How many parts the samples and units of a step are split into."""
        return self.shards(SAMPLES) * self.shards(UNITS)

    def sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding:
        """An axis that its devices do not divide is whole on each of them."""
        names = {SAMPLES: self.batch, UNITS: self.units, None: None}
        pairs = zip(shape, axes, strict=True)
        spec = [names[a] if n % self.shards(a) == 0 else None for n, a in pairs]
        while spec and spec[-1] is None:  # as JAX writes it: another spelling compiles again
            spec.pop()
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def check_samples(self, samples: int | None) -> None:
        """Refuse a number of samples that the devices do not divide."""
        if self.batch is not None and samples is None:
            raise value_error(
                f"batch={self.batch!r}, and the step has no axis of samples.",
                why="the first axis of the operators' results is not one that their weights share",
                do="give states and inputs a leading axis of samples (batch_size=...), or leave "
                "out batch",
            )
        if samples is not None and samples % self.shards(SAMPLES):
            raise value_error(
                f"{samples} samples over the {self.shards(SAMPLES)} devices of axis "
                f"{self.batch!r}.",
                why="every device takes the same number of samples",
                do=f"choose a multiple of {self.shards(SAMPLES)} samples, or a smaller mesh",
            )

    def gathered(self, op: Operator, tree: PyTree, behind: int) -> PyTree:
        """Values at units, `behind` axes from the end, whole where each weight looks up its own.

        The compiler would look them up on the devices of the units, and send what was found.
        """
        if self.units is None or not _is_sparse(op):
            return tree

        def whole(a: Any) -> Any:
            free: list[Any] = [PartitionSpec.UNCONSTRAINED] * a.ndim
            free[a.ndim - 1 - behind] = None
            spec = NamedSharding(self.mesh, PartitionSpec(*free))
            return jax.lax.with_sharding_constraint(a, spec)

        return jax.tree.map(whole, tree)

    def parts_of(self, r: Relation) -> int:
        """How many parts the samples of an operator are in, each with its own part of a sum."""
        op, x = r.operator, r.operator.x
        rows = op.maps_rows or (op.plain and op.primitive.rules.pull is not None)
        apart = rows and not r.slots.lanes
        if not apart or x is None or r.site.iterations is not None:
            return 1
        samples = {s[:1] for s in (op.y.shape, x.shape, *map(op.free_shape, r.keys))}
        return self.shards(SAMPLES) if len(samples) == 1 and () not in samples else 1

    # --------------------------------------------------------------------------- of one graph

    def check(self, graph: Graph) -> None:
        """Refuse a step whose samples or units cannot be split."""
        self.check_samples(samples_of(graph))
        if self.units is not None:
            split = [s for s in self.params(graph) if self.units in s.spec]
            if not split:
                names = ", ".join(dict.fromkeys(dotted(r.path) for r in graph.relations))
                raise value_error(
                    f"no weight can be split over the {self.shards(UNITS)} devices of axis "
                    f"{self.units!r}: {names or 'none has a trace'}.",
                    why="a weight is split along the units it leads to, if their number is a "
                    "multiple of the devices",
                    do="choose a multiple of units, or leave out units",
                )

    def records(self, graph: Graph) -> list[CompilationRecord]:
        """The weights that are whole on every device, although units are split."""
        if self.units is None:
            return []
        kind, level = DiagnosticKind.WEIGHT_REPLICATED, DiagnosticLevel.INFO
        text = f"is whole on each of the {self.shards(UNITS)} devices of axis {self.units!r}"
        pairs = zip(graph.step.params, self.params(graph), strict=True)
        return [
            CompilationRecord(kind, level, f"{leaf.name} {text}.", weight_path=leaf.path)
            for leaf, sharding in pairs
            if self.units not in sharding.spec
        ]

    def params(self, graph: Graph) -> list[NamedSharding]:
        """Where each parameter leaf lies: along units if it is the weight of an operator."""
        shapes = [graph.step.entry(leaf).shape for leaf in graph.step.params]
        axes: list[Axes] = [[None] * len(s) for s in shapes]
        for site in graph.sites:
            for k, leaves in site.leaves.items():
                sizes, of_weight = site.operator.shapes[k].shape, _weight_axes(site.operator, k)
                pairs = zip(sizes, of_weight, strict=True)
                long = [(n, a) for n, a in pairs if n > 1]  # a row may be broadcast
                for i in leaves:
                    # A bias (1, 64) of a parameter (64,): without axes of size one both are (64,),
                    # so the parameter lies along units as the bias does. Of w.T, (8, 64) for a
                    # parameter (64, 8), the sizes differ: the parameter is whole on every device.
                    if [n for n in shapes[i] if n > 1] == [n for n, _ in long]:
                        of = iter(a for _, a in long)
                        axes[i] = [next(of) if n > 1 else None for n in shapes[i]]
        return [self.sharding(*pair) for pair in zip(shapes, axes, strict=True)]

    def states(self, graph: Graph, leaves: Sequence[Leaf]) -> list[NamedSharding]:
        """Where each leaf of states lies: the first axis along samples, the last along units."""
        samples = samples_of(graph)
        out = []
        for leaf in leaves:
            shape = graph.step.entry(leaf).shape
            axes = _sample_axes(shape, samples)
            last = len(shape) - 1 - leaf.channels
            if last >= 0 and axes[last] is None and leaf in graph.step.hidden:
                axes[last] = UNITS
            out.append(self.sharding(shape, axes))
        return out

    def traces(self, graph: Graph, rule: Rule, traces: Sequence[PyTree]) -> list[PyTree]:
        """Where the arrays of each trace lie; those of rules over all parameters along samples."""
        if rule.replay is not None:
            samples = samples_of(graph)
            (trace,) = traces
            axes = lambda n, s: [*[None] * n, *_sample_axes(s[n:], samples)]
            place = lambda n, a: self.sharding(a.shape, axes(n, a.shape))
            return [{k: place(int(k.startswith("inputs")), a) for k, a in trace.items()}]
        if not rule.parts:
            return self._of_rule(graph, rule.per_parameter, traces)
        rules = [part.rule for part in rule.parts]
        each = zip(graph.parts, rules, split_traces(rules, graph, traces), strict=True)
        return [at for own, part, of in each for at in self.traces(own, part, of)]

    def _of_rule(self, graph: Graph, per_parameter: bool, traces: Sequence[PyTree]) -> list[PyTree]:
        samples = samples_of(graph)
        sized = lambda a, axes: self.sharding(a.shape, axes)
        out = []
        for i, trace in enumerate(traces):
            leaves, tree = jax.tree_util.tree_flatten_with_path(trace)
            places = []
            for path, a in leaves:
                # Steps that wait beside a trace have it under its own name, in a dict.
                name = str(next((k.key for k in reversed(path) if hasattr(k, "key")), ""))
                if per_parameter or len(traces) != len(graph.relations):
                    places.append(sized(a, _influence_axes(graph, i, name, a.shape, samples)))
                else:
                    places.append(sized(a, _trace_axes(graph.relations[i], name, a.shape, samples)))
            out.append(jax.tree.unflatten(tree, places))
        return out

    def whole(self, tree: PyTree) -> PyTree:
        """Arrays that lie on one device, on each of them: as compiled programs return them."""
        every = NamedSharding(self.mesh, PartitionSpec())
        return put(tree, jax.tree.map(lambda _: every, tree))

    def moments(self, tree: PyTree, params: PyTree) -> PyTree:
        """Where an optimizer's arrays lie: one per weight beside it, others on every device."""
        flatten = jax.tree_util.tree_flatten_with_path
        weights = dict(flatten(params)[0])
        leaves, structure = flatten(tree)
        out = []
        for path, a in leaves:
            of = [weights.get(path[i:]) for i in range(len(path) + 1)]
            beside = [w.sharding for w in of if w is not None and w.shape == np.shape(a)]
            out.append(beside[0] if beside else NamedSharding(self.mesh, PartitionSpec()))
        return jax.tree.unflatten(structure, out)

    def arrays(self, graph: Graph, tree: PyTree, lead: int) -> PyTree:
        """Where inputs lie, whose axis `lead` may be that of samples."""
        samples = samples_of(graph)

        def place(a: Any) -> NamedSharding:
            shape = np.shape(a)
            return self.sharding(shape, [*[None] * lead, *_sample_axes(shape[lead:], samples)])

        return jax.tree.map(place, tree)


def samples_of(graph: Graph) -> int | None:
    """The size of the first axis of all operators' results, if no weight runs along it."""
    sizes: set[int | None] = set()
    for r in graph.relations:
        y = r.operator.y.shape
        if r.operator.x is None and not r.slots.lanes:
            continue
        if r.operator.x is None:
            sizes.add(r.slots.lanes[0])
        else:
            free = bool(y) and all(0 in r.operator.free_axes(k) for k in r.keys)
            sizes.add(y[0] if free else None)
    return sizes.pop() if len(sizes) == 1 else None


def _sample_axes(shape: Sequence[int], samples: int | None) -> Axes:
    axes: Axes = [None] * len(shape)
    if shape and shape[0] == samples:
        axes[0] = SAMPLES
    return axes


def _output_axes(op: Operator, samples: int | None) -> Axes:
    """Of y: its first axis is along the samples, the last one that a weight runs along units."""
    axes = _sample_axes(op.y.shape, samples)
    tied = [a for pairs in op.ties.values() for a, _ in pairs]
    if tied and axes[max(tied)] is None:
        axes[max(tied)] = UNITS
    return axes


def _weight_axes(op: Operator, key: str) -> Axes:
    """Of a weight: the axis that runs along the units of y, or the synapses of a sparse one."""
    of_y = _output_axes(op, None)
    axes: Axes = [None] * len(op.shapes[key].shape)
    for a, b in op.ties[key]:
        axes[b] = of_y[a]
    return [UNITS] if _is_sparse(op) and axes == [None] else axes


def _is_sparse(op: Operator) -> bool:
    """Whether weights lie between units in a way of their own, not along axes."""
    return op.plain and op.primitive.rules.spread is not None


def _trace_axes(r: Relation, name: str, shape: Sequence[int], samples: int | None) -> Axes:
    """Of an array in the trace of a relation, by its name: a weight's, the input's, the slots'."""
    op = r.operator
    lanes = _sample_axes(r.slots.lanes, samples)
    if name in r.keys:
        sizes = (*r.slots.lanes, *op.trace_shape(name))
        free = _sample_axes(op.free_shape(name), None if SAMPLES in lanes else samples)
        axes = [*lanes, *free, *_weight_axes(op, name)]
    elif name == "x" and op.x is not None:
        sizes, axes = tuple(op.x.shape), _sample_axes(op.x.shape, samples)
    else:
        of_y = _output_axes(op, None if SAMPLES in lanes else samples)
        sizes, axes = r.slots.shape, [*lanes, *of_y]
    # Axes of buffered steps come before these, axes of slots after them.
    for start in range(len(shape) - len(sizes) + 1):
        if sizes and tuple(shape[start : start + len(sizes)]) == sizes:
            rest = len(shape) - start - len(sizes)
            return [*[None] * start, *axes, *[None] * rest]
    return [None] * len(shape)


def _influence_axes(
    graph: Graph, i: int, name: str, shape: Sequence[int], samples: int | None
) -> Axes:
    """Of an array of a rule over all parameters: the samples of the state it is about."""
    axes: Axes = [None] * len(shape)
    hidden = graph.step.hidden
    state = graph.step.entry(hidden[int(name)]).shape if name.isdigit() else ()
    if state and tuple(shape[len(shape) - len(state) :]) == state and state[0] == samples:
        axes[len(shape) - len(state)] = SAMPLES
    return axes


# ------------------------------------------------------------------------------------- arrays


def put(tree: PyTree, shardings: PyTree, old: Placement | None = None) -> PyTree:
    """Arrays where they belong; one that its owner has spread over devices stays where it is.

    Those that lie on the mesh of an `old` placement were spread by it.
    """

    def one(a: Any, sharding: NamedSharding) -> Any:
        if isinstance(a, Tracer):
            return a
        before = getattr(a, "sharding", None)
        ours = old is not None and getattr(before, "mesh", None) == old.mesh
        if before is None or len(before.device_set) == 1 or ours:
            return jax.device_put(a, sharding)
        if isinstance(before, NamedSharding) and before.mesh.explicit_axes:
            return jax.device_put(a, NamedSharding(_auto(before.mesh), before.spec))
        return a

    return jax.tree.map(one, tree, shardings)


def places_of(arrays: PyTree) -> tuple[NamedSharding | None, ...] | None:
    """Where arrays lie, None inside of a transformation, on one device or along explicit axes."""

    def place(a: Any) -> NamedSharding | None:
        sharding = None if isinstance(a, Tracer) else getattr(a, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.explicit_axes:
            return None
        return sharding

    places = tuple(map(place, jax.tree.leaves(arrays)))
    return places if any(places) else None


def left_at(arrays: PyTree, places: Sequence[NamedSharding | None] | None) -> PyTree:
    """Values of a compiled program at `places`, None being any."""
    if places is None:
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    pairs = zip(leaves, places, strict=True)
    left = [a if s is None else jax.lax.with_sharding_constraint(a, s) for a, s in pairs]
    return jax.tree.unflatten(tree, left)


def pinned(tree: PyTree, shardings: PyTree) -> PyTree:
    """Values of a compiled program, where they belong."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def check_placement(mesh: Any, batch: str | None, units: str | None) -> Placement | None:
    """The placement of these arguments of a user, None without a mesh."""
    if mesh is None:
        named = [f"{k}={v!r}" for k, v in (("batch", batch), ("units", units)) if v is not None]
        if named:
            raise value_error(
                f"{', '.join(named)} without a mesh.",
                why="it is the name of an axis of a mesh of devices",
                do="pass mesh=jax.make_mesh((jax.device_count(),), ('data',))",
            )
        return None
    if not isinstance(mesh, Mesh):
        raise type_error(
            f"the mesh has type {type(mesh).__name__}.",
            why="arrays are placed on a jax.sharding.Mesh of devices",
            do="pass mesh=jax.make_mesh((jax.device_count(),), ('data',))",
        )
    axes = ", ".join(map(repr, mesh.axis_names))
    unknown = [n for n in (batch, units) if n is not None and n not in mesh.axis_names]
    if unknown:
        raise value_error(
            f"the mesh has no axis {', '.join(map(repr, unknown))}.",
            why=f"its axes are {axes}",
            do="name one of these",
        )
    if batch == units:
        raise value_error(
            f"batch={batch!r} and units={units!r}.",
            why="each is split over its own axis of the mesh, and one of them at least is",
            do=f"name an axis for batch or units, of {axes}",
        )
    return Placement(_auto(mesh), batch, units)


def _auto(mesh: Any) -> Mesh:
    """A mesh without explicit axes: along those, every operation has to say where its result is."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def check_surroundings(placement: Placement | None, arrays: PyTree) -> None:
    """Refuse meshes of the user's own, around a call or of its arrays, that a call cannot be on."""
    ambient = jax.sharding.get_abstract_mesh()
    leaves = [a for a in jax.tree.leaves(arrays) if isinstance(a, jax.Array)]
    if placement is not None and ambient.manual_axes:
        raise not_supported(
            "a learner with a mesh inside of shard_map.",
            why="every device has its own part of the arrays there, and no mesh to spread it over",
            do="leave out mesh, and reduce the gradients by jax.lax.psum; or leave out shard_map",
        )
    if vary_by_device(leaves):
        raise not_supported(
            "a learner inside of shard_map with check_vma=True.",
            why="the equations of an analysed step do not say along which axes they vary",
            do="pass check_vma=False to jax.shard_map",
        )
    if placement is not None and ambient.explicit_axes:
        raise not_supported(
            "a learner with a mesh inside of a jax.set_mesh of explicit axes.",
            why="the mesh of the learner has automatic axes, and two meshes do not go together",
            do="leave out jax.set_mesh; or make its mesh with axis_types=(AxisType.Auto,)",
        )
    if placement is None and any(any(jax.typeof(a).sharding.spec) for a in leaves):
        raise not_supported(
            "arrays along explicit axes of a mesh.",
            why="the equations of an analysed step do not say where their results lie",
            do="pass the mesh to the learner (mesh=mesh, batch=...), or make it with "
            "axis_types=(AxisType.Auto,)",
        )
