"""The pictures of docs/race.md, from the runs in docs/results.

    python benchmarks/studies/race_pictures.py [theory] [finals] [branches] [causal] [copying] [--samples 1024] [--out docs/images]

race-finals.png: test loss against steps and against seconds of the GPU, of the runs of the finals' length.
race-branches.png: the attention branches of Recover with QK-norm after 20,000 steps: gamma and entropy of each layer, by learning rate.
race-causal.png: where the causal lead is lost, before and after the free choices: loss of Recover less that of Pre-LN, on the text of
training and on the test text, and the entropy of the attention of both.
race-copying.png: which causal arms learn to copy, with the tables of either side.
race-theory.png: what QK-norm changes. Left, the SDE of the race's shaped arms: the share of paths that explode, if the tokens' variance has
grown by a factor. Right, the race: the test loss after 4,000 steps against the learning rate.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from causal_race import FILES as CAUSAL_FILES
from common import report
from race import ARMS, EMBEDDING_LR, FILES, RATES, TUNING, find_loss, read_known, set_rate
from race_tables import group_long_runs, milliseconds_a_step

import shaped
from shaped.figures.harness.style import BLACK, BLUE, GREEN, GREY, ORANGE, apply_style, make_panels, pick_ordered_colours
from shaped.files import write_atomically
from shaped.intervals import share_interval
from shaped.train.run.settings import DEFAULTS, TAU0
from shaped.train.run_records import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"recover": BLUE, "learn": ORANGE, "preln": GREEN}
NAMES = {"recover": "Recover", "learn": "Learn", "preln": "Pre-LN"}
WIDTH, DEPTH, HEADS, GAMMA = (DEFAULTS[name] for name in ("width", "depth", "heads", "gamma"))
FACTORS = np.geomspace(1.0, 100.0, 25)
USUAL = WIDTH**-0.5
ATTENTION = {  # the race's two temperatures, and what QK-norm alone changes
    "τ0 = 0.01 (recover)": (False, TAU0, "o-", BLACK),
    "τ0 = n^(−1/2)": (False, USUAL, "^-", GREY),
    "QK-norm, τ0 = n^(−1/2) (recover-qk)": (True, USUAL, "s--", BLUE),
}
M, RHO, SEED = 8, 0.1, 0
PICTURES = ("theory", "finals", "branches", "causal", "copying")
SECOND_PASS = 4928  # step of the causal finals: 39,424 rows of 1,024 tokens, 8 a step
COPYING_SEEDS = (0, 1, 2)
CAUSAL_FINALS = {  # runs of both arms, without their seeds
    "before the choices": ("causal-recover-qk-final-0.008", "causal-preln-qk-final-0.004"),
    "after the choices": ("causal-recover-qk-chosen-0.004", "causal-preln-qk-chosen-0.004"),
}
CAUSAL_ENTROPIES = {  # and a run of 4,000 steps with the choice that is not in the finals yet
    "Recover, before the choices": ("causal-recover-qk-final-0.008-1", BLUE, ":"),
    "Recover, after the choices": ("causal-recover-qk-chosen-0.004-1", BLUE, "-"),
    "Recover, with trained gains too": ("causal-recover-qk-qk-gain-0.004", BLACK, "--"),
    "Pre-LN, before the choices": ("causal-preln-qk-final-0.004-1", GREEN, ":"),
    "Pre-LN, after the choices": ("causal-preln-qk-chosen-0.004-1", GREEN, "-"),
}
WINDOW = 250  # steps over which the training losses are averaged
Known = dict[str, RunRecord]


def count_exploding(name: str, factor: float, samples: int) -> dict[str, Any]:
    """Of the race's shaped blocks at initialisation, as SDE to the time depth/width, from tokens whose variance is this factor."""
    qk_norm, tau0, *_ = ATTENTION[name]
    attention = shaped.ShapedAttention(GAMMA, tau0, HEADS, project=True, qk_norm=qk_norm)
    block = attention >> shaped.ShapedFeedForward(GAMMA, c_minus=-1.0)
    V0 = factor * shaped.equicorrelated(M, RHO)
    how: dict[str, Any] = {"T": DEPTH / WIDTH, "steps": 4 * DEPTH, "record": "last", "check": False, "progress": False}
    exploded = int(shaped.solve(block, V0, samples=samples, seed=SEED, **how).stopped.isfinite().sum())
    low, high = share_interval(exploded, samples)
    return {"attention": name, "factor": factor, "exploded": exploded, "share": exploded / samples, "low": low, "high": high}


