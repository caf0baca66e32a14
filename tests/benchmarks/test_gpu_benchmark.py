"""benchmarks/gpu.py on a machine with torch and few other packages."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import gpu_levers
import gpu_plan
from limits import Work

QUICK = [ROOT / "benchmarks" / "gpu.py", "--tiny", "--steps", "2", "--warmup", "1", "--out", "out"]
# torch and what it needs itself (with CUDA, the last row, too), then what gpu.py asks for.
THERE = """
    torch torchgen functorch filelock typing_extensions sympy mpmath networkx jinja2 markupsafe
    fsspec setuptools _distutils_hack
    triton nvidia cuda
    jaxtyping wadler_lindig torchao
"""


@pytest.mark.long
def test_every_kind_of_row_is_measured_with_torch_torchao_and_two_small_packages(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    for spec in filter(None, map(importlib.util.find_spec, THERE.split())):
        home = Path([*(spec.submodule_search_locations or []), spec.origin][0])
        for link in (home, *home.parent.glob(f"{home.name}-*.dist-info")):
            (site / link.name).symlink_to(link)
    # -S: without site-packages.
    # One contender of each kind; the others differ by a setting.
    only = ["plain", "ours_compiled", "ours_float8_tensorwise", "ours_compiled_cudnn"]
    python = ["env", f"PYTHONPATH={site}", sys.executable, "-S"]
    done = run([*python, *QUICK, "--only", *only], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out").read_text())
    results = {row["contender"]: row["result"] for row in report["measured"]}
    assert sorted(results) == sorted(only)
    assert "a CPU has flash and math only" in results.pop("ours_compiled_cudnn")
    assert set(results.values()) == {"measured"}
    # Every lever is a row with its variants, and every finding has a verdict.
    levers = {row["lever"]: row["result"] for row in report["levers"]}
    assert levers.pop("reading") == "not measured: numpy is not installed"
    assert levers == dict.fromkeys(
        ("ring joins", "EMA", "optimizer", "prepare", "token copies"), "measured"
    )
    verdicts = {row["finding"]: row["verdict"] for row in report["verdicts"]}
    assert verdicts["a step of ours_compiled runs"] == "yes"
    assert verdicts["a step of ours_compiled_cudnn runs"].startswith("not measured: [precision]")
    assert verdicts["speed of compiled joins in that ring"] == "not measured"  # No 16k tokens.
    assert verdicts["speed of preadv over mapped rows"] == "not measured"
    assert len(report["starts_s"]) == 1
    # Each timed step is a lap of its own, and the table has their median.
    shown = {row["contender"]: row for row in report["rows"]}
    for row in report["measured"]:
        if "laps_ms" in row:
            assert len(row["laps_ms"]) == 2
            mean = sum(row["laps_ms"]) / 2
            assert float(shown[row["contender"]]["ms per step"]) == pytest.approx(mean, abs=0.06)
    # A block's four linear layers; attention of few and of many tokens.
    assert len(report["ceilings"]["gemm_shapes"]) == 4
    assert {row["tokens"] for row in report["ceilings"]["attention"]} == {16, 64}
    for row in report["max_tokens"]:
        assert row["fits"]["tokens"] >= row["whole"]["tokens"] > 0


def test_rows_are_read_both_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = gpu_levers.reads(gpu_levers.TINY)["ms"]
    assert found.keys() == {"mapped", "preadv"}
    assert min(found.values()) > 0


def test_the_usual_cells_fit_a_device_of_139_gib(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    for cell in gpu_plan.cells_of(gpu.settle(gpu.parse())):
        # See the comment at gpu_plan.CELLS: the plain DiT's 48 h bytes per token and layer.
        hidden, layers, *_ = cell.config.shape
        tokens = cell.batch * cell.config.token_shape[0]
        parameters = Work(cell.config, 4, cell.batch).num_parameters
        assert (22 * parameters + 48 * hidden * layers * tokens) / 2**30 < 0.9 * 139


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_is_counted(tmp_path):
    # The compiled ones of all contenders take minutes.
    few = ["--only", "plain", "ours", "--parts", "steps", "max_tokens", "--tokens-s", "20"]
    done = run([sys.executable, *QUICK, *few], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out").read_text())
    rows = report["measured"] + [row["fits"] for row in report["max_tokens"]]
    assert all(row["peak_gib"] > 0 for row in rows if "peak_gib" in row)
