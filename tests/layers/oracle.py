"""The theorems' sums, written out index by index. Nothing here shares code with the package."""

from __future__ import annotations

import math

import numpy as np


def resting(bias: np.ndarray) -> np.ndarray:
    """softmax(B), entry by entry."""
    m = len(bias)
    P = np.zeros((m, m))
    for a in range(m):
        total = sum(math.exp(bias[a, k]) for k in range(m))
        for d in range(m):
            P[a, d] = math.exp(bias[a, d]) / total
    return P


def correlation(V: np.ndarray) -> np.ndarray:
    """Entry by entry; 0 in the row and column of a token of length zero, also on the diagonal."""
    m = len(V)
    rho = np.zeros((m, m))
    for a in range(m):
        for b in range(m):
            if V[a, a] > 0 and V[b, b] > 0:
                rho[a, b] = V[a, b] / math.sqrt(V[a, a] * V[b, b])
    return rho


def lag_similarity(rope, s: int) -> float:
    """The mean of cos(theta s) over frequencies; for a base, of the frequencies base^-u, u uniform: (Ci(s) - Ci(s/base))/log(base)."""
    if isinstance(rope, tuple):
        return sum(math.cos(theta * s) for theta in rope) / len(rope)
    total = math.log(rope)
    for k in range(1, 60):
        total += (-1) ** k * (s ** (2 * k) - (s / rope) ** (2 * k)) / (2 * k * math.factorial(2 * k))
    return total / math.log(rope)


def logit_moments(V: np.ndarray, P: np.ndarray, rope=None) -> tuple[np.ndarray, np.ndarray]:
    """S1 and S2 from E[Y_ab Y_cd] = n_k V_ac V_bd (Lemma mom-y), for means taken under P. With QK-norm V is the correlation."""
    m = len(V)
    kappa = {s: 1.0 if rope is None else lag_similarity(rope, s) for s in range(2 * m - 1)}

    def second(a, b, c, d):
        return V[a, c] * V[b, d] * kappa[abs((a - b) - (c - d))]

    S1, S2 = np.zeros((m, m, m, m)), np.zeros((m, m))
    for a in range(m):
        for d in range(m):
            for b in range(m):
                for w in range(m):
                    S1[a, d, b, w] = (
                        second(a, d, b, w)
                        - sum(P[b, k] * second(a, d, b, k) for k in range(m))
                        - sum(P[a, k] * second(a, k, b, w) for k in range(m))
                        + sum(P[a, k] * P[b, j] * second(a, k, b, j) for k in range(m) for j in range(m))
                    )
    for a in range(m):
        mean_square = sum(P[a, k] * P[a, j] * second(a, k, a, j) for k in range(m) for j in range(m))
        square_mean = sum(P[a, k] * second(a, k, a, k) for k in range(m))
        for d in range(m):
            cross = sum(P[a, k] * second(a, d, a, k) for k in range(m))
            S2[a, d] = second(a, d, a, d) - 2 * cross + mean_square - (square_mean - mean_square)
    return S1, S2


def paper_moments(V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S1 and S2 as the paper prints them, for attention without a mask."""
    m = len(V)
    to_mean = [sum(V[a, k] for k in range(m)) / m for a in range(m)]
    mean_mean = sum(to_mean) / m
    trace = sum(V[k, k] for k in range(m)) / m
    S1, S2 = np.zeros((m, m, m, m)), np.zeros((m, m))
    for a in range(m):
        for d in range(m):
            S2[a, d] = V[a, a] * (V[d, d] - 2 * to_mean[d] + 2 * mean_mean - trace)
            for b in range(m):
                for w in range(m):
                    S1[a, d, b, w] = V[a, b] * (V[d, w] - to_mean[d] - to_mean[w] + mean_mean)
    return S1, S2


def attention_drift(V, P, S1, S2, gamma, tau0):
    m = len(V)
    b = np.zeros((m, m))
    for a in range(m):
        for c in range(m):
            first = sum(P[a, v] * P[c, k] * V[v, k] * S1[a, v, c, k] for v in range(m) for k in range(m))
            second = sum(P[a, v] * V[c, v] * S2[a, v] + P[c, v] * V[a, v] * S2[c, v] for v in range(m)) / 2
            b[a, c] = gamma**2 / tau0**2 * (first + second)
    return b


def attention_sigma(V, P, S1, gamma, tau0, heads=1, project=False):
    m = len(V)
    index = [(a, b) for a in range(m) for b in range(a, m)]
    linear = 2 * gamma**2 if project else gamma**2 * (2 - gamma**2)
    Sigma = np.zeros((len(index), len(index)))
    for i, (a, b) in enumerate(index):
        for j, (d, w) in enumerate(index):
            logits = 0.0
            for v in range(m):
                for k in range(m):
                    logits += P[b, k] * P[w, v] * V[a, k] * V[d, v] * S1[b, k, w, v]
                    logits += P[b, k] * P[d, v] * V[a, k] * V[w, v] * S1[b, k, d, v]
                    logits += P[a, v] * P[w, k] * V[b, v] * V[d, k] * S1[a, v, w, k]
                    logits += P[a, v] * P[d, k] * V[b, v] * V[w, k] * S1[a, v, d, k]
            Sigma[i, j] = linear * linear_entry(V, a, b, d, w) + gamma**4 / tau0**2 / heads * logits
    return Sigma


def linear_entry(V, a, b, d, w):
    return V[a, d] * V[b, w] + V[a, w] * V[b, d]


def relu_drift(V, c_plus, c_minus):
    m = len(V)
    b = np.zeros((m, m))
    for a in range(m):
        for c in range(m):
            rho = 1.0 if a == c else V[a, c] / math.sqrt(V[a, a] * V[c, c])
            nu = (c_plus - c_minus) ** 2 / (2 * math.pi) * (math.sqrt(1 - rho**2) - rho * math.acos(rho))
            b[a, c] = nu * math.sqrt(V[a, a] * V[c, c])
    return b


def linear_sigma(V):
    m = len(V)
    index = [(a, b) for a in range(m) for b in range(a, m)]
    return np.array([[linear_entry(V, a, b, d, w) for d, w in index] for a, b in index])
