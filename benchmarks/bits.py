"""Hashes of what the library computes from fixed seeds, to hold a change that must change no number against the commit before it.

    python benchmarks/bits.py > before.json    # at the commit before
    python benchmarks/bits.py > after.json     # the same machine, the same versions of everything else
    diff before.json after.json

The bits of a sum depend on the processor and on the libraries, so no hashes are committed.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shaped
from shaped.hf import ShapedConfig, ShapedForCausalLM, ShapedForMaskedLM

LAYERS: dict[str, shaped.Layer] = {
    "attention": shaped.ShapedAttention(gamma=0.5, tau0=1.0),
    "heads": shaped.ShapedAttention(gamma=0.5, tau0=0.5, heads=4, project=True, mask="causal"),
    "perceptron": shaped.ShapedPerceptron(c_plus=0.5, c_minus=-1.0),
    "transformer": shaped.ShapedAttention(gamma=0.5, tau0=1.0) >> shaped.ShapedFeedForward(gamma=0.5, c_plus=0.0, c_minus=-1.0),
}


def digest(*parts: Any) -> str:
    """Of tensors, texts and bytes."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.detach().cpu().contiguous().numpy().tobytes() if isinstance(part, torch.Tensor) else str(part).encode())
    return total.hexdigest()[:16]


def paths() -> Iterator[tuple[str, str]]:
    V0 = 0.8 * torch.eye(4, dtype=torch.float64) + 0.2
    for name, layer in LAYERS.items():
        for dtype in (torch.float64, torch.float32):
            kept = shaped.solve(layer, V0, T=0.2, samples=640, seed=1, dtype=dtype, record=5)
            yield f"solve {name} {dtype}", digest(kept.t, kept.V, kept.stopped, kept.info)
            kept = shaped.propagate(layer, V0, n=32, d=6, samples=300, seed=2, dtype=dtype)
            yield f"propagate {name} {dtype}", digest(kept.t, kept.V, kept.stopped, kept.info)
        kept = shaped.solve(layer, V0, T=0.2, steps=20, samples=64, seed=1, method="euler", upper=3.0, lower=0.05)
        yield f"euler {name}", digest(kept.V, kept.stopped, kept.info)
        kept = shaped.propagate(layer, V0, n=32, d=6, samples=64, seed=2, path="tokens")
        yield f"tokens {name}", digest(kept.V)
        module = layer.module(16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        yield f"module {name}", digest(module(torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)))


def models() -> Iterator[tuple[str, str]]:
    ids = torch.arange(24).reshape(2, 12) % 50
    for block in ("shaped", "preln", "postln", "vanilla"):
        config = ShapedConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, block=block)
        for kind in (ShapedForMaskedLM, ShapedForCausalLM):
            torch.manual_seed(5)
            model = kind(config)
            loss = model(ids, labels=ids).loss
            loss.backward()
            yield f"{kind.__name__} {block}", digest(loss, *(p.grad for p in model.parameters() if p.grad is not None))


def training(folder: Path) -> Iterator[tuple[str, str]]:
    draw = random.Random(6)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(300)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choices(words, k=60)) for _ in range(400)))
    command(folder, "data", "prepare", "--text", "text.txt", "--out", "data", "--vocab", "400", "--length", "32", "--valid-share", "0.1")
    shape = ["--depth", "3", "--width", "32", "--heads", "2", "--batch", "8", "--steps", "20", "--warmup", "5"]
    looks = ["--log-every", "5", "--evaluate-every", "10", "--observe-every", "10", "--device", "cpu", "--data", "data"]
    for name, more in {
        "recover": [],
        "learn": ["--schedule", "learn"],
        "preln": ["--model", "preln"],
        "paper": ["--preset", "paper"],
        "bf16": ["--precision", "bf16"],
    }.items():
        command(folder, "pretrain", *shape, *looks, *more, "--out", name)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        seen = [{key: value for key, value in line.items() if key not in ("tokens_per_second", "crc32")} for line in lines]
        weights = next((folder / name).rglob("model.safetensors"))
        yield f"pretrain {name}", digest(json.dumps(seen, sort_keys=True), hashlib.sha256(weights.read_bytes()).hexdigest())


def figures(folder: Path) -> Iterator[tuple[str, str]]:
    for id in ("fig1", "fig2", "fig4"):
        command(folder, "reproduce", id, "--scale", "quick", "--workers", "1", "--out", "figures")
        summary = json.loads((folder / "figures" / f"{id}.json").read_text())
        yield f"reproduce {id}", digest(json.dumps({key: summary[key] for key in ("arrays_sha256", "claims", "table", "settings")}))


def command(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "shaped", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=None)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for part in (paths(), models(), training(Path(name)), figures(Path(name))):
            for what, bits in part:
                print(f"{bits}  {what}", file=sys.stderr)
                found[what] = bits
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
