"""The causal part of docs/race.md: the protocol as a program.

    python benchmarks/studies/causal_race.py tune --data data-1024 --out runs/causal --minutes 9
    python benchmarks/studies/causal_race.py choose --data data-1024 --out runs/causal --minutes 9
    python benchmarks/studies/causal_race.py exchange --data data-1024 --out runs/causal --minutes 9
    python benchmarks/studies/causal_race.py final --data data-1024 --out runs/causal --minutes 9 [--models]
    python benchmarks/studies/causal_race.py sample --out runs/causal
    python benchmarks/studies/causal_race.py context --data data-1024 --out runs/causal
    python benchmarks/studies/causal_race.py table --write

A run that docs/results/causal-race*.json or the folder `--out` has already is not made again. `sample` and `context` are for the machine
that made the finals: models are too large to keep. `final --models` repeats finals of earlier machines for them, under names of their own.
`context` writes context.json: the test loss by the token's position in its row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import race
import race_tables
from common import report
from race import Choice, Measure, OutOfTime, RunRecord, Track

from shaped.train.data.prepared import Data, load_data

FILES = "causal-race*.json"
ARMS = ("recover-qk", "preln-qk", "prerms-qk")  # the best three of the masked race
CONTEXT = 1024
SHAPE: dict[str, Any] = {"objective": "causal", "positions": "rope", "depth": 12, "heads": 12, "batch": 8}
TUNING = race.TUNING | SHAPE
FINAL: dict[str, Any] = SHAPE | {"steps": 10_000, "evaluate_every": 1000, "observe_every": 1000, "keep": 0}
SEEDS = (1, 2)
TABLES: Choice = ("tables", race.TABLES[1] | {"head_lr": 1.0})  # they slow the output matrix too: in place of a slower one
CHOICES: dict[str, tuple[Choice, ...]] = {  # as many for each arm; none was tried in the first finals
    "recover-qk": (race.FAST_TABLES, race.SLOW_HEAD, TABLES),
    "preln-qk": (race.SLOW_HEAD, race.QK_GAIN, race.CLIP),
    "prerms-qk": (race.SLOW_HEAD, race.QK_GAIN, race.CLIP),
}
EXCHANGED: dict[str, Choice] = {  # each side gets the kind of choice that the other has kept
    "recover-qk": race.QK_GAIN,
    "preln-qk": (
        "fast-tables",
        {"embedding_lr": 2.0},
    ),  # an entry of 0.02 moves by 0.4 of its size at the rate of 4e-3, as those of recover-qk do
    "prerms-qk": ("fast-tables", {"embedding_lr": 2.0}),
}
KINDS = ("final", "chosen", "exchanged", "repeat")  # the last is for its model alone: no table has it
PROMPTS = ("The history of the city begins", "She opened the door and", "The experiment shows that")


# This arm had no run of 20,000 steps yet when its causal runs were made.
STARTS = {"prerms-qk": "preln-qk"}

read_masked = cache(race.read_known)


def read_masked_settings(arm: str) -> dict[str, Any]:
    """Those of the best run in step 4 of the masked race's tuning: its later choices are choices here too."""
    start = STARTS.get(arm, arm)
    runs = [run for name, run in read_masked().items() if name.startswith(f"{start}-full-") and not race.is_later(start, name)]
    best = min(runs, key=race.read_loss)
    choices = race.read_choices(best)
    return race.set_rate(race.ARMS[arm].settings | choices, choices["lr"])


def tune(arm: str, measure: Measure) -> dict[str, Any]:
    """The masked race's settings with the best rate for causal models, found from the masked one by factors of 2 until it is inside."""
    return search_rate(arm, measure)[1]


def search_rate(arm: str, measure: Measure) -> tuple[float, dict[str, Any]]:
    """The settings of `tune`, after their loss."""
    start = read_masked_settings(arm)

    def run(rate: float) -> float:
        return measure(f"causal-{arm}-{rate:g}", TUNING | race.set_rate(start, rate))

    losses = {start["lr"]: run(start["lr"])}
    rate = race.extend(losses, run)
    return losses[rate], race.set_rate(start, rate)


def choose(arm: str, measure: Measure) -> dict[str, Any]:
    """Those of `tune` with the free choices that lower the loss."""
    return search_choices(arm, measure)[1]


