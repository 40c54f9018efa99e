"""The command line of training: data prepare, pretrain, study, collect, glue."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shaped.checks import parse_whole_numbers
from shaped.commands.console import Lines, print_error
from shaped.commands.options import PLACE, show_choices
from shaped.process import INTERRUPTED, require
from shaped.train.run.options import TOPICS
from shaped.train.run.settings import DEFAULTS, HINTS, PRESETS, Settings

app = typer.Typer()
text = typer.Typer(help="Text for training: data prepare.", no_args_is_help=True)
app.add_typer(text, name="data", rich_help_panel="Training")


UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h: training stopped before its end, and the same command goes on


@text.command()
def prepare(
    text: Annotated[list[str], typer.Option(help="Text files (plain, .gz, .zst) or names of Hugging Face datasets; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokenizer and the arrays.", **PLACE)],
    valid: Annotated[list[str] | None, typer.Option(help="The same for the test text; repeatable.")] = None,
    valid_share: Annotated[float, typer.Option(help="Share of the documents that is held out, without --valid.")] = 0.01,
    vocab: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 32_000,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 128,
    cased: Annotated[bool, typer.Option("--cased", help="Keep capitals and accents.")] = False,
    tokens: Annotated[int | None, typer.Option(help="Stop after so many training tokens.")] = None,
) -> None:
    """Train a tokenizer on text and pack the text into memory-mapped arrays; the same command continues after an interruption."""
    require("training", "train", "tokenizers", "transformers")
    from shaped.train.data.prepare import prepare as prepare_data

    options: dict[str, Any] = {"vocab": vocab, "length": length, "valid_share": valid_share, "cased": cased, "tokens": tokens}
    lines = Lines()
    try:
        made = prepare_data(text, out, valid=valid, progress=is_terminal(), log=print_error, **options)
    except KeyboardInterrupt:  # arrays may be half-written: data.json, which is written last, makes the folder a whole one
        print_error("shaped: interrupted; the same command goes on from there")
        sys.exit(INTERRUPTED)
    for part in ("train", "valid"):
        about = made.facts[part]
        cut = ", stopped at the limit: the rest is left out" if about["stopped_at_limit"] else ""
        lines.say(f"{part}: {about['documents']} documents, {about['tokens']} tokens in {about['rows']} rows of {made.length}{cut}")
    lines.say(f"vocabulary: {made.vocab}")
    lines.say(f"written: {out}")
    lines.end(out)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each setting to a command, which gets those that were given as a dict."""
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in (("config", Config), ("preset", Preset))
    ]
    for name, hint in HINTS.items():
        about = Settings.__dataclass_fields__[name].metadata
        default = "" if DEFAULTS.get(name) is None else f" Default: {str(DEFAULTS[name]).lower()}."
        shown: dict[str, Any] = PLACE if hint is Path else show_choices(*about["choices"]) if about["choices"] else {}
        if about["choices"] and all(f"{choice}: " in about["help"] for choice in about["choices"]):
            shown["metavar"] = "NAME"  # the help says what each choice is; a second list would leave it no room in 80 columns
        # The names with --no- need a column, so they have a panel of their own.
        panel = TOPICS[about["topic"]] + (", on or off" if hint is bool else "")
        option = typer.Option(help=about["help"] + default, show_default=False, rich_help_panel=panel, **shown)
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint | None, option]))

    def called(config: Path | None = None, **options: Any) -> None:
        command(config, {name: value for name, value in options.items() if value is not None})

    called.__doc__, called.__name__ = command.__doc__, command.__name__
    called.__signature__ = inspect.Signature(options)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in options}
    return called


Config = Annotated[Path | None, typer.Option(help="TOML file with settings; options override it.", show_default=False, **PLACE)]
Preset = Annotated[
    str | None,
    typer.Option(help="Other defaults; settings in the file or as options override them.", show_default=False, **show_choices(*PRESETS)),
]


@app.command(rich_help_panel="Training")
@with_settings
def pretrain(config: Path | None, given: dict[str, Any]) -> None:
    """Train a model on prepared text; the same command continues a run that was interrupted.

    A run that `--minutes` stopped ends with exit status 75, and the same command continues it. Start it with torchrun for several devices.
    """
    require("training", "train", "transformers")
    from shaped.train.run import loop
    from shaped.train.run.processes import is_first
    from shaped.train.run.stopping import Stopped

    settings = Settings.from_toml(config, **given) if config else Settings.of(given)
    lines = Lines()
    say = lines.say if is_first() else (lambda line: None)
    say(settings.to_toml())
    try:
        result = loop.pretrain(settings, progress=is_terminal(), log=print_error)
    except Stopped as stopped:
        say(stopped)
        raise typer.Exit(UNFINISHED) from None
    say(f"train loss {result.train_loss:.4f}, test loss {result.test_loss:.4f}")
    say(f"written: {settings.out}")
    lines.end(settings.out)


