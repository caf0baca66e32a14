"""What was measured: run directories and the JSON of benchmarks/gpu.py, as plans and times."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT

from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.opening import VERSIONS
from titan_dit.planner import calibrate as calibration
from titan_dit.planner import measured
from titan_dit.planner.calibrate import calibrate, known_device
from titan_dit.planner.hardware import device_of, read
from titan_dit.planner.measured import (
    another_device,
    beside,
    measured_on_gpu,
    measured_run,
    outdated,
    warnings,
)

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_configs import CONTENDERS, tables_of
from gpu_contenders import CONTENDERS as ALL
from gpu_contenders import Cell
from shapes import config_of


def tables():
    found = config_file.read_toml(ROOT / "train_configs" / "digits.toml")
    config = config_file.build({**found, "job": {"name": "digits"}}, catalog.variant)
    return config_file.to_tables(config), config


def row(step, ms, ranks=2, wait=1.0, mfu=None):
    samples_per_s = 128 / ms * 1e3
    return {
        "step": step,
        "step_ms": ms,
        "samples_per_s": samples_per_s,
        "tflops_per_gpu": samples_per_s * flops() / ranks / 1e12,
        "mfu": mfu,
        "peak_gib": 0.3,
        "data_wait_ms": wait,
    }


def flops():
    import torch

    _, config = tables()
    spec = config.objective.model_spec(config.model)
    with torch.device("meta"):
        return spec.build().flops_per_sample(spec.num_tokens)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "config.toml").write_text(config_file.to_toml(tables()[0]))
    rows = [row(1, 900.0), row(5, 41.0), row(10, 51.0), row(15, 61.0)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


@pytest.fixture
def gpu_json(tmp_path):
    cell = Cell(config_of("toy", 8), 4, model="toy")
    wanted = [(cell, "ours"), (cell, "ours_compiled"), (cell, "plain")]
    measured = [
        {**cell.key, "contender": name, "round": 1, "result": "measured", "laps_ms": laps}
        | {"peak_gib": 8.0, "reserved_gib": 10.0}
        for name, laps in (("ours", [3.0, 2.0, 9.0]), ("plain", [5.0]))
    ]
    measured.append({**cell.key, "contender": "ours_compiled", "result": "failed: no compiler"})
    configs = [
        {**one.key, "contender": name, "tables": tables_of(one, CONTENDERS[name])}
        for one, name in wanted
        if name in CONTENDERS
    ]
    path = tmp_path / "gpu.json"
    place = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.12.0", "titan_dit": "0.1.0"}
    path.write_text(json.dumps({**place, "measured": measured, "configs": configs}))
    return path


def test_a_run_is_the_median_after_the_first_row_without_waiting_and_its_ranks(run):
    found = measured_run(run)
    assert found.step_ms == 50.0
    assert found.plan.world_size == 2
    assert found.plan.sizes.dp_shard == 2
    # Without mfu peak_gib may be the process's, of a CPU.
    assert (found.allocated_gib, found.device, found.peak_tflops) == (None, "", None)
    assert found.samples_per_s == pytest.approx(128 / 0.05)


def test_of_a_run_that_was_resumed_on_other_ranks_only_the_rest_counts(run):
    rows = [row(1, 900.0), row(5, 99.0), row(10, 99.0)]
    rows += [row(15, 700.0, ranks=4), row(20, 21.0, ranks=4), row(25, 31.0, ranks=4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = measured_run(run)
    assert (found.plan.world_size, found.step_ms) == (4, 25.0)
    del rows[-1]["data_wait_ms"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(UserError, match=r"a row of metrics\.jsonl has no data_wait_ms"):
        measured_run(run)


def with_versions(monkeypatch, torch="2.13.0+cpu"):
    """As if the run had a checkpoint; a CPU's build of torch has such a version."""
    monkeypatch.setattr(measured, "versions_of", lambda run: {**VERSIONS, "torch": torch})


