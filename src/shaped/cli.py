"""The command `shaped`: typed functions, no logic."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from shaped import __version__

app = typer.Typer(add_completion=False, invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)

INTERRUPTED = 130  # what typer returns after Ctrl-C, as shells do


def main() -> None:
    """Runs the command. What the user got wrong is one line on standard error, and exit code 2."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            print("shaped: interrupted; no file is half-written", file=sys.stderr)
        sys.exit(code)
    except (ValueError, OSError) as error:
        complain(str(error))
    except Exception as error:
        # typer brings its own copy of click and does not export the base of its usage errors; BadParameter stands for them.
        if not isinstance(error, typer.BadParameter.__bases__):
            raise
        usage_error: Any = error
        complain(usage_error.format_message())


def complain(message: str) -> None:
    print(f"shaped: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"shaped {__version__}")
        raise typer.Exit


@app.callback()
def shaped(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """The shaped Transformer in the infinite depth-and-width limit."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def simulate(
    layers: Annotated[str, typer.Option(help="Layers of a block: attention, feedforward, perceptron.")] = "attention,feedforward",
    tokens: Annotated[int, typer.Option(help="Number of tokens m.")] = 4,
    width: Annotated[int, typer.Option(help="Width n.")] = 200,
    depth: Annotated[int, typer.Option(help="Depth d; the horizon is depth/width.")] = 150,
    gamma: Annotated[float, typer.Option(help="Weight of the residual branches.")] = 8**-0.5,
    tau0: Annotated[float, typer.Option(help="Temperature.")] = 1.0,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 1,
    project: Annotated[bool, typer.Option("--project", help="Add an output projection to attention.")] = False,
    mask: Annotated[str | None, typer.Option(help="'causal', or nothing.")] = None,
    c_plus: Annotated[float, typer.Option(help="Shaped ReLU: positive slope is 1 + c_plus/sqrt(n).")] = 0.0,
    c_minus: Annotated[float, typer.Option(help="Shaped ReLU: negative slope is 1 + c_minus/sqrt(n).")] = -1.0,
    rho: Annotated[float, typer.Option(help="Correlation of each pair of tokens at the start.")] = 0.2,
    samples: Annotated[int, typer.Option(help="Number of paths.")] = 4096,
    step: Annotated[float, typer.Option(help="Time step.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    method: Annotated[str, typer.Option(help="cone or euler.")] = "cone",
    upper: Annotated[float, typer.Option(help="Stop a path whose largest eigenvalue passes this.")] = 1e4,
    lower: Annotated[float | None, typer.Option(help="Stop a path whose smallest eigenvalue falls below this.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for simulate.json and simulate.png; 'out' unless --json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Sample the covariance SDE; by default at the setting of the paper's Figure 1."""
    from shaped.figures import simulate as figure

    if out is None and not as_json:
        out = Path("out")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    given = {key: value for key, value in locals().items() if key in figure.Settings.__dataclass_fields__}
    summary, arrays = figure.compute(figure.Settings(**given), progress=False if as_json else None)
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        print_table(summary)
    if out is not None:
        write_results(out, "simulate", summary, arrays, say=not as_json)


def write_results(out: Path, name: str, summary: dict[str, Any], arrays: dict[str, Any], *, say: bool) -> None:
    from shaped.figures import simulate as figure
    from shaped.files import write_atomically, write_json

    write_json(out / f"{name}.json", summary)
    written = [out / f"{name}.json"]
    if "rho_density" in arrays and find_spec("matplotlib"):
        picture = figure.draw(summary, arrays)
        write_atomically(out / f"{name}.png", lambda file: file.write(picture))
        written.append(out / f"{name}.png")
    if say:
        print("written:", *written)
        if not find_spec("matplotlib"):
            print("no picture: matplotlib is not installed (pip install 'shaped-transformer[plot]')")


def print_table(summary: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    settings = summary["settings"]
    table = Table(title=f"{settings['layers']} at t = {settings['horizon']:g}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "mean", "std", "5 %", "25 %", "50 %", "75 %", "95 %"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for key, label in (("rho", "rho (pairs)"), ("V", "V (pairs)"), ("variance", "V (diagonal)")):
        row = summary[key]
        if row is not None:
            error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.3f}"
            table.add_row(
                label, f"{row['mean']:.3f}{error}", f"{row['standard_deviation']:.3f}", *(f"{x:.3f}" for x in row["percentiles"].values())
            )
    Console().print(table)
    stopped = f"{summary['stopped_share']:.4%} of {settings['samples']} paths stopped"
    print(f"{stopped}; {settings['steps']} steps in {summary['seconds']:.2f} s; seed {settings['seed']}")
