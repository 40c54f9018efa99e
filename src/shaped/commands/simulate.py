"""`shaped simulate`: the covariance SDE in numbers and a picture."""

from __future__ import annotations

import math
import time
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from jaxtyping import Float

import shaped
from shaped.checks import positive, whole_number
from shaped.commands import options
from shaped.commands.blocks import BlockSettings
from shaped.commands.options import LAYER, SOLVER, show_choices
from shaped.commands.results import check_folder, name_files, show_results, start_table, to_png, write_results
from shaped.covariance import equicorrelated
from shaped.figures.shared.density import densities, pairs
from shaped.intervals import format_share
from shaped.limit import default_steps, solve
from shaped.workers import open_executor

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (5, 25, 50, 75, 95)
SERIES_MEMORY = 2**28  # bytes that the recorded paths may take


@dataclass(frozen=True, kw_only=True)
class Settings(BlockSettings):
    """The paper's Figure 1 by default."""

    width: int = 200
    depth: int = 150
    samples: int = 4096
    step: float | None = None  # chosen by `solve`
    seed: int = 0
    method: str = "cone"
    upper: float | None = 1e4  # a path that large is exploding (Fig. stability); it would drown every mean
    lower: float | None = None
    device: str = "cpu"


def simulate(
    layers: options.Layers = "attention,feedforward",
    tokens: options.Tokens = 4,
    width: Annotated[int, typer.Option(help="Width n.", rich_help_panel=LAYER)] = 200,
    depth: Annotated[int, typer.Option(help="Depth d; the horizon is depth/width.", rich_help_panel=LAYER)] = 150,
    gamma: options.Gamma = 8**-0.5,
    tau0: options.Tau0 = 1.0,
    heads: options.Heads = 1,
    project: options.Project = False,
    mask: options.Mask = None,
    qk_norm: options.QKNorm = False,
    rope: options.Rope = None,
    c_plus: options.CPlus = 0.0,
    c_minus: options.CMinus = -1.0,
    rho: options.Rho = 0.2,
    samples: options.Samples = 4096,
    step: Annotated[
        float | None,
        typer.Option(help="Time step of the SDE; by default at most 0.01, and shorter where the layers need it.", rich_help_panel=SOLVER),
    ] = None,
    seed: options.Seed = 0,
    method: Annotated[
        str,
        typer.Option(
            help="Step in the cone of covariances, or Euler with projection.", rich_help_panel=SOLVER, **show_choices("cone", "euler")
        ),
    ] = "cone",
    upper: options.Upper = 1e4,
    lower: Annotated[
        float | None, typer.Option(help="Stop a path whose smallest eigenvalue falls below this.", rich_help_panel=SOLVER)
    ] = None,
    device: options.Device = "cpu",
    workers: options.Workers = None,
    scheduler: options.Scheduler = None,
    out: options.Out = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Sample the covariance SDE; by default at the setting of the paper's Figure 1."""
    settings = Settings.from_options(locals())
    check_folder(out, *name_files("simulate"))
    with open_executor(workers, scheduler) as executor:
        summary, arrays = compute(settings, executor, progress=False if as_json else None)
    picture = (lambda: draw(summary, arrays)) if "rho_density" in arrays else None
    written = write_results(out, "simulate", summary, picture)
    show_results(summary, make_table(summary), describe_run(summary), written, as_json)


def compute(
    settings: Settings, executor: Executor | None = None, progress: bool | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The summary, which is JSON, and the arrays that `draw` reads."""
    for name in ("tokens", "width", "depth"):
        whole_number(name, getattr(settings, name))
    T, layer = settings.depth / settings.width, settings.build_layer()
    steps = default_steps(layer, settings.tokens, T) if settings.step is None else max(1, round(T / positive("step", settings.step)))
    V0 = equicorrelated(settings.tokens, settings.rho)
    frames = max(1, min(64, SERIES_MEMORY // (8 * max(1, settings.samples) * settings.tokens**2)))
    began = time.perf_counter()
    paths = solve(
        layer,
        V0,
        T=T,
        steps=steps,
        samples=settings.samples,
        seed=settings.seed,
        method=settings.method,
        record=math.ceil(steps / frames),
        upper=settings.upper,
        lower=settings.lower,
        device=settings.device,
        executor=executor,
        progress=progress,
        check=settings.samples >= 512,
    )
    seconds = time.perf_counter() - began
    V, rho, stopped = paths.V.cpu().numpy(), paths.rho.cpu().numpy(), paths.stopped.numpy()
    survived = stopped > paths.t[-1].item()  # the last of the steps' times, which rounding may put beyond T
    summary: dict[str, Any] = {
        "version": shaped.__version__,
        "settings": asdict(settings) | {"horizon": T, "steps": steps},
        "rho": summarise(pairs(rho[-1, survived])),
        "V": summarise(pairs(V[-1, survived])),
        "variance": summarise(np.diagonal(V[-1, survived], axis1=-2, axis2=-1)),
        "stopped_share": paths.stopped_share,
        "stopped_interval": list(paths.stopped_interval),
        "step_effect": asdict(paths.info["step_effect"]) if "step_effect" in paths.info else None,
        "seconds": seconds,
    } | {key: value for key, value in paths.info.items() if key == "projections"}
    arrays = {"t": paths.t.numpy()}
    if settings.tokens > 1 and survived.any():
        running = (pairs(rho[i, stopped > t]).ravel() for i, t in enumerate(arrays["t"]))
        arrays["rho_over_time"] = np.stack([np.percentile(values, PERCENTILES) for values in running], 1)
        arrays |= densities("rho", pairs(rho[-1, survived]).ravel())
        arrays |= densities("V", pairs(V[-1, survived]).ravel())
    return summary, arrays


def summarise(values: Float[np.ndarray, "sample entry"]) -> dict[str, Any] | None:
    """Over the paths that did not stop. Entries of one path depend on each other, so the standard error is that of the paths' means."""
    if values.size == 0:
        return None
    own = values.mean(1)
    return {
        "mean": float(values.mean()),
        "standard_error": float(own.std(ddof=1) / math.sqrt(len(own))) if len(own) > 1 else None,
        "standard_deviation": float(values.std()),
        "percentiles": {str(p): float(x) for p, x in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)},
    }


def make_table(summary: dict[str, Any]) -> Table:
    settings = summary["settings"]
    columns = ("", "mean", "std", *(f"{p} %" for p in PERCENTILES))
    made = start_table(columns, words=1, title=f"{settings['layers']} at t = {settings['horizon']:g}")
    for key, label in (("rho", "rho (pairs)"), ("V", "V (pairs)"), ("variance", "V (diagonal)")):
        row = summary[key]
        if row is not None:
            error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.3f}"
            percentiles = (f"{x:.3f}" for x in row["percentiles"].values())
            made.add_row(label, f"{row['mean']:.3f}{error}", f"{row['standard_deviation']:.3f}", *percentiles)
    made.caption = f"stopped: {format_share(summary['stopped_share'], settings['samples'])} of {settings['samples']} paths"
    return made


