"""The race of docs/race.md: the protocol as a program.

    python benchmarks/studies/race.py tune recover-qk preln-qk --data data --out runs/race --minutes 9
    python benchmarks/studies/race.py lengthen recover-qk preln-qk --data data --out runs/full
    python benchmarks/studies/race.py refine recover-qk --data data --out runs/refine
    python benchmarks/studies/race.py final recover-qk --data data --out runs/finals --seeds 1 2 3

A run that docs/results/race*.json or the folder `--out` has already is not made again. `shaped collect` turns the folder into such a file,
and race_tables.py writes the tables of the page.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shaped.train.run.loop import pretrain
from shaped.train.run.settings import DEFAULTS, TAU0, Settings
from shaped.train.run.stopping import Diverged, Stopped
from shaped.train.run_records import RunRecord, read_folder, read_runs
from shaped.train.step.stepper_cache import StepperCache

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILES = "race*.json"
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
EMBEDDING_LR = 5e-3  # of the embedding tables, at every learning rate of the rest
VARIANCE_ONE = 0.5**0.5  # standard deviation of the tables: tokens + positions have variance 1, whatever the initialisation of the rest
DIVERGED = math.log(32_000)
TOKENS = 128  # of a row
TUNING: dict[str, Any] = {"steps": 4000, "evaluate_every": 4000, "observe_every": 1000, "keep": 0, "seed": 0}
# Three minutes of training: a checkpoint of 1.8 GB takes longer to write than it saves.
FINAL: dict[str, Any] = {"steps": 20_000, "evaluate_every": 1000, "observe_every": 5000, "keep": 0}
LONG: dict[str, Any] = FINAL | {"seed": 0, "evaluate_every": 10_000, "observe_every": 10_000}  # tuning looks at the last test loss only
# Of these arms an earlier probe had a better run than the grid, with small tables at the rate of the rest: they get it as a third start.
PROBED = {"preln-qk": 2e-3, "prerms-qk": 2e-3}
LENGTHENED = ("recover-qk", "learn-qk", "preln-qk", "prerms-qk")  # the two best arms of each side after 4,000 steps
REFINED = ("recover-qk", "learn-qk")  # the shaped ones of them
POSSIBLE = {"lengthen": LENGTHENED, "refine": REFINED}
LOGGING = {about.name for about in fields(Settings) if about.metadata["affects"] == "logging"}  # not part of what a run finds
QUIET: dict[str, Any] = {"save_model": False, "tensorboard": False}

Choice = tuple[str, dict[str, Any]]
Measure = Callable[[str, dict[str, Any]], float]
"""The test loss of a run by its name and settings."""

SLOW_EMBEDDING: Choice = ("embedding-lr", {"embedding_lr": 1.0})
BERT: Choice = ("bert", {"init": "bert", "embedding_std": VARIANCE_ONE})
GPT2: Choice = ("gpt2", {"init": "gpt2", "embedding_std": VARIANCE_ONE})
CLIP: Choice = ("clip", {"clip": 1.0})
SMALL_TABLES: Choice = ("bert-tables", {"init": "bert", "embedding_std": 0.02, "embedding_lr": 1.0})
GAMMA: Choice = ("gamma", {"gamma": 0.2})
QK_GAIN: Choice = ("qk-gain", {"qk_gain": True})
SLOW_GAINS: Choice = ("slow-gains", {"gain_lr": 0.1})
TABLES: Choice = ("tables", {"embedding_std": 0.02, "embedding_lr": 1.0})
SLOW_HEAD: Choice = ("slow-head", {"head_lr": 0.1})
FAST_TABLES: Choice = ("fast-tables", {"embedding_lr": 50.0})
LATER = (SLOW_GAINS, FAST_TABLES, QK_GAIN)


@dataclass(frozen=True)
class Arm:
    """Settings that differ from the defaults, and the free choices in their order."""

    settings: dict[str, Any]
    choices: tuple[Choice, ...]


def _with_qk(arm: dict[str, Any]) -> dict[str, Any]:
    return arm | {"qk_norm": True}


PRELN, LEARN = {"model": "preln"}, {"schedule": "learn"}
ARMS = {
    "preln": Arm(PRELN, (SLOW_EMBEDDING, BERT, GPT2, CLIP, SMALL_TABLES)),
    "preln-qk": Arm(_with_qk(PRELN), (SLOW_EMBEDDING, BERT, QK_GAIN, CLIP, SMALL_TABLES)),
    "prerms-qk": Arm(_with_qk(PRELN | {"norm": "rms"}), (SLOW_EMBEDDING, BERT, QK_GAIN, CLIP, SMALL_TABLES)),
    "dyt": Arm({"model": "dyt"}, (SLOW_EMBEDDING, BERT, ("alpha", {"dyt_alpha": 0.25}), CLIP, SMALL_TABLES)),
    "recover": Arm({}, (SLOW_EMBEDDING, GAMMA, ("tau0", {"tau0": 0.04}), CLIP)),
    "learn": Arm(LEARN, (SLOW_EMBEDDING, GAMMA, ("shaping-lr", {"shaping_lr": 10.0}), CLIP)),
    "recover-qk": Arm(_with_qk({}), (SLOW_EMBEDDING, GAMMA, ("tau0", {"tau0": 0.01}), CLIP)),
    "learn-qk": Arm(_with_qk(LEARN), (SLOW_EMBEDDING, GAMMA, ("tau0", {"tau0": 0.01}), CLIP)),
}


def tune(name: str, measure: Measure, *, free: bool = True) -> dict[str, Any]:
    """The arm's tuned settings: the best learning rate of the grid, each choice that lowers the loss, and again the best learning rate.

    Without `free` the grid alone.
    """
    arm = ARMS[name]
    losses = {rate: measure(f"{name}-{rate:g}", set_rate(arm.settings, rate)) for rate in RATES}
    rate = extend(losses, lambda rate: measure(f"{name}-{rate:g}", set_rate(arm.settings, rate)))
    return search_choices(name, arm.choices if free else (), set_rate(arm.settings, rate), losses[rate], measure)[1]


def search_choices(
    name: str, choices: tuple[Choice, ...], kept: dict[str, Any], best: float, measure: Measure
) -> tuple[float, dict[str, Any]]:
    """These settings, whose loss is `best`, with each choice that lowers the loss, and, if one was kept, again the best learning rate.

    Their loss stands before them.
    """
    start = kept
    for number, (label, change) in enumerate(choices, 1):
        loss = measure(f"{name}-{number}-{label}", kept | change)
        if loss < best:
            best, kept = loss, kept | change
    if kept == start:
        return best, start
    losses = {kept["lr"]: best}
    rate = extend(losses, lambda rate: measure(f"{name}-again-{rate:g}", set_rate(kept, rate)))
    return losses[rate], set_rate(kept, rate)


def lengthen(name: str, measure: Measure) -> dict[str, Any]:
    """The best settings at the finals' length, with the rate tuned again from the grid's best, the tuned settings and a probe's."""
    return search_length(name, measure)[1]


