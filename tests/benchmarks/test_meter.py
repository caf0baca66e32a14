"""Time and ceilings; the GPU's meter with events that only write down when they are recorded."""

import sys

import pytest
import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import meter


@pytest.fixture
def queue(monkeypatch):
    """What a GPU would be told, in order; a piece of work takes as long as it says."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = sum(word for word in told if isinstance(word, int))
            told.append("record")

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    return told


def test_a_gpu_is_waited_for_before_and_after_the_laps_only(queue):
    work = iter([3, 4])
    assert meter.CudaMeter().laps_ms(lambda: queue.append(next(work)), 2) == [3.0, 4.0]
    assert queue == ["wait", "record", 3, "record", 4, "record", "wait"]


def test_laps_on_a_cpu_take_time():
    laps = meter.HostMeter().laps_ms(lambda: sum(range(1000)), 3)
    assert len(laps) == 3
    assert min(laps) > 0


class OneMillisecondAndAHalf(meter.HostMeter):
    def laps_ms(self, work, times):
        work()
        return [1.5] * times


def test_ceilings_count_two_flops_a_product_and_both_ways_of_a_copy():
    device, clock = torch.device("cpu"), OneMillisecondAndAHalf()
    per_call = 1.5e-3 / meter.CALLS
    assert meter.gemm_tflops(clock, device, 32, 2) == pytest.approx(2 * 32**3 / per_call / 1e12)
    assert meter.copy_gb_per_s(clock, device, 640, 2) == pytest.approx(1280 / per_call / 1e9)
