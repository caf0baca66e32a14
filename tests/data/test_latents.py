import json
import pickle
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from folders_of_files import files_in
from small_shards import SECOND, ten_latents, write_ten

from titan_dit.config.section import UserError
from titan_dit.data import latents as latents_module
from titan_dit.data import sections
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.latents import LatentShards, write_buckets, write_shards
from titan_dit.data.sections import Digits, Latents
from titan_dit.diffusion.objective import drawn_latents
from titan_dit.rng import SampleRNG


@pytest.fixture
def folder(tmp_path):
    return write_ten(tmp_path / "set")


def test_the_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    digits = Digits().open()
    assert len(digits) == digits.facts.count == 1797
    assert digits.facts.shape == (1, 8, 8)
    assert digits.facts.num_classes == 10
    assert digits.facts.value_range == (-1, 1)
    samples = [digits[i] for i in range(1797)]
    drawn = torch.stack([sample["latent"] for sample in samples])
    assert drawn.dtype == torch.float16
    assert torch.equal(drawn.double().flatten(1), torch.from_numpy(pixels / 8 - 1))
    assert [sample["label"] for sample in samples] == labels.tolist()
    assert (drawn.min(), drawn.max()) == (-1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.18215, 0.5)])
def test_what_is_written_is_read(tmp_path, dtype, scale, shift):
    latents, labels = ten_latents(dtype), torch.arange(10) % 4
    write_shards(
        tmp_path / "set",
        latents,
        labels,
        num_classes=4,
        source="a test",
        scale=scale,
        shift=shift,
        value_range=(0.0, 255.0),
        shard_size=4,
    )
    source = LatentShards(tmp_path / "set", verify=True)
    assert len(source) == 10
    assert len(source.shards) == 3
    assert source.facts.value_range == (0, 255)
    for row in (9, 0, 4, 3, 8, 7, 5, 1, 2, 6, 0):
        sample = source[row]
        assert sample["latent"].dtype == dtype
        assert torch.equal(sample["latent"], latents[row])
        assert sample["label"] == labels[row]
    rows = [9, 0, 4, 3, 8, 7, 5, 1, 2, 6, 0]
    samples = source.read(rows)
    assert torch.equal(samples["latent"], latents[rows])
    assert torch.equal(samples["label"], labels[rows])
    seen = drawn_latents(
        source.read(range(10))["latent"], source.facts, 2, SampleRNG(0, torch.arange(10))
    )
    expected = (latents.double() - shift) * scale
    torch.testing.assert_close(seen.double(), expected, rtol=1e-6, atol=1e-6)
    back = source.facts.to_stored_units(seen)
    # Clamped to value_range.
    torch.testing.assert_close(back, latents.float().clamp(0, 255), rtol=1e-5, atol=1e-4)


def test_the_digest_tells_datasets_apart_but_not_their_places(folder, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert LatentShards(moved).facts == LatentShards(folder).facts
    shutil.rmtree(moved)
    write_shards(
        moved, ten_latents(torch.float16) + 1, torch.arange(10) % 4, num_classes=4, source="b"
    )
    assert LatentShards(moved).facts.digest != LatentShards(folder).facts.digest


def test_a_dataset_that_is_there_is_not_overwritten(folder):
    before = files_in(folder)
    with pytest.raises(UserError, match=r"set already holds a dataset.*Delete the folder, or"):
        write_shards(
            folder, ten_latents(torch.uint8), torch.zeros(10).long(), num_classes=1, source=""
        )
    assert files_in(folder) == before
    # Without a manifest it is no dataset: files of an unfinished write are overwritten.
    (folder / "manifest.json").unlink()
    write_shards(folder, ten_latents(torch.uint8), torch.zeros(10).long(), num_classes=1, source="")
    assert len(LatentShards(folder)) == 10


def test_a_dtype_that_could_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(UserError, match="float64"):
        write_shards(
            tmp_path / "set",
            torch.zeros(2, 1, 8, 8, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            num_classes=1,
            source="test",
        )
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(9).long(), r"label is torch.int64 \[9\], not int64 \[10\]"),
        (torch.zeros(10), r"label is torch.float32 \[10\]"),
        (torch.zeros(10).int(), r"label is torch.int32"),
        (torch.arange(10), r"row 4 has label=4, outside 0 to 3"),
        (torch.full((10,), -1), r"row 0 has label=-1"),
    ],
)
def test_labels_that_could_not_be_opened_are_not_written(tmp_path, labels, words):
    with pytest.raises(UserError, match=words):
        write_shards(
            tmp_path / "set", ten_latents(torch.float16), labels, num_classes=4, source="test"
        )
    assert not (tmp_path / "set").exists()


def test_no_samples_are_no_dataset(tmp_path):
    with pytest.raises(UserError, match="hold no sample"):
        write_shards(
            tmp_path / "set",
            ten_latents(torch.float16)[:0],
            torch.zeros(0).long(),
            num_classes=4,
            source="test",
        )
    assert not (tmp_path / "set").exists()


