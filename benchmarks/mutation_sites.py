"""The places of a module at which `benchmarks/mutation.py` can change the code, and the changes themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
DESCRIBING = {"strict", "description", "default_factory", "name", "discriminator", "stacklevel", "encoding"}
ON_A_GPU = {"non_blocking", "pin_memory", "pin_memory_device"}
WITHOUT_EFFECT = DESCRIBING | ON_A_GPU
"""Keyword arguments that are never dropped: they only check, name or describe, or do nothing on a CPU."""
BOUNDS = {"ge", "gt", "le", "lt", "min_length", "max_length", "pattern", "multiple_of"}
"""Keyword arguments of pydantic's `Field` that are never changed, because they only reject values."""


@dataclass
class Site:
    """A place of a module's syntax tree that can be changed.

    Attributes:
        kind: The kind of the change, such as `comparison`.
        line: The line of the code.
        function: The first line of the function around it, including its decorators; None outside functions.
        before: The code of the smallest changed expression.
        after: The same code after the change.
        change: A function that changes the syntax tree in place.
    """

    kind: str
    line: int
    function: int | None
    before: str
    after: str
    change: Callable[[], None]


def sites(tree: ast.Module) -> list[Site]:
    """Return all places of a module at which the code can be changed, in the order of the code."""
    return list(_within(tree, None))


def _within(node: ast.AST, function: int | None) -> Iterator[Site]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    yield from _of(node, function)
    for child in _children(node):
        yield from _within(child, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that can influence a number: no annotations, decorators, messages or exceptions."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test):
                continue
            if isinstance(one, ast.Assign | ast.AnnAssign) and _is_alias(one):
                continue
            if isinstance(one, ast.keyword) and one.arg in (BOUNDS | WITHOUT_EFFECT):
                continue
            if isinstance(one, ast.AST):
                yield one


def _is_alias(node: ast.Assign | ast.AnnAssign) -> bool:
    """Return whether an assignment defines a type in capitalized words, such as `Images = Tensor | Batch`."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    name = target.id if isinstance(target, ast.Name) else ""
    return name[:1].isupper() and not name.isupper()


def _of(node: ast.AST, function: int | None) -> Iterator[Site]:
    """Yield the changes of one node."""

    def site(kind: str, after: ast.AST, change: Callable[[], None], before: ast.AST | None = None) -> Site:
        shown = ast.unparse(before or node), ast.unparse(after)
        return Site(kind, getattr(node, "lineno", 0), function, *shown, change)

    def replaced(kind: str, name: str, value: object) -> Site:
        changed = type(node)(**{**dict(ast.iter_fields(node)), name: value})
        ast.copy_location(changed, node)
        return site(kind, changed, lambda: setattr(node, name, value))

    if isinstance(node, ast.Compare):
        for place, one in enumerate(node.ops):
            ops = [*node.ops[:place], COMPARISONS[type(one)](), *node.ops[place + 1 :]]
            yield replaced("comparison", "ops", ops)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS and not _is_text(node):
        yield replaced("operator", "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield replaced("and or", "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        # `+x` cannot stand for `x` of any type, but `x and x` returns x.
        twice = ast.BoolOp(ast.And(), [node.operand, node.operand])
        yield site("dropped not", node.operand, lambda: _become(node, twice))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield site("dropped minus", node.operand, lambda: setattr(node, "op", ast.UAdd()))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = not node.value if isinstance(node.value, bool) else _other(node.value)
        yield replaced("constant", "value", value)
    elif isinstance(node, ast.IfExp | ast.If):
        negated = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        yield site("swapped branches", negated, lambda: setattr(node, "test", negated), before=node.test)
    elif isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in WITHOUT_EFFECT | BOUNDS:
                yield replaced("dropped argument", "keywords", [*node.keywords[:place], *node.keywords[place + 1 :]])


def _other(value: float) -> float:
    return value + 1 if isinstance(value, int) else (value * 2 or 1.0)


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Return whether an operation joins texts or types instead of calculating."""
    parts = [one for one in ast.walk(node) if isinstance(one, ast.Constant | ast.JoinedStr)]
    return any(isinstance(one, ast.JoinedStr) or isinstance(one.value, str) for one in parts) and isinstance(
        node.op, ast.Add | ast.Mod | ast.BitOr
    )


def _become(node: ast.AST, other: ast.expr) -> None:
    """Turn a node into another one in place."""
    located = ast.fix_missing_locations(ast.copy_location(other, node))
    node.__class__ = type(located)  # type: ignore[assignment]
    node.__dict__.clear()
    node.__dict__.update(located.__dict__)
