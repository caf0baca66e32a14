"""[checkpoint] resume with the path of a run, its checkpoints folder or a checkpoint."""

import pytest
import records
import torch

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.operation import CheckpointConfig
from titan_dit.recovery import resume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_with(folder, *steps):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=0, async_save=False))
    for step in steps:
        checkpoints.save(step, {"model": {"w": torch.ones(1)}}, records.of_run(step))
    return checkpoints


def starting_point(checkpoints, path):
    return resume.starting_point(checkpoints, path).path


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-00000003"])
def test_a_run_and_its_checkpoints_folder_name_the_newest_that_is_whole(tmp_path, name):
    other = run_with(tmp_path / "other", 2, 3)
    damaged = run_with(tmp_path / "other", 4).newest() / "manifest.json"
    damaged.write_text("{}")
    (tmp_path / "other" / "config.toml").touch()
    found = starting_point(run_with(tmp_path / "ours"), str(tmp_path / "other" / name))
    assert found == other.folder / "step-00000003"
    # Its own directory is where it goes on anyway.
    assert starting_point(other, str(tmp_path / "other")) == other.folder / "step-00000003"
