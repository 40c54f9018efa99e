"""`shaped predict`: what the tokens of any Transformer do at initialisation, from its config."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import shaped
from shaped.commands import options
from shaped.commands.options import ATTENTION, PLACE, SOLVER, WORK
from shaped.commands.results import check_folder, name_files, show_results, start_table, to_png, write_results
from shaped.files import read_array
from shaped.process import require

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from shaped.hf.prediction import Prediction

CONFIGS: dict[str, Any] = PLACE | {"metavar": "CONFIG…"}
QUANTITIES = ("rho", "length", "entropy", "rank")
GRADIENTS = ("tokens", "query", "value", "second")
"""Gradients in the table. The .npz file and the JSON have all."""
LARGEST_START = 10**6  # numbers in a file of ids or of a covariance


def predict(
    configs: Annotated[list[Path], typer.Argument(help="Files config.json, or folders that have one.", **CONFIGS)],
    tokens: Annotated[
        str,
        typer.Option(
            help="How many distinct tokens, or a .npy file with their ids, [m], or their covariance at the start, [m, m].",
            metavar="NUMBER|FILE.npy",
            rich_help_panel=SOLVER,
        ),
    ] = "64",
    samples: Annotated[int, typer.Option(help="Number of models.", rich_help_panel=SOLVER)] = 64,
    seed: options.Seed = 0,
    shape: Annotated[
        bool,
        typer.Option("--shape", help="Stock models with shaped attention, as shaped.hf.shape leaves them.", rich_help_panel=ATTENTION),
    ] = False,
    gamma: Annotated[
        float | None, typer.Option(help="With --shape: weight of the attention branch, by default 1.", rich_help_panel=ATTENTION)
    ] = None,
    gamma1: Annotated[
        float | None, typer.Option(help="With --shape: gain of the identity, by default 1.", rich_help_panel=ATTENTION)
    ] = None,
    gamma2: Annotated[
        float | None, typer.Option(help="With --shape: gain of the centring, by default 1.", rich_help_panel=ATTENTION)
    ] = None,
    tau0: Annotated[
        float | None,
        typer.Option(help="With --shape: temperature; by default the model's own scaling alone.", rich_help_panel=ATTENTION),
    ] = None,
    device: options.Device = "cpu",
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also the norms of the gradients for random labels; takes longer.", rich_help_panel=SOLVER)
    ] = False,
    threads: Annotated[int | None, typer.Option(help="On the CPU; by default one a core.", rich_help_panel=WORK)] = None,
    out: options.Out = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Predict correlation, length, rank and attention entropy of the tokens of a randomly initialised model, layer by layer.

    The model is never made: its law is drawn without its weights.
    """
    require("predict", "hf", "transformers")
    from rich.console import Group

    from shaped.hf.prediction.families import read_config
    from shaped.hf.prediction.simulation import predict as run
    from shaped.hf.prediction.simulation import prepare, read_tokens
    from shaped.hf.shaping import read_arguments

    given, shaping = read_start(tokens), read_shape(shape, gamma=gamma, gamma1=gamma1, gamma2=gamma2, tau0=tau0)
    read_tokens(given)  # these two refuse what is wrong for every config
    read_arguments("shape", shaping or {})
    read = []
    for path in configs:
        with naming(path if len(configs) > 1 else None):
            read.append(read_config(path, shaping))
            prepare(read[-1], given)  # refuses a config before the work on others
    check_folder(out, *name_files("predict"))
    began, progress = time.perf_counter(), False if as_json else None
    found = [run(config, given, samples=samples, seed=seed, device=device, threads=threads, progress=progress) for config in read]
    if gradients:
        for prediction in found:
            _ = prediction.gradients  # drawn at the first use
    predictions = dict(zip(choose_names(name_prediction(prediction.info) for prediction in found), found, strict=True))
    summary = {
        "version": shaped.__version__,
        "settings": {"tokens": tokens, "samples": samples, "seed": seed, "shape": shaping, "device": device, "gradients": gradients},
        "models": {name: summarise(prediction, gradients) for name, prediction in predictions.items()},
        "seconds": time.perf_counter() - began,
    }
    for name, prediction in predictions.items():
        prediction.save(out / f"{name}.npz")
    written = write_results(out, "predict", summary, lambda: draw(predictions))
    written += [out / f"{name}.npz" for name in predictions]
    tables = Group(make_table(summary), make_gradient_table(summary)) if gradients else make_table(summary)
    show_results(summary, tables, f"{samples} models in {summary['seconds']:.1f} s; seed {seed}", written, as_json)


