"""Rounds of benchmarks/gpu.py: figures from timed steps, and the step against the trainer's."""

import sys

import pytest
import torch
from commands import ROOT
from harness import on_ranks
from tiny import randomize, tiny_config

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_contenders
import gpu_rounds

CEILINGS = {"peak_tflops": 100.0, "gemm_tflops": 80.0}


@pytest.fixture
def cell():
    return gpu_contenders.Cell(tiny_config().model, 4, model="toy")


def test_the_figures_follow_from_the_median_step(cell):
    mine = {"contender": "ours", "result": "measured", "first_step_s": 2.0, **cell.key}
    measured = [
        {**mine, "round": 1, "laps_ms": [1.0, 2.0, 3.0], "peak_gib": 3.0},
        {**mine, "round": 2, "laps_ms": [2.0, 4.0, 9.0], "peak_gib": 3.5},
        {**mine, "contender": "plain", "round": 1, "laps_ms": [5.0], "peak_gib": 4.0},
        {**mine, "contender": "plain_compiled", "round": 1, "laps_ms": [2.0], "peak_gib": 4.0},
        {**mine, "contender": "ours", "model": "other", "round": 1, "laps_ms": [99.0]},
    ]
    wanted = [(cell, "ours"), (cell, "plain")]
    row, plain = gpu_rounds.summary(wanted, measured, CEILINGS, {cell: 3.25})
    with torch.device("meta"):
        model = cell.config.build(1)
    tflops = model.flops_per_sample(16) * 4 / 2.5e-3 / 1e12
    assert row["ms per step"] == "2.5"
    assert row["by round"] == "2.0 / 4.0"
    assert row["time / plain"] == "0.500"
    assert row["time / plain compiled"] == "1.250"
    assert row["TFLOP/s"] == f"{tflops:.3g}"
    assert row["MFU"] == f"{tflops / 100:.3f}"
    assert row["of GEMM"] == f"{tflops / 80:.3f}"
    assert row["peak GiB"] == "3.5"
    # The dry run knows our step only.
    assert (row["dry run GiB (eager)"], plain["dry run GiB (eager)"]) == ("3.2", "-")


def losses_of_both(world):
    """Three steps of the trainer and three of the benchmark, from equal weights, on one batch."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import ours

    from titan_dit.optim.optimizer import shards_of
    from titan_dit.trainer import Trainer

    as_default = {"lr": 1e-4, "weight_decay": 0.0}
    config = tiny_config(precision={"dtype": "bf16"}, optimizer=as_default)
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    start = [t.detach().clone() for t in shards_of(trainer.parameters.values())]
    batch = ours.resident_batch(config.model, 16, world.device)
    theirs = []
    for trainer.step in (1, 2, 3):
        theirs.append(trainer.train_step(batch)[0].item())

    ours.randomize = lambda tensors: torch._foreach_copy_([t.data for t in tensors], start)
    ours.resident_batch = lambda *_: batch
    mesh, objective = trainer.mesh, config.objective
    step = ours.trainer_step(config.model, 16, world.device, objective, mesh, compiled=False)
    return theirs, [step().item() for _ in range(3)]


def test_our_step_is_the_trainers():
    [(theirs, ours)] = on_ranks(1, losses_of_both)
    assert theirs == ours
    assert len(set(theirs)) == 3
