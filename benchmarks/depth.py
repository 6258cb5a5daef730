"""What a choice reaches on deep stacks, against D-RTRL for all parameters.

    python benchmarks/depth.py gru --layers 2 4            # cosines, printed
    python benchmarks/depth.py --everything out.json       # cosines and scores, on all cores
    python benchmarks/depth.py --record out.json           # into docs/results

Stacks of LRU, minGRU, Mamba-2 (a decay per channel) and GRU layers. Cosines are those of the
weights at the start, for the loss to repeat the input of 20 steps ago: of D-RTRL, and of what
`braintrace.choose` takes within the memory of D-RTRL and three times BPTT's time. Scores are those
of `braintrace compare` on `copy`, `pixels` and `text`, for BPTT, D-RTRL and `auto`, which is that
choice on the first batch. Of everything there is one job per core; what is not done after
`--seconds` is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results"
KINDS = ("lru", "mingru", "mamba", "gru")
LAYERS = (2, 3, 4, 6)
SHIFT = 20  # steps between an input and the answer
SIZES = {"units": 24, "length": 64, "batch": 8}  # of the cosines
UNITS = 32  # of the scores
# Inputs, outputs, steps and updates of the tasks.
TASKS = {"copy": (9, 8, 40, 2000), "pixels": (1, 10, 64, 1000), "text": (64, 64, 64, 600)}
RATES = ("0.003", "0.01")


# ------------------------------------------------------------------------------------------ stacks


def network(kind, layers, inputs, outputs, length, seed=0, batch_size=32, units=UNITS):
    """A step of a stack with its parameters and its state; time constants are up to `length`."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(seed), layers + 2)
    cell = {"lru": _lru, "mingru": _mingru, "mamba": _mamba, "gru": _gru}[kind]
    params = {f"layer{i}": _layer(kind, keys[i], units, length) for i in range(layers)}
    params |= {"enter": _drawn(keys[-2], inputs, units), "leave": _drawn(keys[-1], units, outputs)}

    def step(p, state, x):
        new, x = [], x @ p["enter"]
        for i, h in enumerate(state):
            h, x = cell(p[f"layer{i}"], h, x)
            new.append(h)
        return tuple(new), x @ p["leave"]

    shape = (2, batch_size, units) if kind == "lru" else (batch_size, units)
    return step, params, tuple(jnp.zeros(shape) for _ in range(layers))


def _drawn(key, *shape):
    import jax

    return jax.random.normal(key, shape) / shape[0] ** 0.5


def _lru(p, h, x):
    """A complex linear recurrence, in real and imaginary parts."""
    import jax
    import jax.numpy as jnp

    radius = jnp.exp(-jnp.exp(p["rate"]))
    decay = radius * jnp.exp(1j * p["phase"])
    given = jnp.sqrt(1 - radius**2 + 1e-6) * (x @ p["in"] + 1j * (x @ p["im"]))
    new = decay * jax.lax.complex(h[0], h[1]) + given
    return jnp.stack([new.real, new.imag]), jnp.tanh(new.real @ p["out"]) + x


def _mingru(p, h, x):
    import jax

    z = jax.nn.sigmoid(x @ p["z"] + p["bias"])
    h = (1 - z) * h + z * (x @ p["h"])
    return h, h


def _mamba(p, h, x):
    """A decay that the input gates, one state per channel."""
    import jax
    import jax.numpy as jnp

    decay = jnp.exp(-jax.nn.softplus(x @ p["dt"] + p["bias"]))
    h = decay * h + (1 - decay) * (x @ p["in"])
    return h, h * jax.nn.silu(x @ p["gate"]) + x


def _gru(p, h, x):
    import jax
    import jax.numpy as jnp

    xh = jnp.concatenate([x, h], -1)
    z, r = jax.nn.sigmoid(xh @ p["z"] + p["bias"]), jax.nn.sigmoid(xh @ p["r"])
    h = (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h], -1) @ p["h"])
    return h, h


def _layer(kind, key, n, length):
    """Weights; as many short time constants as long ones, on a logarithmic scale."""
    import jax
    import jax.numpy as jnp

    k = jax.random.split(key, 5)
    times = jnp.exp(jax.random.uniform(k[4], (n,), maxval=jnp.log(float(length)))) + 1
    names = {"lru": ("in", "im", "out"), "mingru": ("z", "h"), "mamba": ("dt", "in", "gate"),
             "gru": ("z", "r", "h")}[kind]  # fmt: skip
    wide = 2 * n if kind == "gru" else n
    params = {name: _drawn(key, wide, n) for name, key in zip(names, k, strict=False)}
    if kind == "lru":
        return {**params, "rate": -jnp.log(times), "phase": jax.random.uniform(k[3], (n,))}
    return {**params, "bias": -jnp.log(times)}


