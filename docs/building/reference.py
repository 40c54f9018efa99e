"""The API reference: a directive that writes signatures and docstrings, and a check that nothing public is left out.

Docstrings are Markdown, as the pages are, so the directive hands them to the same parser. Examples stand on the page below the names:
there they have the same form, and the same run, as on every other page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from pages import ROOT, find_blocks

logger = logging.getLogger(__name__)
PUBLIC = (
    "shaped",
    "shaped.layers",
    "shaped.nn",
    "shaped.nn.functional",
    "shaped.nn.activations",
    "shaped.workers",
    "shaped.hf",
    "shaped.testing",
    "shaped.train",
    "shaped.watching",
)
"""What a name must be exported by to be public: a package that re-exports it (`import x as x`), or a module that defines it."""


def list_public(module_name: str) -> list[str]:
    """Names that a package re-exports, or that a module defines, but for those of modules and those with an underscore."""
    module = importlib.import_module(module_name)
    assert module.__file__ is not None
    body, names = ast.parse(Path(module.__file__).read_text()).body, list[str]()
    for node in body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif not module.__file__.endswith("__init__.py") and isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(module, name))]


class Entry:
    """A public name: its object, and what the source says about it."""

    def __init__(self, module: str, name: str):
        self.module, self.name, self.object = module, name, getattr(importlib.import_module(module), name)

    @cached_property
    def class_body(self) -> list[ast.stmt]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.object))).body[0]
        assert isinstance(tree, ast.ClassDef)
        return tree.body

    def write(self) -> str:
        """Markdown of the whole entry."""
        if inspect.isclass(self.object):
            inside = [
                describe(self.object),
                self.tell_source(),
                *self.write_fields(),
                *(self.write_member(name) for name in self.list_members()),
            ]
            return write_object("class", self.module, self.name + write_signature(self.object), "\n\n".join(filter(None, inside)))
        if callable(self.object):
            return write_object(
                "function", self.module, self.name + write_signature(self.object), f"{describe(self.object)}\n\n{self.tell_source()}"
            )
        return write_object("data", self.module, self.name, f"The value is `{self.object!r}`.")

    def tell_source(self) -> str:
        place = inspect.getsourcefile(inspect.unwrap(self.object))
        assert place is not None
        return f"Source: `{Path(place).resolve().relative_to(ROOT)}`."

    def list_members(self) -> list[str]:
        """Public methods and properties that the class has itself, but for overrides that the base describes."""
        return [
            name
            for name, member in vars(self.object).items()
            if not name.startswith("_")
            and (inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod | cached_property))
            and (find_doc(member) or not any(hasattr(base, name) for base in self.object.__mro__[1:]))
        ]

    def write_member(self, name: str) -> str:
        member, path = vars(self.object)[name], f"{self.name}.{name}"
        if isinstance(member, property | cached_property):
            return write_object("property", self.module, path, describe(member))
        kind = {classmethod: "classmethod", staticmethod: "staticmethod"}.get(type(member), "method")
        return write_object(kind, self.module, path + write_signature(getattr(self.object, name), bound=kind == "method"), describe(member))

    def write_fields(self) -> Iterator[str]:
        """Fields of a dataclass, each with the string below it."""
        if not hasattr(self.object, "__dataclass_fields__"):
            return
        rows = []
        for node, after in zip(self.class_body, [*self.class_body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):
                told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
                about = f": {join_lines(told)}" if isinstance(told, str) else ""
                rows.append(f"- `{node.target.id}`, `{ast.unparse(node.annotation)}`{about}")
        if rows:
            yield "Fields:\n\n" + "\n".join(rows)

    def find_faults(self, examples: set[str]) -> Iterator[str]:
        """What the reference lacks about this name."""
        path = f"{self.module}.{self.name}"
        if callable(self.object) and not find_doc(self.object):
            yield f"{path} has no docstring"
        if self.name not in examples:
            yield f"{path} has no example on its page"
        if inspect.isclass(self.object):
            for name in self.list_members():
                if not find_doc(vars(self.object)[name]):
                    yield f"{path}.{name} has no docstring"


def find_doc(thing: Any) -> str:
    """Its own docstring, not one that is inherited or made by `dataclass`."""
    thing = thing.func if isinstance(thing, cached_property) else getattr(thing, "__wrapped__", thing)
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else getattr(thing, "__doc__", None)
    made = inspect.isclass(thing) and doc is not None and doc.startswith(f"{thing.__name__}(")
    return "" if doc is None or made else inspect.cleandoc(doc)


def describe(thing: Any) -> str:
    """The docstring as Markdown: what stands under "Args:" becomes a list."""
    lines, doc = [], find_doc(thing)
    head, _, listed = doc.partition("\nArgs:\n")
    for line in textwrap.dedent(listed).splitlines():
        given = re.match(r"(\*{0,2}[\w, *]+): (.*)", line)
        lines.append(f"- `{given[1]}`: {given[2]}" if given else f"  {line.strip()}" if line.strip() else "")
    return head + ("\n\n" + "\n".join(lines) if lines else "")


def write_signature(thing: Any, bound: bool = False) -> str:
    """As the source has it: types are names, shapes are strings."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return ""
    signature = inspect.signature(thing)
    given = list(signature.parameters.values())[1 if bound else 0 :]
    parameters = [one.replace(annotation=Source.of_type(one.annotation), default=Source.of_value(one.default)) for one in given]
    returned = signature.empty if inspect.isclass(thing) else Source.of_type(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


class Source(str):
    """Text whose repr is itself; `inspect.signature` shows types and defaults by their repr."""

    __repr__ = str.__str__

    @classmethod
    def of_type(cls, annotation: Any) -> Any:
        """Annotations are strings, as the source has them, but for those of a module without postponed evaluation."""
        if annotation is inspect.Parameter.empty:
            return annotation
        return cls(annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation)))

    @classmethod
    def of_value(cls, default: Any) -> Any:
        if default is inspect.Parameter.empty:
            return default
        text = repr(default)
        return cls(getattr(default, "__name__", "...") if text.startswith("<") else text)


