"""Random one-line mutants of the core, for `plant.py --draw`.

Mutation operators: swap + and -, * and /, < and <=, and and or, min and max; constants off by one;
drop a `not`; swap two arguments or branches; drop a call whose result is unused. A line is drawn
uniformly, then one of its mutations.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORE = (
    "models",
    "objectives",
    "diffusion",
    "kernels",
    "parallel",
    "pipeline",
    "optim",
    "checkpoint",
    "recovery",
    "interop",
    "ranks/process_group.py",
    "system/files.py",
    "checkpoint/run_lock.py",
    "opening.py",
    "data/order.py",
    "data/order.py",
    "rng.py",
    "plan.py",
    "trainer.py",
)
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
OTHER_END = {"min": "max", "max": "min"}
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr)
"""Error messages and assertions."""


@dataclass(frozen=True)
class Mutant:
    """A text replacement within one symbol."""

    symbol: str
    old: str
    new: str
    what: str


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a file become `new`."""

    start: int
    end: int
    new: bytes
    what: str


class File:
    """A source file with byte positions, as ast uses them."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_bytes()
        self.tree = ast.parse(self.source)
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte range of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> bytes:
        """The source of a node."""
        first, end = self.span(node)
        return self.source[first:end]

    def line_of(self, position: int) -> int:
        """The index of the line that holds a byte."""
        return sum(start <= position for start in self.starts) - 1

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
        """Replace the operator between two operands."""
        first, end = self.span(left)[1], self.span(right)[0]
        place = self.source.find(old.encode(), first, end)
        if place >= 0:
            yield Edit(place, place + len(old), new.encode(), f"{old} -> {new}")

    def edits(self, node: ast.AST) -> Iterator[Edit]:
        """Every mutation of one node."""
        if kind := MUTATIONS.get(type(node)):
            yield from kind(self, node)


def of_operation(file: File, node: ast.BinOp) -> Iterator[Edit]:
    """Swap the operator of a sum or product."""
    if signs := OPERATORS.get(type(node.op)):
        yield from file.between(node.left, node.right, *signs)


def of_comparison(file: File, node: ast.Compare) -> Iterator[Edit]:
    """Replace each operator of a comparison."""
    operands = [node.left, *node.comparators]
    for left, operator, right in zip(operands, node.ops, node.comparators, strict=False):
        if signs := OPERATORS.get(type(operator)):
            yield from file.between(left, right, *signs)


def of_logic(file: File, node: ast.BoolOp) -> Iterator[Edit]:
    """Swap the first `and` or `or` of a chain."""
    yield from file.between(node.values[0], node.values[1], *OPERATORS[type(node.op)])


def of_constant(file: File, node: ast.Constant) -> Iterator[Edit]:
    """Add or subtract 1 from a number."""
    if isinstance(node.value, int | float) and not isinstance(node.value, bool):
        for new in (repr(node.value + 1), repr(node.value - 1)):
            yield Edit(*file.span(node), new.encode(), f"{node.value} -> {new}")


def of_not(file: File, node: ast.UnaryOp) -> Iterator[Edit]:
    """Drop a `not`."""
    if isinstance(node.op, ast.Not):
        yield Edit(*file.span(node), file.text(node.operand), "not dropped")


def of_call(file: File, node: ast.Call) -> Iterator[Edit]:
    """Swap min and max, or the first two arguments."""
    if isinstance(node.func, ast.Name) and node.func.id in OTHER_END:
        new = OTHER_END[node.func.id]
        yield Edit(*file.span(node.func), new.encode(), f"{node.func.id} -> {new}")
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    if len(plain) > 1 and plain == node.args:
        yield from swapped(file, plain[0], plain[1], "arguments swapped")


def of_choice(file: File, node: ast.IfExp) -> Iterator[Edit]:
    """Swap both branches of a conditional expression."""
    yield from swapped(file, node.body, node.orelse, "branches swapped")


def of_if(file: File, node: ast.If) -> Iterator[Edit]:
    """Negate the condition of an if statement."""
    new = b"not (" + file.text(node.test) + b")"
    yield Edit(*file.span(node.test), new, "condition negated")


def of_statement(file: File, node: ast.Expr) -> Iterator[Edit]:
    """Drop a call whose result is unused."""
    if isinstance(node.value, ast.Call):
        yield Edit(*file.span(node), b"pass", "statement left out")


def swapped(file: File, one: ast.expr, other: ast.expr, what: str) -> Iterator[Edit]:
    """Swap two parts of an expression."""
    (start, middle), (after, end) = file.span(one), file.span(other)
    if file.text(one) != file.text(other):
        new = file.text(other) + file.source[middle:after] + file.text(one)
        yield Edit(start, end, new, what)


MUTATIONS: dict[type[ast.AST], Callable[[File, Any], Iterator[Edit]]] = {
    ast.BinOp: of_operation,
    ast.Compare: of_comparison,
    ast.BoolOp: of_logic,
    ast.Constant: of_constant,
    ast.UnaryOp: of_not,
    ast.Call: of_call,
    ast.IfExp: of_choice,
    ast.If: of_if,
    ast.Expr: of_statement,
}


def eligible(node: ast.AST) -> Iterator[ast.AST]:
    """A node and its descendants, without annotations, decorators, messages and assertions."""
    if isinstance(node, SKIPPED):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from eligible(child)


def functions(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(dotted name, node) of the functions and methods of a module."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")


def mutants_by_line(path: Path, module: str) -> dict[tuple[str, int], list[Mutant]]:
    """Mutants of a file's functions by (module, line)."""
    file = File(path)
    found: dict[tuple[str, int], list[Mutant]] = {}
    for name, function in functions(file.tree.body, f"{module}."):
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        whole = file.starts[first - 1], file.starts[function.end_lineno or first]
        for edit in (edit for node in eligible(function) for edit in file.edits(node)):
            line = file.line_of(edit.start)
            if mutant := as_mutant(file, name, whole, edit):
                found.setdefault((module, line), []).append(mutant)
    return found