def search_length(name: str, measure: Measure) -> tuple[float, dict[str, Any]]:
    """The settings of `lengthen`, after their loss."""
    starts: dict[str, dict[str, Any]] = {}  # where the best is likely comes first
    if name in PROBED:
        label, change = TABLES
        starts[label] = set_rate(ARMS[name].settings | change, PROBED[name])
    starts |= {"tuned": tune(name, measure), "grid": tune(name, measure, free=False)}
    if starts["grid"] == starts["tuned"]:
        del starts["grid"]
    found: list[tuple[float, dict[str, Any]]] = []
    for label, start in starts.items():

        def run(rate: float, label: str = label, start: dict[str, Any] = start) -> float:
            return measure(f"{name}-full-{label}-{rate:g}", LONG | set_rate(start, rate))

        losses = {start["lr"]: run(start["lr"])}
        goal = min((loss for loss, _ in found), default=math.inf)
        rate = extend(losses, run, first=2.0 if name in PROBED else 0.5, goal=goal)
        found.append((losses[rate], set_rate(start, rate)))
    return min(found, key=lambda pair: pair[0])


def refine(name: str, measure: Measure) -> dict[str, Any]:
    """The best settings at the finals' length with each later choice that lowers the loss, and the rate tuned again after each."""
    goal, best = search_length(name, measure)
    for label, change in LATER:

        def run(rate: float, label: str = label, start: dict[str, Any] = best | change) -> float:
            return measure(f"{name}-full-{label}-{rate:g}", LONG | set_rate(start, rate))

        losses = {best["lr"]: run(best["lr"])}
        if losses[best["lr"]] < goal:
            rate = extend(losses, run, first=2.0)
            goal, best = losses[rate], set_rate(best | change, rate)
    return best


