import math

import pytest

from titan_dit.config.training import LRScheduleConfig
from titan_dit.optim.lr_schedule import learning_rate

PEAK, STEPS = 3e-4, 1000


def rates(steps=STEPS, **settings):
    config = LRScheduleConfig(**settings)
    return [learning_rate(config, PEAK, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_the_warm_up_rises_in_equal_steps_to_the_peak(decay):
    rising = rates(decay=decay, warmup_steps=100)[:100]
    assert rising == pytest.approx([PEAK * (i + 1) / 100 for i in range(100)])
    assert rising[-1] == PEAK


def test_constant_stays_at_the_peak():
    assert set(rates(decay="constant", warmup_steps=10, min_lr_ratio=0.5)[9:]) == {PEAK}
    assert set(rates(decay="constant")) == {PEAK}


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 100])
def test_a_decay_falls_from_the_peak_to_its_end_at_the_last_step(decay, ratio, warmup):
    falling = rates(decay=decay, warmup_steps=warmup, min_lr_ratio=ratio)[warmup:]
    assert falling[0] == pytest.approx(PEAK, rel=0.01)
    assert falling[-1] == pytest.approx(PEAK * ratio, abs=1e-12)
    assert falling == pytest.approx(sorted(falling, reverse=True))


def test_a_linear_decay_is_a_line():
    falling = rates(decay="linear", warmup_steps=100, min_lr_ratio=0.2)[99:]
    assert falling == pytest.approx([PEAK * (1 - 0.8 * i / 900) for i in range(901)])


def test_a_cosine_decay_is_half_a_cosine():
    falling = rates(decay="cosine", warmup_steps=100, min_lr_ratio=0.2)[99:]
    cosine = [0.6 + 0.4 * math.cos(math.pi * i / 900) for i in range(901)]
    assert falling == pytest.approx([PEAK * part for part in cosine])


@pytest.mark.parametrize(("warmup", "steps"), [(1, 1), (0, 1), (5, 5), (10, 5)])
def test_runs_as_short_as_their_warm_up_work(warmup, steps):
    got = rates(steps=steps, decay="cosine", warmup_steps=warmup, min_lr_ratio=0.1)
    assert len(got) == steps
    assert all(0 < rate <= PEAK for rate in got)
