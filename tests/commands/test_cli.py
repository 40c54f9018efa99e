"""The command line: what it prints, what it writes, and how it refuses."""

import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from command_runner import make_runner

import shaped
from shaped import files
from shaped.commands import app as cli
from shaped.figures.shared import laws

SMALL = ["simulate", "--samples", "50", "--width", "20", "--depth", "3", "--step", "0.05"]
run = make_runner()


def test_simulate_writes_table_picture_and_numbers(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, *SMALL, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "rho (pairs)" in shown
    assert "stopped: " in shown
    assert " of 50 paths" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["simulate.json", "simulate.png"]
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "simulate.json").read_text())
    assert summary["settings"]["horizon"] == 0.15
    assert summary["settings"]["steps"] == 3


def test_simulate_takes_biases_of_heads(monkeypatch, capsys, tmp_path):
    """ALiBi by its name, or the same biases from a file: the same numbers. What is no such file is refused."""
    heads = ["--heads", "2", "--project", "--tokens", "3", "--out", str(tmp_path), "--mask"]
    bias, wrong = tmp_path / "bias.npy", tmp_path / "wrong.npy"
    np.save(bias, shaped.alibi(3, 2).numpy())
    found = []
    for mask in ("alibi", str(bias), "causal"):
        assert run(monkeypatch, *SMALL, *heads, mask) == 0
        found.append(json.loads((tmp_path / "simulate.json").read_text())["rho"]["mean"])
    assert found[0] == found[1] != found[2]
    capsys.readouterr()
    np.save(wrong, np.zeros((2, 4, 4)))
    for mask, words in (
        (str(wrong), ["mask must be [3, 3] or [2, 3, 3]", "[2, 4, 4]"]),
        (str(tmp_path / "none.npy"), ["mask must be an array in a .npy file", "none.npy"]),
        ("diagonal", ["mask must be causal, alibi or a .npy file", "diagonal"]),
    ):
        assert run(monkeypatch, *SMALL, *heads, mask) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words)
        assert said.count("\n") == 1


def test_simulate_takes_qk_norm_and_rope(monkeypatch, capsys, tmp_path):
    """Each of them changes the numbers, and both are refused where no layer has them."""
    found = []
    for given in ([], ["--qk-norm"], ["--rope", "100"], ["--qk-norm", "--rope", "100"]):
        assert run(monkeypatch, *SMALL, "--tau0", "0.3", "--out", str(tmp_path), *given) == 0
        summary = json.loads((tmp_path / "simulate.json").read_text())
        assert summary["settings"]["qk_norm"] is ("--qk-norm" in given)
        assert summary["settings"]["rope"] == (100.0 if "--rope" in given else None)
        found.append(summary["rho"]["mean"])
    assert len(set(found)) == 4
    capsys.readouterr()
    unused = {"mask": "causal", "heads": "4", "tau0": "2", "rope": "100"}
    wrong = [(["--qk-norm"], "qk_norm must be left out"), (["--project"], "project must be left out")]
    for given, words in wrong + [([f"--{name}", value], f"{name} must be left out") for name, value in unused.items()]:
        assert run(monkeypatch, *SMALL, "--layers", "feedforward,perceptron", "--out", str(tmp_path), *given) == 2
        assert words in capsys.readouterr().err
    assert run(monkeypatch, *SMALL, "--out", str(tmp_path), "--rope", "0.5") == 2
    assert "rope must lie in" in capsys.readouterr().err


def test_simulate_tells_the_step_and_the_share_that_stopped(monkeypatch, capsys, tmp_path):
    settings = ["simulate", "--layers", "attention", "--gamma", "0.7", "--tau0", "0.25", "--samples", "512", "--out", str(tmp_path)]
    assert run(monkeypatch, *settings, "--width", "512", "--depth", "96") == 0
    summary = json.loads((tmp_path / "simulate.json").read_text())
    low, high = summary["stopped_interval"]
    assert 0.0 < low < summary["stopped_share"] < high < 1.0
    assert summary["settings"]["steps"] == 19
    assert summary["step_effect"]["pairs"] == 16
    assert f"stopped: {100 * summary['stopped_share']:.3f} % ({100 * low:.3f} to {100 * high:.3f}) of 512 paths" in capsys.readouterr().out