def describe_run(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    return f"{settings['steps']} steps in {summary['seconds']:.2f} s; seed {settings['seed']}"


def draw(summary: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A PNG: the spread of rho over time, and the densities of rho and V at the horizon."""
    from matplotlib.figure import Figure

    from shaped.figures.harness.style import BLUE, GREY

    settings = summary["settings"]
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    over_time, at_end, covariance = figure.subplots(1, 3)
    t, bands = arrays["t"], arrays["rho_over_time"]
    over_time.fill_between(t, bands[0], bands[4], color=BLUE, alpha=0.15, linewidth=0, label="5 % to 95 %")
    over_time.fill_between(t, bands[1], bands[3], color=BLUE, alpha=0.3, linewidth=0, label="25 % to 75 %")
    over_time.plot(t, bands[2], "--", color=BLUE, label="median")
    over_time.set(xlabel="$t = $ depth / width", ylabel=r"$\rho^{\alpha\beta}_t$", xlim=(t[0], t[-1]))
    over_time.legend(frameon=False, fontsize=8, loc="best")
    for axes, name, label in ((at_end, "rho", r"\rho^{\alpha\beta}_T"), (covariance, "V", r"V^{\alpha\beta}_T")):
        axes.stairs(arrays[f"{name}_heights"], arrays[f"{name}_edges"], fill=True, color=GREY, alpha=0.35, label="histogram")
        axes.plot(arrays[f"{name}_grid"], arrays[f"{name}_density"], "--", color=BLUE, label="kernel density")
        axes.axvline(settings["rho"], color="black", linewidth=0.8, linestyle=":", label="start")
        axes.set(xlabel=f"${label}$", ylabel="density", ylim=(0, None))
        axes.legend(frameon=False, fontsize=8)
    names = " + ".join(settings["layers"].split(","))
    figure.suptitle(
        rf"Covariance SDE, {names}: $m={settings['tokens']}$, $T={settings['horizon']:g}$, "
        rf"$\gamma={settings['gamma']:.4g}$, $\tau_0={settings['tau0']:g}$, {settings['samples']} samples",
        fontsize=10,
    )
    return to_png(figure)
