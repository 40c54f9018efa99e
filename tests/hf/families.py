"""Random models of each family as transformers initialises them, measured layer by layer, against `shaped.hf.predict`.

    PYTHONPATH=tests/hf python tests/hf/families.py [--families gpt2,llama] [--width 512] [--depth 24] [--models 64] [--tokens 8]

The comparisons of a family are one hypothesis: rho, length, effective rank and entropy of the attention at every layer. Each is a
difference of two means in standard errors of both, z. The family is accepted if every |z| is below the limit of Student's t at a level of
0.1 % over all of them (Bonferroni), and if predictions with one ingredient wrong exceed it. Exits with 1 if a family is rejected.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scipy import stats
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    ViTConfig,
)

from shaped.covariance import correlation, effective_rank, gram
from shaped.hf import Prediction, ShapedConfig, predict
from shaped.hf.observation import QuantityRecorder
from shaped.hf.prediction import decoders

LEVEL = 0.001
ROUNDING = 2e-5  # relative: both sides compute in float32; it counts where a norm makes a quantity the same for every model
QUANTITIES = ("rho", "length", "rank", "entropy")
VOCABULARY = 61
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {}


def family(function: Callable[..., PreTrainedConfig]) -> Callable[..., PreTrainedConfig]:
    FAMILIES[function.__name__] = function
    return function


def usual(width: int, depth: int, **more: Any) -> dict[str, Any]:
    """Fields that most families share. Initial weights are larger than usual, so that attention and branches matter at small widths."""
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": 8,
        "intermediate_size": 3 * width,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
        "initializer_range": 1.2 * width**-0.5,
    }
    return given | more


def grouped(width: int, depth: int, **more: Any) -> dict[str, Any]:
    return usual(width, depth, num_key_value_heads=2) | more


@family
def gpt2(width: int, depth: int) -> PreTrainedConfig:
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": depth, "n_head": 8, "vocab_size": VOCABULARY, "n_positions": 64}
    return GPT2Config(
        **sizes, initializer_range=1.2 * width**-0.5, scale_attn_by_inverse_layer_idx=True, bos_token_id=None, eos_token_id=None
    )


@family
def bert(width: int, depth: int) -> PreTrainedConfig:
    return BertConfig(**usual(width, depth))


@family
def roberta(width: int, depth: int) -> PreTrainedConfig:
    return RobertaConfig(**usual(width, depth, hidden_act="gelu_new"))


@family
def llama(width: int, depth: int) -> PreTrainedConfig:
    return LlamaConfig(**grouped(width, depth, rope_parameters=LLAMA3 | {"rope_theta": 500.0}, head_dim=width // 4))


@family
def mistral(width: int, depth: int) -> PreTrainedConfig:
    return MistralConfig(**grouped(width, depth, sliding_window=3))


@family
def qwen2(width: int, depth: int) -> PreTrainedConfig:
    return Qwen2Config(**grouped(width, depth, use_sliding_window=True, sliding_window=3, max_window_layers=depth // 2))


@family
def qwen3(width: int, depth: int) -> PreTrainedConfig:
    return Qwen3Config(**grouped(width, depth, head_dim=width // 4))


@family
def gemma2(width: int, depth: int) -> PreTrainedConfig:
    more = {"head_dim": width // 4, "query_pre_attn_scalar": width // 16, "attn_logit_softcapping": 2.0, "sliding_window": 3}
    return Gemma2Config(**grouped(width, depth, **more))


@family
def gpt_neox(width: int, depth: int) -> PreTrainedConfig:
    return GPTNeoXConfig(**usual(width, depth, rotary_pct=0.5, rotary_emb_base=100))


@family
def vit(width: int, depth: int) -> PreTrainedConfig:
    """Eight tokens: the class token and 7 x 1 patches."""
    more = {"image_size": (14, 2), "patch_size": (2, 2), "num_channels": 5, "layer_norm_eps": 1e-2}
    return ViTConfig(**{key: value for key, value in usual(width, depth).items() if "vocab" not in key and "position" not in key} | more)


@family
def modernbert(width: int, depth: int) -> PreTrainedConfig:
    special: dict[str, Any] = {f"{name}_token_id": 2 for name in ("bos", "eos", "cls", "sep")}
    return ModernBertConfig(**usual(width, depth, local_attention=4) | special)


@family
def olmo2(width: int, depth: int) -> PreTrainedConfig:
    return Olmo2Config(**grouped(width, depth, eos_token_id=None))


def ours(width: int, depth: int, **more: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 3 * width, "max_position_embeddings": 64}
    return ShapedConfig(**sizes | more)


@family
def shaped(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, gamma=0.5, gamma_feedforward=0.4, tau0=0.05, c_minus=-2.0, is_decoder=True)


@family
def shaped_preln(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="preln", activation="gelu", type_vocab_size=2)


@family
def shaped_postln(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="postln", embedding_norm=True)


@family
def shaped_vanilla(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="vanilla", gamma=0.6, embedding_std=0.8)


@family
def shaped_qk_rope(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, gamma=0.5, tau0=0.05, qk_norm=True, qk_gain=True, positions="rope", rope_base=100.0, is_decoder=True)


@family
def shaped_rms_qk(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="preln", norm="rms", qk_norm=True, embedding_norm=True)


@family
def shaped_postln_bert(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="postln", norm="rms", init="bert", embedding_norm=True)


@family
def shaped_preln_gpt2(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="preln", init="gpt2")


@family
def shaped_dyt(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="dyt", dyt_alpha=0.8)


@family
def shaped_vanilla_qk(width: int, depth: int) -> PreTrainedConfig:
    return ours(width, depth, block="vanilla", gamma=0.6, tau0=0.3, qk_norm=True)


GAINS: dict[str, Any] = {"tau0": None, "learn": False, "gamma1": 0.9, "gamma2": 0.7, "gamma": 0.8, "instead_of": "sdpa"}


def shape_stock(config: PreTrainedConfig, **gains: Any) -> PreTrainedConfig:
    """As `shaped.hf.shape` leaves it, which saves it with the model."""
    config._attn_implementation, config.shaped = "shaped", GAINS | gains
    return config


def add_shaped_stock(name: str, temperature: float | None = None) -> None:
    """The family with shaped attention; `temperature` is tau0 times the root of the width."""
    make = FAMILIES[name]
    FAMILIES[f"shaped_stock_{name}"] = lambda width, depth: shape_stock(
        make(width, depth), tau0=None if temperature is None else temperature * width**-0.5
    )


for stock in ("bert", "llama", "qwen3", "gpt_neox", "vit"):
    add_shaped_stock(stock)
for stock, temperature in (("gpt2", 0.7), ("mistral", 1.4), ("modernbert", 0.7)):
    add_shaped_stock(stock, temperature)


@family
def shaped_stock_by_name(width: int, depth: int) -> PreTrainedConfig:
    """`attn_implementation="shaped"` alone; Gemma 2 must have no soft cap."""
    config = gemma2(width, depth)
    config.attn_logit_softcapping, config._attn_implementation = None, "shaped"
    return config


def make_ids(m: int) -> Tensor:
    """Ids with repeats: a token that occurs twice has the same embedding twice. Padding (1) is not among them."""
    ids = torch.arange(2, m + 2)
    ids[m // 2] = ids[0]
    return ids


def measure_models(config: PreTrainedConfig, ids: Tensor, models: int, seed: int) -> dict[str, Tensor]:
    """rho, length, rank [layers + 1, models] and entropy [layers, models] of models that transformers initialises."""
    found: dict[str, list[Tensor]] = {name: [] for name in QUANTITIES}
    for number in range(models):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed + number)
            model = AutoModel.from_config(config, **choose_attention(config)).eval()
            for name, value in measure_model(model, config, ids).items():
                found[name].append(value)
    return {name: torch.stack(values, 1) for name, values in found.items()}


def choose_attention(config: PreTrainedConfig) -> dict[str, Any]:
    """That of a shaped stock config is the config's own; the others return their matrices."""
    return {} if config._attn_implementation == "shaped" else {"attn_implementation": "eager"}


