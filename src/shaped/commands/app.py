"""The command `shaped`: typed functions, no logic."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from shaped import __version__, interrupts
from shaped.checks import whole_numbers
from shaped.commands import train as commands
from shaped.commands.lines import Lines, complaint, flush
from shaped.commands.train import PLACE
from shaped.files import make_folder

app = typer.Typer(add_completion=False, invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(commands.app)  # without a name: its commands stand beside those here

NOBODY_READS = 1  # what typer returns where the pipe that a command prints to is closed

Layers = Annotated[str, typer.Option(help="Layers of a block: attention, feedforward, perceptron.")]
Tokens = Annotated[int, typer.Option(help="Number of tokens m.")]
Gamma = Annotated[float, typer.Option(help="Weight of the residual branches.")]
Tau0 = Annotated[float, typer.Option(help="Temperature.")]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
Project = Annotated[bool, typer.Option("--project", help="Add an output projection to attention.")]
Mask = Annotated[
    str | None, typer.Option(help="causal, alibi, or a .npy file with a bias on the logits, [tokens, tokens] or [heads, tokens, tokens].")
]
CPlus = Annotated[float, typer.Option(help="Shaped ReLU: positive slope is 1 + c_plus/sqrt(n).")]
CMinus = Annotated[float, typer.Option(help="Shaped ReLU: negative slope is 1 + c_minus/sqrt(n).")]
Rho = Annotated[float, typer.Option(help="Correlation of each pair of tokens at the start.")]
Samples = Annotated[int, typer.Option(help="Number of paths.")]
Step = Annotated[float, typer.Option(help="Time step of the SDE.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]
Upper = Annotated[float, typer.Option(help="Stop a path whose largest eigenvalue passes this.")]
Workers = Annotated[int | None, typer.Option(help="Processes on this machine to share the work.")]
Scheduler = Annotated[str | None, typer.Option(help="Address of a running Dask scheduler to do the work.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Out = Annotated[Path, typer.Option(help="Folder for the numbers and the picture.", **PLACE)]


def main() -> None:
    """Runs the command. What the user got wrong is one line on standard error, and exit code 2."""
    try:
        interrupts.loaded()
        warnings.showwarning = show_warning
        code = app(standalone_mode=False)
        flush()
        if code == interrupts.INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except KeyboardInterrupt:
        complaint(interrupts.MESSAGE)
        sys.exit(interrupts.INTERRUPTED)
    except BrokenPipeError:
        sys.exit(NOBODY_READS)
    except (ValueError, OSError, ArithmeticError) as error:
        complain(str(error))
    except Exception as error:
        if is_lack_of_memory(error):
            complain("this takes more memory than there is: fewer tokens, samples or steps; in training, a smaller batch or model")
        # typer brings its own copy of click and does not export the base of its usage errors; BadParameter stands for them.
        if not isinstance(error, typer.BadParameter.__bases__):
            raise
        usage_error: Any = error
        complain(usage_error.format_message())


def is_lack_of_memory(error: Exception) -> bool:
    """Python's, a GPU's (whose class is not imported for this), or that of PyTorch's CPU allocator, which has no class of its own."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def show_warning(message: Warning | str, *where: Any) -> None:
    """In one line, without the place in the code."""
    complaint(f"shaped: {' '.join(str(message).split())}")