def test_a_changed_sample_leaves_the_dataset_alone(tmp_path):
    latents = torch.arange(64.0).view(1, 1, 8, 8)
    write_shards(tmp_path, latents, torch.zeros(1, dtype=torch.int64), num_classes=1, source="test")
    opened = LatentShards(tmp_path)
    opened[0]["latent"].zero_()
    assert torch.equal(opened[0]["latent"], latents[0])
    with pytest.raises(IndexError):
        opened[-1]
    with pytest.raises(IndexError):
        opened[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_not_written(tmp_path, bad):
    latents = ten_latents(torch.float16)
    latents[6, 1, 2, 0] = bad
    with pytest.raises(UserError, match="row 6 holds NaN or infinity"):
        write_shards(tmp_path / "x", latents, torch.zeros(10).long(), num_classes=1, source="test")
    assert not (tmp_path / "x").exists()


def test_the_digits_are_always_verified(tmp_path, monkeypatch):
    shutil.copytree(Path(sections.__file__).parent / "digits", tmp_path / "digits")
    monkeypatch.setattr(sections, "__file__", str(tmp_path / "sections.py"))
    assert len(Digits().open()) == 1797
    shard = tmp_path / "digits" / "digits-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="SHA-256"):
        Digits().open()


def test_everyone_may_read_what_is_written(folder):
    assert (folder / SECOND).stat().st_mode & 0o444 == 0o444


def test_facts_survive_json():
    facts = LatentShards(Digits().open().path).facts
    for kept in (facts, LatentFacts(shape=(4, 32, 32), count=7, num_classes=1000, scale=0.18215)):
        assert LatentFacts.from_json(json.loads(json.dumps(kept.as_json()))) == kept


def resident_kib(kind):
    """This process's resident memory: all of it (VmRSS), or without mapped files (RssAnon)."""
    return int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_memory_does_not_grow_with_the_labels(tmp_path):
    """Ten million labels are 80 MB. Opening checks all of them and reads none twice."""
    count = 10_000_000
    latents, labels = torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.arange(count) % 7
    write_shards(tmp_path / "set", latents, labels, num_classes=7, source="a test")
    config = Latents(path=str(tmp_path / "set"))
    own = resident_kib("RssAnon")
    source = config.open_surveyed(None)
    # Reading the header of a mapped shard may map its neighbourhood, too.
    whole = resident_kib("VmRSS")
    config.survey()
    held_out = held_out_rows(source, 0, 700, "feistel")
    assert resident_kib("VmRSS") - whole < 8_000
    assert torch.equal(source.read(held_out)["label"], labels[list(held_out)])
    # Their pages are the page cache's, which all ranks of a node share.
    assert resident_kib("RssAnon") - own < 8_000


def test_only_the_survey_reads_the_labels(tmp_path):
    """One rank surveys; a label of a damaged shard is its finding."""
    folder = write_ten(tmp_path / "set")
    config = Latents(path=str(folder))
    with mock.patch.object(latents_module, "check_labels") as check:
        assert config.survey() is None
        assert check.call_count == 3
        config.open_surveyed(None)
        assert check.call_count == 3


def test_latents_of_several_shapes_are_written_and_read_bucket_by_bucket(tmp_path):
    shapes = [(3, 4, 6), (3, 6, 4), (3, 5, 5)]
    buckets = [
        (torch.randn(n, *shape), torch.arange(n) % 2)
        for n, shape in zip((5, 3, 2), shapes, strict=True)
    ]
    write_buckets(tmp_path / "set", buckets, num_classes=2, source="test", shard_size=2)
    source = LatentShards(tmp_path / "set", verify=True)
    assert len(source.shards) == 3 + 2 + 1
    assert source.facts.bucket_shapes == tuple(shapes)
    for bucket, (latents, labels) in zip(source.buckets, buckets, strict=True):
        rows = torch.randperm(bucket.count)
        found = source.read([bucket.first + row for row in rows.tolist()])
        assert torch.equal(found["latent"], latents[rows])
        assert torch.equal(found["label"], labels[rows])
    assert source.groups().tolist() == [0] * 5 + [1] * 3 + [2] * 2
    assert source.labels.tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 0, 1]


# ---- Clips ----


def write_clips(root, **changed):
    """Six clips [2, f, 3, 4] in two buckets, of one and of three latent frames; their latents."""
    torch.manual_seed(1)
    buckets = [
        (torch.randn(n, 2, f, 3, 4).half(), torch.arange(n) % 2) for n, f in ((2, 1), (4, 3))
    ]
    write_buckets(root, buckets, num_classes=2, source="a test", shard_size=3)
    file = root / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return [latents for latents, _ in buckets]


VIDEO_VAE = {
    "class": "AutoencoderKLWan",
    "source": "vae",
    "digest": "d" * 64,
    "factor": 8,
    "frames_factor": 4,
}