def measure_model(model: nn.Module, config: PreTrainedConfig, ids: Tensor) -> dict[str, Tensor]:
    if config.model_type == "vit":
        inputs = {"pixel_values": torch.randn(1, config.num_channels, *config.image_size)}
    else:
        inputs = {"input_ids": ids[None]}
    with watch_stream(model, config.num_hidden_layers) as stream, QuantityRecorder(model) as seen:
        outputs = model(**inputs, output_attentions=True)
    if "shaped" in (config.model_type, config._attn_implementation):  # its attention matrices are not softmax matrices
        entropy = torch.tensor([values["entropy"] for values in seen.values.values()])
    else:
        entropy = torch.stack([torch.special.entr(A.double()).sum(-1).mean() for A in outputs.attentions])
    V = gram(torch.cat(stream).double())
    pairs = ~torch.eye(V.shape[-1], dtype=torch.bool)
    return {
        "rho": correlation(V)[:, pairs].mean(-1),
        "length": V.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt(),
        "rank": effective_rank(V),
        "entropy": entropy.double(),
    }


@contextmanager
def watch_stream(model: nn.Module, depth: int):
    """A list of the residual stream, [1, m, n], before each block and after the last. `hidden_states` would end after the last norm."""
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == depth)
    stream: list[Tensor] = []

    def before(block: nn.Module, args: Any, kwargs: Any) -> None:
        stream.append(args[0] if args else kwargs["hidden_states"])

    def after(block: nn.Module, args: Any, output: Any) -> None:
        stream.append(output if isinstance(output, Tensor) else output[0])

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True), *(block.register_forward_hook(after) for block in blocks)]
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


