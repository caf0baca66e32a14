"""Plans against the steps of titan_dit that a GPU has measured (docs/planner.md)."""

import json
from dataclasses import replace

import pytest
from commands import ROOT

from titan_dit.parallel.mesh import AxisSizes
from titan_dit.planner.calibrate import calibrate, cases_of, errors, leave_one_out, other_layers
from titan_dit.planner.hardware import device_of, read
from titan_dit.planner.links import Network
from titan_dit.planner.measured import measured_on_gpu
from titan_dit.planner.rates import attention_s
from titan_dit.planner.work import AttentionCall

H200 = device_of("h200")
FILE = ROOT / "benchmarks/results/h200-2026-11-26/gpu.json"
CONTENDERS = ("ours", "ours_compiled", "ours_float8_tensorwise")
LAYERS = ["attn.qkv", "attn.out", "mlp.up", "mlp.down"]


@pytest.fixture(scope="module")
def cases():
    """The steps whose config plans what was measured, by name."""
    found = cases_of([one for one in measured_on_gpu(FILE) if not other_layers(one)])
    return {case.name.replace(", batch", "").replace(" tokens,", ""): case for case in found}


def planned(cases, device=H200):
    return dict(zip(cases, errors([*cases.values()], device), strict=True))


def test_the_plans_of_a_data_sheet_are_near_the_measured_steps(cases):
    found = planned(cases)
    assert len(found) == 11
    for name, error in found.items():
        # XL/2x2 is 2 layers, a step of 20 ms: in float8 it waits for the host.
        limit = 0.20 if "float8" in name else 0.08
        assert abs(error) < limit, (name, error)
    large = [abs(error) for name, error in found.items() if "2x2" not in name and "row" not in name]
    assert max(large) < 0.05


def test_a_fit_predicts_the_step_that_is_left_out(cases):
    fitted = [case for name, case in cases.items() if "rowwise" not in name]
    found = {name: abs(error) for name, error in leave_one_out(fitted, H200).items()}
    assert max(found.values()) < 0.15
    assert max(error for name, error in found.items() if "2x2" not in name) < 0.065


def test_a_calibration_says_which_steps_it_leaves_out_and_why(tmp_path):
    """Few rows, as their fits take no part in what this shows."""
    report = json.loads(FILE.read_text())
    keep = ("ours_float8_rowwise", "ours_compiled")
    report["configs"] = [
        one for one in report["configs"] if one["contender"] in keep and "2x2" not in one["model"]
    ]
    report["configs"] = [one for one in report["configs"] if one["tokens"] != 256]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(report))
    lines = calibrate(path, [], tmp_path / "mine.toml")
    left_out = [line for line in lines if line.startswith("left out")]
    assert [line.split(": ")[0] for line in left_out] == [
        "left out ours_float8_rowwise, 7B/2x8, 4096 tokens, batch 8",
        "left out ours_float8_rowwise, XL/2, 1024 tokens, batch 32",
    ]
    assert "persistent reduction" in left_out[0]
    assert left_out[1].endswith("attn.qkv, mlp.down, mlp.up, its config now has it in none")
    mine = read(tmp_path / "mine.toml")
    assert len(mine.rows) == 2
    assert (mine.torch_name, mine.head_step) == ("NVIDIA H200", 64)


def test_a_step_is_planned_for_the_device_that_measured_it():
    for one in measured_on_gpu(FILE):
        assert one.plan.device == "NVIDIA H200"
        assert other_layers(replace(one, in_float8=None)) is None
        if "tensorwise" in one.name:
            assert one.in_float8 == set(LAYERS)


def test_attention_is_as_fast_as_measured_at_every_length_and_head_dim():
    """At the efficiencies that attention and a copy have alone."""
    alone = replace(H200, efficiency=replace(H200.efficiency, attention=0.68, moved=0.89))
    links = Network(AxisSizes(), alone)
    rows = json.loads(FILE.read_text())["ceilings"]["attention"]
    rows = [row for row in rows if row["backend"] == "cudnn" and row["ring"] == 1]
    assert len(rows) == 10
    for row in rows:
        tokens, dim = row["tokens"], row["head_dim"]
        one = AttentionCall(row["batch"], row["heads"], tokens, tokens, dim, "bf16", False, False)
        for is_backward, kind in ((False, "forward ms"), (True, "backward ms")):
            took = attention_s(one._replace(is_backward=is_backward), alone, links)
            assert 1e3 * took == pytest.approx(row[kind], rel=0.16), (dim, tokens, kind)
