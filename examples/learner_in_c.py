"""A learner that leaves Python: the whole of it as a folder of C, compiled and run.

A minimal GRU learns to give a number. `export_c` writes network, traces, gradient and optimizer as
C99 without allocation: one struct, `learner_step`, `learner_learn`.
The folder is compiled with the C compiler of this machine, learns 20 steps of its own, and is what
one would flash onto a microcontroller. Without a compiler only the folder is shown.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import braintrace

UNITS = 16


def step(params, h, x):
    z = jax.nn.sigmoid(x @ params["z"])
    h = (1 - z) * h + z * (x @ params["w"])
    return h, h @ params["o"]


def loss(out, target):
    return jnp.mean((out - target) ** 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", help="keep the folder here; default a temporary one")
    parser.add_argument("--small", action="store_true", help="for the tests: the same")
    options = parser.parse_args()

    keys = iter(jax.random.split(jax.random.key(0), 3))
    shapes = {"z": (2, UNITS), "w": (2, UNITS), "o": (UNITS, 1)}
    params = {name: 0.5 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    x, target = jnp.ones(2), jnp.ones(1)
    net = braintrace.online(step, "d_rtrl")
    carry = net.init(params, jnp.zeros(UNITS), x)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.path or temporary)
        how = dict(loss=loss, optimizer=optax.adam(0.02), path=folder)
        done = net.export_c(params, carry, x, target, **how)
        print("files", *sorted(file.name for file in folder.iterdir()))
        sizes = done.sizes
        print(f"bytes of the struct: {sizes.total:,}, of them traces and state {sizes.carry:,}")
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            print("no C compiler here: cc -O3 learner.c main.c -lm")
            return
        command = [compiler, "-std=c99", "-O3", "learner.c", "main.c", "-lm", "-o", "learner"]
        subprocess.run(command, cwd=folder, check=True)
        ran = subprocess.run([folder / "learner"], capture_output=True, text=True, check=True)
        lines = ran.stdout.splitlines()
        print(*lines[::4], lines[-1], sep="\n")


if __name__ == "__main__":
    main()
