"""Learners on a microcontroller: compiled for Cortex-M4 and M33, and run on boards of QEMU."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import optax
import pytest
from networks import NETWORKS, O, loss, stream

import braintrace
from braintrace.export._text import numbers

HERE = Path(__file__).parent / "board"
GCC, QEMU = "arm-none-eabi-gcc", "qemu-system-arm"
# The processor, its floating point unit, the board, and where code and memory are on it.
BOARDS = {
    "m4": ("cortex-m4", "fpv4-sp-d16", "mps2-an386", "0x00000000", "0x20000000"),
    "m33": ("cortex-m33", "fpv5-sp-d16", "mps2-an505", "0x10000000", "0x38000000"),
}
TERMINAL = ["-semihosting-config", "enable=on,target=native"]
CASES = [(network, board) for network in ("lif", "mingru") for board in BOARDS]

pytestmark = pytest.mark.skipif(
    not (shutil.which(GCC) and shutil.which(QEMU)),
    reason=f"needs {GCC}, libnewlib-arm-none-eabi and {QEMU}",
)


def table(name, rows):
    lines = ",\n".join(numbers(row) for row in rows)
    return f"static const float {name}[{len(rows)}][{rows.shape[1]}] = {{{lines}}};\n"


@pytest.mark.parametrize(("network", "board"), CASES)
def test_learner_on_a_board_has_the_same_numbers(network, board, tmp_path):
    step, params, state = NETWORKS[network](np.float32)
    xs, ys = stream(np.float32, network, 20)
    net, optimizer = braintrace.online(step, "d_rtrl"), optax.sgd(0.01)
    carry = net.init(params, state, xs[0])
    net.export_c(params, carry, xs[0], ys[0], loss=loss, optimizer=optimizer, path=tmp_path)
    told = f"#define OUTPUTS {O}\n" + table("xs", xs) + table("ys", ys)
    (tmp_path / "told.h").write_text(told)
    cpu, unit, machine, code, memory = BOARDS[board]
    script = (HERE / "board.ld").read_text().replace("CODE", code).replace("MEMORY_AT", memory)
    (tmp_path / "board.ld").write_text(script)
    flags = f"-mcpu={cpu} -mthumb -mfpu={unit} -mfloat-abi=hard -std=c99 -Wall -Wextra -Werror -O2"
    command = [GCC, *flags.split(), "-nostartfiles", "--specs=nosys.specs", "-I", tmp_path]
    files = [HERE / "board.c", HERE / "main.c", tmp_path / "learner.c"]
    link = ["-T", tmp_path / "board.ld", "-o", tmp_path / "p.elf", *files, "-lm"]
    built = subprocess.run([*command, *link], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:3000]
    ran = subprocess.run(
        [QEMU, "-M", machine, "-cpu", cpu, "-nographic", "-kernel", tmp_path / "p.elf", *TERMINAL],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    bits = np.array([int(word, 16) for word in (ran.stdout + ran.stderr).split()], np.uint32)
    found = bits.view(np.float32).reshape(20, O + 1)
    train = net.train(loss, optimizer)
    *_, losses = train(params, optimizer.init(params), carry, xs, ys)
    assert np.abs(found[:, -1] - np.asarray(losses)).max() < 1e-5
