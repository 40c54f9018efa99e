"""The command `shaped`: its commands, and its errors in one line."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from shaped import __version__, process
from shaped.commands.console import flush, print_error
from shaped.commands.explore import explore

# Help is Markdown: in rich's own markup, [tokens, tokens] would be a style and vanish.
app = typer.Typer(invoke_without_command=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)
app.command(rich_help_panel="Theory")(explore)
if not process.is_page_server():  # the others load torch
    from shaped.commands import train
    from shaped.commands.advise import advise
    from shaped.commands.converge import converge
    from shaped.commands.diagnose import diagnose
    from shaped.commands.predict import predict
    from shaped.commands.reproduce import reproduce
    from shaped.commands.simulate import simulate

    for command in (simulate, converge, predict, advise, diagnose, reproduce):
        app.command(rich_help_panel="Theory")(command)
    app.add_typer(train.app)  # without a name: its commands stand beside those here

CLOSED_PIPE = 1  # the exit code of typer where nobody reads the output


def main() -> None:
    """Runs the command. A user's error is one line on standard error, and exit code 2."""
    try:
        process.restore_interrupts()
        warnings.showwarning = show_warning
        code = app(prog_name="shaped", standalone_mode=False)  # also as `python -m shaped`: completion is for the name
        flush()
        if code == process.INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except KeyboardInterrupt:
        print_error(process.MESSAGE)
        sys.exit(process.INTERRUPTED)
    except BrokenPipeError:
        sys.exit(CLOSED_PIPE)
    except (ValueError, OSError, ArithmeticError) as error:
        refuse(str(error))
    except Exception as error:
        if is_out_of_memory(error):
            refuse("this takes more memory than there is: fewer tokens, samples or steps; in training, a smaller batch or model")
        # typer brings its own copy of click and does not export the base of its usage errors; BadParameter stands for them.
        if not isinstance(error, typer.BadParameter.__bases__):
            raise
        usage_error: Any = error
        message = usage_error.format_message()
        if not message:  # `shaped data` alone: its help has been printed
            sys.exit(2)
        refuse(message)


def is_out_of_memory(error: Exception) -> bool:
    """Python's, a GPU's (whose class is not imported for this), or that of PyTorch's CPU allocator, which has no class of its own."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def show_warning(message: Warning | str, *where: Any) -> None:
    """A warning in one line, without its place in the code."""
    print_error(f"shaped: {process.to_line(message)}")


def refuse(message: str) -> NoReturn:
    print_error(f"shaped: {process.to_line(message)}")
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
