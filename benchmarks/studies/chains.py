"""The task of verdicts.py: sequences of several Markov chains. It needs the token before and, to know the chain, attention.

A sequence follows one of CHAINS chains, chosen at random. In each chain a token has one usual successor, its image under a permutation,
which comes with probability USUAL; else any token of the vocabulary comes, all alike. So three levels of the loss are known exactly:

- every token is as frequent as any other: a network whose tokens are all alike, or that learns nothing, stays at log VOCABULARY or above;
- a network that sees only the last token does not know the chain: it stays at `known_token` or above;
- a network that knows the chain too reaches `known_chain`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VOCABULARY, CHAINS, USUAL = 32, 4, 0.9


def make_chains(seed: int) -> Tensor:
    """The successors, [CHAINS, VOCABULARY]. In no two chains a token has the same one."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(VOCABULARY, generator=generator)
    shifts = 1 + torch.randperm(VOCABULARY - 1, generator=generator)[:CHAINS]
    return order[(order.argsort() + shifts[:, None]) % VOCABULARY]


def draw_sequences(successors: Tensor, sequences: int, tokens: int, generator: torch.Generator) -> Tensor:
    """[sequences, tokens]."""
    chain = torch.randint(CHAINS, (sequences,), generator=generator)
    drawn = torch.randint(VOCABULARY, (sequences, tokens), generator=generator)
    usual = torch.rand(sequences, tokens, generator=generator) < USUAL
    for place in range(1, tokens):
        drawn[:, place] = torch.where(usual[:, place], successors[chain, drawn[:, place - 1]], drawn[:, place])
    return drawn


def measure_entropy(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities)


def known_token() -> float:
    """Entropy of the next token, given the last one."""
    other = (1.0 - USUAL) / VOCABULARY
    return measure_entropy(CHAINS * [USUAL / CHAINS + other] + (VOCABULARY - CHAINS) * [other])


def known_chain() -> float:
    """Entropy of the next token, given the last one and the chain."""
    other = (1.0 - USUAL) / VOCABULARY
    return measure_entropy([USUAL + other] + (VOCABULARY - 1) * [other])


def half_way() -> float:
    """From a network that has learned nothing to one that knows the last token and the chain."""
    return (math.log(VOCABULARY) + known_chain()) / 2
