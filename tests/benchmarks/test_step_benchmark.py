"""benchmarks/step.py with a contender of the user's own."""

import json
import sys

from commands import ROOT, run

STEP = [sys.executable, ROOT / "benchmarks" / "step.py"]

MINE = """
import torch

def make_step(config, batch, device):
    weight = torch.zeros((), device=device)
    assert (config.latent_size, batch) == (4, 2)
    return lambda: weight.add_(1)
"""


def test_a_module_of_the_current_folder_can_compete(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    flags = ["--latent-size", 4, "--batch", 2, "--turns", 1, "--out", "rows.json"]
    done = run([*STEP, *flags, "--contenders", "plain", "ours", "mine:make_step"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["plain", "ours", "mine:make_step"]
    assert float(rows[2]["CPU / plain"]) < 1


def test_a_contender_that_nobody_knows_is_refused(tmp_path):
    done = run([*STEP, "--contenders", "theirs"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("--contenders: theirs is none of plain, ours,")
