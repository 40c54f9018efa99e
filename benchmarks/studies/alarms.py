"""Does `shaped.watch` warn before a run dies? Small models at learning rates from sound to far too large.

    python benchmarks/studies/alarms.py --half judging --processes 16 --rows out/alarm-rows --out docs/results/alarms.json
    python benchmarks/studies/alarms.py --rows out/alarm-rows --judge --half tuning
    python benchmarks/studies/alarms.py --cost

The runs are causal language models of width 64 on synthetic text, 1,200 steps, watched every 10. Runs of the tuning half were seen while
the rules, what a death is and the plan of the runs were chosen: its numbers show no more than that the rules fit it. The judging half has
other seeds, and sound runs of its own: 0 false alarms of 75 bound their share by 3.9 % (95 %, one-sided). It was run once, with all
of this fixed: docs/watch.md.

Runs whose rows are in `--rows` are not made again: a command that was killed loses only the runs that it was at.
`--judge` applies the rules to the rows that are there already, and makes none.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import report

import shaped
from shaped.files import write_json
from shaped.intervals import exact_interval, share_interval
from shaped.nn.blocks import NormBlock, ShapedTransformerBlock
from shaped.nn.modules import ShapedFeedForwardBlock, ShapedSelfAttention
from shaped.watching.alarms import Alarm, Alarms
from shaped.watching.rows import Row

VOCABULARY, TOKENS, BATCH, WIDTH, HEADS = 64, 32, 8, 64, 4
STEPS, EVERY = 1200, 10
MEAN = 20  # steps of a smoothed loss
LOSS_RISE = 0.5
"""Diverged: from the death on, the smoothed loss stays this much above its lowest value, in nats, or it is not finite."""
ENTROPY = 0.02
"""Collapsed: from the death on, the entropy of a layer stays below this share of that of uniform attention."""
CORRELATION = 0.99
"""Also collapsed: from the death on, the mean correlation of the tokens behind the last layer stays above this."""
AT_ONCE = 50
"""A run that is dead by this step, the end of the warm-up, never lived: it is counted apart."""
LEAST_LEAD, SHARE_OF_RUN = 200, 0.1
"""A warning in time comes so many steps before the death, or this share of the run."""


@dataclass(frozen=True)
class Setting:
    kind: Literal["pre", "post", "shaped"]
    qk_norm: bool
    depth: int
    lr: float
    ramp: bool
    """The learning rate grows up to the last step, or over 50 steps."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}{'-qk' * self.qk_norm}-{self.depth}-{self.lr:g}-{'ramp' if self.ramp else 'constant'}-{self.seed}"

    @property
    def half(self) -> str:
        """Odd seeds tune, even ones judge."""
        return "tuning" if self.seed % 2 else "judging"


Kind = Literal["pre", "post", "shaped"]
SOUND_RATES: dict[Kind, float] = {"pre": 2e-3, "post": 1e-3, "shaped": 1e-3}
SOUND = ((1.0, False), (2.0, True))
"""Factors of the sound rate, and whether the rate is ramped."""
LARGE, FEW_LARGE = ((10.0, False), (15.0, False), (30.0, True), (50.0, True)), ((15.0, False), (50.0, True))
RAMPED = ((25.0, True), (50.0, True))
"""For those that die at once at a large constant rate."""
PLAN: dict[tuple[Kind, bool, int], tuple[tuple[float, bool], ...]] = {
    ("pre", False, 4): SOUND + LARGE,
    ("pre", False, 12): SOUND + LARGE,
    ("pre", False, 24): SOUND[:1] + FEW_LARGE,
    ("pre", True, 8): SOUND + FEW_LARGE,  # with QK-norm, runs at a large rate stall and live: an alarm would be a false one
    ("post", False, 4): SOUND + RAMPED,
    ("shaped", False, 6): SOUND + LARGE,
    ("shaped", False, 12): SOUND + RAMPED,
}
"""Architecture, QK-norm and depth → learning rates."""
MORE_SOUND: tuple[tuple[Kind, bool], ...] = (("pre", False), ("pre", True), ("post", False), ("shaped", False))
"""Of the judging half alone, of depth 4: without them it has 15 runs that are expected to live, too few to bound the false alarms."""
MORE_RATES, MORE_SEEDS = ((0.5, False), *SOUND), 5


