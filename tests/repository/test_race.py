"""The race's program keeps to the protocol of docs/race.md."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scipy import stats

from programs import load_program
from shaped.train.run.settings import PRESETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def race() -> ModuleType:
    return load_program("studies/race")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_program("studies/race_tables")


@pytest.fixture(scope="module")
def known(race: ModuleType) -> dict[str, Any]:
    return race.read_known()


def tuned(race: ModuleType, loss: Callable[[dict[str, Any]], float]) -> tuple[dict[str, Any], list[str]]:
    """The settings that win if a run's loss is this function of its settings, and the names of the runs."""
    runs: list[str] = []

    def measure(name: str, settings: dict[str, Any]) -> float:
        runs.append(name)
        return loss(settings)

    return race.tune("preln-qk", measure), runs


def test_the_grid_grows_until_the_best_rate_is_inside(race: ModuleType):
    best, runs = tuned(race, lambda settings: abs(settings["lr"] - 6e-5) + settings["embedding_lr"] * 0)
    assert best["lr"] == 6.25e-5
    assert best["embedding_lr"] == pytest.approx(80.0)
    assert runs[5:8] == ["preln-qk-0.000125", "preln-qk-6.25e-05", "preln-qk-3.125e-05"]
    assert len(runs) == 8 + 5


def test_a_choice_is_kept_only_if_it_lowers_the_loss(race: ModuleType):
    def loss(settings: dict[str, Any]) -> float:
        gain = -0.1 * (settings.get("init") == "bert") + 0.1 * bool(settings.get("qk_gain")) - 0.1 * (settings.get("clip") == 1.0)
        gain += 0.1 * (settings.get("embedding_std") == 0.02)
        return abs(settings["lr"] - 1e-3) + gain

    best, runs = tuned(race, loss)
    assert best == {
        "model": "preln", "qk_norm": True, "lr": 1e-3, "embedding_lr": 5.0, "init": "bert", "embedding_std": 0.5**0.5, "clip": 1.0,
    }  # fmt: skip
    choices = ["preln-qk-1-embedding-lr", "preln-qk-2-bert", "preln-qk-3-qk-gain", "preln-qk-4-clip", "preln-qk-5-bert-tables"]
    assert runs[5:] == [*choices, "preln-qk-again-0.0005", "preln-qk-again-0.002"]


def test_the_rate_is_tuned_again_after_a_choice_was_kept(race: ModuleType):
    def loss(settings: dict[str, Any]) -> float:
        small = settings.get("embedding_std") == 0.02
        assert settings["embedding_lr"] == (1.0 if small else settings["embedding_lr"])
        return abs(settings["lr"] - (4e-3 if small else 1e-3)) - 0.1 * small

    best, runs = tuned(race, loss)
    assert (best["lr"], best["embedding_lr"], best["embedding_std"]) == (4e-3, 1.0, 0.02)
    assert [run.removeprefix("preln-qk-again-") for run in runs[10:]] == ["0.0005", "0.002", "0.004", "0.008"]


def test_rates_are_tuned_again_at_full_length_from_each_start(race: ModuleType):
    def loss(settings: dict[str, Any]) -> float:
        small, long = settings.get("embedding_std") == 0.02, settings.get("steps") == 20_000
        assert not long or settings["seed"] == 0
        assert settings["embedding_lr"] == 1.0 or not small
        slow = settings["embedding_lr"] == 1.0 and not small
        tables = 0.1 * (small if long else -small)  # small ones win the short runs alone
        better = 0.01 * (settings.get("init") == "bert")  # so that a straight line from this start reaches the best of the first
        return abs(math.log2(settings["lr"] / (4e-3 if long else 1e-3))) + tables + slow - better

    runs: list[str] = []

    def measure(name: str, settings: dict[str, Any]) -> float:
        runs.append(name)
        return loss(settings)

    best = race.lengthen("preln-qk", measure)
    assert (best["lr"], best["embedding_lr"], best.get("embedding_std")) == (4e-3, 1.25, None)
    full = [run.removeprefix("preln-qk-full-") for run in runs if "-full-" in run]
    rates = ["0.001", "0.002", "0.004", "0.008"]  # upward first: half of the start is never needed
    assert full == [*(f"{start}-{rate}" for start in ("tables", "tuned", "grid") for rate in rates[start == "tables" :])]
    runs.clear()
    race.lengthen("recover-qk", lambda name, settings: measure(name, settings | {"embedding_std": None}))
    assert {run.split("-full-")[1].split("-")[0] for run in runs if "-full-" in run} == {"tuned"}  # no choice was kept: one start


