"""Time and ceilings; the GPU's meter with events that only write down when they are recorded."""

import sys
import time

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


def test_calls_on_a_gpu_are_timed_behind_work_that_lasts_until_they_are_queued(queue, monkeypatch):
    # The host needs 2 ms for a call, the device 3, and 7 for a product; the first call compiles.
    costs, now = iter([9e3]), [0.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])

    def work():
        now[0] += 1e-3 * next(costs, 2)
        queue.append(3)

    gpu = meter.CudaMeter()
    monkeypatch.setattr(gpu, "lead", lambda: lambda: queue.append(7))
    assert gpu.call_ms(work) == pytest.approx(3)
    calls = [3] * meter.CALLS
    tried, products = [*calls, "wait", "record", 7, "record", 7, "record", "wait"], [7] * 6
    assert queue == [*tried, "wait", "record", *products, "record", *calls, "record", "wait"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_call_takes_the_device_less_than_the_host_needs_for_it():
    x, gpu = torch.ones(16, device="cuda"), meter.CudaMeter()

    def work():
        for _ in range(10):
            x.add_(1)

    alone = min(gpu.laps_ms(work, 1)[0] for _ in range(10))
    assert 0 < gpu.call_ms(work) < alone


def test_laps_on_a_cpu_take_time():
    laps = meter.HostMeter().laps_ms(lambda: sum(range(1000)), 3)
    assert len(laps) == 3
    assert min(laps) > 0
    assert meter.HostMeter().call_ms(lambda: time.sleep(0.01)) >= 10


class OneMillisecondAndAHalf(meter.HostMeter):
    def laps_ms(self, work, times):
        work()
        return [1.5] * times


def test_ceilings_count_two_flops_a_product_and_both_ways_of_a_copy():
    device, clock = torch.device("cpu"), OneMillisecondAndAHalf()
    per_call = 1.5e-3 / meter.CALLS
    assert meter.gemm_tflops(clock, device, 32, 2) == pytest.approx(2 * 32**3 / per_call / 1e12)
    assert meter.copy_gb_per_s(clock, device, 640, 2) == pytest.approx(1280 / per_call / 1e9)
