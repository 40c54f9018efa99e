"""Does a verdict mean something? Small models, judged at initialisation by the rules of `shaped.diagnosis.verdicts`, then trained.

    python benchmarks/studies/verdicts.py [--models 160] [--processes 2] [--out FILE]

All of this was fixed before any model of the study was trained. The rules were fixed earlier.

Models: the kinds of KINDS in turn, width 64, 4 heads, causal. Drawn at random, uniformly in the logarithm, with the seed SEED:

- depth, from 4 to 64;
- gamma, from 0.01 to 1, in the blocks that have it (shaped; plain: the same block without shaping and without norms);
- scale, from 0.1 to 10: multiplies the last matrix of each residual branch;
- qk_scale, from 0.1 to 10: multiplies queries' and keys' matrices, so it changes logits by four decades. Not with QK-norm, which undoes it.

Task: `chains`. Attention is needed to get below the entropy of the next token given the last one, `known_token`.

Training: Adam, batches of 8 sequences of 32 tokens, 250 steps, warm-up of 50, gradients clipped at norm 1. The learning rates of RATES are
tried one after another until one of them passes both levels below: a model counts as trainable if any usual rate trains it. A loss that is
not finite ends a run. The outcome is the lowest mean loss of the last 20 steps.

- "Trains": below `half_way`, 2.06, from log 32 = 3.47 to the entropy of the next token given the chain too, 0.65.
- "Attends", a second outcome: below `known_token`, 1.85. Networks that have learned the last token's part, but not yet the chains, are just
  above it, so a level there would also ask how fast attention learns. That is why it is not the first outcome.

Eight runs of usual models (scales 1, gamma 0.2; Pre-LN, Post-LN, shaped, plain; depth 4 to 24), which were trained to choose the sizes of
the task, were at 0.9 to 1.4 after 250 steps at a rate of 1e-3 or 3e-3. Sixteen models of another seed, depth 4 to 7, were examined to try
the program; the third of them, at 1.88, is why "trains" is not the same as "attends".

Finished models are kept in a file of JSON lines beside `--out`; a second call goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import shlex
import sys
import time
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from chains import VOCABULARY, draw_sequences, half_way, known_token, make_chains
from torch import nn
from verdict_tables import make_tables, print_tables

import shaped
from shaped.diagnosis import Observation, observe, verdicts
from shaped.diagnosis.curves import list_curves
from shaped.diagnosis.verdicts import judge, measure_risk
from shaped.files import read_text, write_atomically, write_json
from shaped.hf import ShapedConfig, ShapedForCausalLM
from shaped.train.run.result import find_commit
from shaped.train.step.learning_rates import compute_learning_rate
from shaped.workers import LocalWorkers

KINDS: dict[str, dict[str, Any]] = {
    f"{name}{' + QK-norm' if qk_norm else ''}": {"block": block, "qk_norm": qk_norm}
    for name, block in (("shaped", "shaped"), ("plain", "vanilla"), ("Pre-LN", "preln"), ("Post-LN", "postln"))
    for qk_norm in (False, True)
}
WIDTH, HEADS, HIDDEN, TOKENS, SEQUENCES = 64, 4, 128, 32, 8
STEPS, WARMUP, LAST, CLIP, BETAS = 250, 50, 20, 1.0, (0.9, 0.98)
RATES = (1e-3, 3e-3, 3e-4)
SEED, CHAINS_SEED, TRAINING_SEED = 2026, 0, 1


@dataclass(frozen=True)
class Setting:
    number: int
    kind: str
    depth: int
    gamma: float | None
    scale: float
    qk_scale: float | None


def draw_settings(count: int) -> list[Setting]:
    """The first `count` models of the study. More of them do not change the first ones."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(low: float, high: float) -> float:
        share = float(torch.rand((), generator=generator, dtype=torch.float64))
        return math.exp(math.log(low) + share * math.log(high / low))

    settings = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        depth, gamma, scale, qk_scale = round(draw(4, 64)), draw(0.01, 1), draw(0.1, 10), draw(0.1, 10)
        gains = KINDS[kind]["block"] in ("shaped", "vanilla")
        settings.append(Setting(number, kind, depth, gamma if gains else None, scale, None if KINDS[kind]["qk_norm"] else qk_scale))
    return settings


