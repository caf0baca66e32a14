import pytest
import torch

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.config_file import BEFORE_FORMAT_4
from titan_dit.config.job import NEW_RUN, RunConfig
from titan_dit.config.operation import CheckpointConfig
from titan_dit.recovery.kept_keys import settled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD, NEW = tuple(BEFORE_FORMAT_4.values()), tuple(NEW_RUN.values())
OTHER = {"data_order": "feistel", "initial_weights": "counter"}


def ways(folder, resume="auto", **keys):
    run = settled(RunConfig(dir=str(folder), **keys), CheckpointConfig(resume=str(resume)))
    return run.data_order, run.initial_weights


def save(folder, job, number, step=5, **more):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=0, async_save=False))
    config = {"job": job, "checkpoint": {"resume": "auto"}}
    record = {"step": step, "config": config, "config_format": number, **more}
    return checkpoints.save(step, {"model": {"w": torch.ones(1)}}, record)


def write_config(folder, text, rows="{}"):
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text)
    (folder / "metrics.jsonl").write_text(rows)


def test_a_new_run_takes_the_new_ways_and_any_run_what_is_written(tmp_path):
    assert ways(tmp_path) == NEW
    assert ways(tmp_path, **OTHER) == tuple(OTHER.values())
    save(tmp_path, {}, 3)
    assert ways(tmp_path, data_order="feistel") == ("feistel", "generator")


def test_a_checkpoint_of_before_the_keys_means_the_old_ways(tmp_path):
    save(tmp_path, {"seed": 1}, 3)
    assert ways(tmp_path) == OLD
    # The first format had no number.
    save(tmp_path / "first", {"seed": 1}, 1)
    assert ways(tmp_path / "first") == OLD


def test_a_run_keeps_what_its_checkpoint_says(tmp_path):
    path = save(tmp_path, OTHER, 4)
    assert ways(tmp_path) == tuple(OTHER.values())
    # Its newest one decides, and a damaged one not at all.
    save(tmp_path, BEFORE_FORMAT_4, 4, step=10)
    assert ways(tmp_path) == OLD
    (tmp_path / "checkpoints" / "step-00000010" / "manifest.json").write_text("{")
    assert ways(tmp_path) == tuple(OTHER.values())
    # A run that starts at another run's checkpoint continues it.
    assert ways(tmp_path / "heir", resume=path) == tuple(OTHER.values())


def test_imported_weights_belong_to_no_run(tmp_path):
    path = save(tmp_path / "imported", BEFORE_FORMAT_4, 4, imported=True)
    assert ways(tmp_path / "new", resume=path) == NEW
    write_config(tmp_path / "started", 'format = 4\n[job]\ndata_order = "feistel"\n')
    assert ways(tmp_path / "started", resume=path)[0] == "feistel"


def test_before_the_first_checkpoint_the_written_config_decides(tmp_path):
    write_config(tmp_path, "format = 3\n[job]\nseed = 1\n")
    assert ways(tmp_path) == OLD
    write_config(tmp_path, "[job]\nseed = 1\n")
    assert ways(tmp_path) == OLD
    write_config(tmp_path, 'format = 4\n[job]\ndata_order = "feistel"\n')
    assert ways(tmp_path) == ("feistel", NEW[1])
    # `never` starts a new run in any folder without checkpoints.
    write_config(tmp_path, "format = 3\n")
    assert ways(tmp_path, resume="never") == NEW
    # Without a row of metrics it has not begun.
    write_config(tmp_path, "format = 3\n", rows="")
    assert ways(tmp_path) == NEW