def test_json_is_one_object_and_nothing_else(tmp_path):
    """In a process of its own: standard output is the object; the files are written as without it."""
    done = subprocess.run([sys.executable, "-m", "shaped", *SMALL, "--json"], capture_output=True, text=True, cwd=tmp_path, check=True)
    summary = json.loads(done.stdout)
    assert done.stderr == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["simulate.json", "simulate.png"]
    assert json.loads((tmp_path / "out" / "simulate.json").read_text()) == summary
    for key in ("rho", "V", "variance"):
        assert {"mean", "standard_error", "standard_deviation", "percentiles"} == summary[key].keys()
        assert list(summary[key]["percentiles"]) == ["5", "25", "50", "75", "95"]
    assert 0.0 <= summary["stopped_share"] <= 1.0
    assert summary["seconds"] > 0
    assert summary["settings"]["seed"] == 0


def test_json_and_out_go_together(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, *SMALL, "--json", "--out", str(tmp_path)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "simulate.json").read_text()) == printed


def test_one_token_has_no_pairs(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, *SMALL, "--tokens", "1", "--json", "--out", str(tmp_path)) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rho"] is None
    assert summary["variance"]["mean"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["simulate.json"]


def test_nothing_moves_without_a_branch(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, *SMALL, "--gamma", "0", "--json", "--out", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out)["rho"]["mean"] == pytest.approx(0.2)
    assert (tmp_path / "simulate.png").exists()


def test_all_paths_may_stop(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, *SMALL, "--upper", "0.5", "--json", "--out", str(tmp_path)) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["stopped_share"] == 1.0
    assert summary["rho"] is None


def test_paths_that_stop_in_the_last_step_are_no_survivors(monkeypatch, capsys, tmp_path):
    """The last of the steps' times is by rounding a little later than the horizon T = 22/14."""
    size = ["--width", "14", "--depth", "22", "--step", "0.52", "--samples", "500", "--tokens", "2"]
    assert run(monkeypatch, "simulate", *size, "--layers", "perceptron", "--upper", "4", "--json", "--out", str(tmp_path)) == 0
    found = json.loads(capsys.readouterr().out)
    layer, V0 = shaped.ShapedPerceptron(0.0, -1.0), shaped.equicorrelated(2, 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shaped.StepWarning)
        paths = shaped.solve(layer, V0, T=22 / 14, steps=found["settings"]["steps"], samples=500, seed=0, upper=4.0)
    assert paths.t[-1] > 22 / 14
    survived = paths.stopped > paths.t[-1]
    assert found["variance"]["mean"] == pytest.approx(paths.V[-1, survived].diagonal(dim1=-2, dim2=-1).mean().item())


def test_converge_writes_table_picture_and_numbers(monkeypatch, capsys, tmp_path):
    arguments = ["converge", "--widths", "4,8,16", "--samples", "3000", "--step", "0.05", "--gamma", "0.5", "--out", str(tmp_path)]
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "KS of rho" in shown
    assert "Wasserstein distance of V" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converge.json", "converge.png"]
    summary = json.loads((tmp_path / "converge.json").read_text())
    assert [row["width"] for row in summary["rows"]] == [4, 8, 16]
    assert [row["depth"] for row in summary["rows"]] == [3, 6, 12]
    first = summary["rows"][0]["distances"]["rho"]["ks"]
    assert first.keys() == {"value", "error", "band", "floor", "p"}
    assert first["value"] > first["band"], "a network of width 4 is far from the limit"


def test_reproduce_writes_numbers_pictures_and_report(monkeypatch, capsys, tmp_path):
    small = laws.Settings(n=64, d=48, samples=512)
    monkeypatch.setattr("shaped.figures.pages.fig7.settings", lambda scale: small)
    assert run(monkeypatch, "reproduce", "fig7", "--out", str(tmp_path), "--workers", "1") == 0
    shown = capsys.readouterr().out
    assert "fig7    6 claims: holds 0, not proved 6, fails 0; " in shown
    assert "in all  6 claims: holds 0, not proved 6, fails 0\n" in shown
    assert "fig7.law.m4 not proved: the SDE describes shaped attention" in shown
    last = f"report: {tmp_path / 'report.html'}: 6 claims: holds 0, not proved 6, fails 0; all figures are new"
    assert shown.splitlines()[-1] == last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fig7.json", "fig7.npz", "fig7.pdf", "fig7.png", "report.html"]
    assert json.loads((tmp_path / "fig7.json").read_text())["scale"] == "quick"


def test_networks_of_converge_are_in_float64_where_float32_rounds_the_limit_off():
    from shaped.commands.converge import choose_dtype

    def limit(*V: torch.Tensor, stopped: int = 0) -> shaped.Trajectory:
        ends = torch.full((len(V),), math.inf, dtype=torch.float64)
        ends[:stopped] = 0.5
        return shaped.Trajectory(torch.tensor([1.0], dtype=torch.float64), torch.stack(V)[None], ends)

    usual, near = shaped.equicorrelated(3, 0.2), shaped.equicorrelated(3, 1 - 1e-6)
    opposite = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert choose_dtype(limit(usual, 1e8 * usual, 1e-8 * usual)) == torch.float32
    for V in (near, opposite, 1e-11 * usual, 1e11 * usual):
        assert choose_dtype(limit(V, usual)) == torch.float64
        assert choose_dtype(limit(V, usual, stopped=1)) == torch.float32


@pytest.mark.parametrize(("layers", "horizon", "dtype"), [("attention", 0.5, torch.float32), ("perceptron", 12.0, torch.float64)])
def test_converge_simulates_networks_in_that_dtype(monkeypatch, layers, horizon, dtype):
    from shaped.commands import converge

    drawn = []
    monkeypatch.setattr(converge, "propagate", lambda *given, **how: drawn.append(how["dtype"]) or shaped.propagate(*given, **how))
    converge.compute(converge.Settings(layers=layers, tokens=2, widths=(8,), horizon=horizon, samples=40, step=0.1), progress=False)
    assert drawn == [dtype]


def test_the_rate_of_a_known_decay_is_found():
    from shaped.commands.converge import fit_rate, to_json
    from shaped.compare import Distance

    def row(n):
        exact = 2.0 / n
        distance = {"value": (exact**2 + 1e-6) ** 0.5, "error": 1e-4, "band": 2e-3, "floor": 1e-3, "p": 0.0}
        return {"width": n, "distances": {"rho": {"ks": distance}}}

    found = fit_rate([row(n) for n in (25, 50, 100, 200, 400)], "rho", "ks")
    assert found is not None
    assert found["rate"] == pytest.approx(1.0, abs=0.02)
    assert fit_rate([row(n) for n in (25, 3200)], "rho", "ks") is None
    told = to_json(Distance(1.0, math.nan, 0.1, 0.1, 0.01))
    assert told["error"] is None
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    without = [row(n) | {"distances": {"rho": {"ks": told}}} for n in (50, 100, 200)]
    assert fit_rate(without, "rho", "ks") is None  # an error that cannot be told gives a distance no weight


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["simulate", "--gamma", "2"], "gamma"),
        (["simulate", "--gamma", "much"], "--gamma"),
        (["simulate", "--rho", "-0.9"], "rho"),
        (["simulate", "--layers", "attention,convolution"], "convolution"),
        (["simulate", "--mask", "diagonal"], "diagonal"),
        (["simulate", "--device", "abacus"], "abacus"),
        (["simulate", "--depth", "0"], "depth"),
        (["simulate", "--step", "0"], "step"),
        (["simulate", "--speed", "9"], "--speed"),
        (["simulate", "--workers", "0"], "workers"),
        (["simulate", "--scheduler", "tcp://127.0.0.1:1"], "scheduler"),
        (["converge", "--widths", "25,wide"], "wide"),
        (["converge", "--widths", "3"], "widths"),
        (["converge", "--widths", "8,16,16"], "16"),
        (["converge", "--heads", "7", "--widths", "25", "--samples", "10"], "heads"),
        (["converge", "--horizon", "-1", "--samples", "10"], "horizon"),
        (["converge", "--horizon", "nan", "--samples", "10"], "horizon"),
        (["converge", "--tokens", "1"], "tokens"),
        (["converge", "--heads", "4", "--widths", "24,26"], "26"),
        (["simulate", "--tokens", "0"], "tokens"),
        (["simulate", "--tokens", "3000000"], "3000000"),
        (["simulate", "--tau0", "1e200"], "tau0"),
        (["simulate", "--c-plus", "1e200"], "c_plus"),
        (["simulate", "--step", "1e-320"], "step"),
        (["simulate", "--step", "1e-12"], "steps"),
        (["simulate", "--device", "meta"], "meta"),
        (["simulate", "--scheduler", "here"], "scheduler"),
        (["simulate", "--out", "/sys"], "/sys"),
        (["simulate", "--out", __file__], f"out must be a folder, got {__file__}"),
        (["reproduce", "fig7", "--out", f"{__file__}/out"], f"out must be a folder, got {__file__}/out"),
        (["pretrain", "--config", "nowhere.toml"], "config must be a TOML file, got nowhere.toml"),
        (["study", "nowhere.toml"], "file must be a TOML file, got nowhere.toml"),
        (["reproduce", "fig99"], "fig99"),
        (["reproduce", "fig7", "--scale", "huge"], "huge"),
        (["reproduce", "fig7", "--tokens", "1"], "tokens"),
        (["reproduce", "fig7", "--device", "abacus"], "abacus"),
        (["reproduce", "fig7", "--workers", "0"], "workers"),
        (["reproduce", "--out", "/sys"], "/sys"),
        (["simulate", "--out", ""], "--out"),
        (["converge", "--out", ""], "--out"),
        (["reproduce", "fig7", "--out", ""], "--out"),
        (["reproduce", "fig7", "--runs", "/nonexistent"], "runs must be folders of runs"),
        (["reproduce", "fig7", "--runs", ""], "--runs"),
        (["stimulate"], "stimulate"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_two(monkeypatch, capsys, arguments, word):
    assert run(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("shaped: ")
    assert shown.err.count("\n") == 1
    assert word in shown.err


def test_version_and_help(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("shaped 0.")
    assert run(monkeypatch) == 0
    assert "simulate" in capsys.readouterr().out


def test_a_group_without_its_command_prints_its_help_alone(monkeypatch, capsys):
    assert run(monkeypatch, "data") == 2
    said = capsys.readouterr()
    assert "prepare" in said.out
    assert said.err == ""


def test_help_has_panels_choices_and_brackets(monkeypatch, capsys):
    """Brackets in a help text would vanish if they were taken for markup."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "simulate", "--help") == 0
    shown = capsys.readouterr().out
    for panel in ("Layers", "Attention", "Simulation", "Where it runs", "Output"):
        assert f"─ {panel} ─" in shown
    for words in ("[cone|euler]", "[cpu|cuda|cuda:N]", "[causal|alibi|FILE.npy]", "[tokens, tokens] or [heads, tokens, tokens]"):
        assert words in shown
    assert run(monkeypatch, "reproduce", "--help") == 0
    assert "[quick|paper]" in capsys.readouterr().out


def test_the_shell_completes_commands_options_and_choices(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the shell is an argument, not detected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(monkeypatch, "--install-completion", "bash") == 0
    assert "_SHAPED_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "shaped.sh").read_text()
    capsys.readouterr()
    monkeypatch.setenv("_SHAPED_COMPLETE", "complete_bash")
    for words, *wanted in (
        ("shaped sim", "simulate"),
        ("shaped simulate --meth", "--method"),
        ("shaped simulate --method e", "euler"),
        ("shaped simulate --mask F",),  # FILE.npy in the help is no file
        ("shaped pretrain --model pre", "preln"),
        ("shaped pretrain --attention fl", "flash"),
        ("shaped pretrain --preset p", "paper"),
        ("shaped glue --task r", "rte"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        run(monkeypatch)
        assert capsys.readouterr().out.split() == wanted, words


def test_the_help_of_pretrain_fits_into_80_columns(monkeypatch, capsys):
    """No name is cut, and the texts have room: most of them fit into two lines."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, "pretrain", "--help") == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "--gamma-feedforward" in shown
    assert "--no-embedding-norm" in shown
    assert len(shown.splitlines()) < 190


def test_an_interrupted_write_leaves_no_file(tmp_path):
    def break_off(file):
        file.write(b"half")
        raise KeyboardInterrupt

    target = tmp_path / "numbers.json"
    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(target, break_off)
    assert list(tmp_path.iterdir()) == []
    files.write_json(target, {"whole": True})
    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(target, break_off)
    assert json.loads(target.read_text()) == {"whole": True}
    assert list(tmp_path.iterdir()) == [target]


def test_an_interrupted_run_says_so(monkeypatch, capsys, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("shaped.commands.simulate.solve", interrupt)
    assert run(monkeypatch, *SMALL, "--out", str(tmp_path)) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_importing_the_library_stays_light():
    heavy = ("transformers", "matplotlib", "tokenizers", "scipy", "typer", "torch._dynamo", "starlette", "uvicorn")
    script = f"import sys, shaped; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes."),
    ],
    ids=["Python", "GPU", "CPU"],
)
def test_too_little_memory_is_said_in_a_line(error, monkeypatch, capsys):
    def app(**how):
        raise error

    monkeypatch.setattr(cli, "app", app)
    assert run(monkeypatch, "simulate") == 2
    said = capsys.readouterr().err
    assert said.startswith("shaped: this takes more memory than there is")
    assert said.count("\n") == 1


def test_other_errors_of_ours_are_not_hidden(monkeypatch):
    def app(**how):
        raise RuntimeError("a defect")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main()
