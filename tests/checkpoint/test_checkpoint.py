import json
import pickle
import shutil
from pathlib import Path

import pytest
import records
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from titan_dit.checkpoint import checkpoint, record, store, torch_files
from titan_dit.checkpoint.checkpoint import load
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.saved_weights import Weights
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.section import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RECORD = records.of_run(7) | {"cursor": 896}


def tensors(seed=0):
    """As from the trainer: nested dicts, dots in names and decays, some scalars."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    names = {"embed.patch.weight": (6, 4), "blocks.0.attn.qkv.bias": (12,)}
    return {
        "model": {name: draw(*shape) for name, shape in names.items()},
        "optimizer": {
            name: {"step": draw(), "exp_avg": draw(*shape)} for name, shape in names.items()
        },
        "ema": {"0.9999": {name: draw(*shape) for name, shape in names.items()}},
    }


def at_once(folder, **settings):
    """A run's checkpoints, saved synchronously."""
    return Checkpoints(folder, CheckpointConfig(async_save=False, **settings))


def flat(nested):
    return dict(checkpoint.flatten(nested))


def assert_equal(a, b):
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def saved(folder):
    return at_once(folder).save(7, tensors(), RECORD)


def test_what_is_saved_is_loaded_in_place(saved):
    target = tensors(seed=1)
    places = {name: value.data_ptr() for name, value in flat(target).items()}
    load(saved, target)
    assert_equal(target, tensors())
    assert {name: value.data_ptr() for name, value in flat(target).items()} == places


def test_the_record_comes_back_with_a_digest_of_every_file(saved):
    record = read_record(saved)
    assert {key: record[key] for key in RECORD} == RECORD
    on_disk = {path.name for path in saved.iterdir()}
    assert on_disk == {*record["files"], "manifest.json"}
    assert ".metadata" in on_disk


def test_saving_leaves_the_tensors_alone(folder):
    ours = tensors()
    at_once(folder).save(7, ours, RECORD)
    assert_equal(ours, tensors())


def test_a_part_of_the_tensors_can_be_loaded(saved):
    target = {"ema": {"0.9999": tensors(seed=1)["ema"]["0.9999"]}}
    load(saved, target)
    assert_equal(target, {"ema": tensors()["ema"]})


def test_weights_can_be_loaded_under_the_name_of_an_average(saved):
    model = tensors(seed=1)["model"]
    load(saved, {"ema": {"0.9999": model}})
    assert_equal(model, tensors()["ema"]["0.9999"])


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(saved, file, damage):
    path = saved / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes({"flip": data, "truncate": data[:-1]}.get(damage, b""))
    if damage == "delete":
        path.unlink()
    target = tensors(seed=1)
    with pytest.raises(UserError) as caught:
        load(saved, target)
    assert f"{saved} is damaged: {file}." in str(caught.value)
    assert "--checkpoint.resume" in str(caught.value)
    assert_equal(target, tensors(seed=1))


def test_a_missing_name_is_refused_and_nothing_is_loaded(saved):
    target = tensors(seed=1)
    target["model"]["blocks.1.attn.qkv.bias"] = torch.zeros(12)
    kept = {name: value.clone() for name, value in flat(target).items()}
    with pytest.raises(UserError, match=r"has no tensor model\.blocks\.1\.attn\.qkv\.bias"):
        load(saved, target)
    assert all(torch.equal(value, kept[name]) for name, value in flat(target).items())


@pytest.mark.parametrize("shape", [(6, 5), (4, 6), (24,), (6, 4, 1)])
def test_a_wrong_shape_is_refused_and_nothing_is_loaded(saved, shape):
    target = tensors(seed=1)
    target["model"]["embed.patch.weight"] = torch.ones(shape)
    kept = {name: value.clone() for name, value in flat(target).items()}
    with pytest.raises(UserError) as caught:
        load(saved, target)
    words = f"model.embed.patch.weight is [6, 4], but the model's is {list(shape)}"
    assert words in str(caught.value)
    assert all(torch.equal(value, kept[name]) for name, value in flat(target).items())


