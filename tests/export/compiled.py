"""Emitted folders compiled and run: a driver in C reads arrays from a file and writes what it gets.

`make test` installs clang, where it may; a test that needs it says so where it is not there.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror"]
SAFE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILERS = ("gcc", "clang")
# The sanitizer of older versions of clang does not find its shadow memory at random addresses.
FIXED = ["setarch", "-R"] if shutil.which("setarch") else []

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include "{name}.h"
static {name} l;
static unsigned char bytes[{upper}_BYTES];
{arrays}
static void get(void *to, size_t n) {{ if (fread(to, 1, n, stdin) != n) exit(9); }}
static void put(const void *from, size_t n) {{ if (fwrite(from, 1, n, stdout) != n) exit(8); }}
int main(int argc, char **argv) {{
    int steps = atoi(argv[1]), each = argc > 2;
    {name}_init(&l);
    for (int t = 0; t < steps; t++) {{
        if (each || t == 0) {{
            get(bytes, sizeof bytes);
            int failed = {name}_load(&l, bytes, sizeof bytes);
            if (failed) return failed;
        }}
        {get}
        {name}_step({step});
        {put}
        {loss} loss = {name}_learn({learn});
        put(&loss, sizeof loss);
        if (each || t == steps - 1) put(bytes, {name}_save(&l, bytes));
    }}
    return 0;
}}
"""


def needs(compiler):
    """Skip a test whose compiler is not there."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed: make {compiler}")


@dataclass(frozen=True)
class Run:
    """What a program wrote: outputs and losses of all steps, and the bytes that it saved."""

    outputs: list[list[np.ndarray]]
    losses: np.ndarray
    saved: list[bytes]


def build(exported, compiler="gcc", flags=(*STRICT, *SAFE, "-O0")):
    """The driver of a folder, compiled."""
    code, name, folder = exported.code, exported.name, Path(exported.path)
    ctype = lambda dtype: {"float32": "float", "float64": "double"}.get(str(dtype), f"{dtype}_t")
    told = (*code.inputs, *code.targets)
    sized = [(s.name, s.value.dtype, s.value.size) for s in told]
    sized += [(n, node.dtype, node.size) for n, node in code.outputs]
    text = DRIVER.format(
        name=name,
        upper=name.upper(),
        arrays="\n".join(f"static {ctype(d)} {n}[{size}];" for n, d, size in sized),
        get=" ".join(f"get({s.name}, sizeof {s.name});" for s in told),
        put=" ".join(f"put({n}, sizeof {n});" for n, _ in code.outputs),
        step=", ".join(["&l", *(s.name for s in code.inputs), *(n for n, _ in code.outputs)]),
        learn=", ".join(["&l", *(s.name for s in code.targets)]),
        loss=ctype(code.loss),
    )
    (folder / "driver.c").write_text(text)
    program = folder / f"driver_{compiler}"
    command = [compiler, *flags, "-o", program, folder / f"{name}.c", folder / "driver.c", "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:4000]
    return program


def run(exported, program, told, start=None):
    """Run the driver.

    Args:
        told: for every input and target its values at all steps, by name in C.
        start: saved bytes before the first step, or a list of them: before every step.
    """
    code = exported.code
    steps = len(next(iter(told.values())))
    each = isinstance(start, list)
    data = [] if each else [exported.pack() if start is None else start]
    for t in range(steps):
        data += [start[t]] if each else []
        for slot in (*code.inputs, *code.targets):
            data.append(np.ascontiguousarray(told[slot.name][t], slot.value.dtype).tobytes())
    command = [*FIXED, program, str(steps), *(["each"] if each else [])]
    ran = subprocess.run(command, input=b"".join(data), capture_output=True, timeout=60)
    assert ran.returncode == 0, (ran.returncode, ran.stderr.decode()[:4000])
    return _read(exported, ran.stdout, steps, each)


def _read(exported, data, steps, each):
    code, at = exported.code, 0
    outputs, losses, saved = [], [], []
    size = len(exported.pack())

    def take(dtype, count):
        nonlocal at
        found = np.frombuffer(data, dtype, count, at)
        at += found.nbytes
        return found

    for t in range(steps):
        outputs.append([take(n.dtype, n.size).reshape(n.shape) for _, n in code.outputs])
        losses.append(take(code.loss, 1)[0])
        if each or t == steps - 1:
            saved.append(take(np.uint8, size).tobytes())
    assert at == len(data)
    return Run(outputs, np.array(losses), saved)


def difference(found, truth):
    """The largest difference, relative to the largest number where that is above one."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    assert found.shape == truth.shape, (found.shape, truth.shape)
    assert np.isfinite(truth).all() and np.isfinite(found).all()
    return float(np.abs(found - truth).max(initial=0) / max(1.0, np.abs(truth).max(initial=0)))
