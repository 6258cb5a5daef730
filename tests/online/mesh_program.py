"""What `test_mesh` looks at, from one process with eight devices: a JSON object of results."""

import contextlib
import json
import re
import sys
import tempfile
import warnings
from math import prod
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy.sparse import coo_matrix

import braintrace as bt
from braintrace.lab.cli import main
from braintrace.ops import _sparse

brainstate.environ.set(precision=64)
warnings.simplefilter("ignore")
rng = np.random.default_rng(0)
IN, UNITS, SAMPLES, STEPS = 3, 8, 8, 6
RULES = {"d_rtrl": {}, "pp_prop": {"decay_or_rank": 0.9}, "rtrl": {}}
P = PartitionSpec
AUTO = AxisType.Auto
ADAM = optax.adam(0.1)
COMPILED = []  # an entry per program
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
)


def draw(*shape):
    return jnp.asarray(rng.normal(size=shape)) / 2


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AUTO,) * len(axes))


def weights(n_in, n):
    return {k: draw(n_in + n, n) / n**0.5 for k in "zrc"} | {"b": draw(n)}


def gru(p, h, x):
    xh = jnp.concatenate([x, h], -1)
    z, r = (jax.nn.sigmoid(xh @ p[k]) for k in "zr")
    c = jnp.tanh(jnp.concatenate([x, r * h], -1) @ p["c"] + p["b"])
    h = (1 - z) * h + z * c
    return h, h @ p["out"]


def rnn(p, h, x):
    h = jnp.tanh(p["a"] * h + x @ p["w"] + h @ p["u"])
    return h, h


def loss(out, y):
    return jnp.mean((out - y) ** 2)


PARAMS = {"w": draw(IN, UNITS), "u": draw(UNITS, UNITS), "a": draw(UNITS)}
H = jnp.zeros((SAMPLES, UNITS))
XS, YS = draw(STEPS, SAMPLES, IN), draw(STEPS, SAMPLES, UNITS)


class Programs(dict):
    """Programs of a function of a learner, compiled once: to be run, and to be read."""

    def __setitem__(self, key, jitted):
        def call(*args):
            self.program = jax.jit(jitted).lower(*args).compile()
            return self.program(*args)

        call.__wrapped__ = jitted.__wrapped__
        super().__setitem__(key, call)


def run(net, params=PARAMS, xs=XS, ys=YS, h=H, size=2):
    """Gradients with traces kept over several blocks; the carry after them; the program."""
    carry, f, programs = net.init(params, h, xs[0]), net.grad(loss, block_size=size), Programs()
    net._last.compiled[f] = programs
    grads, (carry, _) = f(params, carry, xs, ys)
    return grads, carry, programs.program


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - y).max() / np.abs(y).max()) for x, y in pairs)


def specs(tree):
    return jax.tree.map(lambda a: f"P{tuple(a.sharding.spec)}", tree)