def list_settings() -> list[Setting]:
    """126 runs: each of the plan with one seed of each half, and 60 sound ones that judge."""
    planned = [
        Setting(kind, qk_norm, depth, factor * SOUND_RATES[kind], ramp, 100 * number + 10 * share + half)
        for number, ((kind, qk_norm, depth), rates) in enumerate(PLAN.items())
        for share, (factor, ramp) in enumerate(rates)
        for half in (0, 1)
    ]
    more = [
        Setting(kind, qk_norm, 4, factor * SOUND_RATES[kind], ramp, 1000 + 100 * number + 10 * share + 2 * repeat)
        for number, (kind, qk_norm) in enumerate(MORE_SOUND)
        for share, (factor, ramp) in enumerate(MORE_RATES)
        for repeat in range(MORE_SEEDS)
    ]
    return planned + more


class Model(nn.Module):
    def __init__(self, setting: Setting):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(make_block(setting) for _ in range(setting.depth))
        self.norm = nn.Identity() if setting.kind == "post" else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_block(setting: Setting) -> nn.Module:
    is_shaped = setting.kind == "shaped"
    attention = ShapedSelfAttention(WIDTH, HEADS, causal=True, shaped=is_shaped, qk_norm=setting.qk_norm)
    feedforward = ShapedFeedForwardBlock(WIDTH, 4 * WIDTH, shaped=is_shaped)
    return (
        ShapedTransformerBlock(attention, feedforward, 0.3) if setting.kind == "shaped" else NormBlock(attention, feedforward, setting.kind)
    )


