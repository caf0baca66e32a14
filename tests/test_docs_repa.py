"""Runs the commands of docs/repa.md as written, with few pictures and steps."""

import json
import re
import shlex
import sys

import pytest
from commands import ROOT, run
from test_tutorial import lay_out

SMALLER = {
    "titan_dit.train": (
        "--training.steps 4 --training.global_batch_size 8 --sampling.every 0 --checkpoint.every 4 "
        "--metrics.every 1 --repa.last_step 3"
    ),
    "titan_dit sample": "--steps 2",
}


@pytest.mark.long
def test_the_page_works_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = (ROOT / "docs" / "repa.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(commands) == 5
    output = ""
    for command in commands:
        if "data example" in command:
            lay_out(tmp_path / "emoji")
            continue
        here = command.replace("NGPU=1 ./run_train.sh", "python -m titan_dit.train")
        words = shlex.split(re.sub("^python", sys.executable, here))
        for part, flags in SMALLER.items():
            words += shlex.split(flags) if part in here else []
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        output += done.stdout + done.stderr
    [line] = re.findall(r"```\n(features of .*)\n```", page)
    assert line in output
    rows = (tmp_path / "outputs/emoji_repa/metrics.jsonl").read_text().splitlines()
    found = [json.loads(row).get("repa_loss") for row in rows]
    assert [value is None for value in found] == [False, False, False, True]
    assert (tmp_path / "emoji_repa.png").is_file()
    weights = [*(tmp_path / "emoji_repa_pipeline").rglob("*.safetensors")]
    assert weights
