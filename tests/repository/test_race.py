"""The race's program keeps to the protocol of docs/race.md."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import shaped.hf
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
def causal_race() -> ModuleType:
    return load_program("studies/causal_race")


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


def test_causal_arms_keep_the_masked_settings_but_the_rate(causal_race: ModuleType, tmp_path: Path):
    starts = {arm: causal_race.read_masked_settings(arm) for arm in causal_race.ARMS}
    assert starts["recover-qk"] == pytest.approx(PRESETS["best"])
    assert starts["preln-qk"] == {"model": "preln", "qk_norm": True, "lr": 2e-3, "embedding_lr": 1.0, "embedding_std": 0.02}
    assert starts["prerms-qk"] == starts["preln-qk"] | {"norm": "rms"}
    for arm, masked in starts.items():
        runs: dict[str, dict[str, Any]] = {}

        def measure(name: str, settings: dict[str, Any], runs: dict[str, dict[str, Any]] = runs) -> float:
            runs[name] = settings
            return abs(settings["lr"] - 1e-3)

        found = causal_race.tune(arm, measure)
        assert found["lr"] == 1e-3
        others = ("init", "embedding_std", "clip", "qk_gain", "qk_norm", "model", "norm")
        assert [found.get(key) for key in others] == [masked.get(key) for key in others]
        for settings in runs.values():
            made = causal_race.race.Settings.of(settings | {"data": tmp_path, "out": tmp_path})
            assert (made.objective, made.positions, made.steps, made.seed) == ("causal", "rope", 4000, 0)


def test_later_choices_of_the_masked_race_leave_the_causal_settings(
    causal_race: ModuleType, known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    best, later = known["recover-qk-full-tuned-0.002"], dict[str, Any]()
    for label, change in causal_race.race.LATER:
        settings = best.settings | change
        run = SimpleNamespace(settings=settings, result=SimpleNamespace(test_loss=best.result.test_loss - 0.1))
        later[f"recover-qk-full-{label}-0.002"] = run
    monkeypatch.setattr(causal_race, "read_masked", lambda: known | later)
    assert causal_race.read_masked_settings("recover-qk") == pytest.approx(PRESETS["best"])
    assert causal_race.read_masked_settings("preln-qk")["embedding_std"] == 0.02  # of step 4


def test_causal_arms_have_as_many_choices_and_finals_of_their_own(causal_race: ModuleType):
    """Runs by name: where no choice lowers the loss, the finals are the first ones."""
    assert {len(choices) for choices in causal_race.CHOICES.values()} == {3}
    assert causal_race.CHOICES.keys() == set(causal_race.ARMS)
    runs: list[str] = []

    def search(arm: str, gain: float) -> dict[str, Any]:
        def measure(name: str, settings: dict[str, Any]) -> float:
            runs.append(name.removeprefix(f"causal-{arm}-"))
            assert settings["objective"] == "causal"
            small, head = settings.get("embedding_std") == 0.02, settings.get("head_lr", 1.0)
            best = 8e-3 if small else 4e-3
            fast = settings["embedding_lr"] * settings["lr"] == pytest.approx(50.0 * 4e-3)
            return abs(math.log2(settings["lr"] / best)) + (gain if small else 1.0) - 0.25 * fast - 0.5 * (head == 0.1)

        return causal_race.choose(arm, measure)

    chosen = search("recover-qk", gain=-1.0)
    assert [chosen[key] for key in ("embedding_std", "embedding_lr", "head_lr", "lr")] == [0.02, 1.0, 1.0, 8e-3]
    choices = ["1-fast-tables", "2-slow-head", "3-tables"]
    assert runs == ["0.002", "0.001", "0.004", "0.008", *choices, "again-0.002", "again-0.008", "again-0.016"]
    assert causal_race.name_final("recover-qk", chosen, 2) == "causal-recover-qk-chosen-0.008-2"
    slow = search("recover-qk", gain=2.0)
    assert "embedding_std" not in slow
    assert (slow["head_lr"], slow["embedding_lr"]) == (0.1, 50.0)
    assert causal_race.race.set_rate(slow, 1e-3)["embedding_lr"] == 200.0  # their own rate stays
    assert causal_race.name_final("recover-qk", slow, 1) == "causal-recover-qk-chosen-0.004-1"
    plain = causal_race.tune("recover-qk", lambda name, settings: abs(math.log2(settings["lr"] / 4e-3)))
    assert causal_race.name_final("recover-qk", plain, 1) == "causal-recover-qk-final-0.004-1"


def test_causal_arms_get_the_choice_that_the_other_side_kept(causal_race: ModuleType):
    def search(arm: str, *, gain: float) -> tuple[dict[str, Any], list[str]]:
        """The best rate is 4e-3, after the exchange half of it; no choice before it is kept."""
        runs: list[str] = []
        label = causal_race.EXCHANGED[arm][0]

        def measure(name: str, settings: dict[str, Any]) -> float:
            runs.append(name.removeprefix(f"causal-{arm}-"))
            if f"-{label}-" in name:
                return abs(math.log2(settings["lr"] / 2e-3)) - gain
            return abs(math.log2(settings["lr"] / 4e-3)) + any(f"-{number}-" in name for number in (1, 2, 3))

        return causal_race.exchange(arm, measure), [run for run in runs if run.startswith(label)]

    kept, runs = search("preln-qk", gain=2.0)
    assert runs == ["fast-tables-0.004", "fast-tables-0.002", "fast-tables-0.001"]
    assert (kept["lr"], kept["embedding_lr"]) == (2e-3, 4.0)  # the tables keep their own rate
    assert causal_race.name_final("preln-qk", kept, 2) == "causal-preln-qk-exchanged-0.002-2"
    kept, _ = search("recover-qk", gain=2.0)
    assert causal_race.name_final("recover-qk", kept, 1) == "causal-recover-qk-exchanged-0.002-1"
    left, runs = search("recover-qk", gain=-1.0)
    assert runs == ["qk-gain-0.004"]
    assert "qk_gain" not in left
    assert causal_race.name_final("recover-qk", left, 1) == "causal-recover-qk-final-0.004-1"


def test_finals_without_their_models_are_repeated_under_another_name(causal_race: ModuleType, tmp_path: Path):
    made: list[str] = []

    def measure(name: str, settings: dict[str, Any]) -> float:
        made.append(name)
        return 9.0

    known = causal_race.race.read_known(files=causal_race.FILES)
    (tmp_path / "causal-preln-qk-final-0.004-1").mkdir()
    (tmp_path / "causal-preln-qk-final-0.004-1" / "model.safetensors").touch()
    track = SimpleNamespace(known=known | {"causal-recover-qk-repeat-final-0.008-1": None}, out=tmp_path, measure=measure)
    starts = {arm: causal_race.read_masked_settings(arm) for arm in ("recover-qk", "preln-qk")}
    rates = {"recover-qk": 8e-3, "preln-qk": 4e-3}

    def search(arm: str, measure: Callable[..., float]) -> dict[str, Any]:
        return causal_race.race.set_rate(starts[arm], rates[arm])

    causal_race._make_runs(track, tuple(rates), search, (1,), True)
    assert made == ["causal-recover-qk-repeat-final-0.008-1", "causal-preln-qk-final-0.004-1"]
    assert made[0] not in track.known  # its record has no model
    causal_race._make_runs(track, tuple(rates), search, (1,), False)
    assert made[2:] == ["causal-recover-qk-final-0.008-1", "causal-preln-qk-final-0.004-1"]
    repeats = {made[0]: known["causal-recover-qk-final-0.008-1"]}
    assert causal_race.make_tables(known | repeats) == causal_race.make_tables(known)


def test_the_loss_by_position_adds_up_to_the_loss(causal_race: ModuleType, tmp_path: Path):
    rows, config = (
        np.arange(40, dtype=np.uint16).reshape(2, 20),
        shaped.hf.ShapedConfig(vocab_size=40, hidden_size=8, num_attention_heads=2),
    )
    model = shaped.hf.ShapedForCausalLM(config)
    model.save_pretrained(tmp_path)
    data = SimpleNamespace(rows={"valid": rows}.__getitem__)
    found = causal_race.measure_context(tmp_path, data)
    ids = torch.from_numpy(rows.astype(np.int64))
    losses = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].mT, ids[:, 1:], reduction="none")
    assert [part["first"] for part in found] == [1, 2, 4, 8, 16]
    counts = [1, 2, 4, 8, 4]
    assert sum(n * part["loss"] for n, part in zip(counts, found, strict=True)) / 19 == pytest.approx(losses.mean().item(), rel=1e-5)
    last = losses[:, 15:].mean(1)
    assert found[-1]["loss"] == pytest.approx(last.mean().item(), rel=1e-5)
    assert found[-1]["standard_error"] == pytest.approx(abs(last[0] - last[1]).item() / 2, rel=1e-3)


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


def test_the_causal_preset_has_the_settings_of_the_best_causal_finals(causal_race: ModuleType):
    known = causal_race.race.read_known(files=causal_race.FILES)
    finals = {name: run.result.test_loss for name, run in known.items() if name.startswith("causal-recover-qk-") and run.result is not None}
    best = known[min((name for name in finals if known[name].settings["steps"] == 10_000), key=finals.__getitem__)]
    chosen = {key: best.settings[key] for key in PRESETS["causal"]}
    assert chosen == pytest.approx(PRESETS["causal"])
    assert causal_race.race.read_choices(best) == {"lr": 4e-3, "embedding_lr": 100.0}


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


def test_the_page_has_the_tables_of_the_causal_results(causal_race: ModuleType):
    """`python benchmarks/studies/causal_race.py table --write` puts them there. A run that was cut off is not in them."""
    text = (ROOT / "docs" / "race.md").read_text(encoding="utf-8")
    made = causal_race.make_tables(causal_race.race.read_known(files=causal_race.FILES))
    assert len(made.splitlines()) > 6
    assert all(table in text for table in made.split("\n\n"))


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
