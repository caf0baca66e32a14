"""Checks of checkpoints in any store; the tests of each store call them."""

import base64

import pytest
import records
import torch

from titan_dit.checkpoint import torch_files
from titan_dit.checkpoint.checkpoint import load
from titan_dit.checkpoint.record import EMPTY_CAPTION, read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints, find_checkpoint, step_of
from titan_dit.checkpoint.store import URL, location, store_of
from titan_dit.commands import checkpoint_list, checkpoint_verify
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.recovery import resume


def state(value):
    return {"model": {"w": torch.full((64, 8), value)}, "ema": {"0.9": {"w": torch.ones(3)}}}


NULL = base64.b64encode(bytes(range(256)) * 128).decode()
"""The empty caption of a record, of 32 KiB: a file of its own."""


def record_of(step):
    return records.of_run(step, data={"text": {"null": NULL}})


def value_of(path):
    target = state(-1.0)
    load(path, target)
    return target["model"]["w"].unique().item()


def check_store(url, monkeypatch, capsys):
    """A run in an object store: save, prune, interrupt, damage, skip the damaged one."""
    checkpoints = Checkpoints(location(url), CheckpointConfig(every=10, keep=2))
    assert isinstance(checkpoints.folder, URL)
    assert checkpoints.complete() == []
    for step in (10, 20, 30):
        path = checkpoints.save(step, state(float(step)), record_of(step))
    checkpoints.finish()
    assert str(path) == f"{url}/step-00000030"
    assert read_record(path)["data"]["text"] == {"null": NULL}
    assert store_of(path).size(path / EMPTY_CAPTION) == 32 << 10
    assert [line for line in checkpoints.poll() if "not saved" in line] == []
    assert [step_of(found) for found in checkpoints.complete()] == [20, 30]
    assert value_of(path) == 30.0
    assert read_record(path)["cursor"] == 30
    assert find_checkpoint(location(url), 20) == location(f"{url}/step-00000020")

    # Another run starts from it by its URL, in the same store or elsewhere.
    other = Checkpoints(location(f"{url}-other"), CheckpointConfig())
    assert resume.starting_point(other, str(path)).path == path
    with pytest.raises(UserError, match="nowhere: no checkpoint found"):
        resume.starting_point(other, f"{url}/nowhere")

    # The store fails while tensors are written: a folder without a manifest is not a checkpoint.
    with monkeypatch.context() as patched:
        patched.setattr(torch_files.Digesting, "write", refuse)
        checkpoints.save(40, state(40.0), record_of(40))
        checkpoints.wait()
    assert any("step 40 was not saved" in line for line in checkpoints.poll())
    assert resume.starting_point(checkpoints, "auto").path == path

    # Killed during a save: the leftovers are not loaded and do not block the next save.
    store = store_of(path)
    store.begin(checkpoints.folder / "step-00000050")
    store.write(checkpoints.folder / "step-00000050" / "__3_0.distcp", "of a rank that is no more")
    assert resume.starting_point(checkpoints, "auto").path == path
    again = checkpoints.save(50, state(50.0), record_of(50))
    checkpoints.finish()
    assert "__3_0.distcp" not in store.names(again)
    assert [step_of(found) for found in checkpoints.complete()] == [30, 50]

    # A flipped bit.
    file = again / "__0_0.distcp"
    with store.open(file) as stream:
        data = bytearray(stream.read())
    data[len(data) // 2] ^= 1
    with store.files.open(str(file), "wb") as stream:
        stream.write(data)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        checkpoint_verify.main(checkpoint_verify.CheckpointVerifyFlags(path=url))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{path}: whole, 4 files")
    assert said[1] == f"{again}: damaged: __0_0.distcp"
    checkpoint_list.main(checkpoint_list.CheckpointListFlags(run=url))
    assert len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(UserError, match=r"is damaged: __0_0\.distcp"):
        load(again, state(0.0))
    start = resume.starting_point(checkpoints, "auto")
    assert start.path == path
    resume.set_aside_newer(checkpoints, start)
    assert store.names(checkpoints.folder) == ["step-00000030", "step-00000050.damaged-1"]
    assert "manifest.json" in store.names(checkpoints.folder / "step-00000050.damaged-1")


def refuse(*args, **kwargs):
    raise PermissionError("Access Denied")
