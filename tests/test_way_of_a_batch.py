"""The files that one step visits from disk to gradient."""

import sys
from pathlib import Path

from tiny import tiny_config

import titan_dit
from titan_dit.ranks import process_group
from titan_dit.rng import SampleRNG
from titan_dit.trainer import Trainer

PACKAGE = Path(titan_dit.__file__).resolve().parent
WAY = [
    "data/loader.py",
    "data/order.py",
    "data/latents.py",
    "data/shards.py",
    "diffusion/objective.py",
    "models/dit_config.py",
    "models/layers.py",
    "diffusion/conditions.py",
    "diffusion/rectified_flow.py",
    "diffusion/sections.py",
    "diffusion/samplers/ode.py",
    "execution.py",
    "models/dit.py",
    "kernels/linear.py",
]
"""Without rng.py and the interfaces in base.py."""


def visited(trainer):
    """Files of the package in the order of their first call."""
    seen = {}

    def look(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            seen.setdefault(str(file.relative_to(PACKAGE)))

    batches = trainer.batches()
    for _ in range(2):  # The first one warms up caches.
        trainer.step += 1
        trainer.train_step(next(batches))
    sys.setprofile(look)
    try:
        batch = next(batches)
        rng = SampleRNG(trainer.config.job.seed, batch.sample_numbers)
        trainer.executor.step(trainer.built.prepare(batch, rng))
    finally:
        sys.setprofile(None)
    return list(seen)


def test_a_step_of_digits_visits_fourteen_files_each_entered_in_turn(tmp_path):
    config = tiny_config(job={"dir": str(tmp_path), "name": "run"})
    with process_group.start("cpu") as world:
        files = visited(Trainer(config, world))
    counted = [file for file in files if Path(file).name not in ("rng.py", "base.py")]
    assert counted == WAY