@app.command(rich_help_panel="Training")
def study(
    file: Annotated[Path, typer.Argument(help="TOML file: out, minutes, [defaults], [[run]]…")],
    minutes: Annotated[float | None, typer.Option(help="Time for all runs together; the same command continues.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs, in place of the file's.", **PLACE)] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared text, in place of the file's.", **PLACE)] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the run of this name; repeatable.", show_default=False)] = None,
) -> None:
    """Run a queue of trainings one after another; those of the same shape share one compiled step.

    The exit status is 1 if a run failed, and 75 if runs are left to do: the same command continues.
    """
    require("training", "train", "transformers")
    from shaped.train import study as studies

    overrides = {"minutes": minutes, "out": None if out is None else str(out), "data": None if data is None else str(data)}
    lines, folder = Lines(), studies.read_study(file, **overrides)[2]
    summary = studies.study(file, only=only or (), log=lines.say, progress=is_terminal(), **overrides)
    diverged = sum(bool(run["why"]) for run in summary["unfinished"])
    left = {run["name"] for run in summary["unfinished"] if not run["why"]} - summary["failed"].keys()
    lines.say(f"{len(summary['runs'])} finished, {diverged} diverged, {len(summary['failed'])} failed, {len(left)} unfinished")
    if summary["failed"]:
        raise typer.Exit(1)
    if left & set(only or left):
        raise typer.Exit(UNFINISHED)
    lines.end(folder)


@app.command(rich_help_panel="Training")
def collect(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, folders with such folders, or files that this made.")],
    out: Annotated[Path, typer.Option(help="JSON file; the metrics go beside it, into a file that ends in .jsonl.", **PLACE)],
) -> None:
    """Put runs into one file, with their settings, metrics and GLUE scores; `shaped reproduce --runs` reads it."""
    from shaped.train import run_records

    run_records.check_out(out)  # before many runs are read
    found = run_records.read_runs(runs)
    if not found:
        raise ValueError(f"runs must have been begun by `shaped pretrain`, got none in {', '.join(map(str, runs))}")
    run_records.collect(found, out)
    lines = Lines()
    lines.say(f"{len(found)} runs, {sum(run.result is not None for run in found)} finished")
    lines.say(f"written: {out}, {out.with_suffix('.jsonl')}")
    lines.end(out)


@app.command(rich_help_panel="Training")
def glue(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of `shaped pretrain`.")],
    task: Annotated[list[str], typer.Option(help="GLUE task; repeatable.", **show_choices("cola", "mrpc", "rte"))],
    data: Annotated[Path | None, typer.Option(help="Folder with CoLA, MRPC, RTE; by default the Hugging Face hub.", **PLACE)] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 5e-4,
    batch: Annotated[int, typer.Option(help="Examples of a step.")] = 16,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the learning rate grows.")] = 0.0,
    device: Annotated[str, typer.Option(help="Device; auto: cuda where there is one.", **show_choices("auto", "cpu", "cuda"))] = "auto",
    compile: Annotated[
        str, typer.Option(help="What is compiled; auto: blocks on a GPU.", **show_choices("auto", "off", "blocks", "whole"))
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
) -> None:
    """Fine-tune runs on GLUE tasks, over several seeds, and score them on the development sets."""
    require("training", "train", "transformers")
    from shaped.train import glue as fine_tuning
    from shaped.train.run.stopping import Diverged
    from shaped.train.step.stepper_cache import StepperCache

    options: dict[str, Any] = {"epochs": epochs, "lr": lr, "batch": batch, "warmup": warmup, "device": device, "compile": compile}
    tasks = [fine_tuning.GlueSettings(task=name, seeds=parse_whole_numbers("seeds", seeds), **options) for name in task]
    lines, steppers, diverged = Lines(), StepperCache(), False
    for run in runs:  # all of them before the first is fine-tuned
        fine_tuning.check_run(run, *(settings.task for settings in tasks))
    for run in runs:
        for settings in tasks:
            try:
                summary = fine_tuning.glue(run, settings, data, log=(lambda line: None) if as_json else lines.say, steppers=steppers)
            except Diverged as error:  # the others may not
                print_error(f"shaped: {run}, {settings.task}: {error}")
                diverged = True
                continue
            if as_json:
                lines.say(json.dumps(summary, allow_nan=False))
                continue
            for name in ("matthews", "accuracy", "f1"):
                spread = "" if summary[name]["std"] is None else f" ± {summary[name]['std']:.3f}"
                lines.say(
                    f"{name}: {summary[name]['mean']:.3f}{spread} over {len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}"
                )
            lines.say(f"written: {run / f'glue-{settings.task}.json'}")
    if diverged:
        raise typer.Exit(1)
    lines.end(*runs)


def is_terminal() -> bool:
    """Does someone see the progress?"""
    return sys.stderr is not None and sys.stderr.isatty()