def draw_theory(rows: list[dict[str, Any]], known: Known) -> Figure:
    figure, (left, right) = make_panels(2, height=3.1)
    for name, (_, _, style, colour) in ATTENTION.items():
        here = [row for row in rows if row["attention"] == name]
        shares = np.array([[row["share"], row["low"], row["high"]] for row in here]).T
        reach = abs(shares[1:] - shares[0])
        left.errorbar([row["factor"] for row in here], shares[0], reach, fmt=style, color=colour, markersize=3, label=name)
    left.set(xscale="log", xlabel="factor of the tokens' variance", ylabel="share of paths that explode", ylim=(-0.04, 1.04))
    for arm, label in NAMES.items():
        for suffix, style in (("", "o-"), ("-qk", "s--")):
            name = arm + suffix
            losses = {rate: find_loss(known, f"{name}-{rate:g}", TUNING | set_rate(ARMS[name].settings, rate)) for rate in RATES}
            made = {rate: loss for rate, loss in losses.items() if loss is not None}
            shown = f"{label} + QK-norm" if suffix else label
            right.plot(list(made), list(made.values()), style, color=COLOURS[arm], markersize=3, label=shown)
    right.set(xscale="log", xlabel="learning rate", ylabel="test loss after 4,000 steps (nats)", xticks=RATES)
    right.set_xticklabels([f"{rate:g}" for rate in RATES])
    right.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left")
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def draw_finals(known: Known) -> Figure:
    """A line for each seed of the arms that have several."""
    figure, panels = make_panels(2, sharey=True)
    for group in group_long_runs(known):
        if group.is_tuning or len(group.runs) < 2:
            continue
        plain, seeds = group.arm.removesuffix("-qk"), ", ".join(str(run.settings["seed"]) for run in group.runs)
        tables = describe_tables(group.runs[0])
        label = f"{NAMES.get(plain, plain)}{' + QK-norm' if group.arm != plain else ''}{tables}, seeds {seeds}"
        for number, run in enumerate(group.runs):
            tests = [line for line in run.metrics if line["kind"] == "test"]
            steps, losses = (np.array([line[key] for line in tests], dtype=float) for key in ("step", "loss"))
            for axes, x in zip(panels, (steps, steps * milliseconds_a_step(run) / 1e3), strict=True):
                style, colour = "--" if tables else "-", COLOURS.get(plain, GREY)
                axes.plot(x, losses, style, color=colour, linewidth=0.9, label=label if number == 0 else None)
    panels[0].set(xlabel="step", ylabel="test loss (nats)", ylim=(None, 7.5))
    panels[1].set(xlabel="seconds of training on an H200")
    panels[0].legend()
    return figure


def describe_tables(run: RunRecord) -> str:
    """Of a shaped run whose embedding tables move faster than those of the first finals."""
    fast = run.settings["model"] == "shaped" and run.settings["embedding_lr"] * run.settings["lr"] > 1.5 * EMBEDDING_LR
    return ", fast tables" if fast else ""


def find_rates(run: RunRecord) -> tuple[float, float]:
    """The learning rate, and that of the gains over it."""
    return run.settings["lr"], run.settings["gain_lr"]


