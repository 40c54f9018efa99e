"""The causal race's program keeps to the protocol of docs/race.md."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shaped.hf
from programs import load_program
from shaped.train.run.settings import PRESETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def causal_race() -> ModuleType:
    return load_program("studies/causal_race")


@pytest.fixture(scope="module")
def known(causal_race: ModuleType) -> dict[str, Any]:
    return causal_race.race.read_known()


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


def test_the_causal_preset_has_the_settings_of_the_best_causal_finals(causal_race: ModuleType):
    known = causal_race.race.read_known(files=causal_race.FILES)
    finals = {name: run.result.test_loss for name, run in known.items() if name.startswith("causal-recover-qk-") and run.result is not None}
    best = known[min((name for name in finals if known[name].settings["steps"] == 10_000), key=finals.__getitem__)]
    chosen = {key: best.settings[key] for key in PRESETS["causal"]}
    assert chosen == pytest.approx(PRESETS["causal"])
    assert causal_race.race.read_choices(best) == {"lr": 4e-3, "embedding_lr": 100.0}


def test_the_page_has_the_tables_of_the_causal_results(causal_race: ModuleType):
    """`python benchmarks/studies/causal_race.py table --write` puts them there. A run that was cut off is not in them."""
    text = (ROOT / "docs" / "race.md").read_text(encoding="utf-8")
    made = causal_race.make_tables(causal_race.race.read_known(files=causal_race.FILES))
    assert len(made.splitlines()) > 6
    assert all(table in text for table in made.split("\n\n"))