def refusal(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# ------------------------------------------------------------------------------ compiled programs

COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
SHAPE = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")


def sent(program):
    """[kind, bytes] of every collective of a compiled program."""
    out = []
    for match in COLLECTIVE.finditer(program.as_text()):
        sizes = [
            int(bits) // 8 * prod(int(n) for n in dims.split(",") if n)
            for _, bits, dims in SHAPE.findall(match[1])
        ]
        out.append([match[2], sum(sizes)])
    return out


def documented(choose=lambda code: True):
    """The names of the blocks of the page, run on these devices."""
    from test_readme import ROOT, blocks

    names = {"__name__": "page"}
    for code, _ in blocks((ROOT / "docs/how-to/more-than-one-device.md").read_text("utf-8")):
        if choose(code):
            exec(code, names)
    return names


# ----------------------------------------------------------------------------------------- results


def gradients():
    """On one device and on eight, and what the program of d_rtrl sends."""
    out, where = {}, {"mesh": mesh(data=4, model=2), "batch": "data", "units": "model"}
    for rule, options in RULES.items():
        grads, carry, program = run(bt.online(rnn, rule, **where, **options))
        traces = jax.tree.leaves(carry.traces)
        out[rule] = {"places": specs([carry.state, grads["u"], *traces])}
        if rule == "rtrl":  # exact
            reference = jax.grad(by_reverse_mode)(PARAMS)
        else:
            reference, _, _ = run(bt.online(rnn, rule, **options))
        out[rule]["error"] = distance(grads, reference)
        if rule == "d_rtrl":
            page, axes = documented(lambda code: "def " in code), {"data": 4, "size": 8}
            shapes = [(IN, UNITS), (UNITS, UNITS), (1, UNITS)]
            out["sent"] = sent(program)
            out["trace"] = sum(a.addressable_shards[0].data.nbytes for a in traces)
            out["trace by formula"] = page["trace_bytes"](SAMPLES, shapes, model=2, **axes)
            out["gather by formula"] = page["gather_bytes"](SAMPLES, UNITS, **axes)
            out["gradient by formula"] = page["gradient_bytes"](shapes, model=2, size=8)
    mixture = {"w": "d_rtrl", "u": bt.rules.snap(2), "a": "rtrl"}
    spread, one = (run(bt.online(rnn, mixture, **options))[0] for options in (where, {}))
    out["mixture"] = {"error": distance(spread, one)}
    return out


def by_reverse_mode(params):
    def body(h, pair):
        h, out = rnn(params, h, pair[0])
        return h, loss(out, pair[1])

    return jax.lax.scan(body, H, (XS, YS))[1].sum()


def large():
    """A GRU of 256 units and 16 samples on a mesh of one device, and its samples on eight."""
    n, b, steps, n_in, n_out = 256, 16, 4, 16, 4
    single = lambda tree: jax.tree.map(lambda a: a.astype("float32"), tree)
    params = single(weights(n_in, n) | {"out": draw(n, n_out)})
    xs, ys, h = single((draw(steps, b, n_in), draw(steps, b, n_out), jnp.zeros((b, n))))
    nets = [bt.online(gru, mesh=mesh(data=count), batch="data") for count in (1, 8)]
    programs = [run(net, params, xs, ys, h)[2] for net in nets]
    return {
        "temporary": [p.memory_analysis().temp_size_in_bytes for p in programs],
        "sent": sent(programs[1]),
        "gradient": sum(a.nbytes for a in jax.tree.leaves(params)),
        "losses": 2 * 4,
    }


def placed(net):
    """Where the arrays of a learner lie; names of traces without their digests of the samples."""
    own = ("running_index", "optimizer_state")
    states = {path: s for path, s in net.states().items() if path[0] not in own}
    name = lambda path: ".".join(str(key).partition(" @")[0] for key in path)
    return {name(path): specs(jax.tree.leaves(s.value)) for path, s in states.items()}


def gru_learner(**where):
    cell = bt.nn.GRUCell(IN, UNITS)
    return bt.compile(cell, "d_rtrl", XS[0], batch_size=SAMPLES, seed=1, **where)


BOTH = {"batch": "data", "units": "model"}


def learner():
    """Placements of a learner of a module, and what they survive."""
    many = gru_learner()
    step = lambda x, y: loss(many(x), y)
    train = lambda: many.etrace_train(XS, YS, step_fn=step, optimizer=ADAM, update_every=2)
    with tempfile.TemporaryDirectory() as folder:
        many.save(f"{folder}/a", optimizer=False)
        losses = train()
        after = jax.tree.map(np.asarray, [s.value for s in many.param_states.values()])
        many.load(f"{folder}/a")
        many.init_optimizer(ADAM)
        many.shard(mesh(data=4, model=2), **BOTH)
        first = placed(many)
        error = distance([losses], [np.asarray(train())])
        new = [s.value for s in many.param_states.values()]
        out = {"first": first, "training": [error, distance(new, after), placed(many) == first]}
        out["moments"] = sorted({*jax.tree.leaves(specs(many.optimizer_state.value))})
        many.load(f"{folder}/a")
        out["load"] = placed(many) == first
    many.reset(batch_size=4)
    out["resized"] = [placed(many) == first, many.model4compile.h.value.shape]
    many.reset()
    out["reset"] = placed(many) == first
    out["7 samples"] = refusal(lambda: many.reset(batch_size=7))
    many.shard(mesh(data=2, model=2), **BOTH)
    values = [s.value for s in many.states().values()]
    counts = [len(a.sharding.device_set) for a in jax.tree.leaves(values) if hasattr(a, "sharding")]
    out["other mesh"] = [placed(many) == first, max(counts)]
    layers = brainstate.nn.Sequential(bt.nn.GRUCell(IN, 8), bt.nn.GRUCell(8, 7))
    eight = mesh(model=8)
    odd = bt.compile(layers, "d_rtrl", XS[0], batch_size=8, mesh=eight, units="model")
    whole = [r.message for r in odd.report.diagnostics if r.kind == "weight_replicated"]
    own = layers.layers[0].Wz.weight  # its columns would be split
    own.value = jax.device_put(own.value, NamedSharding(eight, P()))
    before, counts = placed(odd), [len(COMPILED)]
    for _ in range(3):  # `placed` has read the traces: only the second call may reuse their memory
        step = lambda x: jnp.mean(odd(x) ** 2)
        odd.etrace_train(XS, step_fn=step, optimizer=ADAM, update_every=2)
        counts.append(len(COMPILED))
    moments = specs(odd.optimizer_state.value[0].mu[("layers", 0, "Wz", "weight")])
    out["own"] = [placed(odd) == before, sorted(moments.values()), *np.diff(counts).tolist()]
    return out | {"whole": [len(whole), whole[0]]}


def refusals():
    two = mesh(data=2, model=4)
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    spread = bt.online(rnn, mesh=explicit, batch="data")
    there = jax.device_put(XS, NamedSharding(explicit, P(None, "data")))

    def inside():
        with jax.set_mesh(explicit):
            run(spread)

    small = {"w": draw(IN, 7), "u": draw(7, 7), "a": draw(7)}
    samples, units = (bt.online(rnn).shard(two, **{k: BOTH[k]}) for k in BOTH)
    calls = {
        "explicit arrays": lambda: run(bt.online(rnn), xs=there),
        "set_mesh": inside,
        "checked shard_map": lambda: mapped(bt.online(rnn), True),
        "mesh in shard_map": lambda: mapped(spread, False),
        "no samples": lambda: samples.init(PARAMS, H[0], XS[0, 0]),
        "5 samples": lambda: samples.init(PARAMS, H[:5], XS[0, :5]),
        "7 units": lambda: units.init(small, H[:, :7], XS[0]),
        "vmap": lambda: gru_learner(vmap=True, mesh=two, batch="data"),
    }
    return {name: refusal(call) for name, call in calls.items()}


def mapped(net, check):
    """The gradient inside of a `shard_map` over the samples."""

    def local(params, h, xs, ys):
        f = net.grad(lambda out, y: loss(out, y) / 8, block_size=2)
        return jax.lax.psum(f(params, net.init(params, h, xs[0]), xs, ys)[0], "data")

    split = (P(), P("data"), P(None, "data"), P(None, "data"))
    f = jax.shard_map(local, mesh=mesh(data=8), in_specs=split, out_specs=P(), check_vma=check)
    return jax.jit(f)(PARAMS, H, XS, YS)


# ------------------------------------------------------------------------------- with every case


def sparse():
    """Synapses and samples split: nothing as large as the traces of a device is sent."""
    n, count = 32, 512
    places = rng.choice(n * n, count, replace=False)
    matrix = coo_matrix((np.ones(count), divmod(places, n)), (n, n)).tocsr()
    params = {"s": draw(count), "w": draw(IN, n)}

    def step(p, h, x):
        h = 0.5 * h + jnp.tanh(bt.sparse_matmul(h, p["s"], sparse_mat=matrix) + x @ p["w"])
        return h, h

    sequence = (XS[:4], draw(4, SAMPLES, n), jnp.zeros((SAMPLES, n)), 1)
    one, _, _ = run(bt.online(step), params, *sequence)
    grads, carry, program = run(
        bt.online(step, mesh=mesh(data=2, model=4), **BOTH), params, *sequence
    )
    most = max(size for _, size in sent(program))
    whole, _sparse._gathered = _sparse._gathered, lambda: 64  # chunks of a few synapses
    net = bt.online(step, mesh=mesh(data=2, model=4), **BOTH)
    chunks, _, program = run(net, params, *sequence)
    _sparse._gathered = whole
    most = max([most, *(size for _, size in sent(program))])
    chunked = max(distance(chunks, one), 0.0 if "while" in program.as_text() else 1.0)
    trace = jax.tree.leaves(carry.traces)[0].addressable_shards[0].data.nbytes
    return {"error": max(distance(grads, one), chunked), "most": most, "trace": trace}


def placements():
    """Whose arrays stay where; meshes with explicit axes; `shard_map`; the page."""
    two = mesh(data=2, model=4)
    own = PARAMS | {"u": jax.device_put(PARAMS["u"], NamedSharding(two, P("model")))}
    net = bt.online(rnn).shard(two, **BOTH)
    start = (own, ADAM.init(own), net.init(own, H, XS[0]))
    params, opt, _, _ = net.train(loss, ADAM, 2)(*start, XS, YS)
    out = {"own": specs([params["u"], params["w"], opt[0].mu["u"], opt[0].mu["w"]])}
    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    there = jax.device_put(XS, NamedSharding(explicit, P(None, "data")))
    one, _, _ = run(bt.online(rnn))
    out["explicit"] = distance(run(bt.online(rnn, mesh=explicit, batch="data"), xs=there)[0], one)
    out["shard_map"] = distance(mapped(bt.online(rnn), False), one)
    out["page"] = documented()["mesh"].size
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        words = f"train copy --updates 2 --length 12 --units 4 --batch 8 --out {folder}/"
        for name, where in (("one", ""), ("eight", " --mesh data=4,model=2")):
            main([*f"{words}{name}{where}".split()])
        records = [json.loads(Path(folder, n, "train.json").read_text()) for n in ("one", "eight")]
    out["train"] = [r["losses"] for r in records]
    return out


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
