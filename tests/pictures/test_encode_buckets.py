"""`data encode --buckets`: which bucket a picture goes to, its crop, the shards and the report."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from commands import run
from encoded_sets import CPU, plan_of, run_job
from folders_of_files import files_in
from PIL import Image
from refusals import refused
from tiny_vae import save_vae

from titan_dit.commands.flags import DataEncodeFlags
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latents import LatentShards
from titan_dit.data.manifest import bucket_names, read_manifest
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.pictures import autoencoder
from titan_dit.pictures.bucket_job import make_bucket_job
from titan_dit.pictures.encode_job import EncodeOptions
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.picture_sizes import Size
from titan_dit.pictures.readers import open_input
from titan_dit.pictures.report import by_bucket, read_report
from titan_dit.pictures.survey import Survey, survey_share

SIZES = (Size(8, 16), Size(16, 8), Size(12, 12))
TURNED = 6
"""EXIF orientation: the camera was held by its side."""


def noise(number, width, height):
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save_pictures(root):
    """Eight pictures for three buckets, of which one lies on its side, and three that fit none."""
    root.mkdir()
    sizes = [(8, 16), (16, 8), (24, 24), (9, 18), (40, 18), (6, 6), (17, 9), (80, 8)]
    for number, (width, height) in enumerate(sizes):
        noise(number, width, height).save(root / f"{number}.png")
    exif = Image.Exif()
    exif[0x0112] = TURNED
    noise(8, 16, 8).save(root / "8.jpg", exif=exif)
    (root / "9.png").write_bytes(b"no picture")
    for number in range(10):
        (root / f"{number}.txt").write_text(f"picture {number}")
    noise(10, 8, 8).save(root / "10.png")
    (root / "notes.md").write_text("x")
    return root


def job_of(source, output, vae, sizes=SIZES, device=CPU, **how):
    """The job of an encoding by buckets, and the autoencoder."""
    loaded = autoencoder.load(vae, device)
    pictures = open_input(source, ListingOptions(no_caption=how.pop("no_caption", "skip")))
    survey = survey_share(pictures, 2, lambda _: None)
    options = EncodeOptions(**{"batch_size": 4, "shard_size": 2} | how)
    job = make_bucket_job(pictures, source, output, loaded, options, sizes=sizes, survey=survey)
    return job, loaded


def encoded(source, output, vae, **how):
    return run_job(*job_of(source, output, vae, **how), output)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("buckets")
    save_vae(root / "vae")
    save_pictures(root / "in")
    encoded(root / "in", root / "set", str(root / "vae"), dtype="float32", posterior="mean")
    return root


def stored(root, name, row):
    """The latent of a row, and the one that the autoencoder gives for the picture's pixels."""
    return LatentShards(root / name).read([row])["latent"][0]


def latent_of(root, pixels):
    """The latent of pixels [h, w, 3]."""
    vae = autoencoder.load(str(root / "vae"), CPU)
    picture = torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1)
    return vae.encode(picture[None])[0][0]


def test_a_picture_of_a_buckets_size_is_stored_as_it_is_height_before_width(root):
    reports = {report.name: report for report in read_report(root / "set")}
    for name, shape in (("0.png", (2, 8, 4)), ("1.png", (2, 4, 8))):
        with Image.open(root / "in" / name) as image:
            wanted = latent_of(root, image)
        found = stored(root, "set", reports[name].row)
        assert tuple(found.shape) == tuple(wanted.shape) == shape
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_picture_that_lies_on_its_side_is_turned_before_its_bucket_is_chosen(root):
    report = next(report for report in read_report(root / "set") if report.name == "8.jpg")
    assert (report.size, report.bucket, report.crop, report.scale) == ("8x16", "8x16", 0.0, 1.0)
    with Image.open(root / "in" / "8.jpg") as image:
        wanted = latent_of(root, image.transpose(Image.Transpose.ROTATE_270))
    torch.testing.assert_close(stored(root, "set", report.row), wanted, atol=1e-5, rtol=1e-5)


