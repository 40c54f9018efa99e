"""Has `backpropagate` the law of autograd's gradients? Fresh networks with explicit weights against the law, float64 throughout.

    python tests/gradients/verify_gradients.py --device cuda --out out/gradients.json
    python tests/gradients/verify_gradients.py --networks 20000 --subset

Compared are the logarithms of squared gradient norms of every weight and of the tokens, at every fourth layer and the last, of the loss
and of the last covariance: their distributions (Kolmogorov-Smirnov), and the correlations of gradients with loss and covariance.
With one true law a run fails with a probability of at most 1 % (Bonferroni, over all comparisons).
A run also fails if it accepts a law whose gamma is 5 % off, or independent matrices for the way back of shaped blocks.
Finished settings are kept in a file of JSON lines beside `--out`; the same command goes on from there.
"""

import argparse
import contextlib
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from autograd_networks import OUTPUTS, Loss, cross_entropy, find_gradients, squared_error
from torch import Tensor
from two_samples import correlate, find_ks, find_two_sided, find_z

import shaped
from shaped.checks import whole_number
from shaped.covariance import correlation
from shaped.files import write_json
from shaped.intervals import Z
from shaped.testing.stats import seed
from shaped.train.run.result import find_commit

FALSE_ALARM = 0.01
DEPTH, EVERY, CORRELATION = 12, 4, 0.2
BYTES, MOST = {"cpu": 2**29, "cuda": 2**34}, 2**14
"""Of the networks that autograd differentiates at once, and their largest number."""
STATES = 50
"""Tensors of m x n numbers that autograd keeps for the way back through a block, at most."""
LOSSES: dict[str, Loss] = {"squared error": squared_error, "cross-entropy": cross_entropy}
FLOOR = -50.0
"""Smaller logarithms of gradients count as this. Where tokens are long, softmax saturates, and its gradient may even underflow to zero."""
FLAT = 1e-9
"""A quantity with a smaller spread is a constant with rounding errors, such as the trace of normed tokens without an epsilon."""


def make_blocks(off: float = 1.0) -> dict[str, shaped.Layer]:
    """The blocks that are compared. `off` is a factor of every gamma.

    Leaky, because a ReLU may switch off all hidden features of a token, and the logarithm of a zero gradient is no number.
    """
    gamma, feedforward = 0.6 * off, shaped.ShapedFeedForward(0.6 * off, 1.0, -1.0)
    attention, relu = shaped.ShapedAttention(off, lam=1.0).unshaped, shaped.ReLUFeedForward(off, 0.1, lam=1.0)
    return {
        "shaped": shaped.ShapedAttention(gamma, 0.3) >> feedforward,
        "QK-norm": shaped.ShapedAttention(gamma, 0.3, heads=2, qk_norm=True) >> feedforward,
        "unshaped": shaped.ShapedAttention(gamma).unshaped >> shaped.ReLUFeedForward(gamma, 0.1),
        "Pre-LN": shaped.PreLN(attention) >> shaped.PreLN(relu),
        "Post-LN": shaped.PostLN(attention) >> shaped.PostLN(relu),
    }


