"""`shaped converge`: the distance between finite networks and the SDE against the width."""

from __future__ import annotations

import math
import time
from collections import Counter
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

import shaped
from shaped.checks import parse_whole_numbers, positive, whole_number
from shaped.commands import options
from shaped.commands.blocks import BlockSettings
from shaped.commands.options import LAYER, SOLVER
from shaped.commands.results import check_folder, name_files, show_results, start_table, to_png, write_results
from shaped.compare import Distance, compare, find_resolution
from shaped.covariance import correlation, equicorrelated
from shaped.engine.walk import is_safe
from shaped.files import replace_non_finite
from shaped.finite import propagate
from shaped.layers.base import Sizes
from shaped.limit import solve
from shaped.trajectory import Trajectory
from shaped.workers import open_executor

if TYPE_CHECKING:
    from rich.table import Table

STATISTICS = ("rho", "V")
MEASURES, TITLES = ("ks", "wasserstein"), ("Kolmogorov-Smirnov", "Wasserstein")


@dataclass(frozen=True, kw_only=True)
class Settings(BlockSettings):
    widths: tuple[int, ...] = (25, 50, 100, 200, 400, 800, 1600, 3200)
    horizon: float = 0.75
    samples: int = 65536
    step: float = 0.0025
    seed: int = 0
    upper: float = 1e4

    def networks(self, n: int) -> int:
        """Samples at width n: from width 100 on as many as take about as long as there, but no fewer than 512."""

        def cost(n: int) -> float:
            """Of the d ~ n layers of a network, each some algebra and, for a feed-forward layer, m·n normals."""
            features = self.tokens * n if {"feedforward", "perceptron"} & set(self.names) else 0
            return n * (400 + features)

        return min(self.samples, max(512, round(self.samples * cost(100) / cost(n))))


