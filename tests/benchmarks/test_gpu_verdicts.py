"""Verdicts, host time and order of benchmarks/gpu.py, on given figures."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import gpu_plan
import torch
from gpu_contenders import Cell, Place
from gpu_host import spent, union
from gpu_verdicts import FINDINGS, Measured, verdicts
from shapes import config_of

CELL = Cell(config_of("XL/2", 64), 32, model="XL/2")


def step(contender, ms, **columns):
    row = {**CELL.key, "contender": contender, "round": 1, "result": "measured"}
    return {**row, "laps_ms": [9e9, ms, 0.0], "first_step_s": 21.5, **columns}


def attention(backend, ms, tokens, ring=1, compiled=False):
    row = {"head_dim": 128, "backend": backend, "tokens": tokens, "ring": ring}
    return {**row, "compiled": compiled, "both ms": ms}


STEPS = [
    step("ours_compiled", 200.0, busy_ms=198.0, host_ms=60.0, reserved_gib=50.0),
    step("ours", 300.0, busy_ms=240.0),
    step("ours_compiled_cuda_graphs", 199.0),
    {**CELL.key, "contender": "ours_float8_tensorwise", "result": "not measured: no torchao. Fix"},
    {**CELL.key, "contender": "ours_compiled_cudnn", "result": "failed: gave no answer in 60 s"},
    step("ours_compiled_muon", 220.0),
    step("ours_compiled_plain_allocator", 201.0, reserved_gib=60.0),
]
LEVERS = [
    {"lever": "EMA", "ms": {"lerp": 4.0, "one call": 2.0}},
    {"lever": "prepare", "ms": {"eager": 3.0, "compiled": 2.5}, "host_ms": {"eager": 5.0}},
    {"lever": "token copies", "ms": {"dim 1": 0.1, "dim 0": 0.0}},
    {"lever": "optimizer", "result": "failed: RuntimeError"},
]
CEILINGS = {
    "attention": [
        *(attention("auto", 1.0, n) for n in (1024, 4096, 16384)),
        *(attention("flash", 1.5, n) for n in (1024, 4096, 16384)),
        *(attention("cudnn", 1.0 if n > 1024 else 0.5, n) for n in (1024, 4096, 16384)),
        attention("flash", 1.0, 16384, ring=4),
        attention("cudnn", 0.99, 16384, ring=4),
    ]
}


def test_each_finding_is_judged_by_its_rows_and_threshold():
    found = {r["finding"]: (r["figure"], r["verdict"]) for r in
             verdicts(Measured(CELL, STEPS, LEVERS, CEILINGS))}  # fmt: skip
    expected = {
        "a step of ours_compiled runs": ("first after 21.5 s", "yes"),
        "a step of ours_float8_tensorwise runs": ("-", "not measured: no torchao"),
        "a step of ours_compiled_cudnn runs": ("-", "failed: gave no answer in 60 s"),
        "idle share of a compiled step": ("0.01", "the host is ahead"),
        "idle share of an eager step": ("0.2", "the device waits for the host"),
        "speed of compiled blocks": ("1.5", "a gain"),
        "speed of float8": ("-", "not measured"),
        "speed of CUDA graphs": ("1.01", "no gain"),
        "speed of cuDNN attention over flash, 16k tokens": ("1.5", "cuDNN"),
        # At 1,024 tokens auto takes twice as long as cuDNN.
        "speed of auto over the faster of flash and cuDNN, worst length": (
            "0.5",
            "auto takes the slower one",
        ),
        "speed of cuDNN over flash in a ring of 4, 16k tokens": ("1.01", "flash"),
        "speed of compiled joins in that ring": ("-", "not measured"),
        "speed of EMA in one call over lerp": ("2", "a gain"),
        "host time of AdamW on DTensors over local tensors": ("-", "not measured"),
        "speed of compiled prepare": ("1.2", "no gain"),
        "host time of prepare, share of a step": ("0.025", "matters"),
        # 8 x 28 layers x 0.1 ms of 200 ms.
        "copies of tokens in dim 1, share of a step": ("0.112", "worth a layout"),
        "speed of a step with Muon over AdamW": ("0.909", "more than 5% slower"),
        "memory held without expandable segments over with them": ("1.2", "a gain"),
    }
    assert {name: found[name] for name in expected} == expected


def test_without_rows_nothing_is_judged():
    rows = verdicts(Measured(CELL, [], [], {}))
    assert len(rows) == len(FINDINGS) + len(gpu_plan.RUNS)
    assert {row["verdict"] for row in rows} == {"not measured"}


def test_a_step_without_a_trace_is_judged_only_where_the_host_returns_early():
    for host_ms, idle in ((60.0, 0.0), (190.0, None)):
        steps = [step("ours_compiled", 200.0, host_ms=host_ms)]
        assert Measured(CELL, steps, [], {}).idle("ours_compiled") == idle


def test_kernels_that_overlap_are_busy_once():
    assert union([(5, 7), (0, 4), (1, 2), (3, 6)]) == 7
    assert union([(0, 1), (2, 4)]) == 3
    assert union([]) == 0


@pytest.mark.parametrize("tiny", [False, True])
def test_the_first_rows_answer_whether_a_step_runs_and_what_it_waits_for(monkeypatch, tiny):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *["--tiny"] * tiny])
    options = gpu.settle(gpu.parse())
    options.cells = gpu_plan.cells_for(options, None if tiny else 79.2)
    place = Place(torch.device("cpu"), None, None)
    jobs = gpu_plan.jobs_of(options, place, None)
    names = [(job.key.get("model"), job.key.get("contender")) for job in jobs[:7]]
    whole, shallow = ("toy", "toyx1") if tiny else ("XL/2", "XL/2x2")
    assert names == [
        (shallow, "ours"),
        (shallow, "ours_compiled"),
        (whole, "ours_compiled"),
        (whole, "ours"),
        (shallow, "ours_float8_tensorwise"),
        (shallow, "ours_compiled_cudnn"),
        (shallow, "ours_compiled_cuda_graphs"),
    ]
    assert len({str(job) for job in jobs}) == len(jobs)
    if tiny:
        return
    # Then what a run is made for: bf16 beside its rivals, the 7B shape, float8.
    worth = [
        (job.key.get("model"), job.key.get("tokens"), job.key.get("contender")) for job in jobs
    ]
    assert worth[7:20] == [
        ("XL/2", 1024, "original_compiled"),
        ("XL/2", 1024, "plain_compiled"),
        ("XL/2", 256, "ours_compiled"),
        ("XL/2", 256, "original_compiled"),
        ("XL/2", 256, "plain_compiled"),
        ("7B/2x4", 4096, "ours_compiled"),
        ("7B/2x4", 4096, "ours_float8_tensorwise"),
        ("7B/2x4", 4096, "ours_float8_rowwise"),
        ("XL/2", 1024, "ours_float8_tensorwise"),
        ("XL/2", 1024, "ours_float8_rowwise"),
        ("XL/2", 1024, "plain"),
        ("XL/2", 256, "plain"),
        ("XL/2", 256, "ours"),
    ]
    kinds = [next(iter(job.key)) for job in jobs[20:]]
    assert list(dict.fromkeys(kinds)) == ["ceiling", "lever", "model", "max tokens of"]
    assert {key for job in jobs for key in ("lever", "ceiling", "max tokens of") if key in job.key}


def test_time_is_summed_by_kernel_and_by_kind():
    ran = [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 0, 300),
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", 300, 500),
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", 500, 800),
        ("triton_poi_fused_add_2", 800, 900),
        ("Memcpy DtoD (Device -> Device)", 900, 950),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", 950, 1000),
    ]
    found = spent(ran)
    kinds = {"attention": 0.3, "products": 0.5, "compiled": 0.1, "copies": 0.05, "other": 0.05}
    assert found["by_kind_ms"] == kinds
    assert found["slowest"][0] == {"ms": 0.5, "calls": 2, "kernel": ran[1][0]}
    assert union((start, end) for _, start, end in ran) == 1000
