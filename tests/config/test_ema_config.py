import pytest

from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig


@pytest.mark.parametrize(("steps", "every", "number"), [(1000, 1, 64), (64, 1, 64), (1001, 7, 10)])
def test_snapshots_are_spread_evenly_up_to_the_last_update(steps, every, number):
    ema = EMAConfig(power=(0.1,), snapshots=number, every=every)
    taken = [step for step in range(1, steps + 1) if ema.takes_snapshot(step, steps)]
    assert len(taken) == ema.num_snapshots(steps) == number
    assert taken[-1] == steps // every * every
    for i, step in enumerate(taken, 1):
        # The first update at or after i / number of all updates.
        assert step == -(-i * (steps // every) // number) * every


def test_there_are_no_more_snapshots_than_updates_and_none_without_power():
    assert EMAConfig(power=(0.1,), every=10).num_snapshots(95) == 9
    none = (EMAConfig(), EMAConfig(power=(0.1,), snapshots=0), EMAConfig(power=(0.1,), every=300))
    for ema in none:
        assert not any(ema.takes_snapshot(step, 200) for step in range(1, 201))


def test_names_tell_widths_from_decays():
    assert EMAConfig(decays=(0.9, 0.1), power=(0.1,)).names == ("0.9", "0.1", "power_0.1")


@pytest.mark.parametrize(
    ("power", "words"),
    [
        ((0.1, 0.1), r"\[ema\] power=\[0.1, 0.1\] has duplicates"),
        ((0.0,), r"\[ema\] power\[0\]=0.0 must be at least 0.001"),
        ((0.3,), r"\[ema\] power\[0\]=0.3 must be at most 0.28"),
    ],
)
def test_widths_that_are_none_are_refused(power, words):
    with pytest.raises(UserError, match=words):
        EMAConfig(power=power)
