"""benchmarks/gpu.py on a machine with torch and few other packages."""

import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT, run
from forked import context

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
import gpu_configs
import gpu_contenders
import gpu_levers
import gpu_plan
import plain_dit
from gpu_contenders import Place
from gpu_queue import Task
from gpu_report import Findings
from limits import Work

from titan_dit.config.section import UserError
from titan_dit.parallel import float8

QUICK = [ROOT / "benchmarks" / "gpu.py", "--tiny", "--steps", "2", "--warmup", "1", "--out", "out"]
# torch and what it needs itself (with CUDA, the last row, too), then what gpu.py asks for.
THERE = """
    torch torchgen functorch filelock typing_extensions sympy mpmath networkx jinja2 markupsafe
    fsspec setuptools _distutils_hack
    triton nvidia cuda
    numpy
    jaxtyping wadler_lindig torchao
"""


@pytest.mark.long
def test_every_kind_of_row_is_measured_with_torch_numpy_torchao_and_two_small_packages(tmp_path):
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
    assert levers == dict.fromkeys(
        ("ring joins", "EMA", "optimizer", "prepare", "token copies", "reading"), "measured"
    )
    verdicts = {row["finding"]: row["verdict"] for row in report["verdicts"]}
    assert verdicts["a step of ours_compiled runs"] == "yes"
    assert verdicts["a step of ours_compiled_cudnn runs"].startswith("not measured: [precision]")
    assert verdicts["speed of compiled joins in that ring"] == "not measured"  # No 16k tokens.
    assert verdicts["speed of preadv over mapped rows"] != "not measured"
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


def options_of(monkeypatch, memory_gib, *flags):
    """The flags of gpu.py on a device with so much memory."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    options = gpu.settle(gpu.parse())
    options.cells = gpu_plan.cells_for(options, memory_gib)
    return options


@pytest.mark.parametrize("memory_gib", [79.2, 139.8])
def test_the_usual_cells_fit_the_device(monkeypatch, memory_gib):
    cells = gpu_plan.cells_of(options_of(monkeypatch, memory_gib))
    assert [(cell.model, cell.config.token_shape[0]) for cell in cells[:2]] == [
        ("XL/2", 1024),
        ("XL/2", 256),
    ]
    for cell in cells:
        # See the comment at gpu_plan.SMALL: the plain DiT's 48 h bytes per token and layer.
        hidden, layers, *_ = cell.config.shape
        tokens = cell.batch * cell.config.token_shape[0]
        parameters = Work(cell.config, 4, cell.batch).num_parameters
        assert (22 * parameters + 48 * hidden * layers * tokens) / 2**30 < 0.9 * memory_gib


def test_cells_that_are_asked_for_are_kept_and_the_first_minute_comes_before_them(monkeypatch):
    options = options_of(monkeypatch, 79.2, "--cells", "S/2:32:8")
    assert options.cells == ["S/2:32:8"]
    assert [name for _, name in gpu_plan.probes_of(options)] == list(gpu_plan.RUNS)
    assert not gpu_plan.probes_of(options_of(monkeypatch, 79.2, "--only", "plain"))


def test_the_peak_beside_a_row_is_that_of_the_dry_run(monkeypatch, capsys):
    """The same model by the command that users have."""
    from titan_dit.config import catalog, config_file
    from titan_dit.dry_run.command import dry_run

    monkeypatch.setattr(gpu.multiprocessing, "get_context", lambda kind: context())
    options = options_of(monkeypatch, None, "--tiny")
    [cell] = gpu_plan.cells_of(options)
    predictions = gpu.predicted([cell])
    [config] = gpu_configs.configs([(cell, "ours")])
    dry_run(config_file.build(config["tables"], catalog.variant), 1)
    shown = capsys.readouterr().out
    found, end = {}, time.monotonic() + 60
    while not found and time.monotonic() < end:
        found = predictions()
        time.sleep(0.01)
    # In MiB: all peaks are small.
    assert f"{found[cell] * 1024:.2f}\n" in shown


def test_what_fails_is_in_the_json_whatever_its_part(tmp_path, capsys):
    facts = {"place": {"device": "H100"}, "peak_tflops": None, "memory_gib": 79.2}
    cells = [gpu_plan.Cell(gpu_plan.config_of("toy", 8), 4, model="toy")]
    found = Findings("rectified_flow", cells, [], str(tmp_path / "out"), facts)
    results = {
        "ceiling": ("copy", "failed: RuntimeError"),
        "lever": ("EMA", "out of memory"),
        "contender": ("ours", "not measured: no torchao"),
    }
    tasks = [Task(key={kind: name}, estimate_s=1.0) for kind, (name, _) in results.items()]
    for task, (_, result) in zip(tasks, results.values(), strict=True):
        found.add(task, {**task.key, "result": result})
    capsys.readouterr()
    written = json.loads((tmp_path / "out").read_text())
    assert written["failed"] == {"copy": "failed: RuntimeError", "EMA": "out of memory"}
    assert [found.has_failed(task) for task in tasks] == [True, False, False]


ORIGINAL = """
from torch import nn

