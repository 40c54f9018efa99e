"""Gradients of models that transformers initialises, by autograd, against `predict(…).gradients`.

    PYTHONPATH=tests/hf python tests/hf/family_gradients.py [--families gpt2,llama] [--width 64] [--depth 6] [--models 400] [--tokens 8]

The comparisons of a family are one hypothesis: the mean and the variance of the logarithm of the squared gradient at every layer, with
respect to the residual stream and to each matrix, and of the loss. It is judged as in `families`. A head that is tied wrongly must be
rejected.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from families import FAMILIES, LEVEL, choose_attention, find_worst, make_ids, watch_stream
from scipy import stats
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    ViTConfig,
)

from shaped import Gradients
from shaped.hf import ShapedConfig, predict

MASKED = ("bert", "roberta", "modernbert")
MATRICES = {
    "query": ("q_proj", "self.query", "attention.query"),
    "key": ("k_proj", "self.key", "attention.key"),
    "value": ("v_proj", "self.value", "attention.value"),
    "output": ("o_proj", "attention.output.dense", "attn.c_proj", "attention.dense", "attn.Wo", "attention.output"),
    "first": ("gate_proj", "mlp.fc1", "intermediate.dense", "mlp.c_fc", "mlp.dense_h_to_4h", "feedforward.pre"),
    "gate": ("up_proj",),
    "second": ("down_proj", "mlp.fc2", "output.dense", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.Wo", "feedforward.post"),
}
"""Ends of the names of transformers' matrices. Those that follow hold several matrices each."""
FUSED = ("attn.c_attn", "attention.query_key_value", "attn.Wqkv", "mlp.Wi")


def measure_gradients(config: PreTrainedConfig, ids: Tensor, models: int, seed: int) -> dict[str, Tensor]:
    """Logarithms of the squared gradients, [layers, models] each, and of the loss, [1, models]."""
    found: dict[str, list[Tensor]] = {}
    for number in range(models):
        with torch.random.fork_rng():
            torch.manual_seed(seed + number)
            for name, values in differentiate(config, ids).items():
                found.setdefault(name, []).append(values)
    return {name: torch.stack(rows, 1).double().log() for name, rows in found.items()}


def differentiate(config: PreTrainedConfig, ids: Tensor) -> dict[str, Tensor]:
    """The squared gradients of one model, on random labels."""
    model = make_model(config).eval()
    depth = config.num_hidden_layers
    with watch_stream(model, depth) as stream:
        if isinstance(config, ViTConfig):
            size: Any = config.image_size
            logits = model(torch.randn(1, config.num_channels, *size)).logits
        else:
            logits = model(ids[None]).logits[0]
    for tokens in stream:
        tokens.retain_grad()
    labels = torch.randint(logits.shape[-1], (len(logits),))
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    gradients = [tokens.grad for tokens in stream]
    found = {"tokens": torch.stack([gradient.square().sum() for gradient in gradients if gradient is not None])}
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == depth)
    layers = [split_block(block, config) for block in blocks]
    return (
        found | {name: torch.stack([layer[name].square().sum() for layer in layers]) for name in layers[0]} | {"loss": loss.detach()[None]}
    )


def make_model(config: PreTrainedConfig) -> nn.Module:
    if isinstance(config, ViTConfig):
        return AutoModelForImageClassification.from_config(config, **choose_attention(config))
    masked = config.model_type in MASKED or (isinstance(config, ShapedConfig) and not config.is_decoder)
    return (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(config, **choose_attention(config))


def split_block(block: nn.Module, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The gradient of each matrix of a block, by our names."""
    found: dict[str, Tensor] = {}
    for path, weight in block.named_parameters():
        path = path.removesuffix(".weight")
        if weight.ndim != 2:
            continue
        assert weight.grad is not None
        if path.endswith(FUSED):
            found |= split_fused(path, weight.grad, config)
            continue
        name = next(name for name, ends in MATRICES.items() if path.endswith(ends))
        assert name not in found, path
        found[name] = weight.grad
    return found


def split_fused(path: str, gradient: Tensor, config: PreTrainedConfig) -> dict[str, Tensor]:
    if path.endswith("mlp.Wi"):
        return dict(zip(("first", "gate"), gradient.chunk(2), strict=True))
    if path.endswith("attn.c_attn"):
        parts = gradient.T.chunk(3)
    elif path.endswith("query_key_value"):
        parts = gradient.unflatten(0, (config.num_attention_heads, 3, -1)).unbind(1)
    else:
        parts = gradient.chunk(3)
    return dict(zip(("query", "key", "value"), parts, strict=True))


def take_logarithms(gradients: Gradients) -> dict[str, Tensor]:
    squares = {"tokens": gradients.tokens, **gradients.weights, "loss": gradients.loss[None]}
    return {name: values.log() for name, values in squares.items()}


def score(truth: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Differences in standard errors of both, z: of the means, and of the variances, for each quantity and layer."""
    assert set(truth) == set(found), (set(truth), set(found))
    scores = {}
    for name in truth:
        pair = [truth[name], found[name]]
        for moment in ("mean", "variance"):
            if moment == "variance":
                pair = [(values - values.mean(1, keepdim=True)).square() for values in pair]
            error = sum(values.var(1) / values.shape[1] for values in pair)
            scores[f"{moment} of {name}"] = (pair[0].mean(1) - pair[1].mean(1)).abs() / torch.as_tensor(error).sqrt()
    return scores


def find_limit(scores: dict[str, Tensor], models: int) -> float:
    """As in `families`: Student's t, Bonferroni."""
    return float(stats.t.isf(LEVEL / (2 * sum(len(values) for values in scores.values())), models - 1))


def untie(config: PreTrainedConfig) -> PreTrainedConfig:
    fields: dict[str, Any] = config.to_dict() | {"tie_word_embeddings": not config.tie_word_embeddings}
    return type(config)(**fields)


def compare(name: str, width: int, depth: int, m: int, models: int, samples: int, seed: int) -> dict[str, Any]:
    config, ids = FAMILIES[name](width, depth), make_ids(m)
    began = time.perf_counter()
    truth = measure_gradients(config, ids, models, seed)
    how: dict[str, Any] = {"tokens": m if config.model_type == "vit" else ids, "samples": samples, "seed": seed, "progress": False}
    scores = score(truth, take_logarithms(predict(config, **how).gradients))
    wrong = None if config.model_type == "vit" else find_worst(score(truth, take_logarithms(predict(untie(config), **how).gradients)))
    worst = max(scores, key=lambda key: float(scores[key].max()))
    limit, seconds = find_limit(scores, models), time.perf_counter() - began
    return {"worst": worst, "z": find_worst(scores), "limit": limit, "wrongly tied": wrong, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    for name, default in (("width", 64), ("depth", 6), ("tokens", 8), ("models", 400), ("samples", 2000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    accepted = []
    for name in given.families.split(","):
        row = compare(name, given.width, given.depth, given.tokens, given.models, given.samples, given.seed)
        accepted.append(row["z"] < row["limit"])
        wrong = "" if row["wrongly tied"] is None else f"; wrongly tied {row['wrongly tied']:.1f}"
        verdict = "accepted" if accepted[-1] else "REJECTED"
        print(
            f"{name:18} {verdict}: max |z| {row['z']:.2f} ({row['worst']}); limit {row['limit']:.2f}{wrong}; {row['seconds']:.0f} s",
            flush=True,
        )
    sys.exit(not all(accepted))


if __name__ == "__main__":
    main()
