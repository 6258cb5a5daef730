"""A fork says what is wrong; it would wait for ever."""

import os
import subprocess
import sys

CODE = """
import os, sys, warnings
import jax.numpy as jnp
import numpy as np
import braintrace
warnings.simplefilter("ignore")
def step(w, h, x):
    h = jnp.tanh(0.5 * h + braintrace.matmul(x, w))
    return h, h
net = braintrace.online(step)
w, x, h = np.ones((2, 3)), np.ones(2), np.zeros(3)
early = os.fork()
carry = net.init(w, h, x)
net(w, carry, x)
if not early:
    os._exit(0)  # a fork from before is a process like any other
assert os.waitstatus_to_exitcode(os.waitpid(early, 0)[1]) == 0
if os.fork() == 0:
    try:
        net(w, carry, x)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_fork_of_a_process_with_jax_is_refused():
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(
        words, env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith("this process is a fork of one in which JAX was running.")
    assert "why:" in done.stdout and "'spawn'" in done.stdout
