"""The rounds of benchmarks/gpu.py: what happens when a contender fails, and what a step is."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT
from harness import on_ranks
from tiny import randomize, tiny_config

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_contenders
import gpu_rounds
import meter
import report
from gpu_queue import Clock, work_off

CEILINGS = {"peak_tflops": 100.0, "gemm_tflops": 80.0}


@pytest.fixture
def cell():
    return gpu_contenders.Cell(tiny_config().model, 4, model="toy")


@pytest.fixture
def place():
    return gpu_contenders.Place(torch.device("cpu"), None, meter.HostMeter())


def broken(message):
    def make(cell, place):
        raise RuntimeError(message)

    return make


def rows_of(wanted, place, timing):
    """All rows that the jobs give within a budget that holds them."""
    clock = Clock(1e9, time.monotonic())
    jobs = list(gpu_rounds.jobs(wanted, place, timing, None))
    return [row for _, row in work_off(jobs, place.meter, clock, lambda line: None)]


def test_a_contender_that_fails_is_a_row_and_is_not_tried_again(monkeypatch, cell, place):
    steps = {
        "good": lambda cell, place: lambda: torch.ones(()),
        "big": broken("CUDA out of memory. Tried to allocate 1 TiB"),
        "bad": broken("no such kernel"),
        "nan": lambda cell, place: lambda: torch.tensor(float("nan")),
    }
    monkeypatch.setattr(gpu_rounds, "CONTENDERS", steps)
    wanted = [(cell, name) for name in steps]
    measured = rows_of(wanted, place, gpu_rounds.Timing(2, 1, 2))
    assert [(row["contender"], row["round"], row["result"]) for row in measured] == [
        ("good", 1, "measured"),
        ("big", 1, "out of memory"),
        ("bad", 1, "failed: RuntimeError"),
        ("nan", 1, "failed: ArithmeticError"),
        # The second round goes backwards.
        ("nan", 2, "not tried again"),
        ("bad", 2, "not tried again"),
        ("big", 2, "not tried again"),
        ("good", 2, "measured"),
    ]
    table = report.table(gpu_rounds.summary(wanted, measured, CEILINGS))
    assert "| toy | 16 | 4 | big | out of memory | - |" in table
    assert "| toy | 16 | 4 | bad | failed: RuntimeError | - |" in table


def test_what_was_not_begun_says_so(cell):
    [row] = gpu_rounds.summary([(cell, "plain")], [], CEILINGS)
    assert row["ms per step"] == "not begun"


def test_short_steps_are_timed_more_often_than_long_ones():
    timing = gpu_rounds.Timing(seconds=1.5)
    assert [timing.count([ms]) for ms in (1.0, 100.0, 250.0, 2000.0)] == [40, 15, 6, 5]
    assert gpu_rounds.Timing(steps=3).count([1.0]) == 3


def test_a_compiled_row_is_expected_to_take_longer(cell):
    timing = gpu_rounds.Timing()
    eager, compiled = (
        gpu_rounds.estimate_s(cell, name, timing, 989) for name in ("ours", "ours_compiled")
    )
    assert compiled - eager == pytest.approx(gpu_rounds.COMPILE_S, rel=0.01)


def test_the_figures_follow_from_the_median_step(cell):
    mine = {"contender": "ours", "result": "measured", "first_step_s": 2.0, **cell.key}
    measured = [
        {**mine, "round": 1, "laps_ms": [1.0, 2.0, 3.0], "peak_gib": 3.0},
        {**mine, "round": 2, "laps_ms": [2.0, 4.0, 9.0], "peak_gib": 3.5},
        {**mine, "contender": "plain", "round": 1, "laps_ms": [5.0], "peak_gib": 4.0},
        {**mine, "contender": "plain_compiled", "round": 1, "laps_ms": [2.0], "peak_gib": 4.0},
        {**mine, "contender": "ours", "model": "other", "round": 1, "laps_ms": [99.0]},
    ]
    row, _ = gpu_rounds.summary([(cell, "ours"), (cell, "plain")], measured, CEILINGS)
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


def test_a_writing_that_is_cut_off_leaves_the_one_before(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    report.write("test", [{"a": 1}], str(out))

    def full_disk(path, text):
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space left"):
        report.write("test", [{"a": 2}], str(out))
    assert json.loads(out.read_text())["rows"] == [{"a": 1}]


def losses_of_both(world):
    """Three steps of the trainer and three of the benchmark, from equal weights, on one batch."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import ours

    from titan_dit.state.ema import local
    from titan_dit.trainer import Trainer

    as_default = {"lr": 1e-4, "weight_decay": 0.0}
    config = tiny_config(precision={"dtype": "bf16"}, optimizer=as_default)
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    start = [tensor.clone() for tensor in local(trainer.parameters)]
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
