"""Malformed files of every format: nothing runs, nothing is written elsewhere, memory is bounded.

A failure names a format and a seed: `python -m hostile FORMAT SEED`, with tests on PYTHONPATH.
"""

import builtins
import collections
import hashlib
import json
import os
import pathlib
import pickle
import random
import socket
import subprocess
import sys
import time
from unittest import mock

import forked
import pytest
import torch
from hostile import mutators, pickles, trials, watch
from hostile.formats import FORMATS

from titan_dit.checkpoint import torch_files

FILES = 1000
COSTLY = {
    **{"checkpoint": 20, "run": 20, "old checkpoint": 60, "snapshots": 50, "inputs": 50},
    **{"config": 20, "hardware": 8, "order": 15, "scored run": 20, "peft": 30},
    "released networks": 20,
    "pairs": 40,
}
"""Files of formats whose commands train, or plan a layout, with every one that is still valid."""
OF_COSTLY = 200
"""The same in the long test."""
SHARE = (FILES - sum(COSTLY.values())) // (len(FORMATS) - len(COSTLY)) + 1
CPU_S = 60
FOUND = (
    *(("parquet", 102_118), ("parquet", 102_088)),
    *(("tokenizers", 103_970), ("tokenizers", 102_498), ("autoencoder", 103_673)),
    *(("snapshots", 100_107), ("pictures", 100_133)),
    *(("pipeline", 100_239), ("pipeline", 101_118)),
    *(("reference", 100_295), ("reference", 100_672)),
)
"""Seeds that the long test has found."""


@pytest.fixture
def extras():
    """Skips where the libraries of some formats are missing."""
    for name in ("av", "diffusers", "pyarrow", "tokenizers"):
        pytest.importorskip(name)


def read(folder, plan, seconds):
    """Try a plan in a forked process; its rows, of which those of failures come with a `wrong`."""
    results = folder / "results.jsonl"
    process = forked.call(trials.main, folder, plan, results)
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        process.kill()
        process.join()
    rows = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    if process.exitcode or alive:
        last = next((row["begun"] for row in reversed(rows) if "begun" in row), "the start")
        how = f"no answer in {seconds} s" if alive else f"exit code {process.exitcode}"
        rows.append({"wrong": f"{last}: the process ended: {how}"})
    return rows


def failures(rows):
    """One line for each."""
    return [row["wrong"] for row in rows if "wrong" in row]


@pytest.mark.usefixtures("extras")
def test_malformed_files_of_every_format_are_refused_or_listed_and_do_nothing(tmp_path):
    plan = [(name, 0, COSTLY.get(name, SHARE)) for name in FORMATS]
    plan += [(name, seed, 1) for name, seed in FOUND]
    assert sum(number for _, _, number in plan) >= FILES
    rows = []
    # Training by [repa] keeps memory, which the largest pictures do not leave it.
    for kind in (True, False):
        home = tmp_path / str(kind)
        home.mkdir()
        rows += read(home, [part for part in plan if (part[0] == "pairs") is kind], 540)
    assert failures(rows) == []
    done = [row for row in rows if "format" in row and row["files"] > 1]
    assert len(done) == len(FORMATS)
    assert sum(row["cpu_s"] for row in done) < CPU_S
    assert max(row["peak_mib"] for row in done) < trials.PEAK_MIB
    # A format whose files are all refused, or all read, tests one half of its reader.
    assert [row["format"] for row in done if not all(row["answers"])] == []


@pytest.mark.long
@pytest.mark.usefixtures("extras")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FORMATS)
def test_many_more_malformed_files(name, tmp_path):
    cheap = (100_000 - OF_COSTLY * len(COSTLY)) // (len(FORMATS) - len(COSTLY))
    total = OF_COSTLY if name in COSTLY else cheap
    found = []
    for first in range(100_000, 100_000 + total, 500):
        part = min(500, 100_000 + total - first)
        home = tmp_path / str(first)
        home.mkdir()
        found += failures(read(home, [(name, first, part)], 1200))
        print(
            f"{name}: {first - 100_000 + part:,} of {total:,} files, {len(found)} failures",
            flush=True,
        )
    assert found == []