def converge(
    widths: Annotated[str, typer.Option(help="Widths n, separated by commas.", rich_help_panel=LAYER)] = "25,50,100,200,400,800,1600,3200",
    horizon: Annotated[float, typer.Option(help="Depth/width: depth is horizon times width.", rich_help_panel=LAYER)] = 0.75,
    layers: options.Layers = "attention,feedforward",
    tokens: options.Tokens = 4,
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
    samples: Annotated[int, typer.Option(help="Networks at small widths; twice as many paths of the SDE.", rich_help_panel=SOLVER)] = 65536,
    step: options.Step = 0.0025,
    seed: options.Seed = 0,
    upper: options.Upper = 1e4,
    workers: options.Workers = None,
    scheduler: options.Scheduler = None,
    out: options.Out = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Measure how fast finite networks approach the SDE as the width grows."""
    settings = Settings.from_options(locals() | {"widths": parse_whole_numbers("widths", widths)})
    check_folder(out, *name_files("converge"))
    with open_executor(workers, scheduler) as executor:
        summary = compute(settings, executor, progress=False if as_json else None)
    written = write_results(out, "converge", summary, lambda: draw(summary))
    show_results(summary, make_table(summary), describe_rates(summary), written, as_json)


def compute(settings: Settings, executor: Executor | None = None, progress: bool | None = None) -> dict[str, Any]:
    """Distances at each width, with errors and bands, and the fitted rates."""
    if not settings.widths:
        raise ValueError("widths must not be empty")
    if twice := [n for n, count in Counter(settings.widths).items() if count > 1]:  # the fit would count its distances twice
        raise ValueError(f"widths must differ from each other, got {twice[0]} more than once")
    whole_number("tokens", settings.tokens, least=2)
    whole_number("samples", settings.samples, least=2)
    positive("step", settings.step)
    T = positive("horizon", settings.horizon)
    layer, V0 = settings.build_layer(), equicorrelated(settings.tokens, settings.rho)
    for n in settings.widths:
        if n < settings.tokens:
            raise ValueError(f"widths must be at least {settings.tokens}, the number of tokens, got {n}")
        layer.check_sizes(Sizes(n))
    depths = {n: max(1, round(T * n)) for n in settings.widths}
    began = time.perf_counter()

    @cache
    def limit(t: float) -> Trajectory:
        """The SDE at the time that a network's whole number of layers amounts to."""
        return solve(
            layer,
            V0,
            T=t,
            steps=max(1, round(t / settings.step)),
            samples=2 * settings.samples,
            seed=settings.seed,
            record="last",
            upper=settings.upper,
            executor=executor,
            progress=progress,
            check=True,
        )

    rows = []
    for n in settings.widths:
        network = propagate(
            layer,
            V0,
            n=n,
            d=depths[n],
            samples=settings.networks(n),
            seed=settings.seed + 1,
            record="last",
            upper=settings.upper,
            dtype=choose_dtype(limit(depths[n] / n)),
            executor=executor,
            progress=progress,
        )
        alike = settings.mask is None and settings.rope is None  # tokens are exchangeable unless a mask or their place tells them apart
        pair = None if alike else (0, 1)
        found = compare(limit(depths[n] / n), network, statistics=STATISTICS, pair=pair, resamples=100, seed=settings.seed)
        distances = {name: {"ks": to_json(found.ks[name]), "wasserstein": to_json(found.wasserstein[name])} for name in found.ks}
        rows.append({"width": n, "depth": depths[n], "samples": settings.networks(n), "distances": distances})
    return {
        "version": shaped.__version__,
        "settings": asdict(settings) | {"widths": list(settings.widths)},
        "rows": rows,
        "rates": {name: {measure: fit_rate(rows, name, measure) for measure in MEASURES} for name in STATISTICS},
        "seconds": time.perf_counter() - began,
    }


def to_json(distance: Distance) -> dict[str, float | None]:
    """An error that cannot be told is null."""
    return replace_non_finite(asdict(distance))


def choose_dtype(paths: Trajectory) -> torch.dtype:
    """That of the networks: float32, which takes half the time, unless a path of the SDE ends where float32 rounds it off."""
    V = paths.V[-1][paths.stopped.isinf()]
    rows, columns = torch.triu_indices(V.shape[-1], V.shape[-1], 1)
    away = 1.0 - correlation(V)[:, rows, columns].abs()
    fits = (away >= find_resolution(torch.float32, V.shape[-1])).all() and is_safe(V.float()).all()
    return torch.float32 if fits else torch.float64


def subtract_floor(distance: dict[str, Any]) -> tuple[float, float]:
    """The part of a distance beyond that of two samples of one law, and its error, which is infinite if it cannot be told."""
    value = math.sqrt(max(0.0, distance["value"] ** 2 - distance["floor"] ** 2))
    error = math.inf if distance["error"] is None else distance["error"]
    return value, error * distance["value"] / max(value, 1e-12)


def fit_rate(rows: list[dict[str, Any]], name: str, measure: str) -> dict[str, float] | None:
    """r ± error of distance ~ n^-r, over the widths at which the distance stands out of the sampling noise; None if fewer than 3 do."""
    fitted = fit_line(rows, name, measure)
    return fitted and {"rate": -fitted.slope, "error": fitted.error, "widths": fitted.widths}


@dataclass(frozen=True)
class Line:
    """Of the logarithm of a distance against that of the width."""

    slope: float
    error: float
    constant: float
    widths: int


def fit_line(rows: list[dict[str, Any]], name: str, measure: str) -> Line | None:
    points = []
    for row in rows:
        distance = row["distances"][name][measure]
        value, error = subtract_floor(distance)
        if distance["value"] > distance["band"] and value > 2 * error:
            points.append((math.log(row["width"]), math.log(value), error / value))
    if len(points) < 3:
        return None
    x, y, s = np.array(points).T
    design = np.stack([np.ones_like(x), x], 1) / s[:, None]
    covariance = np.linalg.inv(design.T @ design)
    constant, slope = map(float, covariance @ design.T @ (y / s))
    return Line(slope, float(math.sqrt(covariance[1, 1])), constant, len(points))


def make_table(summary: dict[str, Any]) -> Table:
    settings = summary["settings"]
    title = f"{settings['layers']}: distance to the SDE at d/n = {settings['horizon']:g}"
    made = start_table(("width", "samples", "KS of rho", "one law", "KS of V", "one law"), title=title)
    for row in summary["rows"]:
        cells = [str(row["width"]), str(row["samples"])]
        for name in STATISTICS:
            ks = row["distances"][name]["ks"]
            cells += [format_with_error(ks), f"< {ks['band']:.4f}"]
        made.add_row(*cells)
    return made


def format_with_error(distance: dict[str, float]) -> str:
    """0.0123(45) is 0.0123 with a standard error of 0.0045."""
    return f"{distance['value']:.4f}({round(1e4 * distance['error'])})"


def describe_rates(summary: dict[str, Any]) -> str:
    lines = []
    for name in STATISTICS:
        for measure, title in zip(MEASURES, TITLES, strict=True):
            fitted = summary["rates"][name][measure]
            found = f"n^-{fitted['rate']:.2f} ± {fitted['error']:.2f}" if fitted else "too few widths stand out of the sampling noise"
            lines.append(f"{title} distance of {name}: {found}")
    return "\n".join([*lines, f"{summary['seconds']:.1f} s; seed {summary['settings']['seed']}"])


def draw(summary: dict[str, Any]) -> bytes:
    """A PNG: distance against width with errors, the fitted lines, and below which two samples of one law would be."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    from shaped.figures.harness.style import BLACK, BLUE, VERMILION, apply_style, make_panels

    looks = {"rho": (r"$\rho^{\alpha\beta}$", BLUE, 0.97), "V": (r"$V^{\alpha\beta}$", VERMILION, 1.03)}
    widths = np.array([row["width"] for row in summary["rows"]])
    with apply_style():
        figure, panels = make_panels(2, height=3.3)
        for axes, measure, title in zip(panels, MEASURES, TITLES, strict=True):
            fits = []
            for name, (label, colour, shift) in looks.items():
                found = [Distance(**row["distances"][name][measure]) for row in summary["rows"]]
                values, errors = [d.value for d in found], [d.error or 0.0 for d in found]
                axes.errorbar(shift * widths, values, errors, fmt="o", markersize=3.5, capsize=2, linewidth=1.0, color=colour, label=label)
                axes.plot(widths, [d.band for d in found], ":", color=colour, linewidth=1.0)
                if fitted := fit_line(summary["rows"], name, measure):
                    law = rf"{label}: fit $n^{{{fitted.slope:.2f} \pm {fitted.error:.2f}}}$"
                    fits += axes.plot(widths, math.exp(fitted.constant) * widths**fitted.slope, color=colour, linewidth=1.0, label=law)
            axes.set(xscale="log", yscale="log", xlabel="width $n$", ylabel=f"{title} distance")
            axes.set_xticks(widths, [str(n) for n in widths])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            if fits:
                axes.legend(handles=fits, loc="upper right")
        handles, labels = panels[0].get_legend_handles_labels()
        points = [handles[labels.index(label)] for label, _, _ in looks.values()]
        band = Line2D([], [], color=BLACK, linestyle=":", linewidth=1.0, label="95 % of pairs of samples of one law are below")
        figure.legend(handles=[*points, band], loc="outside lower center", ncols=3)
        settings = summary["settings"]
        names = " + ".join(settings["layers"].split(","))
        numbers = rf"$m={settings['tokens']}$, $d/n={settings['horizon']:g}$, $\gamma={settings['gamma']:.4g}$"
        figure.suptitle(f"Networks against the SDE, {names}: {numbers}", fontsize=8)
        return to_png(figure, dpi=220)
