import copy
import json
import os
from dataclasses import replace

import pytest
import records
import torch
from tiny import tiny_config

from titan_dit.checkpoint.record import digest_of
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.config import config_file
from titan_dit.config.job import JobSection
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.recovery import resume as resuming
from titan_dit.recovery import run_identity
from titan_dit.recovery.resume import Start
from titan_dit.recovery.run_identity import Identity, check_same_mathematics

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TABLES = config_file.to_tables(
    tiny_config(
        job={"name": "a"}, training={"steps": 10, "global_batch_size": 8}, ema={"warmup": True}
    )
)


def run_with(folder, *steps, resume="auto"):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=0, async_save=False))
    for step in steps:
        record = records.of_run(step, {"checkpoint": {"resume": resume}})
        checkpoints.save(step, {"model": {"w": torch.ones(1)}}, record)
    return checkpoints


def starting_point(checkpoints, resume):
    return resuming.starting_point(checkpoints, resume).path


def set_aside_newer(checkpoints, path):
    record = {"step": step_of(path)} if path else {}
    resuming.set_aside_newer(checkpoints, Start(path, record))


def test_auto_takes_the_newest_or_starts_afresh(tmp_path):
    assert starting_point(run_with(tmp_path), "auto") is None
    assert starting_point(run_with(tmp_path, 5, 10), "auto").name == "step-00000010"


def test_never_starts_afresh_and_is_refused_where_checkpoints_are(tmp_path):
    assert starting_point(run_with(tmp_path), "never") is None
    with pytest.raises(UserError) as caught:
        starting_point(run_with(tmp_path, 5, 10), "never")
    message = str(caught.value)
    assert message.startswith('[checkpoint] resume="never"')
    assert "step 10" in message
    assert "--job.name" in message


def test_never_is_for_the_first_ranks_of_a_job(tmp_path, monkeypatch):
    """Restarted ranks resume: the checkpoints belong to their own job."""
    ours = run_with(tmp_path, 5, 10)
    run, settings = JobSection(dir=str(tmp_path)), CheckpointConfig(resume="never")
    with pytest.raises(UserError, match='resume="never"'):
        resuming.has_started(run, settings)
    assert not resuming.has_started(JobSection(dir=str(tmp_path / "new")), settings)
    monkeypatch.setenv("TITAN_DIT_STARTED", "1")
    assert starting_point(ours, "never").name == "step-00000010"
    assert resuming.has_started(run, settings)
    assert not resuming.has_started(JobSection(dir=str(tmp_path / "new")), settings)


def test_a_path_into_another_run_starts_only_a_run_without_checkpoints(tmp_path):
    other = run_with(tmp_path / "other", 3).newest()
    assert starting_point(run_with(tmp_path / "ours"), str(other)) == other
    # The same command then resumes from the run's own checkpoint.
    ours = run_with(tmp_path / "ours", 5)
    assert starting_point(ours, str(other)) == ours.newest()


@pytest.mark.parametrize("spelling", ["absolute", "relative", "dotted"])
def test_a_path_of_its_own_goes_back_to_it(tmp_path, monkeypatch, spelling):
    checkpoints = run_with(tmp_path, 5, 10)
    monkeypatch.chdir(tmp_path)
    path = checkpoints.folder / "step-00000005"
    text = {
        "absolute": str(path),
        "relative": os.path.relpath(path),
        "dotted": str(tmp_path / "checkpoints" / ".." / "checkpoints" / path.name),
    }[spelling]
    assert starting_point(checkpoints, text).resolve() == path


def test_going_back_sets_the_newer_ones_aside_and_deletes_nothing(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10, 15)
    set_aside_newer(checkpoints, checkpoints.folder / "step-00000005")
    assert [path.name for path in checkpoints.complete()] == ["step-00000005"]
    aside = {path.name for path in checkpoints.folder.iterdir()}
    assert aside == {
        "step-00000005",
        "step-00000010.set-aside-1",
        "step-00000015.set-aside-1",
    }
    assert (checkpoints.folder / "step-00000015.set-aside-1" / "manifest.json").is_file()