def read_start(tokens: str) -> Any:
    """A number, or the array in a file."""
    if tokens.isdecimal():
        return int(tokens)
    if not tokens.endswith(".npy"):
        raise ValueError(f"tokens must be a number or a .npy file, got {tokens!r}")
    return read_array(Path(tokens), "tokens", LARGEST_START)


@contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Adds the file to an error that does not name it: among several configs it says which one must change."""
    try:
        yield
    except ValueError as error:
        if path is None or str(path) in str(error):
            raise
        raise ValueError(f"{error} (for {path})") from None


def read_shape(shape: bool, **gains: float | None) -> dict[str, float] | None:
    """The arguments of `shaped.hf.shape` that were given; None without --shape, where a gain would change nothing."""
    given = {name: value for name, value in gains.items() if value is not None}
    if given and not shape:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name} must be left out without --shape, got {value:g}")
    return given if shape else None


def name_prediction(info: dict[str, Any]) -> str:
    """A stock model with shaped attention has a name of its own: in one folder both predictions stay, and a table says which it is."""
    return info["name"] if info["shape"] is None else f"{info['name']}-shaped"


def choose_names(names: Iterable[str]) -> list[str]:
    """The names of the models, numbered where several have the same."""
    chosen: list[str] = []
    for name in names:
        number, free = 1, name
        while free in chosen or free == "predict":
            number, free = number + 1, f"{name}-{number + 1}"
        chosen.append(free)
    return chosen


def summarise(prediction: Prediction, gradients: bool) -> dict[str, Any]:
    """Means over the models and their standard errors, by layer; no errors for a single model."""
    found: dict[str, Any] = dict(prediction.info)
    for quantity in QUANTITIES:
        found[quantity] = describe_mean(*prediction.mean(quantity))
    if gradients:
        from shaped.hf.prediction.result import find_mean

        drawn = prediction.gradients
        squares = {"tokens": drawn.tokens, **drawn.weights}
        found["gradient_norms"] = {name: describe_mean(*find_mean(values.sqrt())) for name, values in squares.items()}
        found["loss"] = describe_mean(*find_mean(drawn.loss[None]))
    return found


def describe_mean(mean: Tensor, error: Tensor) -> dict[str, Any]:
    return {"mean": mean.tolist(), "standard_error": [None if math.isnan(one) else one for one in error.tolist()]}


def make_table(summary: dict[str, Any]) -> Table:
    """Before the first block, at some depths, and after the last block, which has no attention behind it."""
    made = start_table(("model", "layer", *QUANTITIES), words=1)
    for name, model in summary["models"].items():
        for number, stage in enumerate(choose_stages(model["depth"])):
            cells = [format_measured(model[quantity], stage) for quantity in QUANTITIES]
            made.add_row("" if number else name, str(stage), *cells, end_section=stage == model["depth"])
    return made


def make_gradient_table(summary: dict[str, Any]) -> Table:
    made = start_table(("model", "layer", *GRADIENTS), words=1, title="norms of the gradients")
    for name, model in summary["models"].items():
        for number, stage in enumerate(choose_stages(model["depth"])):
            cells = [format_power(model["gradient_norms"][quantity], stage) for quantity in GRADIENTS]
            made.add_row("" if number else name, str(stage), *cells, end_section=stage == model["depth"])
    return made


def choose_stages(depth: int) -> list[int]:
    return sorted({0, 1, depth // 4, depth // 2, 3 * depth // 4, depth})


def format_measured(values: dict[str, list[Any]], stage: int) -> str:
    """0.701(43) is 0.701 with a standard error of 0.043. Empty beyond the last layer.

    Four decimals, and up to six where the error would be 0 in the last of them; a smaller error than these show is <1.
    """
    if stage >= len(values["mean"]):
        return ""
    mean, error = values["mean"][stage], values["standard_error"][stage]
    if not error:
        return f"{mean:.4g}"
    digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    if not round(error * 10**digits):
        digits = min(6, -math.floor(math.log10(error)))
    return f"{mean:.{digits}f}({round(error * 10**digits) or '<1'})"


def format_power(values: dict[str, list[Any]], stage: int) -> str:
    """1.23(4)e-5 is 1.23e-5 with a standard error of 0.04e-5. Empty beyond the last layer."""
    if stage >= len(values["mean"]):
        return ""
    mean, error = values["mean"][stage], values["standard_error"][stage]
    power = math.floor(math.log10(mean)) if mean > 0.0 else 0
    scaled = {"mean": [mean / 10.0**power], "standard_error": [error and error / 10.0**power]}
    return f"{format_measured(scaled, 0)}e{power}"


def draw(predictions: dict[str, Prediction]) -> bytes:
    from shaped.figures.shared.predictions import draw_predictions

    return to_png(draw_predictions(predictions))
