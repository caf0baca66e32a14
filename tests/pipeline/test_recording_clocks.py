"""Offsets of clocks: the fastest round trip counts, and drift is linear."""

import random
from unittest import mock

import pytest
import torch.distributed as dist

from titan_dit.pipeline import recording
from titan_dit.pipeline.recording import Clock, Offset, fastest, measure


def test_the_offset_is_that_of_the_fastest_round_trip():
    # The other clock is 1000 ahead; the second trip took as long both ways.
    trips = [(0, 1090, 100), (200, 1210, 220), (300, 1390, 400)]
    assert fastest(trips) == Offset(210.0, 1000.0, 20)


def test_a_clock_that_drifts_is_drawn_linearly_between_two_measurements():
    offset, drift = 5e9, 40e-6  # 40 us a second, as a quartz may.

    def own(first):
        return first + offset + drift * first

    before, after = (Offset(at, own(at) - at, 0.0) for at in (2e9, 12e9))
    clock = Clock(before, after)
    for at in (0.0, 2e9, 7e9, 12e9, 20e9):
        assert clock.to_first(own(at)) == pytest.approx(at, abs=1.0)


def test_two_measurements_at_one_time_have_no_drift():
    same = Offset(3.0, 100.0, 2.0)
    assert Clock(same, same).to_first(150.0) == 50.0


class Wire:
    """Two ranks in one process: what rank 0 sends is answered after simulated delays."""

    def __init__(self, skew, seed):
        self.now_ns, self.skew, self.draws = 0, skew, random.Random(seed)
        self.least, self.answer = 20_000, None

    def delay(self):
        late = self.draws.choice((0, 0, 0, 1_000_000)) * self.draws.random()
        self.now_ns += self.least + round(late)

    def send(self, value, *_):
        self.delay()
        self.answer = self.now_ns + self.skew

    def recv(self, value, *_):
        self.delay()
        value.fill_(self.answer)


@pytest.mark.parametrize("skew", [0, 7_000_000_123, -3_000_000])
def test_skewed_clocks_are_known_although_most_trips_are_slow(skew):
    for seed in range(20):
        wire = Wire(skew, seed)
        with (
            mock.patch.multiple(dist, send=wire.send, recv=wire.recv),
            mock.patch.multiple(
                recording.dist,
                get_rank=lambda group: 0,
                get_world_size=lambda group: 2,
                get_global_rank=lambda group, rank: rank,
            ),
        ):
            own, other = measure(None, lambda wire=wire: wire.now_ns)
        assert own.offset_ns == 0
        assert other.offset_ns == skew
        assert other.round_trip_ns == 2 * wire.least
