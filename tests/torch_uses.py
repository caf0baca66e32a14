"""Finds what titan_dit uses of torch, torchao and torchdata that is private: named _x."""

import ast
import re
from pathlib import Path

LIBRARIES = ("torch", "torchao", "torchdata")
PUBLIC = {"_replace", "_fields"}
"""Documented methods of a NamedTuple."""
OURS = {"_class_name", "_diffusers_version", "_name_or_path", "_ema_", "_pictures"}
"""Strings that look like a private name, but are none of torch's."""


def private_part(path):
    """The path from its first private name on, "" if there is none: torch._C.x -> _C.x."""
    names = path.replace("::", ".").strip(".").split(".")
    first = next((i for i, name in enumerate(names) if is_private(name)), len(names))
    return ".".join(names[first:])


def is_private(name):
    return len(name) > 1 and name.startswith("_") and not name.startswith("__")


def uses(file):
    """Private names of one file. ".x" is an attribute of an object of unknown class."""
    return Uses(ast.parse(Path(file).read_text())).found()


class Uses(ast.NodeVisitor):
    """Collects imports, attributes and strings."""

    def __init__(self, tree):
        self.paths, self.foreign, self.seen = {}, set(), set()
        self.own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        self.own |= {
            n.attr
            for start in ast.walk(tree)
            if isinstance(start, ast.FunctionDef) and start.name == "__init__"
            for n in ast.walk(start)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and is_self(n.value)
        }
        self.docstrings = {
            id(n.value)
            for n in ast.walk(tree)
            if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
        }
        # Imports inside functions come after uses in the order of the tree.
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.bind(node)
        self.visit(tree)

    def found(self):
        """Without names of which a longer one was found."""
        parts = self.seen - {""}
        return {p for p in parts if not any(other.startswith(f"{p}.") for other in parts)}

    def bind(self, node):
        module = getattr(node, "module", None)
        for alias in node.names:
            path = f"{module}.{alias.name}" if module else alias.name
            name = alias.asname or (alias.name if module else alias.name.split(".")[0])
            if path.split(".")[0] not in LIBRARIES:
                self.foreign.add(name)
                continue
            self.paths[name] = path if module or alias.asname else name
            self.seen.add(private_part(path))

    def visit_Attribute(self, node):
        names, root = [], node
        while isinstance(root, ast.Attribute):
            names.insert(0, root.attr)
            root = root.value
        name = root.id if isinstance(root, ast.Name) else None
        if name in self.paths:
            self.seen.add(private_part(".".join([self.paths[name], *names])))
        elif name not in self.foreign:
            is_super = isinstance(root, ast.Call) and ast.unparse(root.func) == "super"
            for attr in filter(is_private, names):
                if attr not in PUBLIC and (is_super or attr not in self.own):
                    self.seen.add(f".{attr}")
        self.visit(root)

    def visit_Name(self, node):
        if node.id in self.paths:
            self.seen.add(private_part(self.paths[node.id]))

    def visit_Constant(self, node):
        text = node.value
        if not isinstance(text, str) or id(node) in self.docstrings or text in OURS:
            return
        if re.fullmatch(r"_[A-Za-z]\w{3,}", text) and text not in self.own:
            self.seen.add(f".{text}")
        elif re.fullmatch(r"(torch\.|\w+::)[\w.]*", text):
            self.seen.add(private_part(text))


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"