def test_every_file_is_reported_with_its_bucket_crop_and_caption_or_a_reason(root):
    lines = {
        line["file_name"]: line
        for line in map(json.loads, (root / "set" / "pictures.jsonl").read_text().splitlines())
    }
    assert len(lines) == 12
    assert lines["4.png"] == {
        "file_name": "4.png",
        "row": 4,
        "size": "40x18",
        "bucket": "16x8",
        "crop": 0.1,
        "scale": 0.4444,
        "text": "picture 4",
    }
    assert (lines["5.png"]["bucket"], lines["5.png"]["scale"]) == ("12x12", 2.0)
    assert lines["2.png"]["scale"] == 0.5
    names = by_bucket(list(read_report(root / "set")))
    assert sorted(bucket_names(read_manifest(root / "set"))) == sorted(names)
    reasons = {name: line["reason"] for name, line in lines.items() if "reason" in line}
    assert reasons == {
        "7.png": "80 x 8 pixels: too thin, of its nearest bucket 16x8 shows 20% of it",
        "9.png": "not a readable image: damaged, or cut off",
        "10.png": "no caption",
        "notes.md": "not a picture",
    }
    dropped = json.loads((root / "set" / "dropped.json").read_text())
    assert {entry["file"] for entry in dropped} == {"7.png", "9.png", "10.png"}


def test_the_command_lists_the_report(root):
    done = run([sys.executable, "-m", "titan_dit", "data", "report", "set"], root)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == '0.png: 8x16 to 8x16, crop 0.0%, not enlarged, "picture 0"'
    assert said[5] == '5.png: 6x6 to 12x12, crop 0.0%, enlarged 2.00x, "picture 5"'
    assert "10.png: left out, no caption" in said
    assert "bucket 16x8: 3 pictures, crop 5.2% up to 10.0%, 0 enlarged" in said
    assert said[-1] == "8 encoded, 8 of them with a caption"
    few = run(
        [sys.executable, "-m", "titan_dit", "data", "report", "set", "--left-out"], root
    ).stdout
    assert '"picture 0"' not in few
    assert "notes.md: left out, not a picture" in few


def test_a_shard_holds_one_shape_and_rows_of_a_bucket_follow_each_other(root):
    source = LatentShards(root / "set", verify=True)
    assert source.manifest["format"] == "titan_dit.latents/3"
    assert [(b.shape, b.first, b.count) for b in source.buckets] == [
        ((2, 8, 4), 0, 3),
        ((2, 4, 8), 3, 3),
        ((2, 6, 6), 6, 2),
    ]
    assert [entry["bucket"] for entry in source.manifest["shards"]] == [0, 0, 1, 1, 2]
    captions = map(json.loads, (root / "set" / "captions.jsonl").read_text().splitlines())
    reports = {report.row: report for report in read_report(root / "set")}
    rows = [(line["row"], line["file_name"], line["text"]) for line in captions]
    assert rows == [(row, reports[row].name, reports[row].text) for row in range(8)]


def test_bytes_depend_neither_on_stops_nor_on_who_reads_the_sizes(root):
    how = {"dtype": "float32", "posterior": "mean"}
    job, vae = job_of(root / "in", root / "again" / "set", str(root / "vae"), **how)
    parts = [survey_share(job.pictures, 1, lambda _: None, rank, 3) for rank in range(3)]
    whole = survey_share(job.pictures, 1, lambda _: None)
    joined = Survey.joined(parts)
    assert (joined.sizes == whole.sizes).all()
    assert joined.reasons == whole.reasons
    assert run_job(job, vae, root / "again" / "set") is not None
    assert files_in(root / "again" / "set") == files_in(root / "set")
    (root / "again" / "set" / "set-00003.safetensors").unlink()
    assert encoded(root / "in", root / "again" / "set", str(root / "vae"), **how) is not None
    assert files_in(root / "again" / "set") == files_in(root / "set")
    assert encoded(root / "in", root / "again" / "set", str(root / "vae"), **how) is None


def test_other_buckets_are_another_job(root):
    said = refused(lambda: encoded(root / "in", root / "set", str(root / "vae"), sizes=SIZES[:2]))
    assert "holds another dataset" in said


def test_a_single_square_writes_the_bytes_of_image_size(root, tmp_path):
    vae, how = str(root / "vae"), {"flip": True, "batch_size": 4, "shard_size": 3}
    encoded(root / "in", tmp_path / "a" / "set", vae, sizes=(Size(8, 8),), **how)
    plan, loaded = plan_of(root / "in", tmp_path / "b" / "set", vae, no_caption="skip", **how)
    run_job(plan, loaded, tmp_path / "b" / "set")
    squares = files_in(tmp_path / "a" / "set")
    report = squares.pop("pictures.jsonl")
    assert squares == files_in(tmp_path / "b" / "set")
    assert b'"bucket": "8x8"' in report
    # One bucket takes all shapes, as ever.
    assert LatentShards(tmp_path / "a" / "set").facts.count == 2 * 9


