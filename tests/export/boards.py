"""Emitted learners on a microcontroller: built for a board, run by QEMU, weighed by the linker."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

from braintrace.export._text import numbers

HERE = Path(__file__).parent / "board"
GCC, QEMU = "arm-none-eabi-gcc", "qemu-system-arm"
MISSING = [name for name in (GCC, QEMU) if shutil.which(name) is None]
# The processor, its floating point unit, the board, and where code and memory are on it.
BOARDS = {
    "m4": ("cortex-m4", "fpv4-sp-d16", "mps2-an386", "0x00000000", "0x20000000"),
    "m33": ("cortex-m33", "fpv5-sp-d16", "mps2-an505", "0x10000000", "0x38000000"),
}
TERMINAL = ["-semihosting-config", "enable=on,target=native"]
FLAGS = "-std=c99 -Wall -Wextra -Werror -O2 -ffunction-sections -fdata-sections"
PIECE = re.compile(r"^ \.(\w+)\S*\s+0x[0-9a-f]+\s+0x([0-9a-f]+) (\S+)$", re.MULTILINE)


def table(name, rows):
    lines = ",\n".join(numbers(row) for row in rows)
    return f"static const float {name}[{len(rows)}][{rows.shape[1]}] = {{{lines}}};\n"


def built(folder, board, xs, ys):
    """The program of a folder that learns these steps, and the linker's map of it."""
    told = f"#define OUTPUTS {ys.shape[1]}\n#define STEPS {len(xs)}\n"
    (folder / "told.h").write_text(told + table("xs", xs) + table("ys", ys))
    cpu, unit, _, code, memory = BOARDS[board]
    script = (HERE / "board.ld").read_text().replace("CODE", code).replace("MEMORY_AT", memory)
    (folder / "board.ld").write_text(script)
    compiler = [GCC, f"-mcpu={cpu}", "-mthumb", f"-mfpu={unit}", "-mfloat-abi=hard"]
    compiler += [*FLAGS.split(), "-I", folder]
    objects = []
    for source in (HERE / "board.c", HERE / "main.c", folder / "learner.c"):
        objects.append(folder / f"{source.stem}.o")
        _called([*compiler, "-c", source, "-o", objects[-1]])
    how = ["-nostartfiles", "--specs=nosys.specs", "-Wl,--gc-sections", f"-Wl,-Map={folder}/map"]
    linked = ["-T", folder / "board.ld", "-o", folder / "p.elf", *objects, "-lm"]
    _called([*compiler, *how, *linked])
    return folder / "p.elf", (folder / "map").read_text()


def _called(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def ran(program, board, outputs):
    """Outputs and the loss of every step, as the board has them."""
    cpu, _, machine, *_ = BOARDS[board]
    command = [QEMU, "-M", machine, "-cpu", cpu, "-nographic", "-kernel", program, *TERMINAL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    words = [int(word, 16) for word in (done.stdout + done.stderr).split()]
    return np.array(words, np.uint32).view(np.float32).reshape(-1, outputs + 1)


def weight(linked):
    """Bytes of RAM and of flash that the learner takes, by the linker's map.

    RAM is its struct; flash the code, tables and first values of `learner.c`, and what of the C
    library it calls.
    """
    ram = flash = 0
    for section, size, file in PIECE.findall(linked.partition("Memory Configuration")[2]):
        if section == "bss" and file.endswith("main.o"):
            ram = max(ram, int(size, 16))
        if section in ("text", "rodata", "data") and file.endswith(("learner.o", ")")):
            flash += int(size, 16)
    return ram, flash