def test_later_choices_are_kept_if_they_lower_the_loss(race: ModuleType):
    """After each that is kept the rate is tuned again, upward first, and the next choice starts there."""

    def search(slower: float, faster: float) -> tuple[dict[str, Any], list[str]]:
        """With the best rate at 2e-3, 8e-3 for slower gains, and half of that with fast tables, and these gains of the loss."""
        runs: list[str] = []

        def measure(name: str, settings: dict[str, Any]) -> float:
            runs.append(name)
            slow, fast = settings.get("gain_lr") == 0.1, settings["embedding_lr"] * settings["lr"] > 0.05
            assert not (slow or fast) or (settings["steps"], settings["seed"]) == (20_000, 0)
            best = (8e-3 if slow else 2e-3) / (2.0 if fast else 1.0)
            return 9.0 + abs(math.log2(settings["lr"] / best)) - (slower if slow else 0.0) - (faster if fast else 0.0)

        best = race.refine("recover-qk", measure)
        return best, [run.removeprefix("recover-qk-full-") for run in runs if "slow-gains" in run or "tables" in run]

    slow = ["slow-gains-0.002", "slow-gains-0.004", "slow-gains-0.008", "slow-gains-0.016"]
    best, runs = search(slower=2.5, faster=0.0)
    assert (best["gain_lr"], best["lr"], best["embedding_lr"]) == (0.1, 8e-3, 0.625)
    assert runs == [*slow, "fast-tables-0.008"]
    best, runs = search(slower=2.5, faster=1.5)
    assert (best["gain_lr"], best["lr"], best["embedding_lr"]) == (0.1, 4e-3, 100.0)  # the tables keep the rate of the first try
    assert runs == [*slow, "fast-tables-0.008", "fast-tables-0.016", "fast-tables-0.004", "fast-tables-0.002"]
    assert race.name_final("recover-qk", best, 1) == "recover-qk-final-slow-gains-fast-tables-0.004-1"
    best, runs = search(slower=0.5, faster=1.5)
    assert (best.get("gain_lr"), best["lr"], best["embedding_lr"]) == (None, 1e-3, 100.0)
    assert runs == ["slow-gains-0.002", "fast-tables-0.002", "fast-tables-0.004", "fast-tables-0.001", "fast-tables-0.0005"]
    assert race.name_final("recover-qk", best, 1) == "recover-qk-final-fast-tables-0.001-1"
    gained = best | {"qk_gain": True}
    assert race.name_final("recover-qk", gained, 1) == "recover-qk-final-fast-tables-qk-gain-0.001-1"
    best, runs = search(slower=0.5, faster=0.5)
    assert (best["lr"], best["embedding_lr"], "gain_lr" in best) == (2e-3, 2.5, False)
    assert runs == ["slow-gains-0.002", "fast-tables-0.002"]
    assert race.name_final("recover-qk", best, 1) == "recover-qk-final-0.002-1"


def test_finals_have_the_settings_of_all_steps(race: ModuleType):
    searches = {arm: race.choose_search("final", arm) for arm in race.ARMS}
    assert {arm for arm, search in searches.items() if search is race.refine} == {"recover-qk", "learn-qk"}
    assert {arm for arm, search in searches.items() if search is race.lengthen} == {"preln-qk", "prerms-qk"}
    assert [race.choose_search(what, "recover-qk") for what in ("tune", "lengthen", "refine")] == [race.tune, race.lengthen, race.refine]


def test_finals_with_a_later_choice_are_new_runs(race: ModuleType, known: dict[str, Any]):
    """Also where the rate stays: the finals without the choice have been made."""
    first = {name: run for name, run in known.items() if "-fast-tables-" not in name or not name.startswith("recover-qk-")}

    def measure(name: str, settings: dict[str, Any]) -> float:
        loss = race.find_loss(first, name, race.TUNING | settings)
        return (3.0 if name == "recover-qk-full-fast-tables-0.002" else 9.0) if loss is None else loss

    found = race.refine("recover-qk", measure)
    assert (found["lr"], found["embedding_lr"]) == (2e-3, 50.0)
    name = race.name_final("recover-qk", found, 1)
    assert name == "recover-qk-final-fast-tables-0.002-1"
    assert race.find_loss(first, name, race.FINAL | found | {"seed": 1}) is None
    for arm in ("recover-qk", "preln-qk"):  # the normalised arm's small tables are a start of step 4
        tuned = race.lengthen(arm, measure)
        assert race.find_loss(first, race.name_final(arm, tuned, 1), race.FINAL | tuned | {"seed": 1}) is not None