def search_choices(arm: str, measure: Measure) -> tuple[float, dict[str, Any]]:
    """The settings of `choose`, after their loss."""
    loss, tuned = search_rate(arm, measure)
    return race.search_choices(f"causal-{arm}", CHOICES[arm], tuned, loss, lambda name, settings: measure(name, TUNING | settings))


def exchange(arm: str, measure: Measure) -> dict[str, Any]:
    """Those of `choose` with the other side's choice if it lowers the loss, and then again the best learning rate."""
    loss, chosen = search_choices(arm, measure)
    label, change = EXCHANGED[arm]

    def run(rate: float) -> float:
        return measure(f"causal-{arm}-{label}-{rate:g}", TUNING | race.set_rate(chosen | change, rate))

    losses = {chosen["lr"]: run(chosen["lr"])}
    if losses[chosen["lr"]] >= loss:
        return chosen
    return race.set_rate(chosen | change, race.extend(losses, run))


def name_final(arm: str, settings: dict[str, Any], seed: int) -> str:
    """The first finals had no choices, the second ones not that of the other side."""
    start = race.set_rate(read_masked_settings(arm), settings["lr"])
    kind = "chosen" if settings.items() - start.items() else "final"
    if race.has_choice(settings, start, EXCHANGED[arm][1]):
        kind = "exchanged"
    return f"causal-{arm}-{kind}-{settings['lr']:g}-{seed}"


def make_tables(known: dict[str, RunRecord]) -> str:
    """Markdown: test losses of tuning by arm and rate, and of choices, the finals, the lead."""
    tuning, finals, groups = list[list[str]](), list[list[str]](), list[race_tables.LongRuns]()
    for arm in ARMS:
        mine = {name.removeprefix(f"causal-{arm}-"): run for name, run in known.items() if name.startswith(f"causal-{arm}-")}
        short = {name: race.read_loss(run) for name, run in mine.items() if run.settings["steps"] == TUNING["steps"]}
        rates = sorted((name for name in short if race_tables.is_rate(name)), key=float)
        others = sorted(short.keys() - set(rates))  # the choices by their numbers, then the rates again
        if short:
            cells = (", ".join(f"{name}: {short[name]:.3f}" for name in names) for names in (rates, others))
            tuning.append([f"`{arm}`", *cells, f"{len(short)}"])
        for kind in KINDS[:-1]:
            long = [run for name, run in mine.items() if name.startswith(f"{kind}-") and (run.result is not None or run.why)]
            if long:
                settings = race_tables.format_settings(race.read_choices(long[0]))
                finals.append([f"`{arm}`", settings, *_format_finals(long)])
                groups.append(race_tables.LongRuns(arm, settings, False, long))
    lead = [race_tables.format_lead(sorted(groups, key=lambda group: group.mean))]
    tables = zip((TUNED, FINALS, LEAD), (tuning, finals, lead), strict=True)
    return "\n\n".join(race_tables.format_table(head, rows) for head, rows in tables)


TUNED = ["arm", "test loss by rate", "of choices", "runs"]
FINALS = ["arm", "settings", "seeds", "test loss", "95 % interval", "ms a step", "bits a byte"]
LEAD = ["best causal shaped arm", *race_tables.LEAD[1:]]


def _format_finals(runs: list[RunRecord]) -> list[str]:
    losses = [race.read_loss(run) for run in runs]
    bits = [[line["bits_per_byte"] for line in run.metrics if line["kind"] == "test"][-1] for run in runs if run.result is not None]
    pace = statistics.median(race_tables.milliseconds_a_step(run, CONTEXT) for run in runs)
    seeds = ", ".join(str(run.settings["seed"]) for run in runs)
    return [
        seeds,
        f"{statistics.mean(losses):.3f}",
        race_tables.format_interval(losses),
        f"{pace:.2f}",
        f"{statistics.mean(bits):.3f}" if bits else "",
    ]


def write_sample(run: Path) -> None:
    """Text that the model of a run writes after each prompt, sampled at temperature 0.8 among the 50 likeliest tokens."""
    from transformers import AutoTokenizer

    model, tokenizer = load_model(run), AutoTokenizer.from_pretrained(run)
    torch.manual_seed(0)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").to(model.device)
        written = model.generate(**ids, max_new_tokens=60, do_sample=True, temperature=0.8, top_k=50)
        print(f"{run.name}: {tokenizer.decode(written[0], skip_special_tokens=True)}", flush=True)


