"""One step of the unbiased estimates of RTRL, as functions of their random signs.

Letters as in `_rules`: A = dh'/dh, B = dh'/dθ, F = dh'/dy in full.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def uoro_step(
    s: Array, w: Array, nu: Array, A: Array, B: Array, eps: float = 1e-7
) -> tuple[Array, Array]:
    """UORO: the outer product of s (states) and w (parameters) stands for dh/dθ.

    Averaged over the signs `nu`, one per state, the new product is A (s ⊗ w) + B.
    """
    d, p = A @ s, nu @ B
    rho0 = np.sqrt((_norm(w) + eps) / (_norm(d) + eps))
    rho1 = np.sqrt((_norm(p) + eps) / (_norm(nu) + eps))
    return rho0 * d + rho1 * nu, w / rho0 + p / rho1


def kf_step(
    u: Array, K: Array, c: float, x: Array, A: Array, F: Array, eps: float = 1e-7
) -> tuple[Array, Array]:
    """KF-RTRL: K (states, y) and u (like x) stand for dh/dW of one operator y = op(x, W).

    Averaged over the sign `c` the new product is (A K) ⊗ u + F ⊗ x.
    """
    pushed = A @ K
    rho0 = np.sqrt((_norm(pushed) + eps) / (_norm(u) + eps))
    rho1 = np.sqrt((_norm(F) + eps) / (_norm(x) + eps))
    return rho0 * u + c * rho1 * x, pushed / rho0 + c * F / rho1


def _norm(a: Array) -> float:
    return float(np.sqrt(np.sum(np.square(a))))
