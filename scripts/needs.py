"""Exit 0 if this Python meets the dependencies of pyproject.toml: `python needs.py [EXTRA]`.

Otherwise exit 1 and, if torch is installed, say on stderr which packages are missing and how to add
them. With `--add EXTRA`: if only EXTRA is missing, install it and change no installed package.
Standard library only: it runs in empty environments.
"""

import argparse
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
COMPARE = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "==": lambda a, b: a == b}
OTHERS = re.compile(r"nvidia-|cuda-|triton|pytorch-triton")
"""What pip's torch depends on; conda's and a container's have them in other packages."""


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: 2.11.0a0+nv25 -> (2, 11)."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def name_of(requirement: str) -> str:
    """The package of a requirement like "name[extra]>=1,<2"."""
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return match[0]


def is_met(requirement: str) -> bool:
    """True if a requirement like "name>=1,<2" is installed."""
    try:
        installed = version(importlib.metadata.version(name_of(requirement)))
    except importlib.metadata.PackageNotFoundError:
        return False
    rules = re.findall(r"(>=|<|==)\s*([\d.]+)(?![\d.*])", requirement)
    return all(COMPARE[sign](installed, version(bound)) for sign, bound in rules)


def lacking(wanted: list[str]) -> list[str]:
    """The unmet requirements among `wanted` and all that the installed packages depend on."""
    missing, seen, left = [], set(), list(wanted)
    while left:
        requirement = left.pop(0)
        if requirement in seen:
            continue
        seen.add(requirement)
        if is_met(requirement):
            left += dependencies(name_of(requirement))
        else:
            missing.append(requirement)
    return missing


def dependencies(package: str) -> Iterator[str]:
    """What an installed package always needs; upper bounds are left to pip."""
    for requirement in importlib.metadata.requires(package) or ():
        # A marker is about extras, other systems or other Pythons.
        if ";" not in requirement and not OTHERS.match(requirement):
            yield name_of(requirement) + ",".join(re.findall(r">=[\d.]+", requirement))


def requirements(extras: list[str]) -> list[str]:
    """Dependencies of pyproject.toml with these extras."""
    import tomllib  # New in Python 3.11.

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(r for extra in extras for r in optional[extra])]


def quoted(words: list[str]) -> str:
    """The words as a shell takes them."""
    return " ".join(map(shlex.quote, words))


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"titan_dit: {text}\n")


def explain(missing: list[str], torch: str) -> None:
    """Say what is missing, and the command that adds it and keeps torch."""
    say(f"{sys.executable} has torch {torch} but lacks {quoted(missing)}.")
    # Named with its exact version, the installed torch is kept.
    say(f"to use it: {sys.executable} -m pip install {quoted([f'torch=={torch}', *missing])}")


def add(missing: list[str], extra: str) -> bool:
    """Install what an extra lacks; True if that worked. Installed packages keep their versions."""
    say(f"adding to {sys.executable} only what the extra {extra} needs: {quoted(missing)}")
    found = [(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={number}\n" for name, number in found if name and number)
        constraints.flush()
        pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--quiet"]
        command = [*pip, "--disable-pip-version-check", "--constraint", constraints.name, *missing]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        say(f"pip failed: see its error above. {sys.executable} is as it was.")
    return not done.returncode


def main() -> int:
    """Return 0 if all requirements are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--add", action="store_true", help="install what only the extras lack")
    options = parser.parse_args()
    adds, extras = options.add, options.extras
    try:
        own, wanted = requirements([]), requirements(extras)
    except ImportError:
        return 1
    torch = next(requirement for requirement in own if name_of(requirement) == "torch")
    missing = lacking(wanted)
    if missing and adds and not lacking(own):
        return int(not add(missing, ", ".join(extras)))
    if missing and is_met(torch):
        explain(missing, importlib.metadata.version("torch"))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