def test_a_start_is_given_up_when_a_straight_line_stays_above_the_best(race: ModuleType):
    def search(goal: float, losses: dict[float, float]) -> tuple[float, list[float]]:
        made: list[float] = []

        def measure(rate: float) -> float:
            made.append(rate)
            return losses[rate]

        return race.extend({1e-3: losses[1e-3]}, measure, first=2.0, goal=goal), made

    losses = {5e-4: 3.5, 1e-3: 3.7, 2e-3: 3.8, 2.5e-4: 3.9}
    assert search(3.59, losses) == (1e-3, [2e-3])  # 3.7 - 0.1 is above the goal
    assert search(3.61, losses) == (5e-4, [2e-3, 5e-4, 2.5e-4])
    falling = {1e-3: 3.8, 2e-3: 3.7, 4e-3: 3.75}
    assert search(3.59, falling) == (2e-3, [2e-3])
    assert search(3.61, falling) == (2e-3, [2e-3, 4e-3])


def test_every_arm_makes_valid_settings(race: ModuleType, tmp_path: Path):
    for arm in race.ARMS.values():
        for _, change in arm.choices:
            given = race.TUNING | race.QUIET | race.set_rate(arm.settings, 1e-3) | change
            race.Settings.of(given | {"data": tmp_path, "out": tmp_path})


def test_a_record_with_other_settings_is_refused(race: ModuleType, known: dict[str, Any]):
    assert race.find_loss(known, "recover-0.001", {"lr": 1e-3, "steps": 4000}) == pytest.approx(5.065, abs=1e-3)
    with pytest.raises(ValueError, match=r"recover-0\.001 must have been made with steps = 20, got 4000"):
        race.find_loss(known, "recover-0.001", {"steps": 20})
    assert race.find_loss(known, "recover-0.001", {"evaluate_every": 7, "keep": 3})  # how it was logged changes nothing


def test_the_preset_is_the_best_arm(race: ModuleType, known: dict[str, Any]):
    for steps in (4000, 20_000):
        losses = {name: run.result.test_loss for name, run in known.items() if run.result is not None and run.settings["steps"] == steps}
        assert min(losses, key=losses.__getitem__).startswith("recover-qk-")
    search = race.choose_search("final", "recover-qk")

    def read(name: str, settings: dict[str, Any]) -> float:
        loss = race.find_loss(known, name, race.TUNING | settings)
        return math.inf if loss is None else loss  # a later choice that was not tried yet

    tuned = search("recover-qk", read)
    assert tuned == pytest.approx(PRESETS["best"])


def test_the_lead_is_that_of_the_best_finals_with_several_seeds(tables: ModuleType):
    def finals(arm: str, *losses: float, is_tuning: bool = False) -> Any:
        runs = [SimpleNamespace(result=SimpleNamespace(test_loss=loss)) for loss in losses]
        return tables.LongRuns(arm, "", is_tuning, runs)

    groups = [
        finals("learn-qk", 3.0, is_tuning=True), finals("recover-qk", 3.1), finals("recover-qk", 3.4, 3.5, 3.6),
        finals("recover", 3.7, 3.8), finals("prerms-qk", 3.6, 3.8), finals("preln", 3.9, 4.0),
    ]  # fmt: skip
    shaped, normalised, lead, (low, high) = tables.find_lead(groups)
    assert (shaped.arm, normalised.arm) == ("recover-qk", "prerms-qk")
    assert lead == pytest.approx(0.2)
    errors = 0.1**2 / 3, 0.2**2 / 2 / 2  # of the two means, squared
    degrees = sum(errors) ** 2 / (errors[0] ** 2 / 2 + errors[1] ** 2 / 1)  # Welch and Satterthwaite
    reach = stats.t.ppf(0.975, degrees) * math.sqrt(sum(errors))
    assert (low, high) == pytest.approx((0.2 - reach, 0.2 + reach))


def test_the_page_has_the_tables_of_the_results(tables: ModuleType, known: dict[str, Any], tmp_path: Path):
    """`python benchmarks/studies/race_tables.py --write` puts them there."""
    page, copy = ROOT / "docs" / "race.md", tmp_path / "race.md"
    text = page.read_text(encoding="utf-8")
    made = tables.make_tables(known)
    assert len(made.splitlines()) > 10
    assert all(table in text for table in made.split("\n\n"))
    copy.write_text(text.replace("3.445", "9.999"), encoding="utf-8")
    tables.write_tables(copy, made)
    assert copy.read_text(encoding="utf-8").count("3.445") == made.count("3.445")
    with pytest.raises(ValueError, match="must have one table with the columns arm to pace, got 0"):
        tables.write_tables(copy, "| arm | pace |\n|---|---|")
