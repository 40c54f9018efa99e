"""Mutants of a Python file: copies with one small change each, made on its syntax tree.

Text is not mutated: docstrings, annotations, decorators, f-strings and `raise` statements stay as they are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
UNTOUCHED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
WITH_CONDITION = (ast.If, ast.IfExp, ast.While)
Body = ast.expr | ast.stmt
Place = list[tuple[str, int | None]]  # the path from the module to a node: names of fields, and positions in lists


@dataclass(frozen=True)
class Mutant:
    """One change of a file. `name` does not contain the line number, so it survives edits elsewhere in the file."""

    file: str
    function: str
    """Qualified name of the function that is changed, "" at the level of the module or of a class."""
    line: int
    kind: str
    name: str
    tree: ast.Module
    place: Place
    new: Body | None

    def render(self) -> str:
        """The whole file after the change."""
        changed = copy.deepcopy(self.tree)
        parent: ast.AST = changed
        for field, position in self.place[:-1]:
            value = getattr(parent, field)
            parent = value if position is None else value[position]
        field, position = self.place[-1]
        new = ast.Pass() if self.new is None else self.new
        if position is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[position] = new
        return ast.unparse(ast.fix_missing_locations(changed))


def find_unknown(names: Iterable[str], package: Path) -> list[str]:
    """Names of mutants that the package does not have, whichever of its files are to be changed."""
    files = [package / file for file in {name.partition(":")[0] for name in names}]
    known = {mutant.name for file in files if file.exists() for mutant in make_mutants(str(file.relative_to(package)), file.read_text())}
    return [name for name in names if name not in known]


def make_mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file. They are listed in the order of the file."""
    tree = ast.parse(source)
    found, seen = list[Mutant](), dict[str, int]()
    for function, node, place in _walk(tree, "", []):
        for kind, changed in _changes(node):
            before, after = _describe(node), _describe(changed) if changed is not None else "(removed)"
            name = f"{file}: {function or 'module'}: {before} → {after}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                name = f"{name} #{seen[name]}"
            found.append(Mutant(file, function, node.lineno, kind, name, tree, place, changed))
    return found


def _walk(node: ast.AST, function: str, place: Place) -> Iterator[tuple[str, Body, Place]]:
    """Every statement and expression that may be changed, with the function that holds it and its place in the tree."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or (isinstance(node, ast.Subscript) and _is_annotation(node)):
            continue
        for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, UNTOUCHED):
                continue
            here: Place = [*place, (field, position)]
            inside = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{function}.{child.name}".lstrip(".")
            if isinstance(child, ast.expr | ast.stmt):
                yield function, child, here
            yield from _walk(child, inside, here)


def _is_annotation(node: ast.Subscript) -> bool:
    """Such as Float[Tensor, "m m"] and tuple[int, ...], which stand in assignments of type aliases too."""
    return isinstance(node.value, ast.Name) and node.value.id in (
        "Float",
        "Int",
        "Bool",
        "Shaped",
        "tuple",
        "list",
        "dict",
        "type",
        "ClassVar",
    )


def _changes(node: Body) -> Iterator[tuple[str, Body | None]]:
    """The changes of one node, children excluded: the kind of change, and the new node (None: a statement is removed)."""

    def edited(**fields: object) -> Body:
        new = copy.deepcopy(node)
        for field, value in fields.items():
            setattr(new, field, value)
        return new

    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in BINARY and not _is_union(node):
            yield "arithmetic", edited(op=BINARY[type(op)]())
        case ast.Constant(value=bool(value)):
            yield "constant", edited(value=not value)
        case ast.Constant(value=int(value)):
            yield from (("constant", edited(value=value + step)) for step in (1, -1))
        case ast.Constant(value=float(value)):
            yield "constant", edited(value=value * 1.05 if value else 0.05)
        case ast.Compare(ops=ops) if type(ops[0]) in COMPARISONS:
            yield "comparison", edited(ops=[COMPARISONS[type(ops[0])](), *ops[1:]])
        case ast.BoolOp(op=op):
            yield "and/or", edited(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(operand=operand):
            yield "unary", operand
        case ast.Attribute(value=value, attr="mT"):
            yield "transpose", value
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
            yield "where", edited(args=[condition, no, yes])
        case ast.Call(func=ast.Attribute(value=value, attr=attribute)) if attribute.endswith("_") and not attribute.startswith("_"):
            yield "in place", value
        case ast.Expr(value=ast.Call()):
            yield "statement", None
        case ast.Assign(targets=[ast.Subscript()]):
            yield "statement", None
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", edited(value=ast.Constant(None))
    if isinstance(node, WITH_CONDITION):
        yield "condition", edited(test=ast.UnaryOp(ast.Not(), copy.deepcopy(node.test)))
    if isinstance(node, ast.AugAssign):
        yield "statement", None


def _is_union(node: ast.BinOp | ast.AugAssign) -> bool:
    """Such as `float | None` in the assignment of a type alias."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and isinstance(node.right, ast.Name | ast.Constant)


def _describe(node: Body) -> str:
    """The node as text, of a compound statement its first line; long texts are cut in the middle."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).partition("\n")[0]
    return text if len(text) <= 100 else f"{text[:70]} … {text[-28:]}"