def write_object(kind: str, module: str, signature: str, text: str) -> str:
    """A directive of Sphinx. Its fence is longer than those inside."""
    fence = "`" * (12 if kind == "class" else 8)
    role = {"classmethod": "method", "staticmethod": "method"}.get(kind, kind)
    option = f":{kind}:\n" if role != kind else ""
    return f"{fence}{{py:{role}}} {signature}\n:module: {module}\n{option}\n{text}\n{fence}\n"


def join_lines(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


class Reference(SphinxDirective):
    """```{api} MODULE``` with names, one a line: their entries."""

    has_content = True
    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        module, parent = self.arguments[0], nodes.container()
        for name in filter(None, self.content):
            entry = Entry(module, name)
            documented(self.env)[f"{module}.{name}"] = self.env.docname
            lines = StringList(entry.write().splitlines(), source=f"{module}.{name}")
            self.state.nested_parse(lines, self.content_offset, parent)
        return parent.children


def documented(env: BuildEnvironment) -> dict[str, str]:
    """The page of each name in the reference."""
    if not hasattr(env, "shaped_names"):
        env.shaped_names = {}  # pyright: ignore[reportAttributeAccessIssue] (Sphinx keeps what extensions add to it)
    return env.shaped_names  # pyright: ignore[reportAttributeAccessIssue]


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names without an entry, a docstring or an example, and of members without a docstring."""
    names, examples = documented(env), {page: find_used_names(Path(env.doc2path(page))) for page in documented(env).values()}
    known = [Entry(*path.rsplit(".", 1)) for path in names]
    for entry in known:
        for fault in entry.find_faults(examples[names[f"{entry.module}.{entry.name}"]]):
            logger.warning("%s", fault, location=names[f"{entry.module}.{entry.name}"])
    for module in PUBLIC:
        for name in list_public(module):
            thing = getattr(importlib.import_module(module), name)
            if not any(entry.object is thing or f"{entry.module}.{entry.name}" == f"{module}.{name}" for entry in known):
                logger.warning("%s.%s is public and not in the reference", module, name)
    logger.info("reference: %d public names", len(known))


def find_used_names(page: Path) -> set[str]:
    """Names and attributes in the blocks of a page that are run."""
    trees = [ast.parse(block.code) for block in find_blocks(page.read_text()) if block.runs and block.language == "python"]
    found = [node for tree in trees for node in ast.walk(tree)]
    return {node.id for node in found if isinstance(node, ast.Name)} | {node.attr for node in found if isinstance(node, ast.Attribute)}


def link_name(app: Sphinx, env: BuildEnvironment, node: nodes.Element, content: nodes.Node) -> nodes.Node | None:
    """A type in a signature: to its entry, whichever module exports it; as plain text if it is not ours."""
    if node.get("reftype") == "myst" and (Path(env.doc2path(node["refdoc"])).parent / node["reftarget"]).is_dir():
        return content  # a folder of the repository, which GitHub can show
    if node.get("refdomain") != "py":
        return None
    short = node["reftarget"].rsplit(".", 1)[-1]
    for path in documented(env):
        if path.rsplit(".", 1)[-1] == short:
            domain = env.get_domain("py")
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, content)  # pyright: ignore[reportArgumentType]
    return content


def setup(app: Sphinx) -> None:
    app.add_directive("api", Reference)
    app.connect("missing-reference", link_name)
    app.connect("env-check-consistency", check_reference)
