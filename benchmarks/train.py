"""The training step: milliseconds, TFLOP/s and the share of the device's bf16 matrix rate, all in one run.

    python benchmarks/train.py [--models recover,preln] [--compile blocks,whole] [--stream float32,bf16] [--profile] [--out FILE]

Shaped (Recover and Learn), Pre-LN, and transformers' BertForMaskedLM, compiled: depth 18, width 768, 8 heads, 32 rows of 128 tokens, a
vocabulary of 32,000, bf16 on a GPU. On a CPU everything is smaller. The models of this package compute the last feed-forward branch and the
logits at the masked places alone; BERT computes them everywhere, as its loss has it. Operations are counted as those that are needed (from
the last layer's attention on, those at masked places), for all models alike: a matrix of P entries takes 6·P a token, forward and backward;
attention 12·m·n a token and layer. Beside the times stand the GPU's clock and power as `nvidia-smi` sees them meanwhile: a card that is at
the limit of its power slows down.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report
from rich.console import Console
from rich.table import Table

from shaped.hf import ShapedConfig, ShapedForMaskedLM
from shaped.process import quote_error
from shaped.train.data.masking import MaskedBatches
from shaped.train.step.config import StepConfig, StepSchedule
from shaped.train.step.objectives.masked_lm import MaskedLoss
from shaped.train.step.stepper import Stepper

OWN: dict[str, dict[str, Any]] = {"recover": {"schedule": "recover"}, "learn": {"schedule": "learn"}, "preln": {"block": "preln"}}
OWN |= {f"{name}-qk": settings | {"qk_norm": True} for name, settings in OWN.items()}
OTHERS = {"bert-graphs": "reduce-overhead", "bert": None}
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    heads: int
    batch: int
    length: int
    vocab: int

    def flops(self, masked: int) -> float:
        """Of one step, forward and backward."""
        tokens, few = self.batch * self.length, self.batch * masked
        blocks = self.width**2 * (12 * self.depth * tokens - 9 * (tokens - few)) + self.width * self.vocab * few
        return 6.0 * blocks + 12.0 * self.depth * self.length * self.width * tokens


LARGE = Size(depth=18, width=768, heads=8, batch=32, length=128, vocab=32_000)
SMALL = Size(depth=2, width=128, heads=4, batch=8, length=64, vocab=1000)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a large bf16 product of random matrices, the best of several."""
    k = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(k, k, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(10):
        synchronize()
        began = time.perf_counter()
        for _ in range(5):
            torch.mm(a, b)
        synchronize()
        times.append((time.perf_counter() - began) / 5)
    return 2 * k**3 / min(times) / 1e12


def attention_kernels(size: Size, device: torch.device) -> dict[str, float]:
    """Microseconds of plain attention, forward and backward, at the models' shape, for each of PyTorch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (size.batch, size.length, size.heads, size.width // size.heads)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    found = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                times = []
                for _ in range(30):
                    synchronize()
                    began = time.perf_counter()
                    for _ in range(10):
                        torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
                    synchronize()
                    times.append((time.perf_counter() - began) / 10)
            found[name.lower()] = 1e6 * statistics.median(times)
        except (RuntimeError, AttributeError) as error:
            print(f"{name}: {quote_error(error)}")
    return found


def own(
    size: Size, config: StepConfig, steps: int, **model_config: Any
) -> tuple[dict[str, dict[str, float]], Stepper, MaskedBatches, StepSchedule]:
    """A model of this package: seconds until the first chunk is done, milliseconds a step after it; for Recover also without shaping."""
    rows = np.random.default_rng(0).integers(5, size.vocab, (64 * size.batch, size.length), dtype=np.int64)
    batches = MaskedBatches(rows, batch=size.batch, seed=0, vocab=size.vocab, special=SPECIAL, device=config.device)
    began = time.perf_counter()
    torch.manual_seed(0)
    model = ShapedForMaskedLM(
        ShapedConfig(
            vocab_size=size.vocab,
            hidden_size=size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            max_position_embeddings=size.length,
            **model_config,
        )
    )
    stepper = Stepper(model, MaskedLoss, config)
    schedule = StepSchedule(lambda step: 1e-4, {}, model.config.shaping().share)
    stepper.run(batches.chunk(0, config.chunk), schedule)
    start = time.perf_counter() - began

    def chunk(schedule: StepSchedule) -> None:
        stepper.run(batches.chunk(stepper.step, config.chunk), schedule)

    found = {"": {"start_s": start} | timed(lambda: chunk(schedule), config.chunk, steps)}
    if model_config.get("schedule") == "recover":  # zeros in place of small numbers take less power, and power may be what limits the clock
        gone = replace(schedule, share=lambda step: 0.0)
        found[" when the shaping is gone"] = timed(lambda: chunk(gone), config.chunk, steps)
    return found, stepper, batches, schedule


def bert(size: Size, device: torch.device, steps: int, mode: str | None) -> dict[str, float]:
    """transformers' model as its users train it: autocast, torch.compile, fused Adam. The mode "reduce-overhead" makes CUDA graphs."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocab,
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    began = time.perf_counter()
    torch.manual_seed(0)
    model: Any = BertForMaskedLM(config)
    model.to(device)
    compiled: Any = torch.compile(model, dynamic=False, mode=mode)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    rows = np.random.default_rng(0).integers(5, size.vocab, (64 * size.batch, size.length), dtype=np.int64)
    batches = MaskedBatches(rows, batch=size.batch, seed=0, vocab=size.vocab, special=SPECIAL, device=device)
    ids, places, labels = (tensor[0] for tensor in batches.chunk(0, 1))
    labels = torch.full_like(ids, -100).scatter(-1, places, labels)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = compiled(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    for _ in range(5):
        step()
    synchronize()
    start = time.perf_counter() - began

    def chunk() -> None:
        for _ in range(16):
            step()

    return {"start_s": start} | timed(chunk, 16, steps)


def timed(chunk: Callable[[], None], length: int, steps: int) -> dict[str, float]:
    times = []
    with power() as state:
        for _ in range(max(3, steps // length)):
            synchronize()
            began = time.perf_counter()
            chunk()
            synchronize()
            times.append(1e3 * (time.perf_counter() - began) / length)
    return {"ms": statistics.median(times), "ms_least": min(times), "ms_most": max(times)} | state


@contextmanager
def power() -> Iterator[dict[str, float]]:
    """Fills in the medians of clock and power over what is done meanwhile, beside their limits, where there is someone to ask."""
    state: dict[str, float] = {}
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        yield state
        return
    asked = {"clock_mhz": "clocks.sm", "most_clock_mhz": "clocks.max.sm", "watts": "power.draw", "most_watts": "power.limit"}
    command = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits", "--loop-ms=100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        try:
            yield state
        finally:
            sampler.terminate()
            lines = [line.split(",") for line in (sampler.stdout or ())]
    with suppress(ValueError):  # what it does not know it calls [N/A]
        seen = [[float(value) for value in line] for line in lines if len(line) == len(asked)][1:]  # the first one is from before
        state.update({name: statistics.median(values) for name, values in zip(asked, zip(*seen, strict=True), strict=False)})


def profile(stepper: Stepper, batches: MaskedBatches, schedule: StepSchedule, steps: int = 4) -> list[dict[str, Any]]:
    """The kernels (on a CPU: operators) of a step that take longest, with their milliseconds and launches a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    gpu = torch.cuda.is_available()
    with profiled(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        stepper.run(batches.chunk(stepper.step, steps), schedule)
        synchronize()
    rows = [(row.self_device_time_total if gpu else row.self_cpu_time_total, row.count, row.key) for row in found.key_averages()]
    longest = sorted(rows, reverse=True)[:40]
    return [{"name": name, "ms_a_step": time / steps / 1e3, "launches_a_step": count / steps} for time, count, name in longest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", default="blocks", help="blocks, whole, or both with a comma")
    parser.add_argument("--models", default="recover,learn,preln,bert-graphs,bert")
    parser.add_argument("--attention", default="auto", help="auto, flash, cudnn, efficient or math")
    parser.add_argument("--stream", default="bf16", help="tokens between the blocks: float32, bf16, or both with a comma")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest in a step of the first model")
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-train.json"))
    arguments = parser.parse_args()
    if unknown := set(arguments.models.split(",")) - {*OWN, *OTHERS}:
        parser.error(f"--models must be among {', '.join([*OWN, *OTHERS])}, got {', '.join(sorted(unknown))}")
    gpu = torch.cuda.is_available()
    device, size = torch.device("cuda" if gpu else "cpu"), LARGE if gpu else SMALL
    masked = round(0.15 * size.length)
    ceiling, flops = matrix_rate(device), size.flops(masked)
    rows: dict[str, dict[str, float]] = {}
    profiled: dict[str, Any] = {}
    kernels = attention_kernels(size, device) if gpu else {}
    print("attention kernels, forward and backward, µs:", {name: round(value, 1) for name, value in kernels.items()}, flush=True)
    about = {"size": size.__dict__, "masked": masked, "tflop_a_step": flops / 1e12, "matrix_tflops": ceiling, "attention_us": kernels}
    ways = list(product(arguments.compile.split(","), arguments.stream.split(","))) if gpu else [("off", "float32")]
    for name, (compile, stream) in product(arguments.models.split(","), ways):
        if name in OWN:
            dtype = {"float32": torch.float32, "bf16": torch.bfloat16}[stream]
            config = StepConfig(
                device, half=gpu, compile=compile, graph=gpu, attention=arguments.attention, stream=dtype, chunk=128 if gpu else 16
            )
            found, stepper, batches, schedule = own(size, config, arguments.steps, **OWN[name])
            if arguments.profile and not rows:
                profiled = {"profile": {"model": name, "kernels": profile(stepper, batches, schedule)}}
            rows |= {f"{name}{state}, {compile}, {stream} stream": row for state, row in found.items()}
            del stepper, batches, schedule
        elif (compile, stream) == ways[0]:
            rows[name] = bert(size, device, arguments.steps, OTHERS[name])
        for row in rows.values():
            row["tflops"] = flops / row["ms"] / 1e9
            row["share"] = row["tflops"] / ceiling
        report(arguments.out, about | {"models": rows} | profiled)  # after each, should the next one fail
    for kernel in profiled.get("profile", {"kernels": []})["kernels"]:
        print(f"{kernel['ms_a_step']:8.3f} ms {kernel['launches_a_step']:7.1f} x  {kernel['name'][:100]}")
    table = Table(title=f"{size}, {masked} masked places a row; bf16 products run at {ceiling:.0f} TFLOP/s here", box=None)
    columns = {"ms a step": "ms", "least": "ms_least", "most": "ms_most", "TFLOP/s": "tflops", "share": "share"}
    columns |= {"MHz": "clock_mhz", "W": "watts", "start, s": "start_s"}
    table.add_column("model")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key]:.{0 if row[key] >= 100 else 2}f}" if key in row else "" for key in columns.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
