"""Runs the commands of docs/text-to-video.md as written, and scores what its run draws."""

import json
import re

import pytest
from commands import ROOT, measured
from safetensors.torch import load_file
from test_docs_text_to_image import words_of

CPU_SECONDS = 960
"""Training of the recipe: eight minutes on two cores."""
LEAST = {"digit": 0.90, "direction": 0.95}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_page_works_as_written_and_digits_move_as_they_are_told(tmp_path):
    for package in ("transformers", "sklearn", "av"):
        pytest.importorskip(package)
    page = (ROOT / "docs" / "text-to-video.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    seconds = {}
    assert len(commands) == 7
    for command in commands:
        words = words_of(command)
        if "benchmarks/" in command:
            words = [w.replace("benchmarks/", f"{ROOT}/benchmarks/") for w in words]
            words += ["--out", "scores.json"]
        done, used = measured(words, tmp_path, timeout=1800)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        seconds[command] = used.ru_utime + used.ru_stime
        print(f"{seconds[command]:6.1f} s of CPU: {command}")
    rows = json.loads((tmp_path / "scores.json").read_text())["rows"]
    print(rows)
    assert [row["captions"] for row in rows] == ["seen", "held out"]
    for row in rows:
        for name, least in LEAST.items():
            assert float(row[name]) >= least, (row["captions"], name)
    assert seconds["./run_train.sh --config digits_moving.toml"] < CPU_SECONDS
    held_out = (tmp_path / "example" / "held_out.txt").read_text().splitlines()
    samples = load_file(tmp_path / "held_out.safetensors")["samples"]
    assert samples.shape == (len(held_out), 3, 9, 12, 24)
    assert len([*(tmp_path / "moving").glob("*.mp4")]) == 4
