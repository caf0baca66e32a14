"""benchmarks/gpu.py as it is run: with everything, with torch only, without a GPU."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from commands import ROOT, environment

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


def test_every_contender_has_a_row_in_the_table_and_in_the_json(tmp_path):
    out = tmp_path / "figures" / "gpu.json"
    done = run(*QUICK, "--cells", "8:4", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    names = ["plain", "plain_compiled", "ours", "ours_compiled"]
    assert [row["contender"] for row in report["rows"]] == names
    # The second round goes backwards.
    assert [row["contender"] for row in report["measured"]] == [*names, *reversed(names)]
    for row in report["measured"]:
        assert row["result"] == "measured"
        assert len(row["laps_ms"]) == 2
        assert min(row["laps_ms"]) > 0
    assert min(report["ceilings"]["gemm_tflops"], report["ceilings"]["copy_gb_per_s"]) > 0
    assert {"commit", "device", "torch", "python", "date"} <= report.keys()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("bf16 product of 64^3: ")
    for name in names:
        assert sum(line.startswith(f"| 16 | 4 | {name} |") for line in lines) == 1


def test_torch_and_two_wheels_are_enough(tmp_path):
    (tmp_path / "wheels").mkdir()
    for package in ("jaxtyping", "wadler_lindig"):
        zip_wheel(package, tmp_path / "wheels")
    flags = [*QUICK, "--rounds", "1", "--only", "plain", "ours", "--wheels", tmp_path / "wheels"]
    done = run_with_torch_only(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for cell in ("| 16 | 4 |", "| 64 | 2 |"):
        for name in ("plain", "ours"):
            assert f"{cell} {name} |" in done.stdout


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


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--only", "theirs"], "error: --only theirs is none of plain, plain_compiled, ours"),
        (["--cells", "256"], "error: --cells 256 is no latent size:batch, such as 32:256."),
    ],
)
def test_wrong_flags_are_refused_in_words(flags, complaint, tmp_path):
    done = run("--tiny", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(complaint)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_is_counted(tmp_path):
    out = tmp_path / "gpu.json"
    done = run(*QUICK, "--cells", "8:4", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert all(row["peak_gib"] > 0 for row in report["measured"])