# ----------------------------------------------------------------------------------------- cosines


def cosines(kind: str, layers: int, length: int) -> dict:
    """D-RTRL, and the choice in its memory."""
    import jax
    import jax.numpy as jnp

    from braintrace._online import choose_for

    units, batch = SIZES["units"], SIZES["batch"]
    net = network(kind, layers, 4, 4, length, layers, batch, units)
    xs = jax.random.normal(jax.random.key(0), (length, batch, 4))
    loss = lambda out, y: jnp.mean((out - y) ** 2)
    started = time.perf_counter()
    choice = choose_for(*net, xs, jnp.roll(xs, SHIFT, 0), loss, within=("d_rtrl", ()))
    single = next(t for t in choice.tried if t.uniform == ("d_rtrl", ()))
    return {
        "kind": kind,
        "layers": layers,
        "length": length,
        "cosines": [single.cosine, choice.best.cosine],
        "bytes": [single.bytes, choice.best.bytes],
        "time": [single.time, choice.best.time],
        "chosen": choice.summary,
        "tried": len(choice.tried),
        "seconds": time.perf_counter() - started,
    }


def shown(row: dict) -> str:
    """A row as it is printed."""
    d_rtrl, choice = row["cosines"]
    sizes = "  ".join(f"{size:>9,}" for size in row["bytes"])
    return (
        f"{row['kind']:>7} x {row['layers']}  {d_rtrl:8.4f} {choice:8.4f}  {sizes}  "
        f"{row['chosen']}  {row['seconds']:.0f} s"
    )


# -------------------------------------------------------------------------------------- everything


@dataclass(frozen=True, slots=True)
class Job:
    """A process that writes one file; jobs of a lower turn come first."""

    turn: int
    name: str
    words: tuple[str, ...]
    path: Path

    def start(self, core: int, log: Path) -> subprocess.Popen:
        """Start it on a core of its own."""
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "NPROC": "1"}
        with log.open("w") as out:
            return subprocess.Popen(
                [sys.executable, *self.words],
                stdout=out,
                stderr=out,
                env=os.environ | own,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )


def jobs_in(folder: Path, quick: bool, only: str | None) -> list[Job]:
    """Scores of depth, cosines of depth, and the rows of compare's tables that are new."""
    import compare

    own, run = str(HERE / "depth.py"), str(HERE / "_compare_job.py")
    jobs = []

    def add(turn, name, script, *words, file="row.json"):
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        job = Job(turn, name, (script, *(w.format(path=path) for w in words)), path)
        if only is None or only in name:
            jobs.append(job)

    for kind in KINDS:
        for layers in LAYERS:
            add(1, f"cosine-{kind}-{layers}", own, kind, "--layers", str(layers), "--out", "{path}")
        for layers in (4, 2, 6):
            for task, (inputs, outputs, length, updates) in TASKS.items():
                model = f"{own}:network('{kind}', {layers}, {inputs}, {outputs}, {length})"
                sizes = ["--updates", "10" if quick else str(updates), "--lr", *RATES]
                sizes += ["--length", str(length)] if task != "pixels" else []
                sizes += ["--seeds", "1" if quick else "3"]
                for rules in (("bptt", "d_rtrl"), ("auto",)):
                    words = ["{path}", task, "--model", model, *sizes, "--rules", *rules]
                    turn = {4: 0, 2: 2, 6: 4}[layers]
                    name = f"score-{kind}-{layers}-{task}-{rules[0]}"
                    more = {"file": f"compare_{task}.json"}
                    add(turn, name, run, *words, "--out", str(folder / name), **more)
    batches = [(task, task) for task in compare.BATCHES]
    streams = [(f"streams-{cell}", task) for cell in compare.CELLS for task in compare.STREAMS]
    for part, task in (*batches, *streams):
        of = compare.PARTS[part]
        words = ["{path}", task, *of.words.split(), "--optimizers", *of.optimizers]
        for turn, rule in ((3, "auto"), (5, "rolling:window=8")):
            if rule != "auto" or part == task:
                name = f"row.{part}.{task}.{rule.partition(':')[0]}"
                more = ["--rules", rule, "--out", str(folder / name)] + ["--quick"] * quick
                add(turn, name, run, *words, *more, file=f"compare_{task}.json")
    return sorted(jobs, key=lambda job: job.turn)


