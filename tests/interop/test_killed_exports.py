"""SIGKILL while `convert` writes: nothing looks whole, and the same command works."""

import hashlib
import itertools
import os
import shutil
import signal
from pathlib import Path

import forked
import pytest
import torch
from exports import converted, save_run, save_vae
from kills import kill_self, killed_after
from safetensors.torch import load_file

from titan_dit.checkpoint import averages, torch_files
from titan_dit.checkpoint.record import read_record
from titan_dit.commands import convert
from titan_dit.commands.flags import ConvertFlags
from titan_dit.config.section import UserError
from titan_dit.interop import imported, tensor_file
from titan_dit.system import files
from titan_dit.trained_model import open_weights

GPT2 = Path(__file__).resolve().parent.parent / "fixtures" / "hugging_face" / "gpt2"


def ended(source):
    """20 tensors, then the end of the process."""
    yield from itertools.islice(source, 20)
    kill_self()


def convert_and_die(moment, flags):
    """`convert`, killed between two tensors, before a copied file, or before the rename."""
    if moment == "tensors":
        # Of an import the third group; of an export the 21st tensor.
        imported.GROUP = 4000
        averages.write_group = killed_after(2, averages.write_group)
        write_file = tensor_file.write_tensor_file
        tensor_file.write_tensor_file = lambda file, outline, source, metadata: write_file(
            file, outline, ended(source), metadata
        )
    elif moment == "pickle":
        torch.save = kill_self
    elif moment == "copy":
        shutil.copyfile = kill_self
    else:
        files.sync_folder = kill_self
    convert.main(ConvertFlags(**flags))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`run` of a DiT for diffusers with `vae`; `dit`, `dit.safetensors`, `pipeline`; `gpt2`."""
    folder = tmp_path_factory.mktemp("killed")
    vae = save_vae(folder / "vae")
    save_run(folder / "run", vae, "ddpm")
    save_run(folder / "dit", vae, "ddpm", timestep_frequencies="dit")
    converted(folder / "dit", folder / "dit.safetensors")
    converted(folder / "run", folder / "pipeline")
    shutil.copytree(GPT2, folder / "gpt2")
    (folder / "gpt2" / "tokenizer.json").write_text("{}")
    converted(folder / "gpt2", folder / "gpt")
    return folder


CASES = {
    "export to .safetensors": ("dit", "a.safetensors", ("tensors",)),
    "export to .pt": ("dit", "a.pt", ("tensors", "pickle")),
    "export to diffusers": ("run", "a", ("copy",)),
    "export of a GPT": ("gpt", "a", ("tensors", "copy", "rename")),
    "import of a file": ("dit.safetensors", "a", ("tensors", "rename")),
    "import from diffusers": ("pipeline/transformer", "a", ("tensors",)),
    "import of a GPT": ("gpt2", "a", ("copy",)),
}


def digests(path):
    """SHA-256 by name; of a checkpoint those of its manifest, which has a time of its own."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if (path / "manifest.json").is_file():
        return read_record(path)["files"]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize("case", CASES)
def test_after_a_kill_the_same_command_makes_the_same_files(case, runs, tmp_path):
    source, name, moments = CASES[case]
    flags = {"input": str(runs / source), "out": str(tmp_path / name)}
    for moment in moments:
        process = forked.call(convert_and_die, moment, flags)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, moment
        [left] = tmp_path.iterdir()
        assert left.name == f"{name}.{files.this_host()}-{process.pid}.0.partial"
        assert any(file.is_file() for file in left.rglob("*")), moment
        # What is left is neither a checkpoint nor a folder of weights for this command.
        with pytest.raises(UserError, match=r"no checkpoint found|is not a checkpoint"):
            converted(left, tmp_path / "again.pt")
    whole = digests(converted(flags["input"], flags["out"]))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert whole == digests(converted(flags["input"], tmp_path / "undisturbed" / name))


def test_what_a_link_points_to_is_written(tmp_path):
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    (tmp_path / "a").symlink_to(tmp_path / "disk" / "empty")
    (tmp_path / "b").symlink_to(tmp_path / "disk" / "nothing")
    with imported.new_output(tmp_path / "a") as place:
        place.mkdir()
        (place / "file").write_text("whole")
    with imported.new_output(tmp_path / "b") as place:
        place.write_text("whole")
    assert (tmp_path / "disk" / "empty" / "file").read_text() == "whole"
    assert (tmp_path / "disk" / "nothing").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "disk"]


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    host, ended = files.this_host(), 2**22 + 1  # Above the largest number of a process.
    living, dead, other = (
        tmp_path / f"a.{name}.0.partial"
        for name in (f"{host}-{os.getppid()}", f"{host}-{ended}", f"another-{ended}")
    )
    for folder in (living, dead, other):
        folder.mkdir()
    with imported.new_output(tmp_path / "a") as place:
        place.write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a", living, other])


def test_a_full_disk_is_one_line_and_leaves_nothing(runs, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "write_tensor_file", full)
    for source, name in (("dit", "a.pt"), ("run", "a"), ("gpt", "b")):
        with pytest.raises(UserError) as caught:
            converted(runs / source, tmp_path / name)
        expected = f"--out {tmp_path / name} cannot be written: No space left on device."
        assert str(caught.value) == f"{expected} Free some space, or name another path."
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_reading_names_the_source(runs, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    run = open_weights(runs / "dit", "ema", None)
    monkeypatch.setattr(torch_files.Reader, "read_data", broken)
    with pytest.raises(UserError) as caught, imported.new_output(tmp_path / "a"):
        run.tensors[next(iter(run.tensors))]
    words = "cannot be read: Input/output error. Restore it."
    assert str(caught.value) == f"{runs / 'dit'} {words}"
    assert list(tmp_path.iterdir()) == []


def test_large_files_are_read_in_parts_and_old_ones_whole(runs, tmp_path, monkeypatch):
    """After every so many bytes the pages are given back; a file of before torch 1.6 has none."""
    expected = load_file(runs / "dit.safetensors")
    monkeypatch.setattr(tensor_file, "MAPPED", 10_000)
    for is_mapped in (True, False):
        file = tmp_path / f"{is_mapped}.pt"
        torch.save(expected, file, _use_new_zipfile_serialization=is_mapped)
        pickled = tensor_file.Pickled(file)
        loads = []
        monkeypatch.setattr(pickled, "torch_load", counted(loads, pickled.torch_load))
        for name, tensor in expected.items():
            assert torch.equal(pickled.get(name), tensor), name
        assert pickled.is_mapped == is_mapped
        assert (len(loads) > 5) == is_mapped


def counted(calls, function):
    def call():
        calls.append(1)
        return function()

    return call


def test_progress_outlives_a_folder_that_is_renamed(tmp_path, monkeypatch):
    for name in ("new.1.partial", "new.1.partial/new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"12345")
    assert tensor_file.bytes_aside(tmp_path / "new") == 10
    scandir = os.scandir

    def renamed(path="."):
        if str(path).endswith("partial/new"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", renamed)
    assert tensor_file.bytes_aside(tmp_path / "new") == 5