@dataclass(frozen=True)
class Setting:
    block: str
    m: int
    n: int
    loss: str
    number: int
    """Its seeds."""
    networks: int
    device: str

    @property
    def has_controls(self) -> bool:
        """Are wrong laws compared, too?"""
        return (self.m, self.n) == (3, 16)

    def __str__(self) -> str:
        return f"{self.block}, m = {self.m}, n = {self.n}, {self.loss}"

    def differentiate(self) -> dict[str, Tensor]:
        """By autograd, a part of the networks at a time."""
        layer, g = make_blocks()[self.block], torch.Generator(self.device).manual_seed(seed(1000 + self.number))
        entries = sum(weight.numel() for weight in layer.module(self.n).parameters())
        each = 8 * DEPTH * (2 * entries + STATES * self.m * self.n)  # the weights have gradients
        size = max(1, min(MOST, BYTES[self.device] // each))
        V0 = shaped.equicorrelated(self.m, CORRELATION)
        sizes = [min(size, self.networks - first) for first in range(0, self.networks, size)]
        parts = [observe(find_gradients(layer, V0, self.n, DEPTH, LOSSES[self.loss], size, g)) for size in sizes]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def simulate(self, off: float = 1.0, independent: bool = False) -> dict[str, Tensor]:
        """From the law."""
        return observe(
            shaped.backpropagate(
                make_blocks(off)[self.block],
                shaped.equicorrelated(self.m, CORRELATION),
                n=self.n,
                d=DEPTH,
                outputs=OUTPUTS,
                loss=LOSSES[self.loss],
                samples=self.networks,
                seed=seed(2000 + self.number),
                independent=independent,
                device=self.device,
                progress=False,
            )
        )


class Finished:
    """What was found already, by name, in a file of JSON lines, each with the commit that found it; without a path nothing is kept."""

    def __init__(self, path: Path | None):
        self.path, self.found = path, dict[str, dict[str, Any]]()
        for line in path.read_text().splitlines() if path and path.exists() else []:
            with contextlib.suppress(ValueError):  # a line that was interrupted is no JSON
                self.found |= json.loads(line)

    def find(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.found:
            self.found[name] = make() | {"commit": find_commit()}
            if self.path:
                with self.path.open("a") as file:
                    file.write(f"\n{json.dumps({name: self.found[name]})}\n")
        return self.found[name]


def make_settings(networks: int, device: str, subset: bool) -> Iterator[Setting]:
    """All 60, or those of n = 16 with the two losses by turns."""
    number = 0
    for n in (16,) if subset else (16, 64):
        for m in (1, 3, 8):
            for block in make_blocks():
                for loss in [list(LOSSES)[number % 2]] if subset else LOSSES:
                    yield Setting(block, m, n, loss, number, networks, device)
                    number += 1


def observe(gradients: shaped.Gradients) -> dict[str, Tensor]:
    """What is compared, by name, [network] each. With one token the gradients of queries and keys are zero, and left out."""
    assert not gradients.stopped.isfinite().any(), f"no network may leave the range, got {gradients!r}"
    d, m = len(gradients.tokens) - 1, gradients.V.shape[-1]
    layers = sorted({*range(0, d, EVERY), d - 1})
    weights = {name: rows for name, rows in gradients.weights.items() if m > 1 or name not in ("query", "key")}
    squares = weights | {"tokens": gradients.tokens}
    found = {f"{name} {layer}": rows[layer].log().clamp(min=FLOOR) for name, rows in squares.items() for layer in layers}
    found |= {"loss": gradients.loss.log(), "trace": gradients.V.diagonal(dim1=-2, dim2=-1).sum(-1).log()}
    return found if m == 1 else found | {"rho": correlation(gradients.V)[:, 0, 1]}


def compare(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Any]:
    """Distances and differences of correlations with their p-values. `one` is autograd's."""
    names = [name for name in one if one[name].std() > FLAT]
    rows = [torch.stack([sample[name] for name in names]) for sample in (one, other)]
    assert all(part.isfinite().all() for part in rows), "gradients, loss and covariance must be finite, got others"
    ks = find_ks(*rows)
    partners = [name for name in ("loss", "trace", "rho") if name in names]
    norms = [place for place, name in enumerate(names) if name not in partners]
    correlations = {}
    for partner in partners:
        found = [correlate(part[norms], part[names.index(partner)]) for part in rows]
        z = find_z(*found)
        columns = (found[0].value, found[1].value, z, find_two_sided(z))
        for place, *numbers in zip(norms, *(column.tolist() for column in columns), strict=True):
            correlations[f"{names[place]}, {partner}"] = dict(zip(("autograd", "law", "z", "p"), map(shorten, numbers), strict=True))
    distances = {name: {"D": shorten(D), "p": shorten(p)} for name, D, p in zip(names, ks.value.tolist(), ks.p.tolist(), strict=True)}
    return {"ks": distances, "correlations": correlations}


def shorten(number: float) -> float:
    return float(f"{number:.4g}")


def find_worst(found: dict[str, Any]) -> dict[str, Any]:
    name = max(found["ks"], key=lambda name: found["ks"][name]["D"])
    return {"name": name} | found["ks"][name]


def check_setting(setting: Setting) -> dict[str, Any]:
    began = time.perf_counter()
    explicit = setting.differentiate()
    found = compare(explicit, setting.simulate())
    result = {"block": setting.block, "m": setting.m, "n": setting.n, "d": DEPTH, "loss": setting.loss, "number": setting.number} | found
    if setting.has_controls:
        result["gamma 5 % off"] = find_worst(compare(explicit, setting.simulate(off=0.95)))
        result["independent"] = find_worst(compare(explicit, setting.simulate(independent=True)))
    result["seconds"] = shorten(time.perf_counter() - began)
    worst = find_worst(found)
    z = max((abs(entry["z"]) for entry in found["correlations"].values()), default=0.0)
    print(
        f"{setting}: {len(found['ks'])} distances, largest {worst['D']:.4f} ({worst['name']}, p = {worst['p']:.2g});"
        f" correlations up to {z:.1f} standard errors apart; {result['seconds']:.1f} s",
        flush=True,
    )
    return result


def scale_independent(n: int, d: int, networks: int, device: str) -> dict[str, Any]:
    """How far independent matrices are from the law, at layer 0 of d layers of shaped attention: intervals of 95 %."""
    began, layer, V0 = time.perf_counter(), shaped.ShapedAttention(0.5, 0.5), shaped.equicorrelated(3, CORRELATION)
    how: dict[str, Any] = {
        "n": n,
        "d": d,
        "outputs": OUTPUTS,
        "loss": squared_error,
        "samples": networks,
        "device": device,
        "progress": False,
    }
    exact, wrong = (
        observe(shaped.backpropagate(layer, V0, **how, seed=seed(3000 + 2 * (n + d) + independent), independent=independent))
        for independent in (False, True)
    )
    row: dict[str, Any] = {"n": n, "d": d, "seconds": shorten(time.perf_counter() - began)}
    for name in ("tokens 0", "query 0", "value 0"):
        x, y = exact[name], wrong[name]
        ks = find_ks(x[None], y[None])
        row[name] = {
            "D": bound(ks.value.item(), ks.error.item()),
            "p": shorten(ks.p.item()),
            "mean difference": bound((x.mean() - y.mean()).item(), math.sqrt((x.var() + y.var()).item() / networks)),
            "spread ratio": bound((x.std() / y.std()).item(), (x.std() / y.std()).item() * math.hypot(*map(find_error_of_log_std, (x, y)))),
        }
    shown = row["tokens 0"]
    texts = (f"{key} {value[0]:.4f} ({value[1]:.4f} to {value[2]:.4f})" for key, value in shown.items() if key != "p")
    print(f"independent, n = {n}, d = {d}, tokens 0: {', '.join(texts)}", flush=True)
    return row


def find_error_of_log_std(x: Tensor) -> float:
    standardised = (x - x.mean()) / x.std()
    return ((standardised.square() - 1) / 2).std().item() / math.sqrt(len(x))


def bound(value: float, error: float) -> list[float]:
    """A value with its 95 % interval."""
    return [shorten(value), shorten(value - Z * error), shorten(value + Z * error)]


def judge(results: list[dict[str, Any]], networks: int) -> tuple[dict[str, Any], list[str]]:
    """The summary, and what is wrong."""
    ks = {f"{describe(found)}, {name}": entry for found in results for name, entry in found["ks"].items()}
    correlations = {f"{describe(found)}, {name}": entry for found in results for name, entry in found["correlations"].items()}
    alarm = FALSE_ALARM / (len(ks) + len(correlations))
    z = torch.tensor([entry["z"] for entry in correlations.values()], dtype=torch.float64)
    bins = torch.histc(torch.tensor([entry["p"] for entry in ks.values()]), 10, 0.0, 1.0)
    worst = max(ks, key=lambda name: ks[name]["D"])
    farthest = max(correlations, key=lambda name: abs(correlations[name]["z"]))
    summary = {
        "distances": len(ks),
        "correlations": len(correlations),
        "rejected below p": shorten(alarm),
        "band of D": shorten(math.sqrt(math.log(2 / alarm) / networks)),
        "largest D": {"where": worst} | ks[worst],
        "p-values of D in ten bins": bins.int().tolist(),
        "mean z of correlations": shorten(z.mean().item()),
        "root mean square z of correlations": shorten(z.square().mean().sqrt().item()),
        "largest z of correlations": {"where": farthest} | correlations[farthest],
    }
    wrong = [f"{name}: p = {entry['p']:.2g}" for name, entry in (ks | correlations).items() if entry["p"] < alarm]
    for found in results:
        for control in ("gamma 5 % off", "independent"):
            if control not in found:
                continue
            entry = found[control]
            accepted = entry["p"] >= alarm
            said = f"{control}, {describe(found)}: {'accepted' if accepted else 'rejected'}, D = {entry['D']:.4f} ({entry['name']})"
            print(said)
            if accepted and (control != "independent" or found["block"] in ("shaped", "QK-norm")):
                wrong.append(said)
    return summary, wrong


def describe(found: dict[str, Any]) -> str:
    return f"{found['block']}, m = {found['m']}, n = {found['n']}, {found['loss']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--subset", action="store_true", help="width 16, the two losses by turns, and independent matrices at n = 8 and 16")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    networks = whole_number("networks", options.networks, least=100)
    finished = Finished(options.out and options.out.with_suffix(".jsonl"))
    widths = (8, 16) if options.subset else (8, 16, 32, 64, 128)
    scaling = [
        finished.find(f"independent, n = {n}, d = {d}, {networks} networks", partial(scale_independent, n, d, networks, options.device))
        for n in widths
        for d in (3 * n // 4, n)
    ]
    settings = list(make_settings(networks, options.device, options.subset))
    largest_first = [finished.find(f"{setting}, {networks} networks", partial(check_setting, setting)) for setting in reversed(settings)]
    results = largest_first[::-1]
    summary, wrong = judge(results, networks)
    for name, value in summary.items():
        print(f"{name}: {value}")
    seconds = sum(found["seconds"] for found in (*results, *scaling))
    memory = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
    print(f"{seconds:.0f} s" + (f", {memory:.1f} GiB" if memory else ""))
    for line in wrong:
        print(f"WRONG: {line}")
    if options.out:
        environment = {
            "commits": sorted({str(found.get("commit")) for found in (*results, *scaling)}),
            "shaped": shaped.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        }
        whole = {
            "command": shlex.join(["python", "tests/gradients/verify_gradients.py", *sys.argv[1:]]),
            "environment": environment,
            "networks": networks,
            "seconds": shorten(seconds),
            "memory_GiB": memory and shorten(memory),
            "summary": summary,
            "wrong": wrong,
            "independent": scaling,
            "settings": results,
        }
        write_json(options.out, whole)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
