"""The command `shaped`: typed functions, no logic."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from shaped import __version__
from shaped.train import settings as training

app = typer.Typer(add_completion=False, invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)
text = typer.Typer(rich_markup_mode=None, help="Text for training.", no_args_is_help=True)
app.add_typer(text, name="data")

INTERRUPTED = 130  # what typer returns after Ctrl-C, as shells do
UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h: training stopped before its end, and the same command goes on

Layers = Annotated[str, typer.Option(help="Layers of a block: attention, feedforward, perceptron.")]
Tokens = Annotated[int, typer.Option(help="Number of tokens m.")]
Gamma = Annotated[float, typer.Option(help="Weight of the residual branches.")]
Tau0 = Annotated[float, typer.Option(help="Temperature.")]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
Project = Annotated[bool, typer.Option("--project", help="Add an output projection to attention.")]
Mask = Annotated[str | None, typer.Option(help="'causal', or nothing.")]
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
Out = Annotated[Path | None, typer.Option(help="Folder for the numbers and the picture; 'out' unless --json.")]


def main() -> None:
    """Runs the command. What the user got wrong is one line on standard error, and exit code 2."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            print("shaped: interrupted; no file is half-written", file=sys.stderr)
        sys.exit(code)
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
    step: Step = 0.01,
    seed: Seed = 0,
    method: Annotated[str, typer.Option(help="cone or euler.")] = "cone",
    upper: Upper = 1e4,
    lower: Annotated[float | None, typer.Option(help="Stop a path whose smallest eigenvalue falls below this.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Workers = None,
    scheduler: Scheduler = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Sample the covariance SDE; by default at the setting of the paper's Figure 1."""
    from shaped.figures import simulate as figure
    from shaped.workers import working_on

    settings = figure.Settings(**chosen(figure.Settings, locals()))
    out = folder(out, as_json)
    with working_on(workers, scheduler) as executor:
        summary, arrays = figure.compute(settings, executor, progress=False if as_json else None)
    picture = (lambda: figure.draw(summary, arrays)) if "rho_density" in arrays else None
    show(summary, figure.table(summary), figure.remark(summary), as_json)
    write_results(out, "simulate", summary, picture, say=not as_json)


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
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure how fast finite networks approach the SDE as the width grows."""
    from shaped.figures import converge as figure
    from shaped.workers import working_on

    given = chosen(figure.Settings, locals())
    given["widths"] = whole_numbers("widths", widths)
    settings = figure.Settings(**given)
    out = folder(out, as_json)
    with working_on(workers, scheduler) as executor:
        summary = figure.compute(settings, executor, progress=False if as_json else None)
    show(summary, figure.table(summary), figure.remark(summary), as_json)
    write_results(out, "converge", summary, lambda: figure.draw(summary), say=not as_json)


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
        list[Path] | None, typer.Option(help="Folders or files of training runs, for fig6, table1 and table2; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for numbers, pictures and report.")] = Path("out"),
) -> None:
    """Compute and draw the paper's figures, check their claims, and write report.html."""
    from shaped.figures import reproduce as figures_of
    from shaped.workers import working_on

    if workers is None and scheduler is None:
        workers = figures_of.workers_by_default(device)
    ids = figures_of.chosen(figures or [], runs or [])
    how = {"scale": scale, "tokens": tokens, "seed": seed, "device": device, "again": again, "runs": runs or []}
    folder(out, as_json=False)
    with working_on(workers, scheduler) as executor:
        report = figures_of.reproduce(ids, out, executor=executor, **how)
    print("report:", report)


@text.command()
def prepare(
    text: Annotated[list[str], typer.Option(help="Text files (plain, .gz, .zst) or names of Hugging Face datasets; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokenizer and the arrays.")],
    valid: Annotated[list[str] | None, typer.Option(help="The same for the test text; repeatable.")] = None,
    valid_share: Annotated[float, typer.Option(help="Share of the documents that is held out, without --valid.")] = 0.01,
    vocab: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 32_000,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 128,
    cased: Annotated[bool, typer.Option("--cased", help="Keep capitals and accents.")] = False,
    tokens: Annotated[int | None, typer.Option(help="Stop after so many training tokens.")] = None,
) -> None:
    """Train a tokenizer on text and pack the text into memory-mapped arrays; goes on where it was interrupted."""
    needs("tokenizers", "transformers")
    from shaped.train import data

    how: dict[str, Any] = {"vocab": vocab, "length": length, "valid_share": valid_share, "cased": cased, "tokens": tokens}
    made = data.prepare(text, out, valid=valid, say=complaint, **how)
    for part in ("train", "valid"):
        about = made.facts[part]
        cut = ", stopped at the limit: the rest is left out" if about["stopped_at_limit"] else ""
        print(f"{part}: {about['documents']} documents, {about['tokens']} tokens in {about['rows']} rows of {made.length}{cut}")
    print(f"vocabulary: {made.vocab}")
    print("written:", out)


def from_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each setting, which goes into `given` if it was said."""
    options = [inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)]
    for name, hint in training.HINTS.items():
        about = training.Settings.__dataclass_fields__[name]
        choices = f" One of {', '.join(about.metadata['choices'])}." if about.metadata["choices"] else ""
        default = "" if about.default in (None, training.MISSING) else f" [{about.default}]"
        option = typer.Option(help=about.metadata["help"] + choices + default, show_default=False)
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]))

    def called(config: Path | None = None, **options: Any) -> None:
        command(config, {name: value for name, value in options.items() if value is not None})

    called.__doc__, called.__name__ = command.__doc__, command.__name__
    called.__signature__ = inspect.Signature(options)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
    return called


Config = Annotated[Path | None, typer.Option(help="TOML file with settings; options given beside it prevail.", show_default=False)]


@app.command()
@from_settings
def pretrain(config: Path | None, given: dict[str, Any]) -> None:
    """Train a model on prepared text; the same command goes on with a run that was interrupted, or whose minutes were over (status 75).

    Under torchrun, on several devices.
    """
    needs("transformers")
    from shaped.train import pretrain as loop

    settings = training.Settings.of((training.read_toml(config) if config else {}) | given)
    if loop.is_first():
        print(settings.to_toml())
    try:
        result = loop.pretrain(settings, progress=sys.stderr.isatty(), say=complaint)
    except loop.Stopped as stopped:
        if loop.is_first():
            print(stopped)
        raise typer.Exit(UNFINISHED) from None
    if loop.is_first():
        print(f"train loss {result.train_loss:.4f}, test loss {result.test_loss:.4f}")
        print("written:", settings.out)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="TOML file: out, minutes, [defaults], [[run]]…")],
    minutes: Annotated[float | None, typer.Option(help="Time for all runs; the same command goes on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs, in place of the file's.")] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared text, in place of the file's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the run of this name; repeatable.", show_default=False)] = None,
) -> None:
    """Run a queue of trainings one after another; those of the same shape share one compiled step.

    The status is 1 if a run failed, else 75 if some are left to do, which the same command does.
    """
    needs("transformers")
    from shaped.train import study as queue

    overrides = {"minutes": minutes, "out": None if out is None else str(out), "data": None if data is None else str(data)}
    summary = queue.study(file, only=only or (), progress=sys.stderr.isatty(), **overrides)
    diverged = sum(bool(run["why"]) for run in summary["unfinished"])
    left = {run["name"] for run in summary["unfinished"] if not run["why"]} - summary["failed"].keys()
    print(f"{len(summary['runs'])} finished, {diverged} diverged, {len(summary['failed'])} failed, {len(left)} unfinished")
    if summary["failed"]:
        raise typer.Exit(1)
    if left & set(only or left):
        raise typer.Exit(UNFINISHED)


@app.command()
def collect(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, folders with such folders, or files that this made.")],
    out: Annotated[Path, typer.Option(help="JSON file; the metrics go beside it, into a file that ends in .jsonl.")],
) -> None:
    """Put runs into one file, with their settings, metrics and GLUE scores; `shaped reproduce --runs` reads it."""
    from shaped.train import collection

    found = collection.trained(runs)
    if not found:
        raise ValueError(f"runs must have been begun by `shaped pretrain`, got none in {', '.join(map(str, runs))}")
    collection.collect(found, out)
    print(f"{len(found)} runs, {sum(run.result is not None for run in found)} finished")
    print("written:", out)


@app.command()
def glue(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of `shaped pretrain`.")],
    task: Annotated[list[str], typer.Option(help="cola, mrpc or rte; repeatable.")],
    data: Annotated[Path | None, typer.Option(help="Folder with CoLA, MRPC, RTE; the Hugging Face hub without it.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 5e-4,
    batch: Annotated[int, typer.Option(help="Examples of a step.")] = 16,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the learning rate grows.")] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile: Annotated[str, typer.Option(help="auto, off, blocks or whole.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
) -> None:
    """Fine-tune runs on GLUE tasks, over several seeds, and score them on the development sets."""
    needs("transformers")
    from shaped.train import glue as tuning

    given: dict[str, Any] = chosen(tuning.GlueSettings, locals())
    given["seeds"] = whole_numbers("seeds", seeds)
    del given["task"]
    tasks = [tuning.GlueSettings(task=name, **given) for name in task]
    steppers: dict[Any, Any] = {}
    diverged = False
    for run in runs:
        for settings in tasks:
            try:
                summary = tuning.glue(run, settings, data, say=(lambda line: None) if as_json else print, steppers=steppers)
            except tuning.Diverged as error:  # the others may not
                complaint(f"shaped: {run}, {settings.task}: {error}")
                diverged = True
                continue
            if as_json:
                print(json.dumps(summary, allow_nan=False))
                continue
            for name in ("matthews", "accuracy", "f1"):
                spread = "" if summary[name]["std"] is None else f" ± {summary[name]['std']:.3f}"
                print(f"{name}: {summary[name]['mean']:.3f}{spread} over {len(settings.seeds)} seeds")
            print("written:", run / f"glue-{settings.task}.json")
    if diverged:
        raise typer.Exit(1)


def needs(*packages: str) -> None:
    missing = [package for package in packages if not find_spec(package)]
    if missing:
        raise ValueError(f"training needs {', '.join(missing)} (pip install 'shaped-transformer[train]')")


def complaint(line: str) -> None:
    """What a run says while it goes: on standard error, where the progress is."""
    print(line, file=sys.stderr, flush=True)


def chosen(settings: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key in settings.__dataclass_fields__}


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers separated by commas, got {text!r}") from None


def folder(out: Path | None, as_json: bool) -> Path | None:
    """Where to write; made, and tried, before the work and not after it."""
    if out is None and not as_json:
        out = Path("out")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    return out


def show(summary: dict[str, Any], table: Any, remark: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return
    from rich.console import Console

    Console().print(table)
    print(remark)


def write_results(out: Path | None, name: str, summary: dict[str, Any], picture: Callable[[], bytes] | None, *, say: bool) -> None:
    from shaped.files import write_atomically, write_json

    if out is None:
        return
    write_json(out / f"{name}.json", summary)
    written = [out / f"{name}.json"]
    if picture is not None and find_spec("matplotlib"):
        drawn = picture()
        write_atomically(out / f"{name}.png", lambda file: file.write(drawn))
        written.append(out / f"{name}.png")
    if say:
        print("written:", *written)
        if not find_spec("matplotlib"):
            print("no picture: matplotlib is not installed (pip install 'shaped-transformer[plot]')")