ACTS = {
    "a child": lambda box: subprocess.run(["true"], check=True),
    "a shell": lambda box: os.system("true"),
    "a fork": lambda box: os.fork(),
    "a socket": lambda box: socket.socket().connect(("127.0.0.1", 9)),
    "a file beside the output": lambda box: (box / "in" / "x").write_text(""),
    "a file above": lambda box: (box / "out" / ".." / ".." / "x").write_text(""),
    "a file by a link": lambda box: by_link(box).write_text(""),
    "a removed input": lambda box: (box / "in" / "a.png").unlink(),
    "an import": lambda box: __import__(watch.CANARY),
    "an import already there": lambda box: __import__(f"{watch.CANARY}.part"),
    "code": lambda box: exec("pass"),
    "an expression": lambda box: eval("1"),
    "a pickle": lambda box: pickle.loads(b"cos\ngetcwd\n)R."),
    "a library": lambda box: __import__("ctypes").CDLL("libm.so.6"),
    "memory": lambda box: bytes(3 << 30),
    "a traceback": lambda box: [][0],
    "an attribute of a module": lambda box: setattr(torch, "hostile", 1),
    "a code": lambda box: sys.exit(3),
    "a control character": lambda box: print("\x1b[31m"),
}


def by_link(box):
    """A file outside, by a link in the output's folder."""
    (box / "out" / "link").symlink_to("/tmp/hostile-link")
    return box / "out" / "link"


class Acting:
    """A command that does something, in place of one that opens a file."""

    name, writes = "acting", ("out",)

    def __init__(self, act):
        self.act = act

    def __call__(self, box):
        ACTS[self.act](box)


def act_all(home, results):
    """In a forked process: the acts, and what was wrong with each."""
    trial = trials.Trials(home)
    (home / "valid" / "acts").mkdir(parents=True)
    (home / "valid" / "acts" / "a.png").write_bytes(b"x")
    trials.FORMATS.clear()
    trial.begin()
    found = {}
    for act in (*ACTS, "nothing"):
        ACTS["nothing"] = lambda box: None
        found[act] = trial.judged("acts", Acting(act), lambda folder: None)[0]
    results.write_text(json.dumps(found))


def test_every_forbidden_act_is_seen(tmp_path):
    results = tmp_path / "results.json"
    process = forked.call(act_all, tmp_path / "home", results)
    process.join(120)
    found = json.loads(results.read_text())
    assert not found.pop("nothing")
    assert [act for act, wrong in found.items() if not wrong] == []
    assert found.keys() == {*ACTS} - {"nothing"}


def everything():
    """The attributes of the modules and classes that a checkpoint's pickle could reach."""
    metadata = sys.modules[watch.DCP]
    found = [
        torch,
        metadata,
        torch_files,
        torch.serialization,
        os,
        builtins,
        pickle,
        collections,
        pathlib,
    ]
    kinds = (getattr(sys.modules[module], name, None) for module, name in watch.CHECKPOINTED)
    return [
        dict(vars(each)) for each in (*found, *(kind for kind in kinds if isinstance(kind, type)))
    ]


def same(before, after):
    """True if no attribute came, went or is another."""
    pairs = zip(before, after, strict=True)
    return all(a.keys() == b.keys() and all(a[key] is b[key] for key in a) for a, b in pairs)


def read_pickles(folder, written):
    """Read pickles as the `.metadata` of a checkpoint; the commands that they ran."""
    ran = []
    with mock.patch.object(os, "system", ran.append):
        for data in written:
            (folder / ".metadata").write_bytes(data)
            files = {".metadata": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
            with pytest.raises(
                torch_files.UserError, match=r"is damaged or not plain DCP metadata"
            ):
                torch_files.Reader(folder, files).read_metadata()
    return ran


def test_random_programmes_over_the_allowed_names_change_no_module(tmp_path):
    before, start = everything(), time.process_time()
    programmes = (pickles.programme(random.Random(seed)) for seed in range(5000))
    assert read_pickles(tmp_path, programmes) == []
    assert same(before, everything())
    assert time.process_time() - start < 10


def test_forged_pickles_run_nothing_and_change_nothing(tmp_path):
    before = everything()
    forged = (pickles.forged(random.Random(seed)) for seed in range(500))
    assert read_pickles(tmp_path, forged) == []
    assert same(before, everything())


def test_a_seed_makes_the_same_file_again():
    value = {"a": [1, {"b": "c"}], "d": None}
    for seed in range(50):
        first, again = (
            mutators.any_json(json.dumps(value).encode(), random.Random(seed)) for _ in range(2)
        )
        assert first == again
