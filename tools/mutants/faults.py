# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The faults that are planted: every place of a source file where one small change yields another program.

README.md lists the kinds, and the rules for places that are left out.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

# Their arguments are texts for people.
MESSAGES = {"bad_value", "bad_type", "warn", "print", "fail", "add_argument", "ArgumentParser", "error"}

_COMPARISONS = {
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
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_QUIET = ("errstate", "_quiet", "catch_warnings")
_NAMES = {"min": "max", "minimum": "maximum", "any": "all", "zeros": "ones", "zeros_like": "ones_like"}
_NAMES |= {other: name for name, other in _NAMES.items()}


class Fault(NamedTuple):
    """A change of a file: the bytes from ``begin`` to ``end`` become ``text``."""

    line: int
    kind: str
    begin: int
    end: int
    text: bytes
    lines: range  # of the statement around it, for a compound one its head


def faults_of(source: bytes) -> list[Fault]:
    """Returns all faults that can be planted into a source, in the order of the source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    tree = ast.parse(source)
    for kind, node, new, statement in _changes(tree, tree):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        if isinstance(new, ast.stmt):
            text = textwrap.indent(text, " " * node.col_offset).lstrip()
        elif isinstance(new, (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.UnaryOp, ast.Tuple)):
            text = f"({text})"
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
        lines = range(statement.lineno, max(statement.lineno, last) + 1)
        found.append(Fault(node.lineno, kind, begin, end, text.encode(), lines))
    return sorted(set(found), key=lambda fault: (fault.begin, fault.end, fault.text))


def planted(source: bytes, fault: Fault) -> bytes:
    """Returns the source with the fault in it."""
    return source[: fault.begin] + fault.text + source[fault.end :]


def _changes(node: ast.AST, statement: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST, ast.AST]]:
    """Yields kind, node, replacement and enclosing statement of the changes of a node and its descendants."""
    if _is_left_out(node):
        return
    if isinstance(node, ast.stmt):
        statement = node
    for kind, new in _replacements(node):
        yield kind, node, new, statement
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST):
                continue
            found = _changes(child, statement)
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                found = (each for each in found if each[0] != "elements swapped")
            yield from found
            if field == "test" or (isinstance(node, ast.comprehension) and field == "ifs"):
                yield from _negated(child, statement)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip, whose lengths agree
        return True
    called = node.value if isinstance(node, ast.Expr) else node
    return isinstance(called, ast.Call) and _last_name(called.func) in MESSAGES


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _negated(test: ast.AST, statement: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST, ast.AST]]:
    if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.BoolOp, ast.NamedExpr)):
        yield "condition negated", test, ast.UnaryOp(ast.Not(), test), statement


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the kind of each possible replacement of a node, and the replacement."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            operators = [*node.ops[:index], _COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            yield "comparison", ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not isinstance(node.left, ast.Constant) or not isinstance(node.left.value, str):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
    elif isinstance(node, ast.BoolOp):
        yield "and, or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            yield "condition dropped", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):  # -1 is changed as a constant
        yield "operator dropped", node.operand
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, (ast.Name, ast.Attribute)) and _last_name(node) in _NAMES:
        other = _NAMES[_last_name(node)]
        is_name = isinstance(node, ast.Name)
        yield "opposite", ast.Name(other, node.ctx) if is_name else ast.Attribute(node.value, other, node.ctx)
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        for elements in _swapped(node.elts):
            yield "elements swapped", ast.Tuple(elements, node.ctx)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield "slice dropped", node.value
    elif isinstance(node, ast.stmt):
        yield from _other_statements(node)


def _other_constants(value: object) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "constant", ast.Constant(value + 1)
    elif isinstance(value, float):
        yield "constant", ast.Constant(value * 2 or 1.0)


def _other_calls(call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    for arguments in _swapped(call.args):
        yield "arguments swapped", ast.Call(call.func, arguments, call.keywords)
    for index, keyword in enumerate(call.keywords):
        if keyword.arg not in (None, "strict"):
            rest = call.keywords[:index] + call.keywords[index + 1 :]
            yield "keyword dropped", ast.Call(call.func, call.args, rest)
    # x.detach(), x.contiguous(), x.astype(dtype): the unchanged value. A list is mostly as good as an array.
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr not in ("tolist", "items")
    if is_method and (not (call.args or call.keywords) or call.func.attr == "astype"):
        yield "method dropped", call.func.value


def _is_quiet(item: ast.withitem) -> bool:
    """Returns whether a `with` item only suppresses warnings."""
    return isinstance(item.context_expr, ast.Call) and _last_name(item.context_expr.func) in _QUIET


def _swapped(elements: list[ast.expr]) -> Iterator[list[ast.expr]]:
    for index, (one, other) in enumerate(itertools.pairwise(elements)):
        starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        if not starred and ast.dump(one) != ast.dump(other):
            yield [*elements[:index], other, one, *elements[index + 2 :]]


def _other_statements(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or (isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))):
        yield "statement dropped", ast.Pass()
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield "break, continue", ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif isinstance(node, ast.With) and not any(item.optional_vars or _is_quiet(item) for item in node.items):
        yield "with dropped", ast.If(ast.Constant(True), node.body, [])
    elif isinstance(node, ast.Try) and node.finalbody and not node.handlers:
        yield "finally dropped", ast.If(ast.Constant(True), node.body + node.finalbody, [])
