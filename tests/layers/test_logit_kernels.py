"""Shaped attention with QK-norm and with RoPE: what the logits see of the tokens."""

import numpy as np
import oracle
import pytest
import torch
from test_theorems import bias_for, close, mask_for

import shaped
from shaped import testing
from shaped.testing.stats import random_covariance

ROPES = {"none": None, "base": 50.0, "frequencies": (1.3, 0.4, 0.02)}


def oracle_limit(layer, V, biases):
    """Drift and Sigma, a head at a time."""
    kernel = oracle.correlation(V) if layer.qk_norm else V
    drifts, Sigmas = [], []
    for bias in biases:
        P = oracle.resting(bias.numpy())
        S1, S2 = oracle.logit_moments(kernel, P, layer.rope)
        drifts.append(oracle.attention_drift(V, P, S1, S2, layer.gamma, layer.tau0))
        Sigmas.append(oracle.attention_sigma(V, P, S1, layer.gamma, layer.tau0, layer.heads, layer.project))
    return np.mean(drifts, 0), np.mean(Sigmas, 0)


@pytest.mark.parametrize("m", [2, 3, 5])
@pytest.mark.parametrize("kind", ["full", "causal", "random", "a bias for each head"])
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize(("qk_norm", "rope"), [(True, "none"), (False, "base"), (True, "base"), (True, "frequencies")])
def test_drift_and_sigma_are_the_theorems_sums(m, kind, project, qk_norm, rope):
    V = random_covariance(m, m)
    V[0] *= 3.0
    V[:, 0] *= 3.0  # lengths that differ
    heads = 4 if kind.startswith("a bias") or project else 1
    mask, biases = (shaped.alibi(m, heads),) * 2 if kind.startswith("a bias") else (mask_for(kind, m), [bias_for(kind, m)])
    layer = shaped.ShapedAttention(0.6, 0.7, heads=heads, project=project, mask=mask, qk_norm=qk_norm, rope=ROPES[rope])
    drift, Sigma = oracle_limit(layer, V.numpy(), biases)
    close(layer.drift(V), drift)
    close(layer.Sigma(V), Sigma)


def test_networks_with_rope_have_the_limits_drift_and_noise():
    """Without QK-norm the limit needs only the logits' second moments, which are right for every n_k. So narrow keys are enough, and cheap."""
    layer = shaped.ShapedAttention(0.8, 0.4, rope=ROPES["frequencies"])
    testing.check_drift_of_branch(layer, 3, samples=600_000, n_k=6)
    testing.check_Sigma_of_steps(layer, 3, n_k=6)