def test_the_same_command_goes_back_once_and_then_on(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10)
    older = str(checkpoints.folder / "step-00000005")
    set_aside_newer(checkpoints, starting_point(checkpoints, older))
    run_with(tmp_path, 10, resume=older)
    assert starting_point(checkpoints, older).name == "step-00000010"


def test_going_back_twice_keeps_both_futures(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10)
    older = checkpoints.folder / "step-00000005"
    set_aside_newer(checkpoints, older)
    run_with(tmp_path, 10)
    set_aside_newer(checkpoints, older)
    aside = {path.name for path in checkpoints.folder.glob("*aside*")}
    assert aside == {"step-00000010.set-aside-1", "step-00000010.set-aside-2"}


def test_a_run_goes_back_to_what_was_set_aside(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10)
    set_aside_newer(checkpoints, checkpoints.folder / "step-00000005")
    run_with(tmp_path, 10)
    aside = str(checkpoints.folder / "step-00000010.set-aside-1")
    resuming.set_aside_newer(checkpoints, resuming.starting_point(checkpoints, aside))
    assert [path.name for path in checkpoints.complete()] == ["step-00000005"]
    left = {path.name for path in checkpoints.folder.iterdir()}
    assert left == {f"step-00000010.set-aside-{i}" for i in (1, 2)} | {"step-00000005"}


def test_steps_of_nine_digits_are_newer_than_those_of_eight(tmp_path):
    checkpoints = run_with(tmp_path, 99_999_999, 100_000_000)
    set_aside_newer(checkpoints, checkpoints.folder / "step-99999999")
    assert [path.name for path in checkpoints.complete()] == ["step-99999999"]


def test_starting_from_another_run_sets_nothing_aside(tmp_path):
    other, ours = run_with(tmp_path / "other", 3), run_with(tmp_path / "ours", 5)
    set_aside_newer(ours, other.newest())
    set_aside_newer(ours, None)
    set_aside_newer(ours, ours.newest())
    assert [path.name for path in ours.complete()] == ["step-00000005"]


def damage_files(path, file, how):
    """Flip a bit, truncate, empty or delete a file."""
    target = path / file
    data = bytearray(target.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    target.write_bytes({"flip": data, "truncate": data[:-1]}.get(how, b""))
    if how == "delete":
        target.unlink()


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "delete"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path, file, how):
    checkpoints = run_with(tmp_path, 5, 10, 15)
    newest = checkpoints.folder / "step-00000015"
    damage_files(newest, file, how)
    start = resuming.starting_point(checkpoints, "auto")
    assert start.path == checkpoints.folder / "step-00000010"
    assert start.record["step"] == 10
    [said] = start.messages()
    what = f"{file} is missing" if (file, how) == ("manifest.json", "delete") else file
    assert said.startswith(f"{newest} is damaged: {what}")
    assert said.endswith(f"; falling back to the previous one: {start.path}")

    # The resumed run saves that step again, and the damaged one is kept.
    resuming.set_aside_newer(checkpoints, start)
    run_with(tmp_path, 15)
    assert [path.name[-2:] for path in checkpoints.complete()] == ["05", "10", "15"]
    assert (checkpoints.folder / "step-00000015.damaged-1").is_dir()
    assert resuming.starting_point(checkpoints, "auto").path == newest


def test_several_damaged_ones_are_passed_over_and_do_not_count_as_kept(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10, 15)
    for step in ("10", "15"):
        damage_files(checkpoints.folder / f"step-000000{step}", ".metadata", "flip")
    start = resuming.starting_point(checkpoints, "auto")
    assert start.path.name == "step-00000005"
    assert [line.split()[0][-2:] for line in start.messages()] == ["15", "10"]
    assert start.messages()[0].endswith("step-00000010")
    resuming.set_aside_newer(checkpoints, start)
    assert [path.name for path in checkpoints.complete()] == ["step-00000005"]
    Checkpoints(checkpoints.folder, CheckpointConfig(keep=1)).prune()
    assert [path.name for path in checkpoints.complete()] == ["step-00000005"]


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_of_damaged_checkpoints_only_does_not_start_afresh(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10)
    for path in checkpoints.complete():
        damage_files(path, "__0_0.distcp", "flip")
    before = tree(tmp_path)
    with pytest.raises(UserError) as caught:
        starting_point(checkpoints, "auto")
    message = str(caught.value)
    assert "step-00000010 is damaged: __0_0.distcp" in message
    assert "step-00000005 is damaged: __0_0.distcp" in message
    assert tree(tmp_path) == before


