import time

import pytest
import torch

from titan_dit.observe import meter as meter_module
from titan_dit.observe.meter import Meter, peak_gib


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def test_the_meter_gives_milliseconds_per_step_since_the_last_reading(clock):
    meter = Meter()
    clock.now, meter.steps, meter.waited = 102, 4, 0.4
    assert meter.read() == pytest.approx((500, 100))
    clock.now, meter.steps = 103, 1
    assert meter.read() == pytest.approx((1000, 0))


def test_what_happens_while_paused_is_left_out(clock):
    meter = Meter()
    clock.now, meter.steps = 101, 2
    with meter.paused():
        clock.now = 201
    clock.now = 202
    assert meter.read() == pytest.approx((1000, 0))


def test_waiting_for_data_is_counted_and_stays_in_the_time_per_step(clock):
    meter = Meter()
    meter.steps = 2
    for until in (101, 102):
        with meter.waiting():
            clock.now = until
        clock.now = until + 0.5
    assert meter.read() == pytest.approx((1250, 750))


def test_reading_before_the_first_step_divides_by_nothing(clock):
    meter = Meter()
    clock.now = 101
    assert meter.read() == pytest.approx((1000, 0))


def test_a_real_meter_runs():
    meter = Meter()
    time.sleep(0.01)
    meter.steps = 1
    assert 10 <= meter.read()[0] < 5000


def test_peak_memory_of_a_cpu_is_that_of_the_process():
    assert 0.05 < peak_gib(torch.device("cpu")) < 64