def without_rehearsals(monkeypatch):
    """`beside` of a step that is estimated at a second."""
    monkeypatch.setattr(measured, "Rehearsals", lambda _: SimpleNamespace(counts=lambda plan: None))
    monkeypatch.setattr(measured, "estimate", lambda *_: SimpleNamespace(seconds=1.0, terms={}))


def with_mfu(run, peak_tflops=989.0):
    """As a GPU with this peak writes its rows, in bf16."""
    text = config_file.to_toml(tables()[0])
    assert 'dtype = "fp32"' in text
    (run / "config.toml").write_text(text.replace('dtype = "fp32"', 'dtype = "bf16"'))
    rows = [row(step, 50.0) for step in (1, 5)]
    rows = [one | {"mfu": one["tflops_per_gpu"] / peak_tflops} for one in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_a_run_was_on_a_gpu_if_it_has_mfu_and_on_a_cpu_if_its_torch_is_a_cpus(run, monkeypatch):
    with_versions(monkeypatch)
    without_rehearsals(monkeypatch)
    on_cpu = measured_run(run)
    assert (on_cpu.allocated_gib, on_cpu.device) == (None, "CPU")
    assert any("run on a CPU" in line for line in beside(run, device_of("cpu")))
    with_versions(monkeypatch, "2.13.0+cu130")
    assert measured_run(run).device == ""
    assert any("without mfu" in line for line in beside(run, device_of("cpu")))
    with_mfu(run)
    on_gpu = measured_run(run)
    assert (on_gpu.allocated_gib, on_gpu.device) == (0.3, "")
    assert on_gpu.peak_tflops == pytest.approx(989.0)


def test_a_run_without_metrics_is_an_error_of_one_line(run):
    (run / "metrics.jsonl").write_text(json.dumps(row(1, 900.0)) + "\n")
    with pytest.raises(UserError, match="1 rows with step_ms") as error:
        measured_run(run)
    assert "\n" not in str(error.value)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="0 rows with step_ms"):
        measured_run(run)
    with pytest.raises(UserError, match=r"no config\.toml"):
        measured_run(run / "nowhere")


def test_rows_of_gpu_json_that_have_a_config_are_steps_of_one_rank(gpu_json):
    [found] = measured_on_gpu(gpu_json)
    assert found.name == "ours, toy, 16 tokens, batch 4"
    assert found.step_ms == 3.0
    assert (found.plan.world_size, found.plan.microbatch_size) == (1, 4)
    assert (found.allocated_gib, found.reserved_gib) == (8.0, 10.0)
    assert list(warnings(found)) == [
        f"warning: {found.name} was measured with torch 2.12.0, this is {VERSIONS['torch']}: "
        "measure again, or expect other times"
    ]
    assert set(CONTENDERS) <= set(ALL)


def test_a_json_without_steps_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "other.json"
    others = '{"configs": [{}]}', '{"configs": ["a"]}', '{"configs": null}'
    for text in ("{", "[]", '{"measured": []}', *others):
        path.write_text(text)
        with pytest.raises(UserError, match=r"benchmarks/gpu\.py"):
            measured_on_gpu(path)


def test_torchs_name_of_a_device_finds_its_file():
    found = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100_80",
        "NVIDIA A100-SXM4-40GB": "a100_40",
        "Tesla V100-SXM2-16GB": "v100_16",
        "CPU, 2 cores of AMD EPYC": "cpu",
    }
    assert {text: known_device(["", text]).name for text in found} == found
    assert known_device(["CPU"]).name == "cpu"
    with pytest.raises(UserError, match="no device of the package"):
        known_device(["RTX 4090"])
    with pytest.raises(UserError, match="runs do not log their device"):
        known_device([""])


def test_a_plan_stands_beside_the_metrics_of_a_run(run):
    lines = beside(run, device_of("cpu"))
    assert "2 ranks, dp_shard 2" in lines[0]
    assert not any(line.startswith("warning") for line in lines)
    ms, samples = (line.split() for line in lines[2:4])
    assert float(ms[4]) == 50.0
    error = float(ms[2]) / 50.0 - 1
    assert float(ms[-1].rstrip("%")) == pytest.approx(100 * error, abs=2)
    assert float(samples[2]) == pytest.approx(128 / float(ms[2]) * 1e3, rel=0.01)
    assert "not compared" in lines[4]
    assert "products" in lines[-1]


