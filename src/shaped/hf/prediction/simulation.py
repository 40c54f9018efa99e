"""predict: what the tokens of a model do at initialisation, layer by layer, drawn without its weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from shaped.checks import as_tensor, check_device, whole_number
from shaped.covariance import Point, check_covariance, correlation, effective_rank, gram
from shaped.hf.configuration import ShapedConfig
from shaped.hf.prediction.embeddings import GivenStart, Start
from shaped.hf.prediction.families import describe_network, read_config
from shaped.hf.prediction.gradients import GradientSimulation
from shaped.hf.prediction.parts import Network
from shaped.hf.prediction.result import Prediction
from shaped.hf.prediction.stock_shaping import read_shaping
from shaped.hf.prediction.threads import Report, run_blocks
from shaped.layers import Norm, Sizes
from shaped.process import count_cores
from shaped.randomness import Stream

BLOCK_ENTRIES, BLOCK_SAMPLES = 2**19, 8
"""Samples are drawn together up to so many entries of the residual stream: enough to hide Python's overhead in small models, few enough
that all cores have work and that memory is bounded."""


def predict(
    config: PreTrainedConfig | str | os.PathLike[str],
    tokens: Any = 64,
    *,
    samples: int = 64,
    seed: int = 0,
    shape: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    progress: bool | None = None,
) -> Prediction:
    """What the tokens of a model do at initialisation, layer by layer: exact in law, drawn without the model's weights.

    It knows how transformers initialises each family of `shaped.hf.prediction.families.FAMILIES`. Dropout is off.

    Args:
        config: a config of transformers, a folder with a config.json, or such a file. Nothing is fetched.
        tokens: a number of distinct tokens; their ids, [m], where tokens that are equal have the same embedding; or the covariance
            X Xᵀ/n, [m, m], with which the residual stream starts. ViT's tokens are the class token and patches of white noise.
        samples: number of models.
        seed: the same seed gives the same numbers, whatever the number of threads.
        shape: None: the attention is the one that the config chooses. Or the arguments of `shaped.hf.shape`, such as `{"gamma": 0.5}`: a
            stock model as that function leaves it. `{}` has its defaults, as `attn_implementation="shaped"` has.
        device, dtype: where and in which precision the models are simulated; float32 is that of the models.
        threads: on the CPU, by default one for each core.
        progress: a progress bar after a second (None), at once (True) or never.
    """
    read = read_config(config, shape)
    samples, seed = whole_number("samples", samples), whole_number("seed", seed, least=0, most=math.inf)
    where = check_device(device)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    threads = count_cores() if threads is None else whole_number("threads", threads)
    with torch.device("cpu"):  # not on the caller's default device
        m, kind, network, start = prepare(read, tokens)
    norm = None if kind == "covariance" else network.embedding.norm
    simulation = Simulation(network, start, norm, m, seed, dtype, where)
    quantities = simulation.run(samples, threads, progress)
    info = {
        "name": name_model(read),
        "model_type": read.model_type,
        "shape": None if isinstance(read, ShapedConfig) else read_shaping(read),
        "width": network.width,
        "depth": len(network.blocks),
        "tokens": m,
        "tokens_given_as": kind,
        "samples": samples,
        "seed": seed,
        "path": "tokens" if simulation.needs_tokens else "gram",
        "dtype": str(dtype).removeprefix("torch."),
    }
    gradients = GradientSimulation(network, start, norm, m, samples, seed, dtype, where, threads, progress, name_model(read))
    return Prediction(**quantities, info=info, gradient_source=gradients)


def prepare(config: PreTrainedConfig, tokens: Any) -> tuple[int, str, Network, Start]:
    """The number of tokens, what they were given as, the network, and what enters it. Refuses what does not fit together."""
    m, kind, given = read_tokens(tokens)
    network = describe_network(config, m)
    start = GivenStart(check_given(given, network.width)) if kind == "covariance" else network.embedding.choose_start(given)
    return m, kind, network, start


def name_model(config: PreTrainedConfig) -> str:
    """The last part of the path that the config came from, or its family."""
    name = str(getattr(config, "name_or_path", "") or "").rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
    return name.removesuffix(".json") or config.model_type


def read_tokens(tokens: Any) -> tuple[int, str, Any]:
    """The number of tokens, what they were given as ("number", "ids", "covariance"), and the number, ids or covariance itself."""
    if isinstance(tokens, int | np.integer):
        m = whole_number("tokens", tokens, least=2)
        return m, "number", m
    array = as_tensor("tokens", tokens).detach().cpu()
    if array.ndim == 1 and not array.is_floating_point() and array.dtype != torch.bool and len(array) >= 2:
        return len(array), "ids", array.long()
    if array.ndim == 2:
        V = array.double()
        check_covariance(V, "tokens")
        if len(V) >= 2:
            return len(V), "covariance", V
    raise ValueError(
        f"tokens must be a number, ids [m] or a covariance [m, m], of at least 2 tokens, got {array.dtype} of shape {list(array.shape)}"
    )


def check_given(V: Tensor, n: int) -> Tensor:
    if not V.any():
        raise ValueError("tokens must be a covariance of tokens that are not all 0, got one of zeros")
    if len(V) > n:
        raise ValueError(f"tokens must be a covariance of at most {n} tokens, the model's width, got {len(V)}")
    return V


@dataclass(frozen=True, eq=False)
class Simulation:
    """Everything that determines the samples of a prediction."""

    network: Network
    start: Start
    norm: Norm | None
    """That of the embedding; None also where the tokens' covariance is given."""
    m: int
    seed: int
    dtype: torch.dtype
    device: torch.device

    @property
    def needs_tokens(self) -> bool:
        """Single features are needed by some norms, and where there are fewer of them than tokens."""
        by_norm = self.norm is not None and self.norm.needs_features
        return by_norm or self.m > self.network.width or any(layer.needs_tokens for block in self.network.blocks for layer in block)

    def run(self, samples: int, threads: int, progress: bool | None) -> dict[str, Tensor]:
        """rho, length, rank [layers + 1, samples] and entropy [layers, samples]."""
        size = max(1, min(BLOCK_SAMPLES, BLOCK_ENTRIES // (self.m * self.network.width)))
        return run_blocks(self.run_block, samples, size, len(self.network.blocks), threads, self.device, progress)

    @torch.no_grad()
    def run_block(self, block: int, batch: int, report: Report) -> dict[str, Tensor]:
        """The samples of one block. Ends early where `report`, called after each layer, returns False."""
        stream = Stream(self.seed, block, kind="prediction", dtype=self.dtype, device=self.device)
        like, n = torch.empty(batch, 1, 1, dtype=self.dtype, device=self.device), self.network.width
        sizes, by_tokens = Sizes(n), self.needs_tokens
        state: Any = (self.start.draw_tokens if by_tokens else self.start.draw_gram)(like, n, stream)
        if self.norm is not None:
            state = self.norm.apply(state) if by_tokens else Point(matrix=self.norm.rescale(state.V))
        stages, entropies = [measure(state)], []
        for layers in self.network.blocks:
            seen: dict[str, Tensor] = {}
            for layer in layers:
                state = (layer.advance_tokens if by_tokens else layer.advance_gram)(state, sizes, stream, seen)
            stages.append(measure(state))
            entropies.append(seen["entropy"].double().cpu())
            if not report():
                break
        found = {name: torch.stack([stage[name] for stage in stages]) for name in stages[0]}
        return found | {"entropy": torch.stack(entropies)}


def measure(state: Tensor | Point) -> dict[str, Tensor]:
    """rho, length and effective rank of each sample's residual stream, [batch] each."""
    V = state.V if isinstance(state, Point) else gram(state)
    if not V.isfinite().all():
        raise ValueError(f"dtype must hold the numbers of the residual stream, got {V.dtype} and a covariance that is not finite")
    V = V.double().cpu()
    m = V.shape[-1]
    pairs = ~torch.eye(m, dtype=torch.bool)
    return {
        "rho": correlation(V)[:, pairs].mean(-1),
        "length": V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt(),
        "rank": effective_rank(V),
    }
