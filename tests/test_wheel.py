"""The wheel holds all of titan_dit and nothing else, and works outside a clone."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from commands import ROOT

# In a copy: setuptools leaves build/ behind and would pack its files again.
BUILD = """
import json, os, sys
from pathlib import Path
from setuptools import build_meta
from zipfile import ZipFile
wheel = Path("dist", build_meta.build_wheel("dist")).resolve()
ZipFile(wheel).extractall("installed")
os.chdir("elsewhere")
sys.path[0] = str(wheel.parent.parent / "installed")
from titan_dit.config import config_file
found = [str(config_file.CONFIG_DIR), str(config_file.find_config("digits"))]
Path("built.json").write_text(json.dumps([str(wheel), found]))
"""


@pytest.fixture(scope="module")
def files():
    """Files that git tracks or would track."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(files, tmp_path_factory):
    """The wheel, and the recipe folder of a titan_dit unpacked from it."""
    clone = tmp_path_factory.mktemp("clone")
    for name in files:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    (clone / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=clone,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, found = json.loads((clone / "elsewhere" / "built.json").read_text())
    return clone, zipfile.ZipFile(wheel), found


def test_the_wheel_holds_the_package_its_data_and_recipes_and_nothing_else(files, built):
    expected = {name for name in files if name.startswith("titan_dit/")}
    assert {"titan_dit/py.typed", "titan_dit/data/digits/manifest.json"} <= expected
    expected |= {f"titan_dit/{name}" for name in files if name.startswith("train_configs/")}
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"}
    about |= {"licenses/LICENSE", "licenses/NOTICE"}
    _, wheel, _ = built
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert set(wheel.namelist()) == expected | {f"{folder}/{name}" for name in about}


def test_an_installed_titan_dit_finds_its_recipes_from_any_folder(built):
    clone, _, (folder, digits) = built
    assert folder == str(clone / "installed" / "titan_dit" / "train_configs")
    assert digits == f"{folder}/digits.toml"


def test_the_console_script_is_the_module(built):
    clone, _, _ = built
    (about,) = (clone / "installed").glob("*.dist-info")
    (script,) = importlib.metadata.Distribution.at(about).entry_points
    assert (script.group, script.name) == ("console_scripts", "titan_dit")
    from titan_dit import __main__

    assert script.load() is __main__.run
