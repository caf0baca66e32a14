"""Meters and ceilings; CUDA events only on a GPU."""

import sys

import pytest
import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import meter


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_call_takes_the_device_less_than_the_host_needs_for_it():
    x, gpu = torch.ones(16, device="cuda"), meter.CudaMeter()

    def work():
        for _ in range(10):
            x.add_(1)

    alone = min(gpu.laps_ms(work, 1)[0] for _ in range(10))
    assert 0 < gpu.call_ms(work) < alone


class OneMillisecondAndAHalf(meter.HostMeter):
    def laps_ms(self, work, times):
        work()
        return [1.5] * times


def test_ceilings_count_two_flops_a_product_and_both_ways_of_a_copy():
    device, clock = torch.device("cpu"), OneMillisecondAndAHalf()
    per_call = 1.5e-3 / meter.CALLS
    assert meter.gemm_tflops(clock, device, 32, 2) == pytest.approx(2 * 32**3 / per_call / 1e12)
    assert meter.copy_gb_per_s(clock, device, 640, 2) == pytest.approx(1280 / per_call / 1e9)
