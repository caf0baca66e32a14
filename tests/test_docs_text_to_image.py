"""Runs the commands of docs/text-to-image.md as written, and scores what its run draws."""

import json
import re
import shlex
import sys

import pytest
from commands import ROOT, measured
from PIL import Image
from safetensors.torch import load_file

LAUNCH = "titan_dit.launcher.launch --standalone --nproc-per-node 2 -m titan_dit.train"
CPU_SECONDS = 720
"""Training of the recipe: six minutes on two cores."""
LEAST = {
    "seen: digit": 0.95,
    "seen: colours": 0.95,
    "held out: digit": 0.9,
    "held out: colours": 0.9,
}


def words_of(command):
    """A command of the page for this interpreter and this checkout."""
    here = command.replace("./run_train.sh", f"python -m {LAUNCH}")
    here = here.replace(
        "benchmarks/captions.py", f"{ROOT}/benchmarks/captions.py --out scores.json"
    )
    return shlex.split(re.sub("^python", sys.executable, here))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_page_works_as_written_and_pictures_show_what_was_asked_for(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    page = (ROOT / "docs" / "text-to-image.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 14
    seconds = {}
    for command in commands:
        done, used = measured(words_of(command), tmp_path, timeout=1800)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        seconds[command] = used.ru_utime + used.ru_stime
        print(f"{seconds[command]:6.1f} s of CPU: {command}")
    rows = json.loads((tmp_path / "scores.json").read_text())["rows"]
    print(rows)
    assert [row["canvas"] for row in rows] == ["8x8", "8x12", "12x8"]
    for row in rows:
        for name, least in LEAST.items():
            assert float(row[name]) >= least, (row["canvas"], name)
    assert seconds["./run_train.sh --config digits_captioned.toml"] < CPU_SECONDS
    held_out = (tmp_path / "example" / "held_out.txt").read_text().splitlines()
    samples = load_file(tmp_path / "held_out.safetensors")["samples"]
    assert samples.shape == (len(held_out), 3, 8, 8)
    for name in ("seven.png", "seven_16.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 8
