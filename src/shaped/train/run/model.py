"""The model of a run: built from the settings at the start, written in the Hugging Face format at the end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from shaped.hf import ShapedConfig
from shaped.hf.quiet import silence_transformers
from shaped.process import check_memory
from shaped.train.data.prepared import IDS, Data
from shaped.train.data.tokenizer import END, FIRST, write_causal_tokenizer
from shaped.train.run.checkpoint import writing_tensors
from shaped.train.run.settings import DEFAULTS, Settings, find_parts


def build_model(settings: Settings, model: Any, vocab: int, length: int) -> Any:
    """A model of this class at initialisation: a function of the settings and their seed."""
    parts = find_parts(settings.model, settings.schedule, settings.embedding_norm)
    # A vanilla model has no setting for its temperature. With QK-norm it has the usual one.
    usual = settings.qk_norm and "shaping" not in parts
    config = ShapedConfig(
        vocab_size=vocab,
        hidden_size=settings.width,
        num_hidden_layers=settings.depth,
        num_attention_heads=settings.heads,
        intermediate_size=settings.hidden,
        max_position_embeddings=length,
        positions=settings.positions,
        rope_base=settings.rope_base,
        block=settings.model,
        gamma=settings.gamma,
        gamma_feedforward=settings.gamma_feedforward,
        norm=settings.norm if "norms" in parts else DEFAULTS["norm"],
        dyt_alpha=settings.dyt_alpha if "dyt" in parts else DEFAULTS["dyt_alpha"],
        qk_norm=settings.qk_norm,
        qk_gain=settings.qk_gain,
        init=settings.init,
        tau0=settings.width**-0.5 if usual else settings.choose_tau0(),
        c_minus=settings.c_minus,
        activation=settings.activation,
        schedule=settings.schedule,
        recover_steps=settings.recover_steps,
        train_gains=settings.train_gains,
        embedding_norm=settings.embedding_norm,
        embedding_std=settings.embedding_std,
        head_std=settings.head_std,
        tie_word_embeddings=settings.tied,
        bos_token_id=IDS[FIRST] if model.causal else None,  # `generate` begins and ends with them
        eos_token_id=IDS[END] if model.causal else None,
    )
    check_size(config, settings.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return model(config)


def check_size(config: ShapedConfig, device: str) -> None:
    """Refuses a model for which memory has no room, before it is built. On a CPU gradients and the moments of Adam lie beside it."""
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    what, copies = ("weights, gradients and moments", 4) if on_cpu else ("weights", 1)
    check_memory("model", f"{config.weights() / 1e9:.3g} billion {what}", 4.0 * copies * config.weights(), "a smaller width or depth")


def write_model(model: Any, data: Data, out: Path) -> list[str]:
    """Writes weights, config and tokenizer, and returns the names of the files."""
    values = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}  # views of one vector until here
    with silence_transformers(), writing_tensors(out):
        model.save_pretrained(out, state_dict=values)
    tokenizer = data.hash_tokenizer()
    for name in tokenizer:
        shutil.copy2(data.folder / "tokenizer" / name, out)
    if model.causal:
        write_causal_tokenizer(data.folder / "tokenizer", out)
    names = ["config.json", *(["generation_config.json"] if model.causal else []), *(path.name for path in out.glob("*.safetensors*"))]
    return [*names, *tokenizer]
