"""Weighted sums of checkpoints, a group of tensors at a time."""

import json
import signal
import subprocess
import sys
import time

import commands
import pytest
import torch

from titan_dit.checkpoint import averages, checkpoint, torch_files
from titan_dit.checkpoint.averages import Term, shapes_of, write_sum
from titan_dit.checkpoint.store import location
from titan_dit.config.section import UserError

WEIGHTS = (0.25, -1.5, 2.25)


def written(folder, number, sizes=((3, 5), (7,), (), (11, 2), (400,)), dtype=torch.float32):
    torch.manual_seed(number)
    tensors = {f"t{i}": torch.randn(size, dtype=dtype) for i, size in enumerate(sizes)}
    path = folder / f"one-{number}"
    checkpoint.write(path, {"ema": {"a": tensors, "b": {n: -t for n, t in tensors.items()}}}, {})
    return path, tensors


def sum_of(path):
    shapes = checkpoint.contents(path)
    found = {"model": {n.removeprefix("model."): torch.empty(s) for n, (s, _) in shapes.items()}}
    checkpoint.load(path, found)
    return found["model"]


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_sum_of_checkpoints_is_a_checkpoint_of_several_files(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(averages, "GROUP", 30)
    monkeypatch.setattr(averages, "CHUNK", 16)
    paths, tensors = zip(*(written(tmp_path, number) for number in range(3)), strict=True)
    terms = [
        Term(path, {"ema.a.": w, "ema.b.": w / 2}) for path, w in zip(paths, WEIGHTS, strict=True)
    ]
    final = location(str(tmp_path / "sum") if kind == "disk" else f"memory://{tmp_path.name}/sum")
    bytes_read = []
    write_sum(final, "model", [(shapes_of(terms), terms)], {"step": 0}, bytes_read.append)
    record = checkpoint.verify(final)
    # t0 and t1 together, then t2 and t3, then t4 alone.
    assert sum(name.endswith(".distcp") for name in record["files"]) == 3
    assert record["step"] == 0
    found = sum_of(final)
    assert found.keys() == tensors[0].keys()
    for name, tensor in found.items():
        exact = sum(w / 2 * t[name].double() for w, t in zip(WEIGHTS, tensors, strict=True))
        assert torch.equal(tensor, exact.float()), name
    assert sum(bytes_read) == 6 * sum(t.nbytes for t in tensors[0].values())


def test_terms_of_other_tensors_are_refused(tmp_path):
    (first, _), (second, _) = written(tmp_path, 0), written(tmp_path, 1, ((3, 5), (8,)))
    with pytest.raises(UserError, match=r"one-1: its tensors ema.a.. are not those of .*one-0"):
        shapes_of([Term(first, {"ema.a.": 1.0}), Term(second, {"ema.a.": 1.0})])


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path, _ = written(tmp_path, 0)
    terms = [Term(path, {"ema.a.": 1.0})]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch_files.Digesting, "write", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left on device"):
        write_sum(tmp_path / "sum", "model", [(shapes_of(terms), terms)], {})
    assert sorted(tmp_path.iterdir()) == before


MAKE = """
import sys, torch
from pathlib import Path
from titan_dit.checkpoint import checkpoint
names = [f"block.{i}" for i in range(64)]
for number in range(3):
    torch.manual_seed(number)
    ema = {"a": {name: torch.randn(1 << 20) for name in names}}
    checkpoint.write(Path(f"one-{number}"), {"ema": ema}, {"step": number})
"""
SUM = """
import resource
from pathlib import Path
from titan_dit.checkpoint.averages import Term, shapes_of, write_sum
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
terms = [Term(Path(f"one-{number}"), {"ema.a.": number - 0.5}) for number in range(3)]
shapes = shapes_of(terms)
print("begins", flush=True)
write_sum(Path("sum"), "model", [(shapes, terms)], {"step": 0})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_term_that_cannot_be_read_is_named_and_nothing_is_left(tmp_path):
    path, _ = written(tmp_path, 0)
    terms = [Term(path, {"ema.a.": 1.0})]
    shapes = shapes_of(terms)
    [file] = path.glob("*.distcp")
    file.unlink()
    with pytest.raises(
        UserError, match=r"one-0 cannot be read: No such file or directory\. Restore it\.$"
    ):
        write_sum(tmp_path / "sum", "model", [(shapes, terms)], {})
    assert [left.name for left in tmp_path.iterdir()] == ["one-0"]


def python(code, cwd):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=commands.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_a_sum_of_268_mb_takes_half_of_that_and_after_a_kill_the_same_command_works(tmp_path):
    assert python(MAKE, tmp_path).wait() == 0
    whole = 64 * 4 << 20
    process = python(SUM, tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0
    peak = 1024 * int(output.split()[-1])
    assert peak < 0.5 * whole, f"{peak / 2**20:.0f} MiB"
    expected = read_files(tmp_path)
    (tmp_path / "sum").rename(tmp_path / "undisturbed")
    for seconds in (0.0, 0.2, 0.5):
        process = python(SUM, tmp_path)
        assert process.stdout.readline() == "begins\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "sum").exists(), "killed too late"
    assert (tmp_path / "sum.partial").exists()
    assert python(SUM, tmp_path).wait() == 0
    assert read_files(tmp_path) == expected
    assert not (tmp_path / "sum.partial").exists()


def read_files(folder):
    return json.loads((folder / "sum" / "manifest.json").read_text())["files"]