def draw_branches(known: Known) -> Figure:
    """A line for each run of the finals' length of `recover-qk`."""
    figure, panels = make_panels(2)
    runs = [run for group in group_long_runs(known) if group.arm == "recover-qk" for run in group.runs]
    rates = sorted({run.settings["lr"] for run in runs})
    colours = dict(zip(rates, pick_ordered_colours(len(rates)), strict=True))
    named: set[str] = set()
    for run in sorted(runs, key=find_rates):
        last, (rate, gain_lr) = [line for line in run.metrics if line["kind"] == "layers"][-1], find_rates(run)
        layers, slower = np.arange(1, 1 + len(last["entropy"])), f", of λ and γ {gain_lr:g} times that" if gain_lr != 1.0 else ""
        tables = describe_tables(run)
        label, fmt = f"learning rate {rate:g}{slower}{tables}", "^:" if tables else "s--" if slower else "o-"
        color = BLACK if slower else colours[rate]
        for axes, values in zip(panels, (np.abs(last["gamma_attention"]), last["entropy"]), strict=True):
            axes.plot(layers, values, fmt, color=color, linewidth=0.9, markersize=2.5, label=None if label in named else label)
        named.add(label)
    for axes in panels:
        axes.set(xlabel="layer", xticks=range(2, 1 + DEPTH, 4))
    panels[0].set(yscale="log", ylabel="|γ| of the attention branch")
    panels[1].set(ylabel="entropy of the attention (nats)", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def draw_causal(known: Known) -> Figure:
    """Left, a line for each seed of the finals: both arms read the same rows in the same order. Right, attention at the end of a run."""
    figure, (left, right) = make_panels(2, height=3.3)
    for (when, runs), colour in zip(CAUSAL_FINALS.items(), (GREY, BLUE), strict=True):
        for kind, style, text in (("train", "-", f"training text, mean of {WINDOW} steps"), ("test", "o--", "test text")):
            for seed in (1, 2):
                recover, preln = (known[f"{run}-{seed}"] for run in runs)
                steps, gaps = subtract_losses(recover, preln, kind)
                label = f"{text}, {when}" if seed == 1 else None
                left.plot(steps, gaps, style, color=colour, linewidth=0.9, markersize=2.5, label=label)
    left.axhline(0.0, color=BLACK, linewidth=0.6)
    left.axvline(SECOND_PASS, color=BLACK, linewidth=0.6, linestyle=":", label="second pass through the text begins")
    left.set(xlabel="step", ylabel="loss of Recover less Pre-LN (nats)")
    for label, (name, colour, style) in CAUSAL_ENTROPIES.items():
        last = [line for line in known[name].metrics if line["kind"] == "layers"][-1]
        right.plot(np.arange(1, 1 + len(last["entropy"])), last["entropy"], style, color=colour, label=label)
    right.set(xlabel="layer", ylabel="entropy of the attention (nats)", ylim=(0, None), xticks=range(2, 13, 2))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left")
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper right")
    return figure


def draw_copying(known: Known) -> Figure:
    """A panel for each side, a line for each seed of copying.toml."""
    figure, panels = make_panels(2, height=2.8)
    for axes, arm in zip(panels, ("recover", "preln"), strict=True):
        for suffix, style, label in (("", "-", "tables of variance 1"), ("-tables", "--", "tables of 0.02")):
            for seed in COPYING_SEEDS:
                lines = [line for line in known[f"{arm}-qk{suffix}-seed{seed}"].metrics if line["kind"] == "test"]
                steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
                axes.plot(steps, losses, style, color=COLOURS[arm], linewidth=1.0, label=label if seed == COPYING_SEEDS[0] else None)
        axes.set(xlabel="step", ylim=(3.7, 5.7), title=f"{NAMES[arm]} + QK-norm")
        axes.legend(loc="lower left")
    panels[0].set(ylabel="test loss of copying (nats)")
    return figure


def subtract_losses(one: RunRecord, other: RunRecord, kind: str) -> tuple[list[int], list[float]]:
    """The steps at which the losses of both runs are known, and their differences; training losses are averaged over `WINDOW` steps."""
    # A run that began again has its first steps twice: the later ones count.
    losses = [{line["step"]: line["loss"] for line in run.metrics if line["kind"] == kind} for run in (one, other)]
    gaps = {step: loss - losses[1][step] for step, loss in losses[0].items()}
    if kind == "test":
        return list(gaps), list(gaps.values())
    ends = range(WINDOW, 1 + max(gaps), WINDOW)
    return list(ends), [float(np.mean([gap for step, gap in gaps.items() if end - WINDOW < step <= end])) for end in ends]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", default=PICTURES, help=f"of {', '.join(PICTURES)}; all of them by default")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--numbers", type=Path, default=Path("docs/results/explosion-race.json"))
    given = parser.parse_args()
    if unknown := set(given.pictures) - set(PICTURES):
        parser.error(f"pictures must be among {', '.join(PICTURES)}, got {', '.join(sorted(unknown))}")
    masked = [("finals", draw_finals, FILES), ("branches", draw_branches, FILES)]
    for name, draw, files in (*masked, ("causal", draw_causal, CAUSAL_FILES), ("copying", draw_copying, "copying.json")):
        if name in given.pictures:
            with apply_style():
                save(draw(read_known(files=files)), given.out / f"race-{name}.png")
    if "theory" in given.pictures:
        rows = [count_exploding(name, float(factor), given.samples) for name in ATTENTION for factor in FACTORS]
        with apply_style():
            save(draw_theory(rows, read_known()), given.out / "race-theory.png")
        for name in ATTENTION:
            most = [row["factor"] for row in rows if row["attention"] == name and row["share"] >= 0.5]
            print(f"{name}: half of the paths explode from a factor of {most[0]:.3g} on" if most else f"{name}: none explodes")
        setting = {"m": M, "rho": RHO, "gamma": GAMMA, "T": DEPTH / WIDTH, "heads": HEADS, "seed": SEED}
        report(given.numbers, {"samples": given.samples, "setting": setting, "rows": rows})


def save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=220))


if __name__ == "__main__":
    main()
