"""Runs the commands of docs/stages.md as written."""

import json
import re
import shlex
import sys

import pytest
from commands import ROOT, measured
from PIL import Image

from titan_dit.recovery.ledger import Ledger, trained

CPU_SECONDS = 200
"""Training of the recipe: 62 s were measured."""


def words_of(command):
    """A command of the page for this interpreter."""
    here = command.replace("NGPU=1 ./run_train.sh", "python -m titan_dit.train")
    return shlex.split(re.sub("^python", sys.executable, here))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_page_of_stages_works_as_written(tmp_path):
    pytest.importorskip("diffusers")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = (ROOT / "docs" / "stages.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 9
    for command in commands:
        flags = " --faults.log_samples true" if "run_train" in command else ""
        done, used = measured(words_of(command + flags), tmp_path, timeout=1800)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        seconds = used.ru_utime + used.ru_stime
        print(f"{seconds:6.1f} s of CPU: {command}")
        if "--dry-run" in command:
            assert "the most memory has stage 3 of 3, steps 601 to 700" in done.stdout
        if "replay" in command:
            assert f"samples {600 * 64 + 49 * 32}-{600 * 64 + 50 * 32 - 1}" in done.stdout
        if "run_train" in command:
            assert seconds < CPU_SECONDS
            for number, steps in enumerate(("1 to 400", "401 to 600", "601 to 700"), start=1):
                assert f"stage {number} of 3, steps {steps}" in done.stdout
    sizes = []
    for name in ("emoji_32.png", "emoji_64.png"):
        with Image.open(tmp_path / name) as picture:
            sizes.append(picture.width * picture.height)
    assert sizes[1] > 1.5 * sizes[0]
    run = tmp_path / "outputs" / "emoji_stages"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted({1, *range(50, 701, 50)})
    samples = 600 * 64 + 100 * 32
    assert rows[-1]["samples"] == samples
    assert trained(run, Ledger()) == dict.fromkeys(range(samples), 1)
    losses = [row["validation_loss"] for row in rows if row["step"] in (400, 600, 700)]
    print("validation losses at the end of each stage:", losses)
    assert max(losses) < rows[0]["loss"]
