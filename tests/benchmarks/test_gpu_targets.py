"""Ceilings and targets of benchmarks/gpu.py on given figures."""

import sys

import pytest
import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_ceilings
import meter
from gpu_contenders import Cell, Place
from gpu_targets import targets
from shapes import config_of


class OneMillisecond(meter.HostMeter):
    def laps_ms(self, work, times):
        work()
        return [1.0 * meter.CALLS] * times


def test_a_layer_is_three_products_of_equal_flops():
    place = Place(torch.device("cpu"), None, OneMillisecond())
    row = gpu_ceilings.products(place, 32, 16, 48)
    each = 2 * 32 * 16 * 48 / 1e-3 / 1e12
    names = ("forward", "gradient of input", "gradient of weight", "all")
    assert [row[name] for name in names] == pytest.approx([each] * 4)
    assert (row["M"], row["K"], row["N"]) == (32, 16, 48)


def test_targets_are_read_off_the_medians():
    cell = Cell(config_of("XL/2", 64), 32, model="XL/2")
    ms = {"plain": 400.0, "plain_compiled": 250.0, "ours_compiled": 240.0}
    ms |= {"ours_compiled_cudnn": 220.0, "ours_float8_tensorwise": 200.0}
    ms |= {"ours_float8_rowwise": 250.0}
    measured = [{**cell.key, "contender": name, "laps_ms": [9e9, t, 0.0]} for name, t in ms.items()]
    tokens = [{"remat": "none", "fits": {"tokens": 120_000}, "whole": {"tokens": 99_225}}]
    rows = targets([cell], measured, tokens, {"peak_tflops": 989})
    found = {row["target"]: (row["measured"], row["met"]) for row in rows}
    # 32 samples of 3147.191 GFLOP in 220 ms.
    at = "XL/2 at 1024 tokens"
    cudnn = "(ours_compiled_cudnn)"
    assert found == {
        f"{at}: MFU": (f"{32 * 3.147191 / 0.22 / 989:.3f} {cudnn}", "yes"),
        f"{at}: speed over plain DiT": (f"1.818 {cudnn}", "yes"),
        f"{at}: speed over plain compiled DiT": (f"1.136 {cudnn}", "yes"),
        f"{at}: speed of float8 over bf16": ("1.200 (ours_float8_tensorwise)", "yes"),
        f"{at}: speed of float8_tensorwise over bf16": ("1.200", "yes"),
        f"{at}: speed of float8_rowwise over bf16": ("0.960", "no"),
        "tokens on one GPU, remat none": ("120,000 (a whole step: 99,225)", "yes"),
        "tokens on one GPU, remat full": ("not measured", "-"),
    }
    # Fewer layers of a shape have its targets; a smaller device holds fewer tokens.
    shallow = Cell(config_of("7B/2x4", 128), 4, model="7B/2x4")
    rows = targets([shallow], [], tokens, {"peak_tflops": 989, "memory_gib": 79.2})
    least = {row["target"]: row["at least"] for row in rows}
    assert least["7B/2x4 at 4096 tokens: MFU"] == "0.57"
    assert least["7B/2x4 at 4096 tokens: speed of float8 over bf16"] == "1.3"
    assert least["tokens on one GPU, remat none"] == "52,000"
    nothing = targets([cell], [], [], {"peak_tflops": None})
    assert {row["measured"] for row in nothing} == {"not measured"}
