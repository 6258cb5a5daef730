"""Every operator of the table computes what torch computes, and has its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from operator_samples import SAMPLES  # noqa: E402

from braintrace.torch import _tracing  # noqa: E402
from braintrace.torch._arrays import arrays_of  # noqa: E402
from braintrace.torch._functions import tracing  # noqa: E402
from braintrace.torch._step import unwrapped, wrapped  # noqa: E402
from braintrace.torch._table import TABLE  # noqa: E402
from braintrace.torch._tracing import Refused  # noqa: E402


class Recorded(dict):
    """A table that remembers what was looked up."""

    def __init__(self, table):
        super().__init__(table)
        self.used = set()

    def __getitem__(self, key):
        self.used.add(key)
        return super().__getitem__(key)


def leaves(results):
    return [a for a in jax.tree.leaves(results) if isinstance(a, torch.Tensor | jax.Array)]


def is_float(a):
    return (
        a.is_floating_point()
        if isinstance(a, torch.Tensor)
        else jnp.issubdtype(a.dtype, jnp.floating)
    )


def directions(outs):
    """Cotangents, the same for torch and JAX."""
    return [np.cos(np.arange(a.numel() if isinstance(a, torch.Tensor) else a.size)) for a in outs]


def by_torch(function, args):
    args = [a.clone().requires_grad_() if is_float(a) else a for a in args]
    outs = leaves(function(*args))
    smooth = [o for o in outs if is_float(o) and o.requires_grad]
    wanted = [a for a in args if is_float(a)]
    grads = [None] * len(wanted)
    if smooth:
        pulled = zip(smooth, directions(smooth), strict=True)
        cotangents = [torch.tensor(d, dtype=o.dtype).reshape(o.shape) for o, d in pulled]
        grads = torch.autograd.grad(smooth, wanted, cotangents, allow_unused=True)
    which = [o.requires_grad for o in outs if is_float(o)]
    zeros = zip(grads, wanted, strict=True)
    return outs, [torch.zeros_like(a) if g is None else g for g, a in zeros], which


def by_table(function, args, which):
    """Outputs and gradients of one sample, in a trace."""
    at = [i for i, a in enumerate(args) if is_float(a)]

    def run(*floats):
        given = list(args)
        for i, value in zip(at, floats, strict=True):
            given[i] = value
        refused = Refused()
        with tracing(refused):
            outs = function(*wrapped(given))
        refused.check()
        outs = leaves(unwrapped(outs))
        floating = [o for o in outs if is_float(o)]
        return [o for o, keep in zip(floating, which, strict=True) if keep], outs

    smooth, pull, outs = jax.vjp(run, *(args[i] for i in at), has_aux=True)
    cotangents = [
        jnp.asarray(d, o.dtype).reshape(o.shape)
        for o, d in zip(smooth, directions(smooth), strict=True)
    ]
    return outs, pull(cotangents)


@pytest.mark.parametrize("section", SAMPLES)
def test_operators_are_those_of_torch(section):
    """All samples of a section in one compiled program."""
    samples = SAMPLES[section]
    expected = [by_torch(function, args) for function, *args in samples]
    arrays = [arrays_of(args) for _, *args in samples]

    def everything(arrays):
        pairs = zip(samples, arrays, expected, strict=True)
        return [by_table(function, args, which) for (function, *_), args, (*_, which) in pairs]

    results = jax.jit(everything)(arrays)
    for i, (wanted, found) in enumerate(zip(expected, results, strict=True)):
        single = any(a.dtype == jnp.float32 for a in leaves((arrays[i], found)))
        for kind, a, b in (("value", wanted[0], found[0]), ("gradient", wanted[1], found[1])):
            for one, other in zip(a, b, strict=True):
                what = f"sample {i} of {section}: {kind}"
                one = one.detach().resolve_conj().numpy(force=True)
                assert one.dtype == other.dtype and one.shape == other.shape, what
                tight = 1e-5 if single else 1e-9
                np.testing.assert_allclose(other, one, tight, tight, err_msg=what)


def test_every_operator_of_the_table_has_a_sample(monkeypatch):
    table = Recorded(TABLE)
    monkeypatch.setattr(_tracing, "TABLE", table)
    for function, *args in (sample for samples in SAMPLES.values() for sample in samples):
        arrays = arrays_of(args)
        at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

        def run(given, function=function, arrays=arrays, at=at):
            tensors = [given[at.index(i)] if i in at else a for i, a in enumerate(arrays)]
            with tracing(Refused()):
                return leaves(unwrapped(function(*wrapped(tensors))))

        jax.eval_shape(run, [arrays[i] for i in at])
    assert sorted({*TABLE} - table.used) == []
    assert len(TABLE) >= 150
