"""Exit 0 if this Python has what pyproject.toml asks for: `python needs.py [EXTRA]`.

Standard library only: it runs in environments that have nothing yet.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
COMPARE = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "==": lambda a, b: a == b}


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: 2.11.0a0+nv25 -> (2, 11)."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_met(requirement: str) -> bool:
    """Whether "name>=1,<2" is installed."""
    match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", requirement)
    assert match, requirement
    try:
        installed = version(importlib.metadata.version(match[1]))
    except importlib.metadata.PackageNotFoundError:
        return False
    rules = re.findall(r"(>=|<|==)\s*([\d.]+)", match[2])
    return all(COMPARE[sign](installed, version(bound)) for sign, bound in rules)


def main() -> int:
    """0 if all is there."""
    try:
        import tomllib
    except ImportError:  # Python before 3.11.
        return 1

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in sys.argv[1:]:
        wanted += project["optional-dependencies"][extra]
    return int(not all(is_met(requirement) for requirement in wanted))


if __name__ == "__main__":
    sys.exit(main())
