import pytest
import records
import torch

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.config_file import BEFORE_FORMAT_4
from titan_dit.config.job import NEW_RUN, JobSection
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.training import EMAConfig
from titan_dit.recovery import run_identity
from titan_dit.recovery.kept_keys import settled
from titan_dit.recovery.run_identity import Identity

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD, NEW = tuple(BEFORE_FORMAT_4.values()), tuple(NEW_RUN.values())
# Neither those of a new run nor those of an old one.
OTHER = {"data_order": "sort", "initial_weights": "counter"}


def kept_of_both(folder, resume, warmup, **keys):
    settings = CheckpointConfig(resume=str(resume))
    return settled(JobSection(dir=str(folder), **keys), EMAConfig(warmup=warmup), settings)


def warms_up(folder, resume="auto", warmup=None):
    return kept_of_both(folder, resume, warmup)[1].warmup


def kept(folder, resume="auto", **keys):
    run, _ = kept_of_both(folder, resume, None, **keys)
    return run.data_order, run.initial_weights


def save(folder, job, number, step=5, **more):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=0, async_save=False))
    config = {"job": job, "ema": {"decays": []} | more.pop("ema", {})}
    record = records.of_run(step, config, config_format=number, **more)
    return checkpoints.save(step, {"model": {"w": torch.ones(1)}}, record)


def write_config(folder, text, rows="{}"):
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(text)
    (folder / "metrics.jsonl").write_text(rows)


def test_a_new_run_takes_what_is_newest_and_any_run_what_is_written(tmp_path):
    assert kept(tmp_path) == NEW
    assert kept(tmp_path, **OTHER) == tuple(OTHER.values())
    save(tmp_path, {}, 3)
    assert kept(tmp_path, data_order="feistel") == ("feistel", "generator")


def test_a_checkpoint_of_before_the_keys_means_sort_and_generator(tmp_path):
    save(tmp_path, {"seed": 1}, 3)
    assert kept(tmp_path) == OLD
    # The first format had no number.
    save(tmp_path / "first", {"seed": 1}, 1)
    assert kept(tmp_path / "first") == OLD


def test_a_run_keeps_what_its_checkpoint_says(tmp_path):
    path = save(tmp_path, OTHER, 4)
    assert kept(tmp_path) == tuple(OTHER.values())
    # Its newest one decides, and a damaged one not at all.
    save(tmp_path, BEFORE_FORMAT_4, 4, step=10)
    assert kept(tmp_path) == OLD
    (tmp_path / "checkpoints" / "step-00000010" / "manifest.json").write_text("{")
    assert kept(tmp_path) == tuple(OTHER.values())
    # A run that starts at another run's checkpoint continues it.
    assert kept(tmp_path / "heir", resume=path) == tuple(OTHER.values())


def test_a_checkpoint_is_asked_before_the_written_config(tmp_path):
    """A launch that died between writing config.toml and its first save."""
    save(tmp_path, OTHER, 4)
    write_config(tmp_path, 'format = 4\n[job]\ndata_order = "feistel"\n')
    assert kept(tmp_path) == tuple(OTHER.values())
    # An own checkpoint that a path selects, too.
    older = save(tmp_path, BEFORE_FORMAT_4, 4, step=2)
    assert kept(tmp_path, resume=older) == OLD


def test_imported_weights_belong_to_no_run(tmp_path):
    path = save(tmp_path / "imported", BEFORE_FORMAT_4, 4, imported=True)
    assert kept(tmp_path / "new", resume=path) == NEW
    write_config(tmp_path / "started", 'format = 4\n[job]\ndata_order = "sort"\n')
    assert kept(tmp_path / "started", resume=path) == ("sort", NEW[1])


def test_before_the_first_checkpoint_the_written_config_decides(tmp_path):
    write_config(tmp_path, "format = 3\n[job]\nseed = 1\n")
    assert kept(tmp_path) == OLD
    write_config(tmp_path, "[job]\nseed = 1\n")
    assert kept(tmp_path) == OLD
    write_config(tmp_path, 'format = 4\n[job]\ndata_order = "sort"\n')
    assert kept(tmp_path) == ("sort", NEW[1])
    # `never` starts a new run in any folder without checkpoints.
    write_config(tmp_path, "format = 3\n")
    assert kept(tmp_path, resume="never") == NEW
    # Without a row of metrics it has not begun.
    write_config(tmp_path, "format = 3\n", rows="")
    assert kept(tmp_path) == NEW


def test_an_average_warms_up_but_for_an_imported_one_and_a_run_keeps_its_way(tmp_path):
    assert warms_up(tmp_path / "new")
    path = save(tmp_path / "imported", {}, 4, imported=True, ema={"warmup": False})
    assert warms_up(tmp_path / "new", path) is False
    assert warms_up(tmp_path / "new", path, warmup=True)
    # Of a run from imported weights, resumed by its own checkpoint; one of before the key.
    save(tmp_path / "heir", {}, 4, ema={"warmup": False})
    assert [warms_up(tmp_path / "heir", resume) for resume in (path, "auto")] == [False, False]
    save(tmp_path / "old", {}, 4)
    assert warms_up(tmp_path / "old")
    write_config(tmp_path / "begun", "format = 4\n[ema]\nwarmup = false\n")
    assert warms_up(tmp_path / "begun") is False


def lines(saved, **now):
    config = {"compile": {"enabled": True, "objective": True} | now}
    return list(run_identity.lines_of_new_keys({"config": saved}, Identity(config, {}, 0)))


def test_a_compiled_run_of_before_the_key_objective_is_told_that_it_is_new():
    [line] = lines({"compile": {"enabled": True}})
    assert line.startswith("[compile] objective=true is new in this run")
    assert "--compile.objective false" in line
    assert lines({"compile": {"enabled": True}}, objective=False) == []
    assert lines({"compile": {"enabled": True}}, enabled=False) == []
    assert lines({"compile": {"enabled": True, "objective": True}}) == []
    # Not compiled before, or imported weights: no last bits to compare with.
    assert lines({"compile": {"enabled": False}}) == []
    assert lines({}) == []
