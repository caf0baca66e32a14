"""A run does not write into its own data."""

import dataclasses

import pytest
from tiny import tiny_config

from titan_dit.checks.parts import check_folders
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.data.sections import Latents


def config_of(data, folder):
    plain = tiny_config()
    job = dataclasses.replace(plain.job, dir=str(folder))
    return dataclasses.replace(plain, job=job, data=Latents(path=str(data)))


def refused(run):
    with pytest.raises(UserError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("set", "is the data"),
        ("set/class/run", "lies in the data"),
        ("link/run", "lies in the data"),
        (".", "holds, among its own files, the data"),
    ],
)
def test_a_run_in_its_data_is_refused(folder, words, tmp_path):
    data = tmp_path / ("checkpoints/set" if folder == "." else "set")
    data.mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    config = config_of(data, tmp_path / folder)
    assert f"[job] dir={tmp_path / folder} {words} [data] path={data}, so" in refused(
        lambda: check_folders(config)
    )
    beside = config_of(data, tmp_path / "run")
    check_folders(beside)
    checkpoints = CheckpointConfig(dir=str(data / "saved"))
    assert "[checkpoint] dir" in refused(
        lambda: check_folders(dataclasses.replace(beside, checkpoint=checkpoints))
    )