@torch.inference_mode()
def measure_context(run: Path, data: Data) -> list[dict[str, float]]:
    """The test loss by the token's position in its row: what uses the context gains more from the tokens before.

    Means over all rows of the positions 1, 2 and 3, 4 to 7, 8 to 15, ..., with their standard errors. Nothing predicts position 0, `[CLS]`.
    """
    model = load_model(run)
    rows = torch.from_numpy(data.rows("valid").astype("int64"))
    losses = []
    for some in rows.to(model.device).split(SHAPE["batch"]):
        with torch.autocast("cuda", torch.bfloat16, enabled=some.is_cuda):
            logits = model(input_ids=some[:, :-1]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.float().mT, some[:, 1:], reduction="none"))
    by_position = torch.cat(losses).double()
    firsts = [2**k for k in range(by_position.shape[1].bit_length())]
    parts = [by_position[:, first - 1 : 2 * first - 1].mean(-1) for first in firsts]
    errors = [part.std().item() / len(part) ** 0.5 for part in parts]
    return [{"first": at, "loss": part.mean().item(), "standard_error": e} for at, part, e in zip(firsts, parts, errors, strict=True)]


def find_models(out: Path, pattern: str) -> list[Path]:
    return sorted(model.parent for model in out.glob(f"{pattern}/model.safetensors"))


def has_model(run: Path) -> bool:
    return (run / "model.safetensors").exists()


def load_model(run: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import shaped.hf  # noqa: F401  makes the Auto classes know the model

    model: Any = AutoModelForCausalLM.from_pretrained(run)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "choose", "exchange", "final", "sample", "context", "table"))
    parser.add_argument("arms", nargs="*", default=ARMS, help=f"of {', '.join(ARMS)}; all of them by default")
    parser.add_argument("--data", type=Path, default=Path("data-1024"))
    parser.add_argument("--out", type=Path, default=Path("runs/causal"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--models", action="store_true", help="final: repeat also those whose model is not in the folder")
    parser.add_argument("--write", action="store_true", help="table: into docs/race.md too")
    given = parser.parse_args()
    if unknown := set(given.arms) - set(ARMS):
        parser.error(f"arms must be among {', '.join(ARMS)}, got {', '.join(sorted(unknown))}")
    if given.what == "table":
        tables = make_tables(race.read_known(given.out, files=FILES))
        print(tables)
        if given.write:
            race_tables.write_tables(race_tables.RESULTS.parent / "race.md", tables)
    elif given.what == "sample":
        for arm in given.arms:
            for kind in KINDS:
                for run in find_models(given.out, f"causal-{arm}-{kind}-*")[:1]:
                    write_sample(run)
    elif given.what == "context":
        runs = [run for arm in given.arms for run in find_models(given.out, f"causal-{arm}-*")]
        if not runs:
            parser.error(f"out must have models of the arms, got {given.out} without any")
        data = load_data(given.data)
        report(given.out / "context.json", {"runs": {run.name: measure_context(run, data) for run in runs}})
    else:
        search = {"tune": tune, "choose": choose}.get(given.what, exchange)
        seeds = SEEDS if given.what == "final" else ()
        _make_runs(Track(given.data, given.out, given.minutes, FILES), given.arms, search, seeds, given.models)


def _make_runs(
    track: Track, arms: tuple[str, ...], search: Callable[[str, Measure], dict[str, Any]], seeds: tuple[int, ...], models: bool
) -> None:
    try:
        found = dict[str, dict[str, Any]]()
        for arm in arms:
            found[arm] = search(arm, track.measure)
            print(f"{arm}: {found[arm]}", flush=True)
        for seed in seeds:  # seed by seed: if the time is over, the arms have equally many
            for arm, settings in found.items():
                name = name_final(arm, settings, seed)
                if models and name in track.known and not has_model(track.out / name):
                    name = name.replace(f"{arm}-", f"{arm}-repeat-", 1)
                    if not has_model(track.out / name):  # a record of an earlier repeat does not help
                        track.known.pop(name, None)
                track.measure(name, FINAL | settings | {"seed": seed, "save_model": True})
    except OutOfTime as error:
        print(f"{error}: the same command goes on", flush=True)


if __name__ == "__main__":
    main()
