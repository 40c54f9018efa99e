"""What a diagnosis costs: seconds of the CPU and peak memory, against one training step of the same model (GPT-2's sizes by default).

    python benchmarks/studies/diagnosis_cost.py [--width 768] [--depth 12] [--tokens 512] [--seeds N] [--copies]

Each part runs in a process of its own, so that its peak is its own; the memory of the loaded libraries and of the model is in all of them.
`--copies` makes the bands from fresh copies, as for a model that `shaped.hf.predict` does not know.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

PARTS = ("model", "step", "observe", "diagnose")


def run_part(part: str, width: int, depth: int, tokens: int, seeds: int | None, copies: bool) -> dict[str, float]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import shaped
    from shaped.diagnosis import bands, observe

    if copies:
        bands.MOST_TOKENS = 0
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": depth, "n_head": max(1, width // 64), "n_positions": tokens}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    ids = torch.randint(0, 50000, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    began, spent = time.perf_counter(), time.process_time()
    if part == "step":
        loss = model(**batch).loss
        assert loss is not None
        loss.backward()
    elif part == "observe":
        observe(model, batch)
    elif part == "diagnose":
        print(shaped.diagnose(model, batch, seeds=seeds).bands.source)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - spent, "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 768), ("depth", 12), ("tokens", 512), ("seeds", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(run_part(given.part, given.width, given.depth, given.tokens, given.seeds, given.copies)))
        return
    for part in PARTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"{part:9} {found['seconds']:7.1f} s, {found['cpu_seconds']:7.1f} s of the CPU, peak {found['peak_gib']:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
