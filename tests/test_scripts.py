"""The scripts that find or create the Python environment."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

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


def test_every_script_reads_its_command_line_before_it_works():
    """Otherwise --help would start a benchmark, or write the fixtures anew."""
    ignores_it = {
        file.name
        for folder in ("benchmarks", "scripts")
        for file in (ROOT / folder).glob("*.py")
        if "__main__" in (text := file.read_text()) and "ArgumentParser(" not in text
    }
    assert ignores_it == {"plant_runner.py"}  # A server of plant.py, which nobody calls.


def test_an_empty_environment_is_not_enough(tmp_path):
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    done = subprocess.run([python, ROOT / "scripts" / "needs.py"], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.fixture
def lacks_protobuf(monkeypatch):
    """An environment that `pip install --no-deps tensorboard` left."""
    original = needs.is_met
    monkeypatch.setattr(needs, "is_met", lambda r: needs.name_of(r) != "protobuf" and original(r))


def test_what_packages_depend_on_is_asked_for_and_the_advice_keeps_torch(
    lacks_protobuf, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["needs.py"])
    assert needs.main() == 1
    lacking, advice = capsys.readouterr().err.splitlines()
    torch = metadata.version("torch")
    assert f"has torch {torch} but lacks 'protobuf>=" in lacking
    assert f"{sys.executable} -m pip install torch=={torch} 'protobuf>=" in advice
    assert "--no-deps" not in advice


def test_what_only_the_tests_need_is_added_to_a_complete_environment(monkeypatch, capfd):
    """As ./run_tests.sh does in an active environment; pip is mocked."""
    original, ran = needs.is_met, []
    monkeypatch.setattr(needs, "is_met", lambda r: needs.name_of(r) != "moto" and original(r))
    monkeypatch.setattr(sys, "argv", ["needs.py", "--add", "dev"])

    def run(command, **_):
        ran.append((command, Path(command[command.index("--constraint") + 1]).read_text()))
        return subprocess.CompletedProcess(command, len(ran) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert needs.main() == 0
    said = "titan_dit: adding to {} only what the extra dev needs: 'moto[server]'\n"
    assert capfd.readouterr().err == said.format(sys.executable)
    command, constraints = ran[0]
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-1] == "moto[server]"
    assert f"torch=={metadata.version('torch')}" in constraints.splitlines()
    assert needs.main() == 1
    assert "pip failed: see its error above." in capfd.readouterr().err
    # The same environment without a package that training needs is left alone.
    monkeypatch.setattr(needs, "is_met", lambda r: needs.name_of(r) != "tyro" and original(r))
    assert needs.main() == 1
    assert len(ran) == 2


def make_environment(tmp_path, **programs):
    """What the scripts say when they make .venv in a copy, with `programs` in place of others."""
    for name in ("scripts/environment.sh", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "source scripts/environment.sh; use_environment"],
        cwd=tmp_path,
        env=environment() | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_a_folder_that_cannot_be_written_is_not_waited_for(tmp_path):
    """A full disk or a read-only one: nobody else holds the lock."""
    failing = 'echo "mkdir: cannot create directory: No space left on device" >&2; exit 1'
    python = f'exec {sys.executable} "$@"'
    (said,) = make_environment(tmp_path, mkdir=failing, python3="exit 1", python=python)
    assert said.startswith("titan_dit: cannot make .venv: cannot create directory: No space left")


def test_a_disk_that_fills_while_the_environment_is_made_is_one_line(tmp_path):
    disk = "echo Filesystem; echo none 1000 1000 2048 100% /"
    python = 'case "$*" in *venv*) echo "Error: No space" >&2; exit 1 ;; *needs.py*) exit 1 ;; esac'
    making, said = make_environment(tmp_path, df=disk, python3=python)
    assert making.startswith("titan_dit: making .venv")
    assert said.startswith(
        f"titan_dit: python -m venv failed: the disk of {tmp_path} has 2 MB left"
    )


def test_any_environment_can_be_activated(tmp_path):
    """`source scripts/activate.sh`, here with this Python under the name of a container's."""
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "python").symlink_to("python3")
    script = f"source {ROOT}/scripts/activate.sh; python -c 'import titan_dit; print(titan_dit)'"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment() | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(ROOT / "titan_dit") in done.stdout, done.stderr