def make_model(setting: Setting) -> ShapedForCausalLM:
    gamma: dict[str, Any] = {} if setting.gamma is None else {"gamma": setting.gamma}
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
    # tau0 = 1 was the default when the study was run, also with QK-norm.
    config = ShapedConfig(
        num_hidden_layers=setting.depth, max_position_embeddings=TOKENS, use_cache=False, tau0=1.0, **sizes, **KINDS[setting.kind], **gamma
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(setting.number)
        model = ShapedForCausalLM(config)
        for name, matrix in model.named_parameters():
            if name.endswith(("attention.output.weight", "feedforward.post.weight")):
                matrix *= setting.scale
            elif name.endswith(("attention.query.weight", "attention.key.weight")) and setting.qk_scale is not None:
                matrix *= setting.qk_scale
    return model


def examine(setting: Setting, steps: int = STEPS) -> dict[str, Any]:
    """Judges a model by one batch, then trains it. What is not finite is None."""
    began = time.thread_time()
    successors = make_chains(CHAINS_SEED)
    ids = draw_sequences(successors, SEQUENCES, TOKENS, torch.Generator().manual_seed(SEED + setting.number))
    seen = observe(make_model(setting), {"input_ids": ids, "labels": ids})
    findings = judge(seen)
    losses: dict[str, float | None] = {}
    for rate in RATES:
        loss = train(make_model(setting), successors, rate, steps)
        losses[f"{rate:g}"] = loss if math.isfinite(loss) else None
        if loss < known_token():
            break
    finite = [loss for loss in losses.values() if loss is not None]
    return {
        "setting": asdict(setting),
        "risk": measure_risk(findings),
        "verdicts": [finding.name for finding in findings if finding.at_risk],
        "decades": {finding.name: finding.decades for finding in findings},
        "quantities": {name: value if math.isfinite(value) else None for name, value in measure_quantities(seen).items()},
        "losses": losses,
        "best_loss": min(finite) if finite else None,
        "trains": min(finite, default=math.inf) < half_way(),
        "attends": min(finite, default=math.inf) < known_token(),
        "cpu_seconds": time.thread_time() - began,
    }


def train(model: nn.Module, successors: torch.Tensor, rate: float, steps: int) -> float:
    """The mean loss of the last steps; inf after a loss or gradient that is not finite."""
    generator = torch.Generator().manual_seed(TRAINING_SEED)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, betas=BETAS)
    losses: list[float] = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = compute_learning_rate(step, lr=rate, warmup=WARMUP, steps=steps, decay="none")
        ids = draw_sequences(successors, SEQUENCES, TOKENS, generator)
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if not (loss.isfinite() and norm.isfinite()):
            return math.inf
        optimiser.step()
        losses.append(float(loss.detach()))
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def measure_quantities(seen: Observation) -> dict[str, float]:
    """Single numbers that could be the risk by themselves: larger is worse."""
    (stack,) = seen.stacks
    curves = list_curves(stack)
    gradients, lengths = curves["gradient"], curves["length"]
    return {
        "gradient spread, decades": math.log10(max(gradients) / max(min(gradients), 1e-30)) if max(gradients) > 0 else math.inf,
        "correlation behind the last layer": curves["correlation"][-1],
        "stream's change over the second half, decades": abs(
            math.log10(max(lengths[-1], 1e-30) / max(lengths[len(stack.layers) // 2], 1e-30))
        ),
        "entropy missing in the sharpest layer": 1.0 - min(curves["entropy_share"]),
        "dead units of the worst layer": max(curves["dead"]),
        "loss at initialisation": seen.loss,
        "depth": float(len(stack.layers)),
    }


def hash_rules(source: str) -> str:
    """Of the rules' code, without comments and docstrings: another wording is not another rule."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def describe_protocol(steps: int) -> dict[str, Any]:
    """What the outcomes depend on. Models that were examined under another protocol are not mixed with these."""
    return {
        "rules_sha256": hash_rules(read_text(Path(verdicts.__file__))),
        "seeds": [SEED, CHAINS_SEED, TRAINING_SEED],
        "sizes": {"width": WIDTH, "heads": HEADS, "hidden": HIDDEN, "tokens": TOKENS, "sequences": SEQUENCES, "vocabulary": VOCABULARY},
        "training": {"steps": steps, "warmup": WARMUP, "last": LAST, "clip": CLIP, "betas": list(BETAS), "rates": list(RATES)},
        "trains_below": half_way(),
        "attends_below": known_token(),
    }


def name_protocol(steps: int) -> str:
    return hashlib.sha256(json.dumps(describe_protocol(steps)).encode()).hexdigest()[:12]


def run_study(settings: list[Setting], steps: int, processes: int, kept: Path) -> list[dict[str, Any]]:
    """Examines what the file does not have yet, the deepest first."""
    name = name_protocol(steps)
    records = read_kept(kept, name)
    waiting = sorted((setting for setting in settings if setting.number not in records), key=lambda setting: -setting.depth)
    began = time.monotonic()
    with LocalWorkers(processes) as workers, kept.open("a", encoding="utf-8") as file:
        for done, future in enumerate(as_completed([workers.submit(examine, setting, steps) for setting in waiting]), start=1):
            record = future.result()
            file.write(json.dumps({"protocol": name} | record, allow_nan=False) + "\n")
            file.flush()
            setting = record["setting"]
            records[setting["number"]] = record
            outcome = "trains" if record["trains"] else "does not train"
            spent = f"{time.monotonic() - began:.0f} s, {done} of {len(waiting)}"
            print(f"{spent}: {setting['kind']}, depth {setting['depth']}: risk {record['risk']:.2f}, {outcome}", flush=True)
    return [records[setting.number] for setting in settings]


def read_kept(kept: Path, protocol: str) -> dict[int, dict[str, Any]]:
    """Finished models by number. A last line without its end, left by an interrupted run, is removed from the file."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    text = read_text(kept) if kept.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_atomically(kept, lambda file: file.write(whole.encode()))
    records = [json.loads(line) for line in whole.splitlines()]
    for record in records:
        if record.pop("protocol") != protocol:
            raise ValueError(f"out must be new or have models of this protocol, {protocol}, got {kept}, which has others")
    return {record["setting"]["number"]: record for record in records}


def list_thresholds() -> dict[str, float]:
    return {name: value for name, value in vars(verdicts).items() if name.isupper() and isinstance(value, float)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=160)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS, help="for a trial: the study has its own number")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/verdicts.json"))
    given = parser.parse_args()
    settings = draw_settings(given.models)
    records = run_study(settings, given.steps, given.processes, given.out.with_suffix(".jsonl"))
    tables = make_tables(records)
    print_tables(tables)
    versions = {"shaped": shaped.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    result = {
        "command": shlex.join(["python", "benchmarks/studies/verdicts.py", *sys.argv[1:]]),
        "environment": {"commit": find_commit(), "python": platform.python_version()} | versions,
        "protocol": describe_protocol(given.steps) | {"thresholds": list_thresholds()},
        "tables": tables,
        "models": records,
    }
    write_json(given.out, result)
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
