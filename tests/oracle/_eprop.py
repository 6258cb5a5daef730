"""e-prop from its paper's equations, on dense float64 arrays (Bellec et al. 2020; NEST's eprop_iaf,
eprop_iaf_adapt and eprop_readout without refractory time and without the factor 1 - kappa).

    v_j = alpha v_j + sum_i W_ji x_i + sum_i W^rec_ji z_i(t-1) - v_th z_j(t-1)
    a_j = rho a_j + z_j(t-1)                 A_j = v_th + beta a_j
    z_j = H(v_j - A_j)                       psi_j = gamma max(0, 1 - |(v_j - A_j) / v_th|) / v_th
    y_k = kappa y_k + sum_j W^out_kj z_j     L_j = sum_k B_jk (y_k - y*_k)

    eps^v_ji = alpha eps^v_ji + x_i          eps^a_ji = psi_j(t-1) eps^v_ji(t-1)
                                                        + (rho - psi_j(t-1) beta) eps^a_ji(t-1)
    e_ji = psi_j (eps^v_ji - beta eps^a_ji)  ebar_ji = kappa ebar_ji + e_ji, once more per filter
    dE/dW_ji = sum_t L_j ebar_ji             dE/dW^out_kj = sum_t (y_k - y*_k) F_kappa(z_j)
    E_reg = c/2 sum_t,j (f_j - f*)^2, f_j = kappa_reg f_j + (1 - kappa_reg) z_j:
                                             sum_t c (f_j - f*) ebar^reg_ji
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Neurons:
    """Constants of the neurons and of the read-out."""

    alpha: float = 0.9
    kappa: float = 0.8
    rho: float = 0.97
    beta: float = 0.0
    gamma: float = 0.3
    v_th: float = 1.0


@dataclass(frozen=True)
class Rate:
    """The regularisation of firing rates."""

    c_reg: float
    f_target: float
    kappa_reg: float


def eprop_grad(weights, xs, targets, neurons=Neurons(), filters=None, feedback=None, rate=None):
    """Gradients of 1/2 sum (y - y*)^2 by name: w_in (inputs, units), perhaps w_rec, and w_out.

    `filters` are the decays of the filters of e, by default the read-out's; `feedback` (units,
    outputs) stands in place of w_out on the way back.
    """
    n, W = neurons, {k: np.asarray(w, float) for k, w in weights.items()}
    units, outputs = W["w_out"].shape
    filters = (n.kappa,) if filters is None else filters
    B = W["w_out"] if feedback is None else feedback
    names = [k for k in ("w_in", "w_rec") if k in W]
    v, a, z, psi, f = (np.zeros(units) for _ in range(5))
    y, filtered_z = np.zeros(outputs), np.zeros(units)
    eps_v, eps_a, reg = ({k: np.zeros_like(W[k]) for k in names} for _ in range(3))
    ebar = {k: [np.zeros_like(W[k]) for _ in filters] for k in names}
    grads = {k: np.zeros_like(w) for k, w in W.items()}
    spikes = 0
    for x, target in zip(np.asarray(xs), np.asarray(targets), strict=True):
        came = {"w_in": x, "w_rec": z}
        for k in names:
            eps_a[k] = psi * eps_v[k] + (n.rho - psi * n.beta) * eps_a[k]
            eps_v[k] = n.alpha * eps_v[k] + came[k][:, None]
        v = n.alpha * v + sum(came[k] @ W[k] for k in names) - n.v_th * z
        a = n.rho * a + z
        over = v - n.v_th - n.beta * a
        z = (over > 0).astype(float)
        psi = n.gamma * np.maximum(0, 1 - np.abs(over / n.v_th)) / n.v_th
        y = n.kappa * y + z @ W["w_out"]
        filtered_z = n.kappa * filtered_z + z
        L = B @ (y - target)
        if rate is not None:
            f = rate.kappa_reg * f + (1 - rate.kappa_reg) * z
        for k in names:
            e = psi * (eps_v[k] - n.beta * eps_a[k])
            value = e
            for i, decay in enumerate(filters):
                value = ebar[k][i] = decay * ebar[k][i] + value
            grads[k] += L * value
            if rate is not None:
                reg[k] = rate.kappa_reg * reg[k] + (1 - rate.kappa_reg) * e
                grads[k] += rate.c_reg * (f - rate.f_target) * reg[k]
        grads["w_out"] += np.outer(filtered_z, y - target)
        spikes += z.sum()
    assert 0.02 < spikes / (len(xs) * units) < 0.6, "the network should spike, and not all the time"
    return grads
