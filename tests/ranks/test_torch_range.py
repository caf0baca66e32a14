"""A torch outside the range is refused in one line, before it is imported."""

import importlib.metadata
import sys
import tomllib

import pytest
import torch
from commands import ROOT
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor

from titan_dit import __main__, train
from titan_dit.checks import device
from titan_dit.config.section import UserError
from titan_dit.ranks import torch_range


def installed(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)


@pytest.mark.parametrize("version", ["2.11.0a0+nv25.12", "2.13.1+cpu", "2.15.2"])
def test_a_torch_in_the_range_starts(monkeypatch, version):
    installed(monkeypatch, version)
    torch_range.check_torch()


@pytest.mark.parametrize("version", ["2.10.2", "1.13.1", "2.16.0", "3.0"])
@pytest.mark.parametrize("words", [["train"], ["sample", "--run", "x"], ["train", "--dry-run"]])
def test_another_torch_is_refused_with_the_range_and_a_way_out(monkeypatch, version, words):
    installed(monkeypatch, version)
    monkeypatch.setattr(sys, "argv", ["titan_dit", *words])
    with pytest.raises(UserError) as error:
        __main__.main()
    assert "\n" not in str(error.value)
    assert f"torch {version} is installed, but titan_dit runs with 2.11 to 2.15" in str(error.value)
    assert "pip install torch==2.15.0" in str(error.value)


def test_a_rank_that_was_started_without_the_command_line_refuses_too(monkeypatch):
    installed(monkeypatch, "2.10.0")
    monkeypatch.setattr(sys, "argv", ["train", "--config", "no-such-file"])
    with pytest.raises(UserError, match=r"torch 2\.10\.0 is installed"):
        train.main()


def test_the_range_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (major, oldest), (_, newest) = torch_range.OLDEST, torch_range.NEWEST
    wanted = f"torch>={major}.{oldest},<{major}.{newest + 1}"
    assert wanted in project["dependencies"]


class Old:
    """A part of a torch that lacks it."""

    _kept = 1


def test_a_missing_part_is_refused_with_the_file_that_uses_it_and_the_version(monkeypatch):
    installed(monkeypatch, "2.14.9")
    torch_range.require("a/b.py", Old, "_kept")
    with pytest.raises(UserError) as error:
        torch_range.require("a/b.py", Old, "_kept", "_gone")
    assert str(error.value) == (
        "torch 2.14.9 has no Old._gone, which titan_dit/a/b.py uses. "
        "Install a version that docs/torch-versions.md names."
    )


@pytest.mark.parametrize(
    ("owner", "name", "file"),
    [
        (DTensor, "_spec", "ranks/shards.py"),
        (torch, "_foreach_copy_", "checkpoint/staging.py"),
        (filesystem, "_StorageInfo", "checkpoint/torch_files.py"),
    ],
)
def test_what_a_checkpoint_needs_is_looked_for_at_the_start(monkeypatch, owner, name, file):
    device.check_torch_parts(profiles_memory=True, rings=True)
    monkeypatch.delattr(owner, name)
    with pytest.raises(UserError, match=f"{name}, which titan_dit/{file} uses"):
        device.check_torch_parts(profiles_memory=False, rings=False)


@pytest.mark.parametrize(
    ("owner", "name"),
    [("FileSystem", "create_stream"), ("FileSystemWriter", "set_up_storage_writer")],
)
def test_undocumented_methods_of_a_checkpoint_are_looked_for_at_the_start(monkeypatch, owner, name):
    monkeypatch.setattr(filesystem, owner, Old)
    with pytest.raises(UserError, match=rf"Old\.{name}, which titan_dit/checkpoint/torch_files"):
        device.check_torch_parts(profiles_memory=False, rings=False)


def test_what_only_some_runs_need_is_looked_for_where_they_start(monkeypatch):
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    monkeypatch.setattr(device, "RING_KERNELS", ["_scaled_dot_product_gone"])
    device.check_torch_parts(profiles_memory=False, rings=False)
    with pytest.raises(UserError, match=r"_dump_snapshot, which titan_dit/observe/profile"):
        device.check_torch_parts(profiles_memory=True, rings=False)
    with pytest.raises(UserError, match=r"product_gone, which titan_dit/kernels/attention_kern"):
        device.check_torch_parts(profiles_memory=False, rings=True)
