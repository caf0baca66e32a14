"""The samples, bits and losses of a run, as benchmarks/chaos.py counts and compares them."""

import importlib.util

from commands import ROOT

_SPEC = importlib.util.spec_from_file_location(
    "chaos_account", ROOT / "benchmarks" / "chaos_account.py"
)
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
BATCH = _MODULE.BATCH
same_bits, same_curve, losses = _MODULE.same_bits, _MODULE.same_curve, _MODULE.losses

COUNTED = ("--config", "digits", "--training.global_batch_size", BATCH)
COUNTED += ("--faults.log_samples", "true", "--training.deterministic", "true")
COUNTED += ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
"""Flags of a run that can be counted."""


PACE = """
import os, time
from titan_dit.hooks import Hook

class Pace(Hook):
    def step_ended(self, run):
        time.sleep(float(os.environ.get("STEP_S", 0.1)))
"""
"""A module with a hook, `--job.hooks pace:Pace`: steps take STEP_S, 0.1 s, without using a core."""


def fresh_clone(folder):
    """A clone of links, without outputs/, with the module `pace`."""
    clone = folder / "clone"
    clone.mkdir()
    for name in ("titan_dit", "launch", "scripts", "train_configs", "run_train.sh"):
        (clone / name).symlink_to(ROOT / name)
    (clone / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    (clone / "pace.py").write_text(PACE)
    return clone


def assert_each_sample_once(run, steps):
    """Every sample of a run's steps was trained on once, by the logs of its ranks."""
    found = _MODULE.account(run, steps)
    assert found == {"samples": steps * BATCH, "lost": 0, "twice": 0, "strange": 0}