@pytest.mark.parametrize("own", [True, False])
def test_a_damaged_checkpoint_that_was_asked_for_is_refused(tmp_path, own):
    other = run_with(tmp_path / "other", 3, 5)
    damage_files(other.newest(), "__0_0.distcp", "truncate")
    checkpoints = other if own else run_with(tmp_path / "ours")
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"step-00000005 is damaged: __0_0\.distcp"):
        starting_point(checkpoints, str(other.newest()))
    assert tree(tmp_path) == before


def test_a_run_that_began_elsewhere_passes_over_its_own_damaged_ones(tmp_path):
    other = str(run_with(tmp_path / "other", 3).newest())
    checkpoints = run_with(tmp_path / "ours", 5, 10, resume=other)
    damage_files(checkpoints.newest(), "manifest.json", "flip")
    assert starting_point(checkpoints, other).name == "step-00000005"


def test_a_checkpoint_of_a_newer_format_is_not_called_damaged(tmp_path):
    checkpoints = run_with(tmp_path, 5, 10)
    manifest = checkpoints.newest() / "manifest.json"
    record = json.loads(manifest.read_text()) | {"format": "titan_dit.checkpoint/9"}
    del record["digest"]
    record["digest"] = digest_of(record)
    manifest.write_text(json.dumps(record))
    with pytest.raises(UserError, match="does not have the format"):
        starting_point(checkpoints, "auto")


def changed(**values):
    tables = copy.deepcopy(TABLES)
    for path, value in values.items():
        section, key = path.split("__")
        tables[section][key] = value
    return tables


def check(tmp_path, tables, digest="abc", text=(None, None)):
    data = [{"digest": "abc"}, {"digest": digest}]
    data = [facts | ({"text_digest": t} if t else {}) for facts, t in zip(data, text, strict=True)]
    record = {"config": TABLES, "config_format": config_file.FORMAT, "data": data[0]}
    identity = Identity(tables, data[1], num_held_out=0)
    check_same_mathematics(tmp_path / "step-00000005", record, identity, lambda: "the ways out")


def test_the_same_mathematics_may_go_on(tmp_path):
    check(tmp_path, TABLES)
    # check_same_mathematics returns nothing; that these do not raise is the assertion.
    check(tmp_path, changed(training__steps=20, job__name="b"))
    with pytest.raises(UserError):
        check(tmp_path, changed(job__seed=1))


def test_captions_may_be_added_to_the_data_but_not_exchanged(tmp_path):
    check(tmp_path, TABLES, text=(None, "a"))
    check(tmp_path, TABLES, text=("a", "a"))
    with pytest.raises(UserError, match="the contents differ"):
        check(tmp_path, TABLES, text=("a", "b"))


def test_other_mathematics_is_refused_change_by_change(tmp_path):
    with pytest.raises(UserError) as caught:
        check(tmp_path, changed(optimizer__lr=2e-3, training__global_batch_size=16))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("[checkpoint] ")
    assert "step-00000005" in lines[0]
    assert lines[1:3] == [
        "  [optimizer] lr: 0.001 -> 0.002",
        "  [training] global_batch_size: 8 -> 16",
    ]
    assert lines[3:] == ["  the ways out"]


