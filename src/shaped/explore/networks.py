"""The layers of a question: the shaped block, and those that it is compared with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shaped.covariance import equicorrelated
from shaped.explore.fields import Question
from shaped.layers import Layer, PostLN, PreLN, ReLUFeedForward, ShapedAttention, ShapedFeedForward

EXPLODED = 1e4
"""A path with a larger eigenvalue stops, as in the command `simulate`."""
NAMES = {"shaped": "shaped", "unshaped": "unshaped", "preln": "Pre-LN", "postln": "Post-LN"}
"""Of the compared blocks, by their role on the page."""


def make_start(asked: Question) -> Tensor:
    return equicorrelated(asked.tokens, asked.rho)


def make_attention(asked: Question, gamma: float, tau0: float, **how: Any) -> ShapedAttention:
    mask = None if asked.mask == "none" else asked.mask
    return ShapedAttention(gamma, tau0, asked.heads, asked.project, mask, qk_norm=asked.qk_norm, **how)


def make_block(asked: Question, gamma: float | None = None, tau0: float | None = None) -> Layer:
    """The paper's block, at the question's gamma and tau0 or at others."""
    gamma, tau0 = asked.gamma if gamma is None else gamma, asked.tau0 if tau0 is None else tau0
    return make_attention(asked, gamma, tau0) >> ShapedFeedForward(gamma, asked.c_plus, asked.c_minus)


def make_attentions(asked: Question) -> dict[str, ShapedAttention]:
    """The attention layer of each block, by role. Attention that is not shaped has the usual temperature √n_k."""
    return {
        "shaped": make_attention(asked, asked.gamma, asked.tau0),
        "unshaped": make_attention(asked, asked.gamma, 1.0).unshaped,
        "preln": make_attention(asked, 1.0, 1.0, lam=1.0).unshaped,
        "postln": make_attention(asked, 1.0, 1.0, lam=1.0).unshaped,
    }


def make_compared(asked: Question) -> dict[str, Layer]:
    """The blocks that the paper compares (Fig. rho_path_density), by role."""
    attention = make_attentions(asked)
    relu = ReLUFeedForward(1.0, lam=1.0)
    return {
        "shaped": make_block(asked),
        "unshaped": attention["unshaped"] >> ReLUFeedForward(asked.gamma),
        "preln": PreLN(attention["preln"]) >> PreLN(relu),
        "postln": PostLN(attention["postln"]) >> PostLN(relu),
    }