def test_a_decay_that_was_not_saved_is_refused(saved):
    with pytest.raises(UserError, match=r"has no tensor ema\.0\.99\.embed"):
        load(saved, {"ema": {"0.99": tensors()["model"]}})


@pytest.mark.parametrize("text", ["", "{", '{"step": 7, "fil'])
def test_a_damaged_manifest_is_named(saved, text):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        load(saved, tensors())


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "titan_dit.checkpoint/0"}'])
def test_a_manifest_of_another_format_is_refused(saved, text):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"does not have the format titan_dit\.checkpoint/1"):
        read_record(saved)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a checkpoint"):
        load(tmp_path, tensors())


def test_checkpoints_are_listed_by_step(folder):
    checkpoints = at_once(folder, keep=0)
    assert checkpoints.complete() == []
    assert checkpoints.newest() is None
    for step in (30, 7, 100_000_000, 99_999_999):
        checkpoints.save(step, {"model": {"w": torch.ones(1)}}, {"step": step})
    # The last has one more digit: sorted as text it would come first.
    steps = [step_of(path) for path in checkpoints.complete()]
    assert steps == [7, 30, 99_999_999, 100_000_000]
    assert checkpoints.newest().name == "step-100000000"


@pytest.mark.parametrize(
    "name",
    ["step-00000009.partial", "step-00000009.set-aside", "step-9", "step-0000009x", "notes"],
)
def test_only_a_folder_with_the_final_name_is_a_checkpoint(saved, folder, name):
    (folder / name).mkdir()
    (folder / name / "manifest.json").write_bytes((saved / "manifest.json").read_bytes())
    assert Checkpoints(folder).complete() == [saved]


def test_a_folder_without_a_manifest_is_no_checkpoint(saved, folder):
    (folder / "step-00000009").mkdir()
    assert Checkpoints(folder).newest() == saved


@pytest.mark.parametrize("moment", ["tensors", "digests", "manifest", "rename"])
def test_an_interrupted_save_is_invisible_and_is_cleaned_by_the_next(
    saved, folder, monkeypatch, moment
):
    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    rename = Path.rename

    def kill_at_the_end(path, target):
        return kill() if Path(path).name.endswith(".partial") else rename(path, target)

    where = {
        "tensors": (torch_files.Writer, "write_data", kill),
        "digests": (torch_files.Digesting, "write", kill),
        "manifest": (store.Disk, "write", kill),
        "rename": (Path, "rename", kill_at_the_end),
    }[moment]
    with monkeypatch.context() as patched:
        patched.setattr(*where)
        with pytest.raises(Killed):
            at_once(folder).save(9, tensors(seed=1), {"step": 9})
    left = folder / "step-00000009.partial"
    assert left.is_dir()
    assert Checkpoints(folder).complete() == [saved]
    load(saved, tensors())
    at_once(folder).save(12, tensors(seed=1), {"step": 12})
    assert not left.exists()
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def test_what_an_interrupted_save_left_does_not_get_into_the_next(folder):
    left = folder / "step-00000007.partial"
    left.mkdir(parents=True)
    (left / "__1_0.distcp").write_bytes(b"of a rank that is no more")
    path = at_once(folder).save(7, tensors(), RECORD)
    assert not (path / "__1_0.distcp").exists()
    load(path, tensors(seed=1))


