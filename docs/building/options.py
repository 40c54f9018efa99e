"""The options of every command, read from the command itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shaped.commands.app import app as command_line


def write_commands(group: Any, path: str = "shaped") -> Iterator[str]:
    """Markdown: for each command its first lines, and a table of its arguments and options."""
    inner = getattr(group, "commands", {})
    for name, command in inner.items():
        yield from write_commands(command, f"{path} {name}")
    if inner:
        return
    yield from (
        f"**{path}**",
        "",
        escape((group.help or "").split("\f")[0].strip().replace("\n", " ")),
        "",
        "| option | default | |",
        "|---|---|---|",
    )
    for one in group.params:
        names = (
            ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            if one.param_type_name == "option"
            else f"`{one.name.upper()}`"
        )
        default = "" if one.default is None or callable(one.default) or not getattr(one, "show_default", True) else f"`{one.default}`"
        yield f"| {names} | {default} | {escape(getattr(one, 'help', None) or '')} |"
    yield ""


def escape(text: str) -> str:
    """Help is plain text: no sign of it begins markup."""
    return "".join(f"\\{sign}" if sign in "\\|`*_[]<>$#" else sign for sign in text.replace("\n", " "))


class Commands(SphinxDirective):
    """```{commands}```: all of them."""

    def run(self) -> list[nodes.Node]:
        parent = nodes.container()
        lines = StringList(list(write_commands(typer.main.get_command(command_line))), source="shaped --help")
        self.state.nested_parse(lines, self.content_offset, parent)
        return parent.children


def setup(app: Sphinx) -> None:
    app.add_directive("commands", Commands)