def as_mutant(file: File, name: str, whole: tuple[int, int], edit: Edit) -> Mutant | None:
    """The edit as whole lines, as many as make the old text unique in its symbol."""
    first, last = file.line_of(edit.start), file.line_of(max(edit.start, edit.end - 1))
    symbol = file.source[slice(*whole)]
    while True:
        start, end = file.starts[first], file.starts[last + 1]
        old = file.source[start:end]
        if symbol.count(old.strip()) == 1:
            break
        first -= 1
        if file.starts[first] < whole[0]:
            return None
    new = file.source[start : edit.start] + edit.new + file.source[edit.end : end]
    changed = file.source[:start] + new + file.source[end:]
    try:
        ast.parse(changed)
    except SyntaxError:
        return None
    return Mutant(name, old.strip().decode(), new.strip().decode(), edit.what)


def draw(package: Path, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of different lines, a function of seed and source."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for entry in CORE:
        place = package / entry
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            if path.is_file():
                module = ".".join(path.relative_to(package).with_suffix("").parts)
                lines |= mutants_by_line(path, module)
    rng = random.Random(seed)
    chosen = rng.sample(sorted(lines), min(count, len(lines)))
    return [rng.choice(lines[line]) for line in chosen]


def rows(mutants: Iterable[Mutant], seed: int) -> str:
    """The mutants as rows of tests/plants.toml."""
    return "\n".join(
        "[[plant]]\n"
        f'name = "drawn-{seed}-{number:02}"\n'
        f'symbol = "{mutant.symbol}"\n'
        f"old = {literal(mutant.old)}\n"
        f"new = {literal(mutant.new)}\n"
        f"why = {json.dumps(mutant.what)}\n"
        f'origin = "drawn, seed {seed}"\n'
        for number, mutant in enumerate(mutants, start=1)
    )


def literal(text: str) -> str:
    """A TOML string, literal if possible, so that code needs no escapes."""
    if "'''" in text:
        return json.dumps(text)
    return f"'''{text}'''" if "\n" in text or "'" in text else f"'{text}'"