def test_a_part_that_only_the_checkpoint_names_is_a_change_and_is_not_imported(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("raise AssertionError('imported')")
    saved = changed(model__name="theirs:Model", objective__name="theirs:Objective")
    record = {"config": saved, "config_format": config_file.FORMAT, "data": {"digest": "abc"}}
    with pytest.raises(UserError) as caught:
        check_same_mathematics(tmp_path, record, Identity(TABLES, {"digest": "abc"}, 0), str)
    assert str(caught.value).splitlines()[1:-1] == [
        '  [model] name: "theirs:Model" -> "dit"',
        '  [objective] name: "theirs:Objective" -> "rectified_flow"',
    ]


def test_imported_adapters_keep_their_scale(tmp_path):
    saved = changed(lora__rank=4, lora__alpha=32.0)
    record = {"config": saved, "config_format": config_file.FORMAT, "data": {}, "imported": True}

    def check_lora(**lora):
        tables = changed(**{f"lora__{key}": value for key, value in lora.items()})
        check_same_mathematics(tmp_path, record, Identity(tables, {}, 0), str)

    scale = "alpha / rank: 8 -> 1"
    for rank, alpha, what in ((4, None, scale), (4, 4.0, scale), (8, 64.0, "rank: 4 -> 8")):
        with pytest.raises(UserError) as caught:
            check_lora(rank=rank, alpha=alpha)
        line = f"  [lora] {what}. Set rank = 4, alpha = 32.0."
        assert str(caught.value).splitlines()[1] == line
    check_lora(rank=4, alpha=32.0, targets=["blocks.*"])


def test_a_record_without_the_keys_means_sort_and_generator(tmp_path):
    """Formats below 4 had neither key of [job], and a user's own tables may lack a default."""
    tables = copy.deepcopy(TABLES)
    for key in config_file.BEFORE_FORMAT_4:
        del tables["job"][key]
    del tables["ema"]["warmup"]  # Means true.
    record = {"config": tables, "config_format": 3, "data": {"digest": "abc"}}
    old = Identity(
        changed(job__data_order="sort", job__initial_weights="generator"), {"digest": "abc"}, 0
    )
    check_same_mathematics(tmp_path, record, old, str)
    new = Identity(
        changed(job__data_order="feistel", job__initial_weights="counter"), {"digest": "abc"}, 0
    )
    with pytest.raises(UserError) as caught:
        check_same_mathematics(tmp_path, record, new, str)
    assert str(caught.value).splitlines()[1:3] == [
        '  [job] data_order: "sort" -> "feistel"',
        '  [job] initial_weights: "generator" -> "counter"',
    ]


def test_rows_once_held_out_are_not_trained_on_in_another_order(tmp_path):
    configs = [changed(job__data_order=way, validation__samples=9) for way in ("sort", "feistel")]
    same, other = (Identity(config, {}, 9) for config in configs)
    record = {"config": copy.deepcopy(configs[0]), "config_format": config_file.FORMAT}
    path = tmp_path / "step-00000005"
    with pytest.raises(UserError) as caught:
        run_identity.check_held_out(path, record, other)
    assert str(caught.value) == (
        f'[job] data_order="feistel" would hold out other rows than {path}, and train on those '
        'held out there ([validation] samples=9). Set data_order = "sort", or start a new run with '
        "--job.name."
    )
    run_identity.check_held_out(path, record, same)
    run_identity.check_held_out(path, record, replace(other, num_held_out=0))
    run_identity.check_held_out(path, record | {"imported": True}, other)
    record["config"]["validation"]["samples"] = 0
    run_identity.check_held_out(path, record, other)


def test_other_data_is_refused_wherever_it_lies(tmp_path):
    with pytest.raises(UserError, match=r"\[data\]: the contents differ"):
        check(tmp_path, TABLES, digest="xyz")


def test_a_run_whose_checkpoints_lie_elsewhere_does_not_begin_anew(tmp_path):
    run_with(tmp_path, 5, 10)
    (tmp_path / "config.toml").write_text('[job]\nname = "a"\n[checkpoint]\ndir = ""\n')
    job = JobSection(dir=str(tmp_path))
    resuming.check_not_elsewhere(job, CheckpointConfig())
    elsewhere = CheckpointConfig(dir=str(tmp_path / "elsewhere"))
    with pytest.raises(
        UserError, match=r"no checkpoint in .*elsewhere, but the run has .*-00000010"
    ):
        resuming.check_not_elsewhere(job, elsewhere)
