"""Runs the commands of the README and the docs as written, in a copy of the checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, environment, run
from folders_of_files import pictures
from PIL import Image

PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
SHORTER = "--training.steps 20 --sampling.num 20 --sampling.steps 2"


def blocks(page, language):
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture
def copy_of_the_checkout(tmp_path):
    """A copy of the files that git tracks or would track, with this environment as .venv."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = tmp_path / "clone" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    (tmp_path / "clone" / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    return tmp_path / "clone"


def test_the_readme_commands_train_and_draw(copy_of_the_checkout):
    commands = "".join(blocks("README.md", "bash")).splitlines()
    assert commands[0] == "./run_train.sh --config digits.toml"
    assert commands[-1] == "./run_tests.sh"
    for i, command in enumerate(commands):
        if command.startswith("./run_train.sh"):
            commands[i] = f"{command} {SHORTER}"
        if " sample --run" in command:
            commands[i] = f"{command} --steps 2"
        if command.startswith("./run_tests.sh"):
            commands[i] = f"{command} --version"
    assert "source scripts/activate.sh" in commands
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=copy_of_the_checkout,
        env=environment() | {"PATH": bin_folder, "PYTHONPATH": "", "NGPU": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    with Image.open(copy_of_the_checkout / "grid.png") as picture:
        assert picture.width > 400
    folder = copy_of_the_checkout / "outputs" / "digits"
    assert (folder / "loss.png").is_file()
    assert (folder / "checkpoints" / "step-00000020" / "manifest.json").is_file()
    assert (folder / "samples" / "step-00000020.png").is_file()


SMALLER = {
    "titan_dit.train": "--training.steps 2 --model.hidden_size 32 --model.num_layers 1 "
    "--sampling.every 0 --training.global_batch_size 4 --metrics.tensorboard false",
    "titan_dit sample": "--steps 1 --device cpu",
}


def test_the_first_hour_leads_from_pictures_to_samples(tmp_path):
    """Its commands without bash and the scripts, on a smaller model."""
    pictures(tmp_path / "photos", each=4, size=(40, 48))
    script = "".join(blocks("docs/first-hour.md", "bash"))
    config = re.search(r"cat > photos.toml <<'END'\n(.*?)END\n", script, re.DOTALL)
    (tmp_path / "photos.toml").write_text(config[1])
    commands = script.replace(config[0], "").splitlines()
    assert len(commands) == 8
    for command in commands:
        if command.startswith("source "):
            continue
        here = command.replace("./run_train.sh", "python -m titan_dit.train")
        if "--dry-run" not in here:
            here += "".join(f" {flags}" for part, flags in SMALLER.items() if part in here)
        done = run([sys.executable, *here.split()[1:]], tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    first_hour_is_complete(tmp_path)


def first_hour_is_complete(folder):
    for name in ("photos_shards.png", "outputs/photos/loss.png", "grid.png", "dogs.png"):
        with Image.open(folder / name) as picture:
            assert picture.width > 30, name


@pytest.mark.long
def test_a_stranger_types_the_first_hour(copy_of_the_checkout):
    pictures(copy_of_the_checkout / "photos", each=20, size=(60, 48))
    script = "".join(blocks("docs/first-hour.md", "bash"))
    assert "source scripts/activate.sh\n" in script
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("steps = 1000", "steps = 60")],
        cwd=copy_of_the_checkout,
        env=environment() | {"PATH": bin_folder, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first_hour_is_complete(copy_of_the_checkout)


def test_the_python_example_trains_in_one_process(tmp_path):
    example = blocks("docs/python-api.md", "python")[0]
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) < 40
    done = run([sys.executable, "-c", example], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])
    assert "torch.Size([10, 1, 8, 8])" in done.stdout


def test_the_readme_links_to_files_that_exist():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_nothing_is_left_to_be_filled_in():
    for page in ("CONTRIBUTING.md", *PAGES):
        assert not re.search(
            r"@@|TODO|FIXME|TBD|\b[A-Z]+_(TABLE|COMMIT|START)\b|MODULATION",
            (ROOT / page).read_text(),
        ), page


def test_the_readme_is_short_and_begins_with_a_picture_and_a_command():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 120
    assert len(text.split()) <= 1500
    assert sum(line.startswith("|") for line in lines) <= 40
    first = "\n".join(lines[:30])
    assert "docs/images/" in first
    assert "run_train.sh --config" in first


def test_the_map_of_files_has_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "titan_dit").iterdir():
        if path.is_dir() and (path / "__init__.py").is_file():
            assert f"{path.name}/" in text, path.name