def score(truth: dict[str, Tensor], prediction: Prediction) -> dict[str, Tensor]:
    """Differences of the means in standard errors of both, z, for each quantity and layer."""
    scores = {}
    for name in QUANTITIES:
        one, other = truth[name], getattr(prediction, name)
        error = (one.var(1) / one.shape[1] + other.var(1) / other.shape[1]).sqrt()
        difference = (one.mean(1) - other.mean(1)).abs()
        excess = (difference - ROUNDING * one.mean(1).abs()).clamp(min=0.0)
        scores[name] = excess / error.clamp(min=1e-12)
    return scores


def find_limit(scores: dict[str, Tensor], models: int) -> float:
    """What |z| may be over all comparisons together: Student's t with the fewest degrees of freedom that Welch's test can have here."""
    count = sum(len(values) for values in scores.values())
    return float(stats.t.isf(LEVEL / (2 * count), models - 1))


def predict_wrong(name: str, config: PreTrainedConfig, **how: Any) -> dict[str, Prediction]:
    """Predictions with one ingredient wrong, which the comparison must reject."""

    def change(**fields: Any) -> dict[str, Any]:
        return config.to_dict() | fields

    if name == "gpt2":
        with mock.patch.object(decoders, "scale_depth", lambda std, depth: std):
            unscaled = predict(config, **how)
        return {"no residual scaling": unscaled, "tanh": predict(GPT2Config(**change(activation_function="tanh")), **how)}
    if name == "qwen3":
        return {"no QK-norm": predict(LlamaConfig(**change(model_type="llama")), **how)}
    if name.startswith("shaped_stock"):
        gains: dict[str, Any] = {key: value for key, value in getattr(config, "shaped", {}).items() if key != "instead_of"}
        wrong = {"plain attention": {"gamma1": 0.0, "gamma2": 0.0}, "no centring": {"gamma2": 0.0}}
        return {label: predict(config, shape=gains | other, **how) for label, other in wrong.items()}
    if name == "gemma2":
        return {"no soft cap": predict(Gemma2Config(**change(attn_logit_softcapping=None)), **how)}
    return {}


def compare(name: str, width: int, depth: int, m: int, models: int, samples: int, seed: int = 0) -> dict[str, Any]:
    config, ids = FAMILIES[name](width, depth), make_ids(m)
    began = time.perf_counter()
    truth = measure_models(config, ids, models, seed)
    how = {"tokens": m if config.model_type == "vit" else ids, "samples": samples, "seed": seed, "progress": False}
    prediction = predict(config, **how)
    scores = score(truth, prediction)
    return {
        "family": name,
        "worst": {key: float(values.max()) for key, values in scores.items()},
        "limit": find_limit(scores, models),
        "wrong": {label: find_worst(score(truth, wrong)) for label, wrong in predict_wrong(name, config, **how).items()},
        "last": {key: [float(truth[key][-1].mean()), float(getattr(prediction, key)[-1].mean())] for key in QUANTITIES},
        "seconds": time.perf_counter() - began,
    }


def find_worst(scores: dict[str, Tensor]) -> float:
    return max(float(values.max()) for values in scores.values())


def is_right(row: dict[str, Any]) -> bool:
    return max(row["worst"].values()) < row["limit"] < min(row["wrong"].values(), default=math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    for name, default in (("width", 512), ("depth", 24), ("tokens", 8), ("models", 64), ("samples", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.families.split(","):
        row = compare(name, given.width, given.depth, given.tokens, given.models, given.samples, given.seed)
        rows.append(row)
        worst = ", ".join(f"{key} {value:.2f}" for key, value in row["worst"].items())
        wrong = "".join(f"; {label}: {value:.1f}" for label, value in row["wrong"].items())
        verdict = "accepted" if is_right(row) else "REJECTED"
        print(f"{name:15} {verdict}: max |z| {worst}; limit {row['limit']:.2f}{wrong}; {row['seconds']:.0f} s", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(not all(map(is_right, rows)))


if __name__ == "__main__":
    main()
