"""JAX's persistent compilation cache: programs have the same keys in every process."""

import os
import subprocess
import sys

import jax

SCRIPT = """
import sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # their folder is in the key
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import brainstate, braintrace, numpy as np

class Gated(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        weight = lambda *shape: brainstate.ParamState(np.ones(shape, "f"))
        self.w, self.u, self.g = weight(2, 3), weight(3, 3), weight(3)
        self.h, self.a = (brainstate.HiddenState(np.zeros((2, 3), "f")) for _ in range(2))

    def update(self, x):
        g = jax.nn.sigmoid(braintrace.element_wise(self.g.value))
        y = braintrace.matmul(x, self.w.value) + braintrace.matmul(self.h.value, self.u.value)
        self.h.value = g * self.h.value + jax.numpy.tanh(y - self.a.value)
        self.a.value = 0.9 * self.a.value + self.h.value
        return self.h.value

x = np.ones((4, 2, 2), "f")
learner = braintrace.compile(Gated(), "d_rtrl", x[0])
learner.etrace_grad(x, step_fn=lambda x: (learner(x) ** 2).sum(), block_size=2)

step = lambda p, h, x: (jax.numpy.tanh(x @ p["w"] + h @ p["u"]),) * 2
params = {"w": np.ones((2, 3), "f"), "u": np.ones((3, 3), "f")}
pure = braintrace.online(step, "pp_prop", decay_or_rank=0.9)
carry = pure.init(params, np.zeros((2, 3), "f"), x[0])
pure.grad(lambda y: (y**2).sum())(params, carry, x)
"""


def test_programs_have_the_same_key_in_every_process(tmp_path):
    runs = []
    for seed in ("1", "2"):  # of Python's hashes: the order of sets and of addresses
        keys = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", SCRIPT, str(keys)]
        runs.append((keys, subprocess.Popen(command, env=environment)))
    assert [run.wait() for _, run in runs] == [0, 0]
    first, second = ({p.name for p in keys.glob("*-cache")} for keys, _ in runs)
    assert first == second
    # Two gradients, and the zeros of their traces: one program for both in JAX 0.8.
    assert len(first) >= (4 if jax.__version_info__ >= (0, 9) else 3)
