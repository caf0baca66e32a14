import math

import pytest

from titan_dit.config.section import UserError
from titan_dit.config.training import LRSchedulerConfig
from titan_dit.optim.lr_schedule import check, learning_rate

PEAK, STEPS = 3e-4, 1000


def rates(steps=STEPS, **settings):
    config = LRSchedulerConfig(**settings)
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


def test_wsd_is_at_the_peak_until_its_decay():
    settings = {"decay": "wsd", "warmup_steps": 100, "wsd_decay_steps": 200, "min_lr_ratio": 0.2}
    shapes = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "exponential": lambda x: 2 * 0.5**x - 1,
        "minus_sqrt": lambda x: 1 - math.sqrt(x),
    }
    for shape, left in shapes.items():
        got = rates(wsd_decay=shape, **settings)
        assert set(got[99:800]) == {PEAK}
        expected = [PEAK * (0.2 + 0.8 * left(i / 200)) for i in range(201)]
        assert got[799:] == pytest.approx(expected)


def test_the_inverse_square_root_of_the_step_follows_the_warm_up():
    got = rates(decay="inverse_square_root", warmup_steps=100, min_lr_ratio=0.4)
    assert got[99] == PEAK
    expected = [PEAK * max(0.4, math.sqrt(100 / step)) for step in range(101, 1001)]
    assert got[100:] == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["cosine", "linear", "inverse_square_root"])
def test_after_decay_steps_the_rate_is_the_least(decay):
    got = rates(decay=decay, decay_steps=600, warmup_steps=50, min_lr_ratio=0.1)
    alone = rates(steps=600, decay=decay, warmup_steps=50, min_lr_ratio=0.1)
    assert got[:600] == alone
    assert got[600:] == pytest.approx([0.1 * PEAK] * 400)


def test_the_warm_up_may_be_a_fraction_of_the_decay():
    by_steps = rates(decay="linear", decay_steps=500, warmup_steps=50)
    assert rates(decay="linear", decay_steps=500, warmup_fraction=0.1) == pytest.approx(by_steps)
    assert rates(decay="linear", warmup_fraction=0.1)[99] == PEAK


def test_the_rates_are_megatrons():
    """Its formulas (core/optimizer_param_scheduler.py get_lr), with lr in place of max_lr."""

    def megatron(style, step, warmup, end, least):
        if warmup and step <= warmup:
            return PEAK * step / warmup
        if step > end:
            return least
        if style == "inverse_square_root":
            return max(least, PEAK * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
        ratio = (step - warmup) / (end - warmup)
        share = 1 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
        return least + share * (PEAK - least)

    for style in ("linear", "cosine", "inverse_square_root"):
        got = rates(decay=style, decay_steps=700, warmup_steps=30, min_lr_ratio=0.2)
        expected = [megatron(style, step, 30, 700, 0.2 * PEAK) for step in range(1, STEPS + 1)]
        assert got == pytest.approx(expected), style


def half_a_step(step, warmup, end, config):
    return 0.5


def test_a_law_of_the_users_own_is_named_by_its_module():
    name = f"{__name__}:half_a_step"
    assert rates(decay=name, warmup_steps=10)[9:12] == [PEAK, PEAK / 2, PEAK / 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": "cosin"}, "is not one of"),
        ({"warmup_steps": 5, "warmup_fraction": 0.1}, "Keep one of them"),
        ({"warmup_steps": 50, "decay_steps": 50}, "Set it above warmup_steps=50"),
        ({"decay": "wsd"}, "Set both, or neither"),
        ({"wsd_decay_steps": 5}, "Set both, or neither"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(UserError) as caught:
        LRSchedulerConfig(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decay": "titan_dit.optim.lr_schedule:typo"}, "has no typo"),
        (
            {"decay": "wsd", "wsd_decay_steps": 91},
            r"wsd_decay_steps=91 begins before the end of the warm-up, step 10 of 100\. "
            "Set at most 90",
        ),
    ],
)
def test_rates_that_a_run_cannot_have_are_refused_before_the_first_step(keys, message):
    with pytest.raises(UserError, match=message):
        check(LRSchedulerConfig(warmup_steps=10, **keys), 100)
    check(LRSchedulerConfig(warmup_steps=10, decay="wsd", wsd_decay_steps=90), 100)
