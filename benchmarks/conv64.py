"""Convolutions in float64, GPU against CPU: what XLA merges with them is rounded to float32.

    python benchmarks/conv64.py        # needs a GPU and JAX alone; about a minute

Each row: a program of plain JAX, the largest difference relative to the largest value, the calls
of cuDNN that it was compiled to, and the factors that XLA handed to them.
"""

import os
import re
import subprocess
import sys

FLAGS = {  # a process each: XLA reads its flags once
    "no flags": "",
    "deterministic": "--xla_gpu_deterministic_ops=true",
    "no autotuning": "--xla_gpu_autotune_level=0",
    "convolutions by themselves": "--xla_disable_hlo_passes=cudnn-fused-convolution-rewriter",
}
T, B, N, I, O, W = 6, 2, 8, 3, 4, 3  # steps, batch, places, channels in and out, window


def measure() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(T, B, N, N, I))
    w = rng.normal(size=(W, W, I, O)) / 3
    h0 = rng.normal(size=(B, N, N, O))

    def conv(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)

    def patches(x, w):  # the same as a matrix product
        p = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        columns = [p[:, i : i + N, j : j + N] for i in range(W) for j in range(W)]
        return jnp.concatenate(columns, -1) @ w.reshape(-1, O)

    def gradient(conv, leak):
        def total(h, w):
            step = lambda h, x: (jnp.tanh(leak * h + conv(x, w)),) * 2
            return jnp.sum(jax.lax.scan(step, h, xs)[1] ** 2)

        return jax.grad(total, argnums=1)

    programs = {
        "conv": lambda h, w: conv(xs[0], w),
        "its pull-back to the kernel": lambda h, w: jax.vjp(lambda w: conv(xs[0], w), w)[1](h),
        "its pull-back to the input": lambda h, w: jax.vjp(lambda x: conv(x, w), xs[0])[1](h),
        "0.8 conv": lambda h, w: 0.8 * conv(xs[0], w),
        "0.8 h + conv": lambda h, w: 0.8 * h + conv(xs[0], w),
        "0.75 h + conv": lambda h, w: 0.75 * h + conv(xs[0], w),
        "0.8 h + patches @ w": lambda h, w: 0.8 * h + patches(xs[0], w),
        "gradient of scan tanh(0.8 h + conv)": gradient(conv, 0.8),
        "gradient of scan tanh(0.75 h + conv)": gradient(conv, 0.75),
        "gradient of scan tanh(0.8 h + patches @ w)": gradient(patches, 0.8),
    }
    cpu = jax.devices("cpu")[0]
    for name, program in programs.items():
        compiled = jax.jit(program).lower(h0, w).compile()
        (got,) = jax.tree.leaves(compiled(h0, w))
        with jax.default_device(cpu):
            (want,) = jax.tree.leaves(jax.jit(program)(h0, w))
        got, want = np.asarray(got), np.asarray(want)
        text = compiled.as_text()
        calls = sorted({*re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)})
        factors = sorted({*re.findall(r'"(?:side_input|conv_result)_scale":(0\.\d+)', text)})
        error = np.abs(got - want).max() / np.abs(want).max()
        print(f"  {name:42s} {error:7.1e}  {' '.join([*calls, *factors])}", flush=True)


def main() -> None:
    for name, flags in FLAGS.items():
        print(f"{name}  {flags}", flush=True)
        subprocess.run(
            [sys.executable, __file__, "measure"], env=os.environ | {"XLA_FLAGS": flags}, check=True
        )


if __name__ == "__main__":
    measure() if len(sys.argv) > 1 else main()