def extend(losses: dict[float, float], measure: Callable[[float], float], *, first: float = 0.5, goal: float = math.inf) -> float:
    """The best learning rate, after the grid has grown by factors of 2 until the best is inside.

    A grid of one rate grows by `first` times that rate first. The search is given up if the best two losses, continued by a straight line
    to the next rate, do not reach `goal`.
    """
    if len(losses) == 1:
        rate = first * next(iter(losses))
        losses[rate] = measure(rate)
    while (rate := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        inner, outer = (2 * rate, rate / 2) if rate == min(losses) else (rate / 2, 2 * rate)
        if 2 * losses[rate] - losses[inner] > goal:
            break
        losses[outer] = measure(outer)
    return rate


def set_rate(settings: dict[str, Any], rate: float) -> dict[str, Any]:
    """With this learning rate. The rate of the embedding tables stays, unless a choice has tied it to that of the rest."""
    factor = settings.get("embedding_lr")
    if factor != 1.0:
        factor = (EMBEDDING_LR if factor is None else factor * settings["lr"]) / rate
    return settings | {"lr": rate, "embedding_lr": factor}


class OutOfTime(Exception):
    pass


class Missing(Exception):
    """A run that has not been made."""


def find_loss(known: dict[str, RunRecord], name: str, settings: dict[str, Any]) -> float | None:
    """The test loss of a run that was made with these settings; ln 32,000 if it diverged; None if there is no such run."""
    found = known.get(name)
    if found is None or (found.result is None and not found.why):
        return None
    for key in settings.keys() - LOGGING:
        value = settings[key]
        # Records of older runs lack the settings that came later; they had today's defaults.
        if (there := found.settings.get(key, DEFAULTS[key])) != value and not _is_close(there, value):
            raise ValueError(f"{name} must have been made with {key} = {value}, got {there} in its record")
    return read_loss(found)


def read_loss(run: RunRecord) -> float:
    """Of a run that has ended: its test loss, ln 32,000 if it diverged."""
    return DIVERGED if run.result is None else run.result.test_loss


def _is_close(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float | int) and math.isclose(one, other, rel_tol=1e-9)


def read_known(*places: Path, files: str = FILES) -> dict[str, RunRecord]:
    """The race's finished runs by name."""
    ended = [path.parent for place in places for name in ("result.json", "diverged.json") for path in place.glob(f"*/{name}")]
    runs = read_runs([*sorted(RESULTS.glob(files)), *sorted(ended)])
    return {run.name.rsplit("/", 1)[-1]: run for run in runs if run.result is not None or run.why}


class Track:
    """Makes runs that are not known yet, one after another, until the time is over."""

    def __init__(self, data: Path, out: Path, minutes: float, files: str = FILES):
        self.data, self.out, self.ends = data, out, time.monotonic() + 60 * minutes
        self.known = read_known(out, files=files)
        self.steppers, self.pace = StepperCache(), 0.0
        """Seconds a step of the last run, its start included."""

    def measure(self, name: str, settings: dict[str, Any]) -> float:
        if (loss := find_loss(self.known, name, settings)) is not None:
            return loss
        left = self.ends - time.monotonic()
        # Without checkpoints an unfinished run is lost.
        if left < self.pace * settings["steps"] and not settings.get("keep"):
            raise OutOfTime(f"no time for {name}")
        began = time.monotonic()
        run = Settings.of(QUIET | settings | {"data": self.data, "out": self.out / name, "minutes": max(left, 1.0) / 60})
        try:
            loss = pretrain(run, steppers=self.steppers).test_loss
        except Diverged as error:
            print(f"{name}: {error}")
            loss = DIVERGED
        except Stopped as error:
            raise OutOfTime(str(error)) from None
        self.known[name] = read_folder(run.out)
        seconds = time.monotonic() - began
        self.pace = seconds / settings["steps"]
        print(f"{name}: {loss:.4f} ({seconds:.0f} s)", flush=True)
        return loss


def is_later(arm: str, name: str) -> bool:
    """Is this a run of a later choice? The normalised arms have small tables too, as their third start."""
    return arm in REFINED and name.startswith(tuple(f"{arm}-full-{label}-" for label, _ in LATER))


def has_choice(settings: dict[str, Any], start: dict[str, Any], change: dict[str, Any]) -> bool:
    """Do the settings have the choice that the start has not? The rate of tables is a factor of the rest's: it follows that."""
    return all(settings.get(key) != start.get(key) and not _is_close(settings.get(key), start.get(key)) for key in change)


def name_final(arm: str, settings: dict[str, Any], seed: int) -> str:
    """With the later choices that were kept: the finals without them stay, whose rate may be the same."""
    start = set_rate(ARMS[arm].settings, settings["lr"])
    kept = [label for label, change in LATER if arm in REFINED and has_choice(settings, start, change)]
    return "-".join([arm, "final", *kept, f"{settings['lr']:g}", f"{seed}"])


RATE_FACTORS = ("embedding_lr", "gain_lr", "head_lr", "shaping_lr")
CHOSEN = ("lr", *RATE_FACTORS, "clip", "init", "embedding_std", "qk_gain", "gamma", "tau0", "dyt_alpha")


def read_choices(run: RunRecord) -> dict[str, Any]:
    """The learning rate, and what else was tuned and is not the default."""
    usual = DEFAULTS | {"lr": None, "tau0": run.settings["width"] ** -0.5 if run.settings["qk_norm"] else TAU0}
    return {key: run.settings[key] for key in CHOSEN if run.settings[key] != usual[key]}


def choose_search(what: str, arm: str) -> Callable[[str, Measure], dict[str, Any]]:
    """Finals have the settings that all steps of the protocol found."""
    if what != "final":
        return {"tune": tune, "lengthen": lengthen, "refine": refine}[what]
    if arm in REFINED:
        return refine
    return lengthen if arm in LENGTHENED else tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "lengthen", "refine", "final"))
    parser.add_argument("arms", nargs="*", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    given = parser.parse_args()
    for name in given.arms:
        if name not in ARMS:
            parser.error(f"arms must be among {', '.join(ARMS)}, got {name}")
        if given.what in POSSIBLE and name not in POSSIBLE[given.what]:
            parser.error(f"arms must be among {', '.join(POSSIBLE[given.what])} for {given.what}, got {name}")
    track = Track(given.data, given.out, given.minutes)
    try:
        found: dict[str, dict[str, Any]] = {}
        for name in given.arms:
            found[name] = choose_search(given.what, name)(name, lambda run, settings: track.measure(run, TUNING | settings))
            print(f"{name}: {found[name]}", flush=True)
        for seed in given.seeds if given.what == "final" else ():  # seed by seed: if the time is over, the arms have equally many
            for name, settings in found.items():
                track.measure(name_final(name, settings, seed), FINAL | settings | {"seed": seed})
    except OutOfTime as error:
        print(f"{error}: the same command goes on", flush=True)


if __name__ == "__main__":
    main()