def test_a_single_oblong_bucket_is_a_dataset_of_one_shape(root, tmp_path):
    encoded(root / "in", tmp_path / "set", str(root / "vae"), sizes=(Size(16, 8),))
    source = LatentShards(tmp_path / "set")
    assert (source.facts.shape, source.facts.bucket_shapes) == ((4, 4, 8), ())
    assert "bucket_shapes" not in source.facts.as_json()
    assert source.read([0, 8])["latent"].shape == (2, 4, 4, 8)
    assert source.order(0, (), "feistel").num_rows == 9


def test_rows_of_a_bucket_are_read_and_those_of_two_have_no_shape(root):
    source = LatentShards(root / "set")
    for bucket in source.buckets:
        rows = list(reversed(bucket.rows))
        found = source.read(rows)["latent"]
        assert tuple(found.shape[1:]) == bucket.shape
        assert all(torch.equal(found[i], source[row]["latent"]) for i, row in enumerate(rows))
    with pytest.raises(ValueError, match="rows of 2 buckets"):
        source.read([0, 3])
    assert source.fields["latent"].shape == (2, None, None)
    assert (source.facts.shape, source.facts.bucket_counts) == ((2, 6, 6), (3, 3, 2))
    assert type(source.facts).from_json(source.facts.as_json()) == source.facts


def test_steps_are_of_one_bucket_and_see_every_row(root):
    source = LatentShards(root / "set")
    order = source.order(1, (), "feistel", [2, 1, 4])
    seen, cursor = [], 0
    while cursor < order.samples_before(2):
        step = order.step(cursor)
        rows = order.rows(step.numbers)
        assert source.read(rows)["latent"].shape[1:] == source.buckets[step.bucket].shape
        seen += rows
        cursor = step.next_cursor
    assert sorted(seen) == sorted(2 * list(range(8)))


@pytest.mark.parametrize("data_order", ["feistel", "sort"])
def test_held_out_rows_come_from_every_bucket_and_leave_it_some(root, data_order):
    source = LatentShards(root / "set")
    for count in (3, 5):
        rows = held_out_rows(source, 7, count, data_order)
        taken = [sum(row in bucket.rows for row in rows) for bucket in source.buckets]
        assert sum(taken) == count
        assert all(0 < n < b.count for n, b in zip(taken, source.buckets, strict=True))
    said = refused(lambda: held_out_rows(source, 7, 6, data_order))
    assert said == (
        "[validation] samples=6: one picture of each of the 3 buckets of [data] stays in training, "
        "so at most 5 rows can be held out. Set fewer."
    )


