"""benchmarks/gpu.py as it is run: with everything, with torch only, without a GPU."""

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from commands import ROOT, environment

from titan_dit.section import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu
from limits import Work

GPU = ROOT / "benchmarks" / "gpu.py"
QUICK = ["--tiny", "--steps", "2", "--warmup", "1"]
TORCHS = [
    *("torch", "torchgen", "functorch", "filelock", "typing_extensions", "sympy", "mpmath"),
    *("networkx", "jinja2", "markupsafe", "fsspec", "setuptools", "_distutils_hack"),
    # With CUDA only.
    *("triton", "nvidia", "cuda"),
]
"""torch, and what torch itself needs."""


def run(*flags, cwd, python=(), **variables):
    """The finished process, with some variables of its environment replaced."""
    return subprocess.run(
        [sys.executable, *python, str(GPU), *map(str, flags)],
        cwd=cwd,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def home_of(package):
    """Where a package lies: its folder or its file."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0] if places else spec.origin)


def run_with_torch_only(*flags, cwd):
    """A machine whose Python has torch and nothing else of ours."""
    site = cwd / "site"
    site.mkdir()
    for home in filter(None, map(home_of, TORCHS)):
        (site / home.name).symlink_to(home)
    # -S: without the folder of the packages that are installed here.
    return run(*flags, cwd=cwd, python=["-S"], PYTHONPATH=str(site))


def zip_wheel(package, folder):
    """A wheel of an installed pure-Python package, its metadata included."""
    home = home_of(package)
    [metadata] = home.parent.glob(f"{package}-*.dist-info")
    with zipfile.ZipFile(folder / f"{package}-0-py3-none-any.whl", "w") as wheel:
        for part in (home, metadata):
            for file in part.rglob("*"):
                if file.is_file() and file.suffix != ".pyc":
                    wheel.write(file, file.relative_to(home.parent))


def test_every_line_runs_on_a_cpu_and_every_row_is_in_the_table_and_the_json(tmp_path):
    out = tmp_path / "figures" / "gpu.json"
    done = run(*QUICK, "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    names = ["plain", "plain_compiled", "ours_compiled", "ours_float8_tensorwise", "ours"]
    later = ["ours_float8_rowwise", "ours_compiled_cudnn", "ours_compiled_resharded"]
    assert [row["contender"] for row in report["rows"]] == names + later
    results = {row["contender"]: row["result"] for row in report["measured"]}
    assert list(results) == names + later
    assert "a CPU has flash and math only" in results.pop("ours_compiled_cudnn")
    assert set(results.values()) == {"measured"}
    assert all(len(row["laps_ms"]) == 2 for row in report["measured"] if "laps_ms" in row)
    ceilings = report["ceilings"]
    assert min(ceilings["gemm_tflops"], ceilings["copy_gb_per_s"]) > 0
    assert {row["tokens"] for row in ceilings["attention"]} == {16, 64}
    assert len(ceilings["gemm_shapes"]) == 4
    assert [row["remat"] for row in report["max_tokens"]] == ["none", "full"]
    for row in report["max_tokens"]:
        assert row["fits"]["tokens"] >= row["whole"]["tokens"] > 0
    assert report["not_begun"] == []
    assert {"commit", "device", "torch", "python", "date"} <= report.keys()
    lines = done.stdout.splitlines()
    # After the rows of the first importance, before those of less.
    order = [line.split("left] ")[1] for line in lines if " left] " in line]
    assert [text.split()[2] for text in order[9:11]] == ["none:", "full:"]
    for name in names + later:
        assert sum(line.startswith(f"| toy | 16 | 4 | {name} |") for line in lines) == 1
    assert "tokens on one GPU, remat full" in done.stdout


def test_torch_and_two_wheels_are_enough(tmp_path):
    (tmp_path / "wheels").mkdir()
    for package in ("jaxtyping", "wadler_lindig"):
        zip_wheel(package, tmp_path / "wheels")
    only = ["plain", "ours", "ours_float8_rowwise"]
    flags = [*QUICK, "--cells", "8:4", "16:2", "--only", *only, "--wheels", tmp_path / "wheels"]
    done = run_with_torch_only(*flags, "--parts", "ceilings", "steps", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for cell in ("| toy | 16 | 4 |", "| toy | 64 | 2 |"):
        for name in ("plain", "ours"):
            assert f"{cell} {name} |" in done.stdout
        why = "not measured: torchao is not installed"
        assert f"{cell} ours_float8_rowwise | {why} |" in done.stdout


def test_what_is_missing_is_named_with_the_command_that_gets_it(tmp_path):
    (tmp_path / "none").mkdir()
    done = run_with_torch_only(*QUICK, "--wheels", tmp_path / "none", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks/gpu.py: jaxtyping, wadler_lindig cannot be imported.")
    assert "pip download --no-deps -d benchmarks/wheels jaxtyping wadler-lindig" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_gpu_it_says_so(tmp_path):
    done = run(cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: benchmarks/gpu.py measures a GPU, and torch sees none")
    assert "--tiny" in done.stderr
    assert "Traceback" not in done.stderr


def asked(monkeypatch, *flags):
    """What follows from flags: cells, and rows as (importance, cell, contender)."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    options = gpu.parse()
    cells = gpu.cells_of(options)
    return cells, gpu.wanted_of(options, cells)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--only", "theirs"], "--only theirs is none of plain, plain_compiled, ours"),
        (["--cells", "256"], "--cells 256 is no latent size:batch, such as 32:256, nor model:"),
        (["--cells", "9B/2:32:1"], "9B/2 is no model. Say one of S, B, L, XL, 3B, 7B with its"),
        (["--objective", "magic"], "--objective magic is none of rectified_flow."),
    ],
)
def test_wrong_flags_are_refused_in_words(flags, complaint, monkeypatch):
    with pytest.raises(UserError, match=re.escape(complaint)):
        asked(monkeypatch, "--tiny", *flags)