def everything(out: Path, seconds: float, cores: list[int], quick: bool, only: str | None) -> int:
    """Run all jobs, one per core, and put their results into one file."""
    end, folder = time.monotonic() + seconds, out.with_suffix(".jobs")
    waiting = jobs_in(folder, quick, only)
    total, free, done = len(waiting), list(cores), []
    running: dict[int, tuple[Job, subprocess.Popen]] = {}
    while (waiting or running) and time.monotonic() < end:
        while free and waiting:
            job, core = waiting.pop(0), free.pop()
            running[core] = job, job.start(core, job.path.with_suffix(".log"))
        for core, (job, process) in list(running.items()):
            if process.poll() is not None:
                del running[core]
                free.append(core)
                if process.returncode == 0 and job.path.is_file():
                    done.append(job)
                said = "done" if process.returncode == 0 else f"status {process.returncode}"
                left = len(waiting) + len(running)
                print(f"{end - time.monotonic():4.0f} s left, {total - left}/{total} {job.name}: "
                      f"{said}", flush=True)  # fmt: skip
                if process.returncode:
                    print(job.path.with_suffix(".log").read_text()[-600:], flush=True)
        time.sleep(0.2)
    for _, process in running.values():
        process.kill()
        process.wait()
    results = {job.name: json.loads(job.path.read_text()) for job in done}
    missing = [job.name for job in (*waiting, *(job for job, _ in running.values()))]
    out.write_text(json.dumps({"results": results, "missing": missing}))
    print(f"{len(done)} of {total} done; not done: {', '.join(missing) or 'none'}")
    return 0


# ------------------------------------------------------------------------------------------ record


def record(path: Path) -> None:
    """Put the results of a run into docs/results: depth.json, and rows of compare's records."""
    from compare import rows_added

    results = json.loads(path.read_text())["results"]
    parts = {name: result for name, result in results.items()}
    cosine = [r for name, r in sorted(parts.items()) if name.startswith("cosine-")]
    scores = [
        {"kind": kind, "layers": int(layers), "task": task, **_short(result, row)}
        for name, result in sorted(parts.items())
        if name.startswith("score-")
        for _, kind, layers, task, _ in [name.split("-")]
        for row in result["rows"]
        if row["refused"] is None and len(row["seeds"]) == 3
    ]
    keep = {"cosines": cosine, "scores": scores, "sizes": {**SIZES, "units of scores": UNITS},
            "sources": _sources(parts)}  # fmt: skip
    (RESULTS / "depth.json").write_text(json.dumps(keep, indent=1) + "\n")
    for name, result in parts.items():
        if name.startswith("row."):
            rows_added(*name.split(".")[1:3], result)


def _short(result: dict, row: dict) -> dict:
    each = lambda when: [seed[when]["cosine"] for seed in row["seeds"]]
    return {
        "rule": row["rule"],
        "chosen": row["options"].get("chosen", ""),
        "metric": result["task"]["metric"],
        **{k: result["settings"][k] for k in ("updates", "rates")},
        "scores": [seed["score"] for seed in row["seeds"]],
        "cosines": each("initial"),
        "trained": each("trained"),
        "working": row["working_bytes"],
        "stored": row["stored_bytes"],
        "milliseconds": row["milliseconds"],
    }


def _sources(parts: dict) -> list:
    found = [{k: r[k] for k in ("versions", "machine")} for r in parts.values() if "machine" in r]
    return [source for n, source in enumerate(found) if source not in found[:n]]


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; default all")
    parse.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parse.add_argument("--length", type=int, default=SIZES["length"], help="steps of the cosines")
    parse.add_argument("--out", type=Path, help="where to write the last row, as JSON")
    parse.add_argument("--everything", type=Path, metavar="FILE", help="run all jobs")
    parse.add_argument("--record", type=Path, metavar="FILE", help="what --everything has written")
    parse.add_argument("--seconds", type=float, default=480, help="of --everything")
    parse.add_argument("--cores", type=int, help="how many, default all")
    parse.add_argument("--only", help="jobs with this in their names")
    parse.add_argument("--quick", action="store_true", help="ten updates, one seed")
    options = parse.parse_args()
    if options.record:
        record(options.record)
        return 0
    if options.everything:
        cores = sorted(os.sched_getaffinity(0))[: options.cores]
        how = (options.seconds, cores, options.quick, options.only)
        return everything(options.everything, *how)
    print(f"{'stack':>11}  {'d_rtrl':>8} {'choice':>8}  bytes of both; what; seconds")
    for kind in options.kinds or KINDS:
        for layers in options.layers:
            row = cosines(kind, layers, options.length)
            print(shown(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
