"""Learners on a microcontroller: compiled for Cortex-M4 and M33, and run on boards of QEMU."""

import numpy as np
import optax
import pytest
from boards import BOARDS, MISSING, built, ran, weight
from networks import NETWORKS, loss, stream

import braintrace

CASES = [(network, board) for network in ("lif", "mingru") for board in BOARDS]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; make boards installs them"
)


@pytest.mark.parametrize(("network", "board"), CASES)
def test_learner_on_a_board_has_the_same_numbers(network, board, tmp_path):
    step, params, state = NETWORKS[network](np.float32)
    xs, ys = stream(np.float32, network, 20)
    net, optimizer = braintrace.online(step, "d_rtrl"), optax.sgd(0.01)
    carry = net.init(params, state, xs[0])
    how = dict(loss=loss, optimizer=optimizer, path=tmp_path)
    done = net.export_c(params, carry, xs[0], ys[0], **how)
    program, linked = built(tmp_path, board, xs, ys)
    found = ran(program, board, ys.shape[1])
    train = net.train(loss, optimizer)
    *_, losses = train(params, optimizer.init(params), carry, xs, ys)
    assert np.abs(found[:, -1] - np.asarray(losses)).max() < 1e-5
    _, outs = net.scan(params, carry, xs[:1])
    assert np.abs(found[0, :-1] - np.asarray(outs[0])).max() < 1e-6
    ram, flash = weight(linked)
    assert done.sizes.total <= ram <= done.sizes.total + 8  # with `pending`
    assert 1000 < flash < 20_000