def make_text(seed: int, chains: int = 256, length: int = 800) -> Tensor:
    """[chains, length]: a random Markov chain. The next token depends on the last one, and on the one before modulo 8."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.softmax(3.0 * torch.randn(8, VOCABULARY, VOCABULARY, generator=generator), -1).cumsum(-1)
    before, last = (torch.randint(VOCABULARY, (chains,), generator=generator) for _ in range(2))
    text = []
    for _ in range(length):
        drawn = (table[before % 8, last] < torch.rand(chains, 1, generator=generator)).sum(-1).clamp(max=VOCABULARY - 1)
        text.append(drawn)
        before, last = last, drawn
    return torch.stack(text, 1)


def draw_batch(text: Tensor, generator: torch.Generator, batch: int = BATCH) -> Tensor:
    chains = torch.randint(len(text), (batch, 1), generator=generator)
    starts = torch.randint(text.shape[1] - TOKENS, (batch, 1), generator=generator)
    return text[chains, starts + torch.arange(TOKENS + 1)]


def compute_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(setting: Setting, steps: int) -> tuple[list[Row], list[float], list[Alarm]]:
    """The watched rows, the loss of every step, and the alarms. A run goes on after alarms, so that its death is seen."""
    torch.set_num_threads(1)
    text = make_text(0)
    torch.manual_seed(setting.seed)
    model, generator = Model(setting), torch.Generator().manual_seed(setting.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr)
    losses: list[float] = []
    with shaped.watch(model, every=EVERY) as watcher:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = setting.lr * ((step + 1) / steps if setting.ramp else min(1.0, (step + 1) / 50))
            loss = compute_loss(model, draw_batch(text, generator))
            optimizer.zero_grad()
            loss.backward()
            watcher.step(loss)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            optimizer.step()
    return watcher.rows, losses, watcher.alarms


def find_death(rows: list[Row], losses: list[float]) -> tuple[int, str] | None:
    """The step and its kind; None for a run that lives."""
    deaths = []
    smooth = [sum(losses[max(0, end - MEAN) : end]) / len(losses[max(0, end - MEAN) : end]) for end in range(1, len(losses) + 1)]
    lowest, beyond = math.inf, []
    for loss in smooth:
        beyond.append(not loss <= lowest + LOSS_RISE if math.isfinite(lowest) else False)
        lowest = min(lowest, loss)
    if beyond[-1]:
        deaths.append((first_of_last_stretch(beyond), "diverged"))
    for kind, is_dead in (("entropy", has_no_entropy), ("rank", has_no_rank)):
        flags = [is_dead(row) for row in rows]
        if flags[-1]:
            deaths.append((rows[first_of_last_stretch(flags)].step, kind))
    return min(deaths, default=None)


def has_no_entropy(row: Row) -> bool:
    return min(row.quantities["entropy_share"].values()) < ENTROPY


def has_no_rank(row: Row) -> bool:
    return [*row.quantities["correlation"].values()][-1] > CORRELATION


def first_of_last_stretch(flags: list[bool]) -> int:
    """The index from which on all flags are True."""
    return max((number + 1 for number, flag in enumerate(flags) if not flag), default=0)


def make_run(setting: Setting, steps: int, folder: Path | None) -> dict[str, Any]:
    """Trains, and writes the rows. A run that is there already is only judged."""
    if folder is not None and is_done(folder / f"{setting.name}.json", setting, steps):
        return judge_run(folder / f"{setting.name}.json")
    began = time.process_time()
    rows, losses, alarms = train(setting, steps)
    about = {"setting": asdict(setting), "steps": steps, "seconds": round(time.process_time() - began, 1)}
    if folder is not None:
        content = about | {"losses": losses_to_json(losses), "rows": [row.to_json() for row in rows]}
        write_json(folder / f"{setting.name}.json", content)
    return record(setting, rows, losses, alarms) | {"seconds": about["seconds"]}


def is_done(path: Path, setting: Setting, steps: int) -> bool:
    if not path.exists():
        return False
    content = json.loads(path.read_text())
    return (content["setting"], content.get("steps")) == (asdict(setting), steps)


def make_runs(settings: list[Setting], steps: int, folder: Path | None, processes: int) -> list[dict[str, Any]]:
    """The deepest first, which take longest. In the order of the settings."""
    runs: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(make_run, one, steps, folder) for one in sorted(settings, key=lambda one: -one.depth)]
        for done in as_completed(waiting):
            run = done.result()
            runs[run["name"]] = run
            print(f"{len(runs)} of {len(settings)}: {run['name']}", file=sys.stderr)
    return [runs[one.name] for one in settings]


def losses_to_json(losses: list[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses]


def judge_run(path: Path) -> dict[str, Any]:
    """The rules on rows that were written."""
    content = json.loads(path.read_text())
    rows = [Row.from_json(row) for row in content["rows"]]
    losses = [math.nan if loss is None else loss for loss in content["losses"]]
    rules = Alarms()
    alarms = [alarm for row in rows for alarm in rules.check(row)]
    return record(Setting(**content["setting"]), rows, losses, alarms) | {"seconds": content.get("seconds")}


def record(setting: Setting, rows: list[Row], losses: list[float], alarms: list[Alarm]) -> dict[str, Any]:
    death = find_death(rows, losses)
    return {
        "name": setting.name,
        "half": setting.half,
        **asdict(setting),
        "death": death[0] if death else None,
        "death_kind": death[1] if death else None,
        "last_loss": losses_to_json([sum(losses[-MEAN:]) / len(losses[-MEAN:])])[0],
        "first_alarm": alarms[0].step if alarms else None,
        "first_kind": alarms[0].kind if alarms else None,
        "alarms": [{"step": alarm.step, "kind": alarm.kind, "layer": alarm.layer} for alarm in alarms],
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    at_once = [run for run in runs if run["death"] is not None and run["death"] <= AT_ONCE]
    dead, alive = [run for run in runs if run["death"] is not None and run not in at_once], [run for run in runs if run["death"] is None]
    warned = [run for run in dead if run["first_alarm"] is not None and run["first_alarm"] < run["death"]]
    timely = [run for run in warned if run["death"] - run["first_alarm"] >= min(LEAST_LEAD, SHARE_OF_RUN * run["death"])]
    early = [run for run in warned if run["death"] - run["first_alarm"] >= SHARE_OF_RUN * STEPS]
    false = [run for run in alive if run["first_alarm"] is not None]
    return {
        "runs": len(runs),
        "died_at_once": len(at_once),
        "died": len(dead),
        "warned_before_death": count(len(warned), len(dead)),
        "warned_in_time": count(len(timely), len(dead)),  # 10 % of the steps up to the death
        "warned_early": count(len(early), len(dead)),  # 10 % of the planned steps
        "median_lead": statistics.median(run["death"] - run["first_alarm"] for run in warned) if warned else None,
        "false_alarms": count(len(false), len(alive)),
        "false_alarms_at_most": round(exact_interval(len(false), len(alive))[1], 4) if alive else None,  # 95 %, one-sided
    }


def count(some: int, all: int) -> dict[str, Any]:
    return {"count": some, "of": all} | ({"interval": [round(bound, 3) for bound in share_interval(some, all)]} if all else {})


def print_table(runs: list[dict[str, Any]]) -> None:
    print(f"{'run':34} {'half':8} {'death':>6} {'kind':10} {'alarm':>6} {'lead':>5}  first alarm")
    for run in runs:
        death, alarm = run["death"], run["first_alarm"]
        lead = "" if death is None or alarm is None else death - alarm
        shown = ["" if value is None else value for value in (death, run["death_kind"], alarm, run["first_kind"])]
        print(f"{run['name']:34} {run['half']:8} {shown[0]:>6} {shown[1]:10} {shown[2]:>6} {lead:>5}  {shown[3]}")


def measure_cost(every: int = 100, rounds: int = 5) -> dict[str, Any]:
    """CPU seconds of a watched step and of others, in one run: the share that watching adds at this interval."""
    torch.set_num_threads(1)
    found = []
    for depth in (4, 12, 24):
        setting = Setting("pre", False, depth, 1e-3, False, 0)
        torch.manual_seed(0)
        model, text, generator = Model(setting), make_text(0), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        idle = []
        with shaped.watch(model, every=5) as watcher:
            for step in range(5 * 10 * rounds):
                ids, began = draw_batch(text, generator, 4 * BATCH), time.process_time()
                loss = compute_loss(model, ids)
                loss.backward()
                before = time.process_time()
                watcher.step(loss)
                if step % 5:
                    idle.append(time.process_time() - before)
                optimizer.step()
                optimizer.zero_grad()
                if step >= 10:
                    seconds[step % 5 == 0].append(time.process_time() - began)
        watched, plain, waiting = (statistics.median(one) for one in (seconds[True], seconds[False], idle))
        share = ((watched - plain) / every + waiting) / (plain - waiting)
        found.append({"depth": depth, "step_s": plain, "watched_step_s": watched, "idle_s": waiting, "share": share})
        print(f"depth {depth}: a step {1e3 * plain:.1f} ms, a watched one {1e3 * watched:.1f} ms: {share:.2%} at an interval of {every}")
    return {"every": every, "batch": 4 * BATCH, "tokens": TOKENS, "width": WIDTH, "models": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--half", choices=("tuning", "judging"), help="runs of this half only")
    parser.add_argument("--rows", type=Path, help="folder for the rows of every run; runs that are there are not made again")
    parser.add_argument("--judge", action="store_true", help="make no runs: judge those in --rows")
    parser.add_argument("--cost", action="store_true", help="measure what watching costs, in place of the runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.judge and given.rows is None:
        parser.error("--rows must be the folder of the runs to judge, got none")
    if given.cost:
        result: dict[str, Any] = {"cost": measure_cost()}
    else:
        settings = [one for one in list_settings() if given.only in one.name and given.half in (None, one.half)]
        if given.judge:
            runs = [judge_run(given.rows / f"{one.name}.json") for one in settings if (given.rows / f"{one.name}.json").exists()]
        else:
            runs = make_runs(settings, given.steps, given.rows, given.processes)
        print_table(runs)
        summary = {half: summarise([run for run in runs if run["half"] == half]) for half in ("tuning", "judging")}
        print(json.dumps(summary, indent=1))
        result = {"steps": given.steps, "every": EVERY, "summary": summary, "runs": runs}
    if given.out:
        report(given.out, result)


if __name__ == "__main__":
    main()