def test_a_plan_beside_a_run_warns_of_an_old_calibration_and_of_another_device(run, monkeypatch):
    with_versions(monkeypatch)
    without_rehearsals(monkeypatch)
    versions, rows = {"torch": "1.0", "titan_dit": VERSIONS["titan_dit"]}, {"one": "measured"}
    old = replace(device_of("cpu"), versions=versions, rows=rows)
    said = [line for line in beside(run, old) if line.startswith("warning")]
    torch = VERSIONS["torch"]
    assert said == [
        f"warning: cpu was calibrated with torch 1.0, this is {torch}: calibrate again, or expect "
        "other errors",
        *warnings(measured_run(run)),
    ]
    said = "\n".join(beside(run, device_of("h100")))
    assert f"warning: {run}: it was measured on CPU, not on h100" in said


def test_a_calibrated_device_is_one_with_rows_whatever_it_says_of_versions():
    device = device_of("h100")
    assert list(outdated(replace(device, versions={"torch": "1.0"}))) == []
    lines = list(outdated(replace(device, rows={"one": "measured"})))
    assert [line.split()[4:7] for line in lines] == [
        ["with", "titan_dit", "(unknown),"], ["with", "torch", "(unknown),"],
    ]  # fmt: skip


def test_steps_of_several_devices_are_not_fitted_together(run, gpu_json, tmp_path, monkeypatch):
    out = tmp_path / "mine.toml"

    def refused(match, device=None):
        with pytest.raises(UserError, match=match) as error:
            calibrate(gpu_json, [run], out, device)
        assert "\n" not in str(error.value)

    with_versions(monkeypatch)
    refused(rf"--calibrate {run}: it was measured on CPU, not on h100")
    refused("--calibrate ours, toy.*measured on NVIDIA H100.*not on a100_80", device_of("a100_80"))
    with_mfu(run, 312.0)
    refused(r"312 TFLOP/s in bf16, but h100 has 989")
    assert not out.exists()
    with_mfu(run)
    assert another_device(measured_run(run), device_of("h100")) is None
    # A file of the user's own may be of any device; its peaks decide.
    own = replace(device_of("h100"), name="ours")
    assert another_device(measured_on_gpu(gpu_json)[0], own) is None
    with_mfu(run, 500.0)
    assert "989" in another_device(measured_run(run), own)


def test_steps_of_several_versions_are_warned_about_and_all_stand_in_the_file(
    run, gpu_json, tmp_path, monkeypatch
):
    with_versions(monkeypatch, "2.13.0+cu130")
    with_mfu(run)
    found = [*measured_on_gpu(gpu_json), measured_run(run)]
    assert list(calibration.mixed_versions(found)) == [
        "warning: the steps were measured with torch 2.12.0, 2.13.0+cu130: expect a larger error"
    ]
    assert calibration.all_versions(found)["torch"] == "2.12.0, 2.13.0+cu130"
    [unknown] = calibration.mixed_versions([replace(found[1], versions={})])
    assert "does not say its titan_dit and torch" in unknown


def test_calibration_writes_a_device_that_fits_its_rows(run, tmp_path):
    out, metrics = tmp_path / "mine.toml", run / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row(step, 150.0)) + "\n" for step in (1, 2)))
    lines = calibrate(None, [run], out, device_of("cpu"))
    assert "does not say its titan_dit and torch" in lines[0]
    assert lines[1] == "calibrated on 1 steps, from cpu"
    assert lines[-1] == f"wrote {out}: plan with --device {out}"
    [case] = calibration.cases_of([measured_run(run)])
    before, after = (abs(calibration.errors([case], d)[0]) for d in (device_of("cpu"), read(out)))
    assert after < 0.5 * before or after < 0.1
    assert str(run) in read(out).rows
    assert Path(out).is_file()
