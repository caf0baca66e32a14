"""The scripts that find or create the Python environment."""

import re
import subprocess
import sys
import tomllib
import venv

import pytest
from commands import ROOT, environment

sys.path.insert(0, str(ROOT / "scripts"))
import needs


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13)),
        ("2.11.0a0+nv25.12", (2, 11)),
        ("0.18.0", (0, 18)),
        ("13.0.0", (13,)),
    ],
)
def test_versions_are_read_from_their_leading_numbers(text, numbers):
    assert needs.version(text) == numbers


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        ("torch>=2.11,<2.16", True),
        ("torch>=2.1,<2.11", False),
        ("torch>=3", False),
        ("no-such-package>=1", False),
        ("Pillow", True),
    ],
)
def test_a_requirement_is_met_or_not(requirement, met):
    assert needs.is_met(requirement) == met


def pinned(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_locks_pin_everything_that_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime = {name.lower(): v for name, v in pinned("requirements.lock").items()}
    everything = runtime | {k.lower(): v for k, v in pinned("requirements-dev.lock").items()}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in wanted:
        name, rules = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()
        version = needs.version(everything[name.lower()])
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", rules):
            assert needs.COMPARE[sign](version, needs.version(bound)), requirement


def test_no_script_installs_torch_without_its_version():
    scripts = ("run_train.sh", "run_tests.sh", ".ci/run", "Makefile")
    for script in (*scripts, "scripts/environment.sh", "scripts/with_torch.sh"):
        text = (ROOT / script).read_text()
        assert not re.search(r"pip install[^\n]*\btorch", text), script


def use_environment(path, *extra):
    """(the python that the scripts choose, what they say) with `path` first on PATH."""
    script = f"source scripts/environment.sh; use_environment {' '.join(extra)}; echo $python"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment() | {"PATH": f"{path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.13", "2.15.0.dev1", ""])
def test_another_torch_needs_an_exact_version_within_the_range(version):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.16" in project["dependencies"]
    script = ROOT / "scripts" / "with_torch.sh"
    done = subprocess.run([script, version], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"titan_dit: scripts/with_torch.sh {version or '(no version)'}: ")
    assert "from 2.11 to 2.15" in done.stderr


def test_an_active_environment_that_has_everything_is_used(tmp_path):
    """A stand-in for a container's Python: this one under another name."""
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    python, said = use_environment(tmp_path)
    assert python == str(tmp_path / "python3")
    assert "using the active environment" in said


def test_an_empty_environment_is_not_enough(tmp_path):
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    done = subprocess.run([python, ROOT / "scripts" / "needs.py"], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == b""


def test_an_environment_that_lacks_little_is_told_what(monkeypatch, capsys):
    original = needs.is_met
    monkeypatch.setattr(needs, "is_met", lambda r: not r.startswith("tyro") and original(r))
    monkeypatch.setattr(sys, "argv", ["needs.py"])
    assert needs.main() == 1
    said = capsys.readouterr().err
    assert "lacks 'tyro>=0.9'" in said
    assert "pip install --no-deps 'tyro>=0.9'" in said
