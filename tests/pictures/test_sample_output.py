"""What `sample` writes: every format, by any number of ranks, also after a stop."""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from harness import on_ranks
from kills import killed_after
from PIL import Image
from safetensors.torch import load_file
from tiny import tiny_config

from titan_dit.commands import sample, sample_inputs, sample_pictures
from titan_dit.commands.flags import SampleFlags
from titan_dit.config.section import UserError
from titan_dit.pictures import output, parts
from titan_dit.system import files
from titan_dit.trainer import Trainer

NUM, BATCH = 11, 4


def on_one(world, folder):
    """A run, and its samples in every format."""
    run = {"job": {"dir": folder}, "checkpoint": {"every": 2}, "training": {"steps": 2}}
    Trainer(tiny_config(**run), world).fit()
    os.chdir(folder)
    for out in ("a.npz", "a.safetensors", "a", "grid.png"):
        drawn(out)


def drawn(out, **flags):
    options = SampleFlags(
        run=".", out=out, num=NUM, batch_size=BATCH, steps=2, device="cpu", **flags
    )
    sample.draw(options, torch.device("cpu"))


def on_two(world, folder):
    """Samples of two ranks; only the first looks for checkpoints, of which a run may save more."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        if not world.is_first:
            for module in (sample, sample_inputs):
                patch.delattr(module, "find_checkpoint")
        drawn("b.npz")
        drawn("b")
        drawn("guided.npz", guide=".", cfg_scale=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    on_ranks(1, on_one, str(folder))
    return folder


def pictures_in(folder):
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("*.png"))])


def test_every_format_holds_the_same_pictures_and_labels(folder):
    archive = np.load(folder / "a.npz")
    tensors = load_file(folder / "a.safetensors")
    pictures, labels = archive["arr_0"], archive["arr_1"]
    assert (pictures.dtype, pictures.shape, labels.dtype) == (np.uint8, (NUM, 8, 8, 3), np.int64)
    assert np.array_equal(labels, tensors["labels"].numpy())
    assert np.array_equal(pictures_in(folder / "a"), pictures)
    rows = [json.loads(line) for line in (folder / "a" / "metadata.jsonl").read_text().splitlines()]
    assert [row["file_name"] for row in rows] == [f"{i:06d}.png" for i in range(NUM)]
    assert [row["label"] for row in rows] == labels.tolist()
    low, high = -1.0, 1.0  # The digits' stored range.
    shades = ((tensors["samples"] - low) / (high - low) * 255).round().clamp(0, 255).byte()
    assert np.array_equal(pictures[..., 0], shades[:, 0].numpy())
    assert len(np.unique(pictures)) > 20
    assert not list(folder.glob("*.parts"))


def test_two_ranks_write_the_bytes_of_one(folder):
    on_ranks(2, on_two, str(folder))
    assert (folder / "b.npz").read_bytes() == (folder / "a.npz").read_bytes()
    assert np.array_equal(pictures_in(folder / "b"), pictures_in(folder / "a"))


def test_a_stopped_command_goes_on_where_it_was(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    original, calls = sample_pictures.drawn, []

    def stops(job, rows, report):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(job, rows, report)

    monkeypatch.setattr(sample_pictures, "drawn", stops)
    with pytest.raises(KeyboardInterrupt):
        drawn("c.npz")
    said = capsys.readouterr().out
    assert "stopped: 2 of 3 batches are in c.npz.parts. The same command goes on." in said
    assert not (folder / "c.npz").exists()
    with pytest.raises(UserError, match=r"c\.npz\.parts holds parts of another command"):
        drawn("c.npz", seed=1)
    drawn("c.npz")
    assert calls[2:] == [range(8, 11), range(8, 11)]
    assert "2 of 3 batches are in c.npz.parts; drawing the others" in capsys.readouterr().out
    assert (folder / "c.npz").read_bytes() == (folder / "a.npz").read_bytes()
    with pytest.raises(UserError, match=r"--out a exists\. Choose another name, or delete it"):
        drawn("a")


def draw_and_die(moment, folder, out):
    os.chdir(folder)
    if moment == "a batch":  # A file is fsynced before its folder: plan, batch 0, batch 1.
        files.os.fsync = killed_after(4, os.fsync)
    elif moment == "the pictures":
        output.Image.fromarray = killed_after(5, Image.fromarray)
    else:
        output.write_header = killed_after(1, output.write_header)
    drawn(out)


KILLS = {"k.npz": ("a batch", "the labels"), "k": ("a batch", "the pictures")}


@pytest.mark.parametrize("out", KILLS)
def test_a_killed_command_goes_on_and_writes_the_same_bytes(out, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for moment in KILLS[out]:
        process = forked.call(draw_and_die, moment, str(folder), out)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, moment
        assert not Path(out).exists()
        left = sorted(file.name for file in Path(f"{out}.parts").iterdir())
        if moment == "a batch":
            assert left[0] == "000000.safetensors"
            assert left[1].startswith("000001.safetensors.")
            assert left[1].endswith(".partial")
            assert left[2:] == ["plan.json"]
        else:
            assert left == [*(f"{i:06d}.safetensors" for i in range(3)), "plan.json"]
            assert list(Path().glob(f"{out}*.partial"))
    files.delete_left_once.cache_clear()  # As in a new process.
    drawn(out)
    assert not list(Path().glob("k*.part*"))
    whole = Path(out.replace("k", "a"))
    assert digests(Path(out)) == digests(whole)


def digests(path):
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in found]


def test_a_deletion_that_is_cut_off_leaves_no_parts_without_their_plan(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def stops(_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts.shutil, "rmtree", stops)
        with pytest.raises(KeyboardInterrupt):
            drawn("d.npz")
    assert [file.name for file in Path("d.npz.parts").iterdir()] == ["plan.json"]
    drawn("d.npz")
    assert (folder / "d.npz").read_bytes() == (folder / "a.npz").read_bytes()


def test_a_newer_guide_does_not_go_on_with_parts_of_the_older(folder, monkeypatch):
    monkeypatch.chdir(folder)
    [checkpoint] = Path("checkpoints").glob("step-*")
    shutil.copytree("checkpoints", "weak/checkpoints")
    original = sample_pictures.drawn

    def stops(job, rows, report):
        if rows.start:
            raise KeyboardInterrupt
        return original(job, rows, report)

    with monkeypatch.context() as patch:
        patch.setattr(sample_pictures, "drawn", stops)
        with pytest.raises(KeyboardInterrupt):
            drawn("guided.safetensors", guide="weak", cfg_scale=2.0)
    newer = Path("weak/checkpoints") / checkpoint.name.replace("2", "4")
    shutil.copytree(checkpoint, newer)
    with pytest.raises(UserError, match=r"command \(guide: step-\d+2 -> step-\d+4\)\. "):
        drawn("guided.safetensors", guide="weak", cfg_scale=2.0)
    shutil.rmtree(newer)
    drawn("guided.safetensors", guide="weak", cfg_scale=2.0)


def test_a_full_disk_is_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"--out: /dev/full/x\.npz\.parts.* cannot be written: "):
        drawn("/dev/full/x.npz")

    def fills(self, file, *_):
        Path(file).write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    there = {*Path().iterdir()}
    for out in ("full", "full.png"):
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image, "save", fills)
            with pytest.raises(UserError, match=f"^--out: {out} cannot be written: No space"):
                drawn(out)
        assert {*Path().iterdir()} - there == {Path(f"{out}.parts")}
        drawn(out)
        assert {*Path().iterdir()} - there == {Path(out)}
        there.add(Path(out))


def test_a_run_guides_another_one(folder, monkeypatch):
    """By itself: guidance is none, whatever its scale."""
    monkeypatch.chdir(folder)
    drawn("own.safetensors", guide=".", cfg_scale=3.0)
    drawn("plain.safetensors", cfg_scale=1.0)
    own, plain = load_file("own.safetensors"), load_file("plain.safetensors")
    torch.testing.assert_close(own["samples"], plain["samples"], rtol=1e-4, atol=1e-4)