def test_clips_are_read_as_they_were_written(tmp_path):
    units = {"scale": [2.0, 4.0], "shift": [0.0, 1.0]}
    one, three = write_clips(tmp_path / "set", vae=VIDEO_VAE, posterior="mean", **units)
    source = LatentShards(tmp_path / "set", verify=True)
    facts = source.facts
    assert (facts.shape, facts.bucket_shapes) == ((2, 3, 3, 4), ((2, 1, 3, 4), (2, 3, 3, 4)))
    assert facts.has_clips
    assert source.bucket_names == ["2x1x3x4", "2x3x3x4"]
    assert source.fields["latent"].shape == (2, None, None, None)
    assert torch.equal(source.read([1, 0])["latent"], one[[1, 0]])
    found = source.read([5, 2, 4])["latent"]
    assert torch.equal(found, three[[3, 0, 2]])
    assert source.as_clips().facts == facts
    # Units are by channel, for all frames.
    seen = drawn_latents(found, facts, 2, SampleRNG(0, torch.arange(3)))
    assert torch.equal(seen[:, 0], 2 * found[:, 0].float())
    assert torch.equal(seen[:, 1], 4 * (found[:, 1].float() - 1))
    torch.testing.assert_close(facts.to_stored_units(seen), found.float())
    # Checkpoints have the facts as JSON.
    record = json.loads(json.dumps(facts.as_json()))
    assert LatentFacts.from_json(record) == facts
    assert facts.vae.frames_factor == record["vae"]["frames_factor"] == 4


def test_a_mean_and_a_std_of_clips_are_drawn_by_sample_number(tmp_path):
    _, three = write_clips(tmp_path / "set")
    source = LatentShards(tmp_path / "set")
    stored = three.abs()
    rng = SampleRNG(0, torch.tensor([7, 8, 9, 10]))
    drawn = drawn_latents(stored, source.facts, 1, rng)
    assert drawn.shape == (4, 1, 3, 3, 4)
    noise = rng.normal("latent", (1, 3, 3, 4))
    assert torch.equal(drawn, stored[:, :1].float() + stored[:, 1:].float() * noise)


def test_a_picture_is_a_clip_of_one_frame(folder):
    pictures = LatentShards(folder)
    clips = pictures.as_clips()
    assert clips.facts.shape == (2, 1, 3, 3)
    assert not pictures.facts.has_clips
    assert clips.fields["latent"].shape == (2, 1, 3, 3)
    assert torch.equal(clips.read([9, 0])["latent"], pictures.read([9, 0])["latent"][:, :, None])
    assert clips.facts.digest == pictures.facts.digest
    again = pickle.loads(pickle.dumps(clips))
    assert again.facts == clips.facts
    assert torch.equal(again.read([4])["latent"], clips.read([4])["latent"])


def test_facts_of_before_clips_are_unchanged(folder):
    record = LatentShards(folder).facts.as_json()
    entry = {"kind": "AutoencoderKL", "digest": "d", "factor": 8}
    facts = LatentFacts.from_json({**record, "vae": entry})
    assert facts.vae.frames_factor == 1
    assert facts.as_json()["vae"] == entry


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"buckets": [{"shape": [2, 1, 3, 4], "count": 2}, {"shape": [2, 3, 4], "count": 4}]},
            "some of its buckets hold pictures and some clips: a picture is [c, 1, h, w]",
        ),
        (
            {"buckets": [{"shape": [2, 1, 1, 3, 4], "count": 2}]},
            "shape=[2, 1, 1, 3, 4] must be [c, h, w], or [c, f, h, w] of clips",
        ),
        (
            {"buckets": [{"shape": [2, 3, 1, 4], "count": 2}, {"shape": [2, 3, 3, 4], "count": 4}]},
            "but the manifest says float16 [2, 2, 3, 1, 4]",
        ),
        ({"vae": VIDEO_VAE | {"frames_factor": 0}}, "vae: frames_factor=0 "),
        ({"fps": 0.0}, "fps=0.0 must be at least 0.1"),
        ({"fps": 1e30}, "fps=1e+30 must be at most 1000"),
    ],
)
def test_wrong_manifests_of_clips_are_refused_by_name(tmp_path, changed, words):
    write_clips(tmp_path / "set", **changed)
    with pytest.raises(UserError, match=re.escape(words)):
        LatentShards(tmp_path / "set")


@pytest.mark.parametrize("shape", [[2, 3], [2, 1, 1, 3, 4], [2, -1, 3, 4]])
def test_wrong_shapes_in_a_record_are_refused(folder, shape):
    record = json.loads(json.dumps(LatentShards(folder).facts.as_json()))
    for changed in ({"shape": shape}, {"bucket_shapes": [[2, 3, 3], shape]}):
        with pytest.raises(UserError, match=r"\[checkpoint\] its data:.*shape"):
            LatentFacts.from_json(record | changed)