def test_mirror_images_stay_with_their_pictures_and_units_are_measured_over_all_buckets(
    root, tmp_path
):
    vae, how = str(root / "vae"), {"flip": True, "units": "measured", "dtype": "float32"}
    encoded(root / "in", tmp_path / "set", vae, **how)
    source = LatentShards(tmp_path / "set")
    assert [bucket.count for bucket in source.buckets] == [6, 6, 4]
    reports = [report for report in read_report(tmp_path / "set") if not report.reason]
    assert {report.row for report in reports} == set(range(0, 16, 2))
    with Image.open(root / "in" / "1.png") as image:
        wanted = latent_of(root, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    row = next(report.row for report in reports if report.name == "1.png")
    torch.testing.assert_close(source[row + 1]["latent"][:2], wanted, atol=1e-5, rtol=1e-5)
    rows = held_out_rows(source, 7, 6, "feistel")
    assert all(row ^ 1 in rows for row in rows)
    assert all(any(row in bucket.rows for row in rows) for bucket in source.buckets)
    means = [source.read(bucket.rows)["latent"][:, :2].double() for bucket in source.buckets]
    pixels = torch.cat([mean.transpose(0, 1).flatten(1) for mean in means], 1)
    shift = torch.tensor(source.facts.shift, dtype=torch.float64)
    torch.testing.assert_close(shift, pixels.mean(1), atol=1e-12, rtol=1e-12)


def test_a_manifest_of_buckets_that_contradicts_itself_is_refused(root, tmp_path):
    def said(change):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        shutil.copytree(root / "set", tmp_path / "set")
        file = tmp_path / "set" / "manifest.json"
        manifest = json.loads(file.read_text())
        change(manifest)
        file.write_text(json.dumps(manifest))
        return refused(lambda: LatentShards(tmp_path / "set"))

    def swap(manifest):
        manifest["buckets"][0]["shape"] = [2, 4, 8]
        manifest["buckets"][1]["shape"] = [2, 8, 4]

    assert "buckets must be a list" in said(lambda m: m.pop("buckets"))
    assert "do not follow each other" in said(lambda m: m["shards"].reverse())
    assert "do not follow each other" in said(lambda m: m["shards"][-1].update(bucket=7))
    assert "buckets[1] has count=9" in said(lambda m: m["buckets"][1].update(count=9))
    assert "differ in their channels" in said(lambda m: m["buckets"][1].update(shape=[4, 4, 8]))
    assert "the same shape" in said(lambda m: m["buckets"][1].update(shape=[2, 8, 4]))
    assert "holds torch.float32 [2, 2, 8, 4], but" in said(swap)


def test_what_cannot_be_encoded_is_one_line(root, tmp_path):
    vae = str(root / "vae")
    save_pictures(tmp_path / "in")
    for number in range(9):
        file = next((tmp_path / "in").glob(f"{number}.[pj]*g"))
        file.write_bytes(b"x")
    said = refused(lambda: encoded(tmp_path / "in", tmp_path / "a", vae))
    assert said.endswith("in/0.png: not a readable image: damaged, or cut off.")
    assert not (tmp_path / "a").exists()


def test_one_flag_says_the_size():
    given = {"input": "in", "out": "out", "vae": "vae"}
    assert DataEncodeFlags(**given, image_size=8).sizes() == ()
    assert DataEncodeFlags(**given, buckets="8x16, 16x8").sizes() == (Size(8, 16), Size(16, 8))
    assert Size(64, 64) in DataEncodeFlags(**given, pixels=4096).sizes()
    none = "[data encode] give one of --image-size, --buckets, --pixels, such as --image-size 256."
    assert refused(DataEncodeFlags(**given).sizes) == none
    assert refused(DataEncodeFlags(**given, image_size=8, pixels=64).sizes).startswith(
        "[data encode] --image-size and --pixels exclude each other: give one of"
    )


def test_reports_of_sets_without_sizes_have_captions_and_reasons(root, tmp_path):
    vae = str(root / "vae")
    plan, loaded = plan_of(root / "in", tmp_path / "set", vae, no_caption="skip")
    run_job(plan, loaded, tmp_path / "set")
    reports = {report.name: str(report) for report in read_report(tmp_path / "set")}
    assert reports["3.png"] == '3.png: "picture 3"'
    assert reports["9.png"] == "9.png: left out, not a readable image: damaged, or cut off"
    assert by_bucket(list(read_report(tmp_path / "set"))) == {}
    assert "no set of `data encode`" in refused(lambda: list(read_report(root / "in")))
    (tmp_path / "set" / "captions.jsonl").write_text('{"file_name": 3}\n')
    assert "captions.jsonl, line 1: file_name" in refused(
        lambda: list(read_report(tmp_path / "set"))
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_encodes_by_buckets_on_any_number_of_ranks(root, tmp_path, ranks):
    shutil.copytree(root / "in", tmp_path / "in")
    words = [
        sys.executable,
        "-m",
        "titan_dit",
        "data",
        "encode",
        "--input",
        "in",
        "--out",
        "set",
        "--workers",
        "1",
    ]
    words += ["--vae", str(root / "vae"), "--buckets", "8x16,16x8,12x12", "--no-caption", "skip"]
    words += ["--dtype", "float32", "--posterior", "mean", "--batch-size", "4", "--shard-size", "2"]
    done = run(words, tmp_path, NGPU=ranks)
    assert done.returncode == 0, done.stderr
    assert "6 shards of float32 in 3 buckets by AutoencoderKL" in done.stdout
    assert "bucket 8x16: 3 pictures, crop 0.0% up to 0.0%, 0 enlarged" in done.stdout
    found, wanted = files_in(tmp_path / "set"), files_in(root / "set")
    assert {k: v for k, v in found.items() if k != "manifest.json"} == {
        k: v for k, v in wanted.items() if k != "manifest.json"
    }


def test_a_network_of_one_size_refuses_several_shapes_before_it_reads_a_row(root):
    facts = LatentShards(root / "set").facts
    model = DiTConfig(size="S/2", latent_size=6, in_channels=2, num_classes=1)
    said = refused(lambda: RectifiedFlowConfig().sized_models(model, facts))
    assert said.startswith(
        '[model] name="dit" takes latents of one shape, but [data] holds 3: [2, 8, 4], [2, 4, 8], '
    )
    assert said.endswith("or encode pictures of one size (--image-size).")
