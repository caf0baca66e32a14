"""The loss scale of fp16, and what the guard makes of an overflow."""

import itertools
import json
import math
import random

import pytest
import torch
from test_guard import alone

from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.operation import FaultsConfig
from titan_dit.config.section import UserError
from titan_dit.recovery import bad_steps
from titan_dit.recovery.bad_steps import Guard, LossScale

CPU = torch.device("cpu")


def fp16(**keys):
    return PrecisionConfig(dtype="fp16", **{f"loss_scale{key}": v for key, v in keys.items()})


def scales(config, verdicts):
    """The scale of each step; `verdicts`: which of them overflow."""
    scaling, found = LossScale(config, CPU), []
    for overflows in verdicts:
        found.append(scaling.value.item())
        scaling.update(torch.tensor(math.inf if overflows else 1e-9))
    return found


def by_hand(verdicts, init, window, hysteresis, least):
    """Megatron-LM's rule in Python numbers."""
    scale, good, left, found = init, 0, hysteresis, []
    for overflows in verdicts:
        found.append(scale)
        good = 0 if overflows else good + 1
        left -= overflows
        if overflows and left <= 0:
            scale = max(scale / 2, least)
        if good == window:
            scale, good, left = min(2 * scale, 2.0**32), 0, hysteresis
    return found


@pytest.mark.parametrize(("window", "hysteresis"), [*itertools.product([1, 2, 5], [1, 2, 3])])
def test_the_scale_halves_and_doubles_by_the_rule(window, hysteresis):
    drawn = random.Random(7 * window + hysteresis)
    verdicts = [drawn.random() < 0.4 for _ in range(300)] + [True] * 40
    config = fp16(_init=256.0, _window=window, _hysteresis=hysteresis, _min=4.0)
    expected = by_hand(verdicts, 256.0, window, hysteresis, 4.0)
    assert scales(config, verdicts) == expected
    assert min(expected) == 4.0


def test_the_first_overflows_since_the_last_growth_do_not_halve_it():
    config = fp16(_init=64.0, _window=2, _hysteresis=2)
    verdicts = [True, True, False, True, False, False, True, False, True]
    assert scales(config, [*verdicts, False]) == [64, 64, 32, 32, 16, 16, 32, 32, 32, 16]


def test_a_constant_scale_stays_and_no_scale_grows_for_ever():
    assert set(scales(fp16(**{"": 8.0}, _window=1), [True, False] * 5)) == {8.0}
    assert max(scales(fp16(_init=2.0**31, _window=1), [False] * 5)) == 2.0**32


@pytest.mark.parametrize("least", [1.0, 2.0**15])
def test_a_norm_beyond_fp16_is_an_overflow_in_every_layout_but_not_at_the_least_scale(least):
    scaling = LossScale(fp16(_init=2.0**15, _hysteresis=1, _min=least), CPU)
    assert scaling.update(torch.tensor(3.0)).item() == (least == 1.0)
    assert scaling.value.item() == (2.0**14 if least == 1.0 else least)
    assert not scaling.update(torch.tensor(65504 * 2.0**-15))
    assert not LossScale(fp16(**{"": 2.0**20}), CPU).update(torch.tensor(3.0))


def test_other_formats_have_none():
    for dtype in ("bf16", "fp32", "fp64"):
        assert LossScale.of(PrecisionConfig(dtype=dtype), CPU) is None
    assert Guard(FaultsConfig(), CPU, PrecisionConfig()).loss_scale is None


def test_a_first_scale_below_the_least_one_is_refused():
    words = r"^\[precision\] loss_scale_init=2.0 is below loss_scale_min=4.0. Raise the first"
    with pytest.raises(UserError, match=words):
        fp16(_init=2.0, _min=4.0)


def judged(norms, guard, first=1, every=1):
    """The skipped steps of a run with these norms: (step, kind, scale)."""
    found = []
    for step, norm in enumerate(norms, start=first):
        guard.check(step, 8 * (step - 1), torch.tensor(1.0), torch.tensor(norm))
        if step % every == 0 or step == first + len(norms) - 1:
            found += guard.read(alone).bad
    return [(bad.step, bad.kind, bad.loss_scale) for bad in found]


