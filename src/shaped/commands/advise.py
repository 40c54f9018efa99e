"""`shaped advise`: the largest safe gamma for a size, with intervals."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import shaped
from shaped.checks import whole_number
from shaped.commands import options
from shaped.commands.blocks import read_mask
from shaped.commands.console import print_error
from shaped.commands.options import ATTENTION, LAYER, PLACE, SOLVER, WORK, show_choices
from shaped.commands.results import check_folder, name_files, show_results, to_png, write_results
from shaped.process import count_cores, require
from shaped.workers import open_executor

if TYPE_CHECKING:
    from shaped.advice.rows import Row

CONFIG: dict[str, Any] = PLACE | {"metavar": "CONFIG.json"}
FROM_CONFIG = ("width", "depth", "heads", "hidden", "rope")
"""Options that a config determines, beside the mask and QK-norm."""


def advise(
    width: Annotated[int | None, typer.Option(help="Width n.", rich_help_panel=LAYER)] = None,
    depth: Annotated[int | None, typer.Option(help="Depth d.", rich_help_panel=LAYER)] = None,
    tokens: options.Tokens = 128,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", show_default="8", rich_help_panel=ATTENTION)] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            help="causal, none, alibi, or a .npy file with a bias on the logits.",
            show_default="causal",
            rich_help_panel=ATTENTION,
            **show_choices("causal", "none", "alibi", "FILE.npy"),
        ),
    ] = None,
    qk_norm: options.QKNorm = False,
    rope: options.Rope = None,
    hidden: Annotated[
        int | None, typer.Option(help="Width inside the feed-forward layers.", show_default="4 width", rich_help_panel=LAYER)
    ] = None,
    c_minus: Annotated[
        float | None,
        typer.Option(help="Shaped ReLU: negative slope is 1 + c_minus/sqrt(n).", show_default="-1", rich_help_panel=LAYER),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Read the sizes from this model's config.json.", rich_help_panel=LAYER, **CONFIG),
    ] = None,
    tau0: Annotated[
        str | None,
        typer.Option(
            help="Temperatures to search, separated by commas.",
            show_default="width^-1/2, width^-1/4, 1",
            metavar="NUMBER,…",
            rich_help_panel=ATTENTION,
        ),
    ] = None,
    rho: options.Rho = 0.2,
    correlation: Annotated[
        float, typer.Option(help="Tokens align if their mean absolute correlation is above this.", rich_help_panel=SOLVER)
    ] = 0.9,
    growth: Annotated[float, typer.Option(help="The stream explodes if its length grows more than this.", rich_help_panel=SOLVER)] = 10.0,
    share: Annotated[float, typer.Option(help="Share of networks that may fail.", rich_help_panel=SOLVER)] = 0.01,
    samples: Annotated[
        int | None,
        typer.Option(help="Most networks at one gamma and tau0.", show_default="what proves the share", rich_help_panel=SOLVER),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    workers: Annotated[
        int | None, typer.Option(help="Processes to share the work.", show_default="one a core", rich_help_panel=WORK)
    ] = None,
    scheduler: options.Scheduler = None,
    out: options.Out = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Find the largest gamma at which shaped networks of a size neither align their tokens nor explode at initialisation."""
    asked = choose_sizes(locals())
    temperatures = None if tau0 is None else parse_numbers("tau0", tau0)
    check_folder(out, *name_files("advise"))
    began = time.perf_counter()

    def tell(row: Row) -> None:
        if not as_json and sys.stderr is not None and sys.stderr.isatty():
            spent = time.perf_counter() - began
            print_error(f"{spent:5.0f} s  {row.law}, tau0 {row.tau0:.3g}, gamma {row.gamma:.3g}: {row.failed} of {row.count} fail")

    if workers is None and scheduler is None and device == "cpu":
        workers = count_cores()
    with open_executor(workers, scheduler) as executor:
        advice = shaped.advise(
            **asked,
            tau0=temperatures,
            rho=rho,
            correlation=correlation,
            growth=growth,
            share=share,
            samples=samples,
            seed=seed,
            device=device,
            executor=executor,
            progress=False,
            tell=tell,
        )
    summary = {"version": shaped.__version__} | advice.to_dict()
    written = write_results(out, "advise", summary, lambda: to_png(advice.draw()))
    remark = f"{advice.info['seconds']:.0f} s; seed {seed}"
    show_results(summary, str(advice), remark, written, as_json)


def choose_sizes(given: dict[str, Any]) -> dict[str, Any]:
    """The sizes as the library names them, from the options or from a config. What is wrong is told by the option's name."""
    whole_number("tokens", given["tokens"], least=2)
    if given["config"] is not None:
        for name in (*FROM_CONFIG, "mask", "qk_norm"):
            if given[name] is not None and given[name] is not False:  # 0 is refused too
                raise ValueError(f"{name} must be left out with a config, which determines it, got {given[name]}")
        require("config", "hf", "transformers")
        from shaped.hf.prediction.sizes import read_sizes

        sizes = read_sizes(given["config"], given["tokens"])
        if given["c_minus"] is not None and "c_minus" in sizes:
            raise ValueError(f"c_minus must be left out with a config, which determines it, got {given['c_minus']}")
        if sizes["n"] < given["tokens"]:
            raise ValueError(f"tokens must be at most {sizes['n']}, the width of the config, got {given['tokens']}")
        return sizes if given["c_minus"] is None else sizes | {"c_minus": given["c_minus"]}
    for name in ("width", "depth"):
        if given[name] is None:
            raise ValueError(f"{name} must be given without a config, got none")
        whole_number(name, given[name])
    if given["width"] < given["tokens"]:
        raise ValueError(f"width must be at least {given['tokens']}, the number of tokens, got {given['width']}")
    heads = 8 if given["heads"] is None else given["heads"]
    mask = None if given["mask"] == "none" else read_mask(given["mask"] or "causal", given["tokens"], heads)
    named = {"n": given["width"], "d": given["depth"], "m": given["tokens"], "heads": heads, "mask": mask}
    named |= {name: given[name] for name in ("qk_norm", "rope", "hidden")}
    return named if given["c_minus"] is None else named | {"c_minus": given["c_minus"]}


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be numbers separated by commas, got {text!r}") from None
