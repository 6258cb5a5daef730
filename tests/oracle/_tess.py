"""TESS on dense float64 arrays, from its paper's equations, for one layer that stores its spikes.

q_j = l_pre q_j + o_j                       inputs o
e_ij = a_pre Psi_i q_j + a_post h_i(t-1) l_post o_j,    h_i = l_post h_i + Psi_i
m = B (softmax(B' z) - y*)                  spikes z of the layer, B (units, classes)
gradient = sum_t m_i e_ij
"""

from __future__ import annotations

import numpy as np


def tess_grad(spikes, psis, xs, targets, B, l_pre, l_post, a_pre, a_post):
    """The gradient of a weight (inputs, units) from the spikes and Psi of every step."""
    q, h = np.zeros(xs.shape[1]), np.zeros(psis.shape[1])
    total = np.zeros((xs.shape[1], psis.shape[1]))
    for x, z, psi, target in zip(xs, spikes, psis, targets, strict=True):
        q = l_pre * q + x
        p = np.exp(z @ B - (z @ B).max())
        m = B @ (p / p.sum() - target)
        total += m * (a_pre * np.outer(q, psi) + a_post * l_post * np.outer(x, h))
        h = l_post * h + psi
    return total