def guard_of(precision, **keys):
    return Guard(FaultsConfig(**keys), CPU, precision)


@pytest.mark.parametrize("every", [1, 4, 100])
def test_a_norm_that_is_not_finite_is_an_overflow_until_the_least_scale(every):
    guard = guard_of(fp16(_init=8.0, _hysteresis=1, _min=2.0), max_consecutive_bad_steps=3)
    norms = [math.inf, 1.0, math.nan, math.nan, math.inf, 1.0]
    assert judged(norms, guard, every=every) == [
        (1, "overflow", 8.0),
        (3, "overflow", 4.0),
        (4, "nonfinite", 2.0),
        (5, "nonfinite", 2.0),
    ]
    assert guard.counters == {
        "skipped_steps": 4,
        "nan_steps": 2,
        "overflow_steps": 2,
        "loss_scale": 2.0,
    }


def test_an_overflow_neither_begins_nor_ends_a_streak():
    keys = {"max_consecutive_bad_steps": 2, "spike_ratio": 2.0, "spike_after": 1}
    guard = guard_of(fp16(_init=8.0), **keys)
    judged([1.0] + [math.inf] * 3, guard)
    assert (guard.streak, guard.num_consecutive) == (None, 0)
    assert judged([5.0, math.inf, 5.0], guard, first=5)[::2] == [
        (5, "spike", 2.0),
        (7, "spike", 1.0),
    ]
    assert (guard.streak, guard.streak_end) == ((5, 32), (7, 48))


def test_with_a_constant_scale_every_such_norm_is_a_bad_step():
    guard = guard_of(fp16(**{"": 8.0}), max_consecutive_bad_steps=2)
    assert judged([math.inf, math.nan], guard) == [(1, "nonfinite", 8.0), (2, "nonfinite", 8.0)]
    assert guard.streak_end


@pytest.mark.parametrize("cut", [1, 4, 7, 11, 20])
def test_a_resumed_guard_continues_with_the_scale_of_the_run(cut):
    drawn = random.Random(3)
    norms = [math.inf if drawn.random() < 0.4 else 1.0 for _ in range(40)]
    precision = fp16(_init=2.0**10, _window=2, _hysteresis=2)
    whole = guard_of(precision)
    expected = judged(norms, whole)
    before = guard_of(precision)
    found = judged(norms[:cut], before)
    state = json.loads(json.dumps(before.state()))
    after = guard_of(precision)
    after.load(state)
    found += judged(norms[cut:], after, first=cut + 1)
    assert found == expected
    assert after.state() == whole.state()


def test_a_run_that_was_not_in_fp16_begins_with_the_first_scale():
    guard = guard_of(fp16(_init=32.0))
    judged([math.inf] * 4, guard)
    guard.load(Guard(FaultsConfig(), CPU).state())
    assert guard.loss_scale.item() == 32.0


def test_a_resumed_run_takes_its_own_limits():
    saved = guard_of(fp16(_init=4.0)).state()
    raised, constant = guard_of(fp16(_min=16.0)), guard_of(fp16(**{"": 128.0}))
    raised.load(saved)
    constant.load(saved)
    assert (raised.loss_scale.item(), constant.loss_scale.item()) == (16.0, 128.0)


def test_the_fault_log_and_the_console_name_the_scale():
    guard = guard_of(fp16(_init=65536.0))
    guard.check(1, 0, torch.tensor(1.5), torch.tensor(math.inf))
    (bad,) = guard.read(alone).bad
    line = bad_steps.line_of_bad_step(bad, [0, 1], [5, 3], {})
    assert (line["kind"], line["loss_scale"], line["loss"]) == ("overflow", 65536.0, 1.5)
    assert bad.message("LOG") == (
        "step 1 skipped: the gradients overflow in fp16 at the loss scale 65536 (see LOG)"
    )
