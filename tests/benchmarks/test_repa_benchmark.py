"""benchmarks/repa.py finds the step at which a run reaches a loss."""

import math
import sys

from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import repa as benchmark


def test_the_first_step_is_between_the_validations_around_the_loss():
    losses = {100: 2.0, 200: 1.0, 300: 0.5, 400: 0.6}
    assert benchmark.first_step(losses, 1.25) == 175
    assert benchmark.first_step(losses, 2.0) == 100
    assert benchmark.first_step(losses, 0.5) == 300
    assert benchmark.first_step(losses, 0.4) == math.inf
