"""Causal training steps: tokens a second and peak memory against transformers' GPT-2 and Llama, all in one run.

    python benchmarks/causal.py [--models recover,gpt2,llama] [--modes default,max-autotune] [--seconds 500] [--out FILE]

Ours: the step of `shaped pretrain --objective causal --positions rope`. Theirs, as their users train them: autocast to bf16, SDPA,
torch.compile in each of the modes, fused AdamW, no dropout. All have the same width, depth, heads, vocabulary, batch and context. Llama's
gated feed-forward layers have 8/3 times the width inside, so that their matrices are as large as the others'. GPT-2's output matrix is its
embedding; Llama's and ours are not.
The default size is that of GPT-2 with a vocabulary of 32,000: depth 12, width 768, 12 heads, 16 rows of 1,024 tokens; tiny without a GPU.
A matrix of P entries counts 6·P operations a token, causal attention 6·m·n a token and layer. After --seconds no other model is begun.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report
from rich.console import Console
from rich.table import Table

from shaped.hf import ShapedConfig, ShapedForCausalLM
from shaped.train.data.causal import CausalBatches
from shaped.train.step.config import StepConfig, StepSchedule
from shaped.train.step.objectives.causal_lm import CausalLoss
from shaped.train.step.stepper import Stepper

KINDS: dict[str, dict[str, Any]] = {"recover": {"schedule": "recover"}, "learn": {"schedule": "learn"}, "preln": {"block": "preln"}}
OWN = KINDS | {f"{name}-qk": config | {"qk_norm": True} for name, config in KINDS.items()}
OTHERS = ("gpt2", "llama")
AT_ONCE = 8  # steps that are timed together


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    heads: int
    batch: int
    length: int
    vocab: int

    def count_flops(self) -> float:
        """Of one step, forward and backward."""
        a_token = 6.0 * (12 * self.depth * self.width**2 + self.width * self.vocab) + 6.0 * self.depth * self.length * self.width
        return a_token * self.batch * self.length


LARGE = Size(depth=12, width=768, heads=12, batch=16, length=1024, vocab=32_000)
SMALL = Size(depth=2, width=64, heads=4, batch=2, length=64, vocab=500)


def draw_rows(size: Size) -> np.ndarray:
    return np.random.default_rng(0).integers(5, size.vocab, (16 * size.batch, size.length), dtype=np.int64)


def make_own(size: Size, config: StepConfig, **model_config: Any) -> tuple[Callable[[], None], int]:
    """A function that takes AT_ONCE steps, and the number of parameters."""
    batches = CausalBatches(draw_rows(size), batch=size.batch, seed=0, end=3, device=config.device)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": size.vocab, "hidden_size": size.width, "num_hidden_layers": size.depth}
    sizes |= {"num_attention_heads": size.heads, "max_position_embeddings": size.length, "positions": "rope"}
    model = ShapedForCausalLM(ShapedConfig(**sizes, **model_config))
    stepper = Stepper(model, CausalLoss, config)
    schedule = StepSchedule(lambda step: 1e-4, {}, model.config.shaping().share)
    count = sum(parameter.numel() for parameter in model.parameters())

    def take_steps() -> None:
        stepper.run(batches.chunk(stepper.step, AT_ONCE), schedule)

    return take_steps, count


def make_other(size: Size, device: torch.device, name: str, mode: str) -> tuple[Callable[[], None], int]:
    """The same for a model of transformers, compiled in a mode."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    given: dict[str, Any] = {"vocab_size": size.vocab, "attn_implementation": "sdpa", "use_cache": False}
    given |= {"bos_token_id": 2, "eos_token_id": 3}
    model: Any
    if name == "gpt2":
        given |= {"n_embd": size.width, "n_layer": size.depth, "n_head": size.heads, "n_positions": size.length}
        given |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**given))
    else:
        given |= {"hidden_size": size.width, "num_hidden_layers": size.depth, "num_attention_heads": size.heads}
        given |= {"intermediate_size": 8 * size.width // 3, "max_position_embeddings": size.length}
        model = LlamaForCausalLM(LlamaConfig(**given))
    model.to(device)
    compiled: Any = torch.compile(model, dynamic=False, mode=mode) if device.type == "cuda" else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = torch.from_numpy(draw_rows(size)).to(device).split(size.batch)

    def take_steps() -> None:
        for ids in rows[:AT_ONCE]:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

    return take_steps, sum(parameter.numel() for parameter in model.parameters())


def measure(make: Callable[[], tuple[Callable[[], None], int]], size: Size, steps: int) -> dict[str, float]:
    """Seconds until the first steps are done, then medians; peak memory from the start."""
    gpu = torch.cuda.is_available()
    torch._dynamo.reset()  # programs keep the tensors of the model before this one
    gc.collect()
    before = 0
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

    def synchronize() -> None:
        if gpu:
            torch.cuda.synchronize()

    began = time.perf_counter()
    take_steps, parameters = make()
    take_steps()
    synchronize()
    start, times = time.perf_counter() - began, []
    for _ in range(max(3, steps // AT_ONCE)):
        began = time.perf_counter()
        take_steps()
        synchronize()
        times.append((time.perf_counter() - began) / AT_ONCE)
    seconds = statistics.median(times)
    row = {"tokens_per_second": size.batch * size.length / seconds, "ms": 1e3 * seconds, "ms_least": 1e3 * min(times), "start_s": start}
    row |= {"tflops": size.count_flops() / seconds / 1e12, "parameters": parameters}
    return row | ({"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30} if gpu else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="recover,gpt2,llama,recover-qk,learn,preln,learn-qk,preln-qk", help="in this order")
    parser.add_argument("--modes", default="default", help="of torch.compile for transformers' models: default, max-autotune, or both")
    parser.add_argument("--compile", default="blocks", choices=("blocks", "whole"), help="of our models")
    parser.add_argument("--attention", default="auto", help="auto, flash, cudnn, efficient or math")
    parser.add_argument("--steps", type=int, default=64, help="that are timed, for each model")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no other model is begun")
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-causal.json"))
    gpu = torch.cuda.is_available()
    usual = LARGE if gpu else SMALL
    for about in fields(Size):
        parser.add_argument(f"--{about.name}", type=int, default=getattr(usual, about.name))
    arguments = parser.parse_args()
    if unknown := set(arguments.models.split(",")) - {*OWN, *OTHERS}:
        parser.error(f"--models must be among {', '.join([*OWN, *OTHERS])}, got {', '.join(sorted(unknown))}")
    began, device = time.perf_counter(), torch.device("cuda" if gpu else "cpu")
    size = Size(**{about.name: getattr(arguments, about.name) for about in fields(Size)})
    stream = torch.bfloat16 if gpu else torch.float32
    how = arguments.compile if gpu else "off"
    config = StepConfig(device, half=gpu, compile=how, graph=gpu, attention=arguments.attention, stream=stream, chunk=AT_ONCE)
    work: dict[str, Callable[[], tuple[Callable[[], None], int]]] = {}
    for name in arguments.models.split(","):
        if name in OWN:
            work[name] = lambda name=name: make_own(size, config, **OWN[name])
        else:
            for mode in arguments.modes.split(","):
                work[f"{name}, {mode}"] = lambda name=name, mode=mode: make_other(size, device, name, mode)
    rows: dict[str, dict[str, float]] = {}
    left_out: list[str] = []
    for name, make in work.items():
        if time.perf_counter() - began > arguments.seconds:
            left_out.append(name)
            continue
        rows[name] = measure(make, size, arguments.steps)
        print(f"{name}: {rows[name]['tokens_per_second']:,.0f} tokens/s, {rows[name]['ms']:.2f} ms", flush=True)
        fastest = max((row["tokens_per_second"] for other, row in rows.items() if other not in OWN), default=None)
        ratios = {} if fastest is None else {other: row["tokens_per_second"] / fastest for other, row in rows.items() if other in OWN}
        report(arguments.out, {"size": asdict(size), "models": rows, "times_the_fastest_of_theirs": ratios, "left_out": left_out})
    if left_out:
        print(f"left out, since the {arguments.seconds:g} s were over: {', '.join(left_out)}")
    table = Table(title=f"{size}", box=None)
    columns = {"tokens/s": "tokens_per_second", "ms a step": "ms", "least": "ms_least", "TFLOP/s": "tflops", "peak GiB": "peak_gib"}
    columns |= {"parameters": "parameters", "start, s": "start_s"}
    table.add_column("model")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key]:,.{0 if row[key] >= 100 else 2}f}" if key in row else "" for key in columns.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