def test_saving_a_step_again_replaces_it(saved, folder):
    again = at_once(folder).save(7, tensors(seed=2), RECORD | {"cursor": 1})
    assert again == saved
    target = tensors(seed=1)
    load(saved, target)
    assert_equal(target, tensors(seed=2))
    assert read_record(saved)["cursor"] == 1


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_the_newest_are_kept(folder, keep, left):
    checkpoints = at_once(folder, keep=keep)
    (folder / "step-00000001.set-aside").mkdir(parents=True)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"model": {"w": torch.full((2,), float(step))}}, {"step": step})
    assert [step_of(path) for path in checkpoints.complete()] == left
    # Renamed checkpoints are never deleted.
    assert (folder / "step-00000001.set-aside").is_dir()
    for path in checkpoints.complete():
        target = {"model": {"w": torch.zeros(2)}}
        load(path, target)
        assert target["model"]["w"].tolist() == [step_of(path)] * 2


def test_a_checkpoint_can_be_moved(saved, tmp_path):
    moved = saved.rename(tmp_path / "best")
    target = tensors(seed=1)
    load(moved, target)
    assert_equal(target, tensors())


def test_a_changed_digit_in_the_manifest_is_noticed(saved):
    manifest = saved / "manifest.json"
    text = manifest.read_text()
    assert '"step": ' in text
    manifest.write_text(text.replace('"step": ', '"step": 1', 1))
    with pytest.raises(UserError, match="digest differs"):
        read_record(saved)


def test_nothing_is_copied_ahead(tmp_path):
    """On a CPU torch would initialise the first GPU for it."""
    assert torch_files.Writer(tmp_path).per_thread_copy_ahead == 0


def test_tensors_that_share_a_storage_are_written_from_the_memory_of_one(folder, monkeypatch):
    allocate, sizes = torch_files.allocate, []

    def noted(num_bytes, **keys):
        sizes.append(num_bytes)
        return allocate(num_bytes, **keys)

    monkeypatch.setattr(torch_files, "allocate", noted)
    flat = torch.arange(60_000.0)
    shared = {str(number): flat[5000 * number :][:5000] for number in range(9)}
    shared["transposed"] = flat[50_000:].view(100, 100).t()[:, :20]
    path = at_once(folder).save(7, {"model": shared, "step": torch.tensor(7.0)}, RECORD)
    assert sum(sizes) <= 2 * 32768
    found = {name: torch.empty(tensor.shape) for name, tensor in shared.items()}
    load(path, {"model": found})
    assert_equal(found, shared)


def as_older(folder, metadata=None):
    """Make a checkpoint as older versions wrote it: only `.metadata` says where tensors are."""
    if metadata is not None:
        (folder / torch_files.METADATA).write_bytes(metadata)
    manifest = record.read_manifest(folder)
    manifest["files"].pop("tensors.json", None)
    manifest["files"][torch_files.METADATA] = checkpoint.describe(folder / torch_files.METADATA)
    manifest["digest"] = record.digest_of(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("num_fields", [5, 6, 7])
def test_metadata_of_another_torch_is_read(saved, monkeypatch, num_fields):
    """torch 2.15 added a sixth property of tensors."""
    fields = (torch.float32, *TensorProperties().__getstate__()[1:], (1,), "later")[:num_fields]
    before = checkpoint.contents(saved)
    whole = pickle.loads((saved / torch_files.METADATA).read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr(TensorProperties, "__getstate__", lambda _: fields)
        as_older(saved, pickle.dumps(whole))
    assert checkpoint.contents(saved) == before
    target = tensors(seed=1)
    load(saved, target)
    assert_equal(target, tensors())


def test_weights_of_a_step_that_was_written_once_more_are_the_new_ones(tmp_path):
    path, found = tmp_path / "step-00000007", {"w": torch.zeros(4, 2)}
    checkpoint.write(path, {"model": {"a": torch.ones(2), "w": torch.ones(4, 2)}}, RECORD)
    saved = Weights(path, read_record(path), "model")
    shutil.rmtree(path)
    # The tensors lie elsewhere in their files.
    checkpoint.write(path, {"model": {"a": torch.ones(900), "w": torch.full((4, 2), 3.0)}}, RECORD)
    saved.load(found)
    assert (found["w"] == 3).all()
