"""Can shaped models with QK-norm learn to attend? At the paper's temperature, tau0 = 1, and at the usual one, width^-1/2.

    python benchmarks/studies/qk_temperature.py --out docs/results/qk-temperature.json

Task, sizes and training are those of verdicts.py. Below `known_token` a model has learned to attend.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from chains import VOCABULARY, known_token, make_chains
from verdicts import CHAINS_SEED, HEADS, HIDDEN, STEPS, TOKENS, WIDTH, train

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import report

from shaped.hf import ShapedConfig, ShapedForCausalLM

GAMMA, SEED, DEPTHS, RATES = 0.2, 3, (6, 17), (1e-3, 3e-3)


def measure(depth: int, tau0: float) -> dict[str, Any]:
    """The loss after the training of verdicts.py, at each learning rate."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
    config = ShapedConfig(
        num_hidden_layers=depth, max_position_embeddings=TOKENS, use_cache=False, qk_norm=True, gamma=GAMMA, tau0=tau0, **sizes
    )
    losses = []
    for rate in RATES:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = ShapedForCausalLM(config)
        losses.append(train(model, make_chains(CHAINS_SEED), rate, STEPS))
    return {"depth": depth, "tau0": tau0, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/qk-temperature.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(depth, tau0) for depth in DEPTHS for tau0 in (1.0, WIDTH**-0.5)]
    for row in rows:
        print(f"depth {row['depth']}, tau0 {row['tau0']:.3g}: {', '.join(f'{loss:.2f}' for loss in row['losses'])}")
    report(given.out, {"gamma": GAMMA, "seed": SEED, "rates": list(RATES), "attends_below": known_token(), "rows": rows})


if __name__ == "__main__":
    main()
