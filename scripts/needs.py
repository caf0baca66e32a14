"""Exit 0 if this Python meets the dependencies of pyproject.toml: `python needs.py [EXTRA]`.

Otherwise exit 1, and list the missing packages on stderr if torch is installed. Standard library
only: it runs in empty environments.
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
    """True if a requirement like "name>=1,<2" is installed."""
    match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", requirement)
    assert match, requirement
    try:
        installed = version(importlib.metadata.version(match[1]))
    except importlib.metadata.PackageNotFoundError:
        return False
    rules = re.findall(r"(>=|<|==)\s*([\d.]+)", match[2])
    return all(COMPARE[sign](installed, version(bound)) for sign, bound in rules)


def requirements(extras: list[str]) -> list[str]:
    """Dependencies of pyproject.toml with these extras."""
    import tomllib  # New in Python 3.11.

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(r for extra in extras for r in optional[extra])]


def main() -> int:
    """Return 0 if all requirements are met."""
    try:
        wanted = requirements(sys.argv[1:])
    except ImportError:
        return 1
    missing = [requirement for requirement in wanted if not is_met(requirement)]
    if missing and is_met(next(r for r in wanted if r.startswith("torch>"))):
        quoted = " ".join(f"'{requirement}'" for requirement in missing)
        sys.stderr.write(
            f"titan_dit: {sys.executable} has torch but lacks {quoted}.\n"
            f"titan_dit: to use it: {sys.executable} -m pip install --no-deps {quoted}\n"
        )
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