def test_the_usual_rows_are_those_of_xl_first_and_fit_the_device(monkeypatch):
    cells, wanted = asked(monkeypatch)
    assert [(c.model, c.config.token_shape[0], c.batch) for c in cells] == [
        *(("XL/2", 1024, 32), ("XL/2", 256, 256), ("7B/2x8", 4096, 8)),
        *(("7B/2x8", 16384, 2), ("3B/2", 4096, 4)),
    ]
    first = [(cells.index(cell), name) for rank, cell, name in wanted if rank == 0]
    main = ["plain", "plain_compiled", "ours_compiled", "ours_float8_tensorwise", "ours"]
    assert first[:10] == [(place, name) for place in (0, 1) for name in main]
    assert first[10:] == [(2, "ours_compiled"), (2, "ours_float8_tensorwise")]
    assert len(set(wanted)) == len(cells) * 8
    for cell in cells:
        # See the comment at gpu.CELLS: the plain DiT's 48 h bytes per token and layer.
        hidden, layers, *_ = cell.config.shape
        tokens = cell.batch * cell.config.token_shape[0]
        parameters = Work(cell.config, 4, cell.batch).num_parameters
        assert (22 * parameters + 48 * hidden * layers * tokens) / 2**30 < 0.9 * 139
    assert cells[2].config.shape == (4096, 8, 32, 2)


def test_a_gpu_keeps_its_compiler(monkeypatch):
    def forbidden(**_):
        raise AssertionError("it would hold from here on")

    monkeypatch.setattr(torch.compiler, "set_stance", forbidden)
    with gpu.compiler_for("cuda"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_is_counted(tmp_path):
    out = tmp_path / "gpu.json"
    done = run(*QUICK, "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert all(row["peak_gib"] > 0 for row in report["measured"] if "peak_gib" in row)
    for row in report["max_tokens"]:
        assert row["fits"]["peak_gib"] > 0