def complain(message: str) -> None:
    complaint(f"shaped: {' '.join(message.split())}")
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
    layers: Layers = "attention,feedforward",
    tokens: Tokens = 4,
    width: Annotated[int, typer.Option(help="Width n.")] = 200,
    depth: Annotated[int, typer.Option(help="Depth d; the horizon is depth/width.")] = 150,
    gamma: Gamma = 8**-0.5,
    tau0: Tau0 = 1.0,
    heads: Heads = 1,
    project: Project = False,
    mask: Mask = None,
    c_plus: CPlus = 0.0,
    c_minus: CMinus = -1.0,
    rho: Rho = 0.2,
    samples: Samples = 4096,
    step: Annotated[
        float | None, typer.Option(help="Time step of the SDE; by default at most 0.01, and less where the layers want that.")
    ] = None,
    seed: Seed = 0,
    method: Annotated[str, typer.Option(help="cone or euler.")] = "cone",
    upper: Upper = 1e4,
    lower: Annotated[float | None, typer.Option(help="Stop a path whose smallest eigenvalue falls below this.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Workers = None,
    scheduler: Scheduler = None,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Sample the covariance SDE; by default at the setting of the paper's Figure 1."""
    from shaped.commands import simulate as figure
    from shaped.workers import working_on

    settings = figure.Settings(**chosen(figure.Settings, locals()))
    try_folder(out)
    with working_on(workers, scheduler) as executor:
        summary, arrays = figure.compute(settings, executor, progress=False if as_json else None)
    picture = (lambda: figure.draw(summary, arrays)) if "rho_density" in arrays else None
    written = write_results(out, "simulate", summary, picture)
    show(summary, figure.table, figure.remark(summary), written, as_json)


@app.command()
def converge(
    widths: Annotated[str, typer.Option(help="Widths n, separated by commas.")] = "25,50,100,200,400,800,1600,3200",
    horizon: Annotated[float, typer.Option(help="Depth/width: depth is horizon times width.")] = 0.75,
    layers: Layers = "attention,feedforward",
    tokens: Tokens = 4,
    gamma: Gamma = 8**-0.5,
    tau0: Tau0 = 1.0,
    heads: Heads = 1,
    project: Project = False,
    mask: Mask = None,
    c_plus: CPlus = 0.0,
    c_minus: CMinus = -1.0,
    rho: Rho = 0.2,
    samples: Annotated[int, typer.Option(help="Networks at small widths; twice as many paths of the SDE.")] = 65536,
    step: Step = 0.0025,
    seed: Seed = 0,
    upper: Upper = 1e4,
    workers: Workers = None,
    scheduler: Scheduler = None,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Measure how fast finite networks approach the SDE as the width grows."""
    from shaped.commands import converge as figure
    from shaped.workers import working_on

    given = chosen(figure.Settings, locals())
    given["widths"] = whole_numbers("widths", widths)
    settings = figure.Settings(**given)
    try_folder(out)
    with working_on(workers, scheduler) as executor:
        summary = figure.compute(settings, executor, progress=False if as_json else None)
    written = write_results(out, "converge", summary, lambda: figure.draw(summary))
    show(summary, figure.table, figure.remark(summary), written, as_json)


@app.command()
def reproduce(
    figures: Annotated[list[str] | None, typer.Argument(help="Figures by their ids, such as fig1; all by default.")] = None,
    scale: Annotated[str, typer.Option(help="quick (few samples) or paper (the captions' numbers).")] = "quick",
    tokens: Annotated[int, typer.Option(help="Number of tokens m that is drawn; claims are checked for 2, 4 and 8 too.")] = 4,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Annotated[int | None, typer.Option(help="Processes to share the work; by default one a core on the CPU.")] = None,
    scheduler: Scheduler = None,
    again: Annotated[bool, typer.Option("--again", help="Compute also what is in the folder already.")] = False,
    runs: Annotated[
        list[Path] | None, typer.Option(help="Folders or files of training runs, for fig6, table1 and table2; repeatable.", **PLACE)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for numbers, pictures and report.", **PLACE)] = Path("out"),
) -> None:
    """Compute and draw the paper's figures, check their claims, and write report.html."""
    from shaped.figures.harness import reproduce as figures_of
    from shaped.workers import working_on

    if workers is None and scheduler is None:
        workers = figures_of.workers_by_default(device)
    figures_of.select_pages(figures or [], runs or [])  # what is no figure is said before anything is made
    how = {"scale": scale, "tokens": tokens, "seed": seed, "device": device, "again": again, "runs": runs or []}
    try_folder(out)
    lines = Lines()
    with working_on(workers, scheduler) as executor:
        report = figures_of.reproduce(figures or [], out, executor=executor, say=lines.say, **how)
    lines.say(f"report: {report}")
    lines.end(out)


def chosen(settings: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key in settings.__dataclass_fields__}


def try_folder(out: Path) -> None:
    """Where to write; made, and tried, before the work and not after it."""
    make_folder(out)
    with TemporaryFile(dir=out):
        pass


def show(summary: dict[str, Any], table: Callable[[dict[str, Any]], Any], remark: str, written: list[Path], as_json: bool) -> None:
    lines = Lines()
    if as_json:
        lines.say(json.dumps(summary, allow_nan=False))
    else:
        from rich.console import Console

        drawn, terminal = io.StringIO(), Console()
        Console(file=drawn, width=terminal.width, force_terminal=terminal.is_terminal).print(table(summary))
        lines.say(drawn.getvalue() + remark)
        lines.say(f"written: {' '.join(map(str, written))}")
        if not find_spec("matplotlib"):
            lines.say("no picture: matplotlib is not installed (pip install 'shaped-transformer[plot]')")
    lines.end(written[0].parent)


def write_results(out: Path, name: str, summary: dict[str, Any], picture: Callable[[], bytes] | None) -> list[Path]:
    from shaped.files import write_atomically, write_json

    write_json(out / f"{name}.json", summary)
    written = [out / f"{name}.json"]
    (out / f"{name}.png").unlink(missing_ok=True)  # an earlier run's, which these numbers are not of
    if picture is not None and find_spec("matplotlib"):
        drawn = picture()
        write_atomically(out / f"{name}.png", lambda file: file.write(drawn))
        written.append(out / f"{name}.png")
    return written
