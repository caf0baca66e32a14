"""The console lines before the first step."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config

from titan_dit.opening import VERSIONS, OpenedRun
from titan_dit.plan import resolve


@pytest.mark.parametrize(
    ("held_out", "about", "data"),
    [
        (0, "10 classes", "6,000 samples, 10 classes"),
        (250, "10 classes", "6,000 samples (250 of them for validation), 10 classes"),
        (0, "", "6,000 samples"),
    ],
)
def test_a_run_begins_by_saying_what_will_be_done_on_what(held_out, about, data):
    software = f"titan_dit {VERSIONS['titan_dit']}, torch {VERSIONS['torch']}"
    assert lines_of(tiny_config(job={"dir": "run"}), held_out, about) == [
        f"{software}: dp_shard 2 on cpu, fp32, attention auto (flash)",
        "model   dit: 1,234 parameters, 16 tokens, 5 GFLOP per sample and step",
        f"data    digits: {data}",
        "steps   3 of 4 done, 16 samples each",
        "output  run",
        "a hook",
    ]


def test_snapshots_have_the_size_of_what_is_trained():
    training = {"frozen": ["embed.*", "blocks.*", "head.modulation.*"]}
    averages = {"power": [0.1], "snapshots": 4}
    config = tiny_config(training=training, ema=averages, checkpoint={"every": 2})
    [line] = [line for line in lines_of(config) if line.startswith("averages: ")]
    # 4 outputs of 32 inputs, and their biases.
    assert f"4 snapshots of 1, {4 * 4 * 33 / 2**30:.3g} GiB each" in line


def lines_of(config, held_out=0, about=""):
    opened = OpenedRun(
        config,
        resolve(config, 2),
        hooks=SimpleNamespace(origins=lambda: ["a hook"]),
        source=Rows(about),
        objective=SimpleNamespace(imported=lambda sampling: {}, modules=lambda: None),
        sample_order=None,
        validation_set=None,
        evaluation=None,
        identity=SimpleNamespace(num_held_out=held_out),
    )
    built = SimpleNamespace(num_parameters=1234, flops_per_sample=5 * 10**9)
    return list(opened.lines(built, torch.device("cpu"), step=3))


class Rows:
    def __init__(self, about):
        self.facts = SimpleNamespace(about=about)

    def __len__(self):
        return 6000

    def lines(self, order):
        return []