class DiT(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.sizes = sizes
        self.blocks = nn.ModuleList([nn.Conv2d(sizes["in_channels"], sizes["in_channels"], 1)])
        self.y_embedder = nn.Embedding(sizes["num_classes"] + 1, 4)
        self.y_embedder.num_classes = sizes["num_classes"]

    def forward(self, x, t, y):
        assert not self.training
        return self.blocks[0](x) * self.y_embedder(y).sum(1)[:, None, None, None] + t.max()
"""


def test_the_original_network_is_read_from_a_clone_and_trained_as_the_plain_one(
    tmp_path, monkeypatch
):
    (tmp_path / "models.py").write_text(ORIGINAL)
    cell = gpu_plan.Cell(gpu_plan.config_of("toy", 8), 4)
    place = Place(torch.device("cpu"), None, None, tmp_path)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    step = gpu_contenders.original(cell, place)
    losses = [step().item() for _ in range(3)]
    assert all(map(math.isfinite, losses))
    assert len(compiled) == 1
    network = plain_dit.original(cell.config, plain_dit.RectifiedFlow(), tmp_path).network
    assert network.sizes == {
        "input_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "hidden_size": 64,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 4.0,
        "num_classes": 1000,
        "learn_sigma": False,
    }


def test_without_a_clone_or_timm_the_original_is_not_measured(tmp_path):
    cell = gpu_plan.Cell(gpu_plan.config_of("toy", 8), 4)
    place = Place(torch.device("cpu"), None, None, tmp_path)
    with pytest.raises(UserError, match=r"no clone of facebookresearch/DiT in .*--original"):
        gpu_contenders.original(cell, place)
    (tmp_path / "models.py").write_text("import no_such_timm")
    with pytest.raises(UserError, match=r"cannot be imported: No module named 'no_such_timm'"):
        gpu_contenders.original(cell, place)


@pytest.mark.parametrize(
    ("model", "recipe", "converts"),
    [("XL/2", "tensorwise", False), ("7B/2x4", "tensorwise", True), ("7B/2x4", "rowwise", False)],
)
def test_a_recipe_that_converts_no_layer_is_no_second_row_of_bf16(
    monkeypatch, model, recipe, converts
):
    """By the roofline of an H100, while no measured table names it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(float8, "read_table", list)
    monkeypatch.setattr(gpu_contenders, "check_matmuls", lambda *_: None)
    monkeypatch.setattr(gpu_contenders, "ours", lambda *_, **__: "a step")
    cell = gpu_plan.Cell(gpu_plan.config_of(model, 64), 32)
    place = Place(torch.device("cuda"), None, None)
    if converts:
        assert gpu_contenders.float8(cell, place, recipe=recipe) == "a step"
    else:
        with pytest.raises(UserError, match=f"converts no layer to {recipe}"):
            gpu_contenders.float8(cell, place, recipe=recipe)


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
