"""Rules that wait for a reward, on dense float64 arrays, in a loop over weights' equations.

r_stdp          X_i = a X_i + x_i,  E_ji = d E_ji + A_pre s_j X_i - A_post x_i Y_j
                Y_j = b Y_j + s_j
reward_eprop    E_ji = d E_ji + psi_j eps_ji,  eps_ji = alpha eps_ji + x_i
both            change along sum_t M_j E_ji; the gradient is minus that
"""

from __future__ import annotations

import numpy as np


def lif(weights, xs, alpha=0.9, v_th=1.0, gamma=0.3):
    """Inputs by weight, spikes and surrogate derivatives of every step; soft reset, detached."""
    w, w_rec = (np.asarray(weights[k], float) for k in ("w_in", "w_rec"))
    v, z, out = np.zeros(w.shape[1]), np.zeros(w.shape[1]), []
    for x in np.asarray(xs):
        came = {"w_in": x, "w_rec": z}
        v = alpha * v + x @ w + z @ w_rec - v_th * z
        over = v - v_th
        z = (over > 0).astype(float)
        out.append((came, z, gamma * np.maximum(0, 1 - np.abs(over))))
    return out


def r_stdp_grad(weights, xs, modulators, d=0.95, a=0.9, b=0.9, a_pre=1.0, a_post=1.0):
    """The gradient of `r_stdp`; a modulator is a number or one per unit."""
    shapes = {k: weights[k].shape for k in ("w_in", "w_rec")}
    E, grads = ({k: np.zeros(s) for k, s in shapes.items()} for _ in range(2))
    X = {k: np.zeros(s[0]) for k, s in shapes.items()}
    Y = np.zeros(shapes["w_in"][1])
    for (came, z, _), M in zip(lif(weights, xs), modulators, strict=True):
        for k, x in came.items():
            X[k] = a * X[k] + x
            E[k] = d * E[k] + a_pre * np.outer(X[k], z) - a_post * np.outer(x, Y)
            grads[k] -= M * E[k]
        Y = b * Y + z
    return grads


def reward_eprop_grad(weights, xs, modulators, d=0.95, alpha=0.9):
    """The gradient of `reward_eprop`."""
    E, eps, grads = ({k: np.zeros(weights[k].shape) for k in ("w_in", "w_rec")} for _ in range(3))
    for (came, _, psi), M in zip(lif(weights, xs, alpha), modulators, strict=True):
        for k, x in came.items():
            eps[k] = alpha * eps[k] + x[:, None]
            E[k] = d * E[k] + psi * eps[k]
            grads[k] -= M * E[k]
    return grads
