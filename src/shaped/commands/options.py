"""Options that several commands share, and the panels of their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

LAYER, ATTENTION, SOLVER, WORK, OUTPUT = "Layers", "Attention", "Simulation", "Where it runs", "Output"


def parse_path(text: str) -> Path:
    """Refuses an empty path, as from an unset shell variable: it would be the current folder."""
    if not text:
        raise typer.BadParameter("must be a path, got ''")
    return Path(text)


def show_choices(*names: str) -> dict[str, Any]:
    """Choices in the help and in shell completion. The library checks the value, and its message names the argument.

    A name with capitals, such as FILE.npy, stands for others, so the shell does not complete it.
    """
    return {"metavar": f"[{'|'.join(names)}]", "autocompletion": lambda: [name for name in names if name.islower()]}


PLACE: dict[str, Any] = {"parser": parse_path, "metavar": "PATH"}
DEVICES = show_choices("cpu", "cuda", "cuda:N")

Layers = Annotated[
    str, typer.Option(help="Layers of a block: attention, feedforward, perceptron.", metavar="NAME,…", rich_help_panel=LAYER)
]
Tokens = Annotated[int, typer.Option(help="Number of tokens m.", rich_help_panel=LAYER)]
Gamma = Annotated[float, typer.Option(help="Weight of the residual branches.", show_default="1/sqrt(8)", rich_help_panel=LAYER)]
CPlus = Annotated[float, typer.Option(help="Shaped ReLU: positive slope is 1 + c_plus/sqrt(n).", rich_help_panel=LAYER)]
CMinus = Annotated[float, typer.Option(help="Shaped ReLU: negative slope is 1 + c_minus/sqrt(n).", rich_help_panel=LAYER)]
Rho = Annotated[float, typer.Option(help="Correlation of each pair of tokens at the start.", rich_help_panel=LAYER)]

Tau0 = Annotated[float, typer.Option(help="Temperature.", rich_help_panel=ATTENTION)]
Heads = Annotated[int, typer.Option(help="Attention heads.", rich_help_panel=ATTENTION)]
Project = Annotated[bool, typer.Option("--project", help="Add an output projection to attention.", rich_help_panel=ATTENTION)]
Mask = Annotated[
    str | None,
    typer.Option(
        help="causal, alibi, or a .npy file with a bias on the logits, [tokens, tokens] or [heads, tokens, tokens].",
        rich_help_panel=ATTENTION,
        **show_choices("causal", "alibi", "FILE.npy"),
    ),
]
QKNorm = Annotated[bool, typer.Option("--qk-norm", help="Divide queries and keys by their root mean square.", rich_help_panel=ATTENTION)]
Rope = Annotated[
    float | None, typer.Option(help="Rotate queries and keys by their positions: the base, such as 10000.", rich_help_panel=ATTENTION)
]

Samples = Annotated[int, typer.Option(help="Number of paths.", rich_help_panel=SOLVER)]
Step = Annotated[float, typer.Option(help="Time step of the SDE.", rich_help_panel=SOLVER)]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers.", rich_help_panel=SOLVER)]
Upper = Annotated[float, typer.Option(help="Stop a path whose largest eigenvalue passes this.", rich_help_panel=SOLVER)]

Device = Annotated[str, typer.Option(help="Device of the simulation.", rich_help_panel=WORK, **DEVICES)]
Workers = Annotated[int | None, typer.Option(help="Processes on this machine to share the work.", rich_help_panel=WORK)]
Scheduler = Annotated[str | None, typer.Option(help="Address of a running Dask scheduler to do the work.", rich_help_panel=WORK)]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)]
Out = Annotated[Path, typer.Option(help="Folder for the numbers and the picture.", rich_help_panel=OUTPUT, **PLACE)]
