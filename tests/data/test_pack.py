import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time

import commands
import numpy as np
import pytest
import torch
from folders_of_files import class_folders, files_in, latents_of, pair, pictures, save
from PIL import Image

from titan_dit.config.section import UserError
from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.listing import list_folder
from titan_dit.data.packing import claim, pack, shard_job, workers
from titan_dit.data.packing.images import center_crop, read_image


def packed(source, output, workers=1, **how):
    """Pack; return the dropped files, None if already packed."""
    return pack.pack(pack.make_plan(source, output, **how), output, workers, lambda *_: None)


def refused(action):
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_class_folders_become_shards(tmp_path, suffix):
    latents, labels = class_folders(tmp_path / "in", suffix)
    how = {"scale": 0.5, "shift": 0.25, "text": "a vae"}
    assert packed(tmp_path / "in", tmp_path / "out", shard_size=5, **how) == []
    names = [f"out-0000{i}.safetensors" for i in range(3)]
    assert sorted(files_in(tmp_path / "out")) == ["manifest.json", *names]
    source = LatentShards(tmp_path / "out", verify=True)
    assert source.manifest["source"] == "a vae"
    assert (source.facts.scale, source.facts.shift) == (0.5, 0.25)
    samples = source.read(range(12))
    assert torch.equal(samples["latent"], latents.half())
    assert torch.equal(samples["label"], labels)
    assert (tmp_path / "out" / names[0]).stat().st_mode & 0o444 == 0o444


def test_the_pair_of_fast_dit_becomes_shards_of_either_precision(tmp_path):
    latents, labels = pair(tmp_path / "in")
    packed(tmp_path / "in", tmp_path / "out", dtype="float32")
    samples = LatentShards(tmp_path / "out", verify=True).read(range(12))
    assert torch.equal(samples["latent"], latents)
    assert torch.equal(samples["label"], labels)


def test_names_of_classes_and_units_go_from_the_manifest_into_the_shards(tmp_path):
    class_folders(tmp_path / "in", classes=("b", "a"))
    manifest = {"format": "titan_dit.folder/1", "scale": 0.5, "source": "x", "classes": ["b", "a"]}
    (tmp_path / "in" / "manifest.json").write_text(json.dumps(manifest))
    packed(tmp_path / "in", tmp_path / "out")
    source = LatentShards(tmp_path / "out")
    assert source.facts.class_names == ("b", "a")
    assert (source.facts.scale, source.manifest["source"]) == (0.5, "x")
    assert "scale=0.1, but" in refused(lambda: packed(tmp_path / "in", tmp_path / "b", scale=0.1))


def test_a_part_of_the_classes_is_packed_for_a_model_of_all(tmp_path):
    class_folders(tmp_path / "in", classes=("0003", "0007"))
    packed(tmp_path / "in", tmp_path / "out", num_classes=1000)
    source = LatentShards(tmp_path / "out")
    assert source.facts.num_classes == 1000
    assert source.labels.unique().tolist() == [3, 7]


def spoil(root):
    """Write one file per kind of fault; return the expected reasons."""
    nan = latents_of(1)[0]
    nan[1, 2, 3] = float("nan")
    save(root / "0000" / "1.npy", nan)
    save(root / "0000" / "2.npy", torch.zeros(4, 8, 9))
    (root / "0001" / "0.npy").write_bytes(b"")
    (root / "0001" / "3.npy").write_bytes((root / "0001" / "2.npy").read_bytes()[:-8])
    save(root / "0002" / "0.npy", torch.full((4, 8, 8), 1e5))
    save(root / "0002" / "1.npy", torch.zeros(4, 8, 8, dtype=torch.int64))
    return {
        "0000/1.npy": "holds NaN or infinity",
        "0000/2.npy": "shape [4, 8, 9], not [4, 8, 8] like the other files",
        "0001/0.npy": "empty file",
        "0001/3.npy": "not a readable .npy file: damaged, or cut off",
        "0002/0.npy": "not finite in float16: above 65504. Pack with --dtype float32",
        "0002/1.npy": "holds torch.int64, not floating-point numbers",
    }


def test_bad_files_are_left_out_and_each_is_in_the_report(tmp_path):
    latents, labels = class_folders(tmp_path / "in", each=6)
    wanted = spoil(tmp_path / "in")
    plan = pack.make_plan(tmp_path / "in", tmp_path / "out", shard_size=4)
    dropped = pack.pack(plan, tmp_path / "out", 1, lambda *_: None)
    report = json.loads((tmp_path / "out" / "dropped.json").read_text())
    assert {entry["file"]: entry["reason"] for entry in report} == wanted
    kept = [i for i in range(18) if i not in {row for row, _ in dropped}]
    assert len(kept) == 12
    samples = LatentShards(tmp_path / "out", verify=True).read(range(12))
    assert torch.equal(samples["latent"], latents[kept].half())
    assert torch.equal(samples["label"], labels[kept])
    assert pack.classes_without_samples(plan, dropped) == []


def test_a_chunk_without_any_good_file_makes_no_shard_and_an_emptied_class_is_known(tmp_path):
    class_folders(tmp_path / "in")
    for i in range(4):
        save(tmp_path / "in" / "0001" / f"{i}.npy", torch.zeros(4, 4, 4))
    plan = pack.make_plan(tmp_path / "in", tmp_path / "out", shard_size=4)
    dropped = pack.pack(plan, tmp_path / "out", 1, lambda *_: None)
    names = [entry["file"] for entry in LatentShards(tmp_path / "out").manifest["shards"]]
    assert names == ["out-00000.safetensors", "out-00002.safetensors"]
    assert pack.classes_without_samples(plan, dropped) == [1]


def test_if_nothing_can_be_packed_nothing_is_left(tmp_path, monkeypatch):
    class_folders(tmp_path / "in")
    for path in (tmp_path / "in").rglob("*.npy"):
        path.write_bytes(b"x" * 50)
    message = refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert "none of 12 sampled files" in message
    assert f"{tmp_path / 'in' / '0000' / '0.npy'}: not a readable .npy file" in message
    # As if all sampled files had been good.
    monkeypatch.setattr(pack, "shape_of_most", lambda *_: (4, 8, 8))
    message = refused(lambda: packed(tmp_path / "in", tmp_path / "out", shard_size=5))
    assert "none of the 12 files can be packed" in message
    assert not (tmp_path / "out").exists()


def test_the_shape_is_that_of_most_files(tmp_path):
    class_folders(tmp_path / "in")
    for i in range(3):
        save(tmp_path / "in" / "0000" / f"{i}.npy", torch.zeros(4, 4, 4))
    assert len(packed(tmp_path / "in", tmp_path / "out")) == 3


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """120 files in 20 chunks, six files bad, packed by one worker."""
    root = tmp_path_factory.mktemp("faulty")
    class_folders(root / "in", each=40)
    spoil(root / "in")
    packed(root / "in", root / "one" / "out", shard_size=6)
    return root


def test_a_full_disk_is_one_error_that_names_the_file_and_workers_write_the_same_bytes(faulty):
    output = faulty / "two" / "out"
    # A folder of that name makes the write fail, like a full disk.
    blocked = output / "out-00019.safetensors.partial"
    blocked.mkdir(parents=True)
    plan = pack.make_plan(faulty / "in", output, shard_size=6)
    with claim.claimed(output, plan.digest()):
        pass
    message = refused(lambda: packed(faulty / "in", output, workers=2, shard_size=6))
    assert message.startswith(f"[data pack] {output}/out-00019.safetensors cannot be written")
    assert "Free space" in message
    assert "run the same command again" in message
    assert len(list(output.glob("out-*.safetensors"))) > 9  # At least all others of that worker.
    assert message == refused(lambda: packed(faulty / "in", output, workers=1, shard_size=6))
    blocked.rmdir()
    packed(faulty / "in", output, shard_size=6)
    assert files_in(output) == files_in(faulty / "one" / "out")


def test_what_is_packed_is_not_packed_again(faulty):
    before = {p: p.stat().st_mtime_ns for p in (faulty / "one" / "out").iterdir()}
    assert packed(faulty / "in", faulty / "one" / "out", shard_size=6) is None
    assert {p: p.stat().st_mtime_ns for p in (faulty / "one" / "out").iterdir()} == before


SLOW = """
import sys, time
from pathlib import Path
from titan_dit.data.packing import pack, shard_job

read = shard_job.read_latent
def slowly(*args):
    time.sleep(0.02)
    return read(*args)
shard_job.read_latent = slowly

if __name__ == "__main__":
    source, output, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    plan = pack.make_plan(source, output, shard_size=6)
    print(pack.pack(plan, output, workers, lambda *_: None) is not None)
"""


def start_slowly(faulty, output, workers):
    """Start packing in a process, with workers, that takes 2.4 s to read."""
    script = faulty / "slow.py"
    script.write_text(SLOW)
    return subprocess.Popen(
        [sys.executable, script, faulty / "in", output, str(workers)],
        env=commands.environment(),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )


def wait_for_shards(process, output, num):
    deadline = time.monotonic() + 60
    while len(list(output.glob("out-*.json"))) < num:
        assert process.poll() is None, "the machine was too fast"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_packing_goes_on_and_ends_with_the_same_bytes(faulty, tmp_path):
    output = tmp_path / "out"
    process = start_slowly(faulty, output, 2)
    wait_for_shards(process, output, 5)
    process.kill()
    process.wait()
    assert not (output / "manifest.json").exists()
    deadline = time.monotonic() + 60  # The workers exit with their parent.
    while alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"no manifest.json"):
        LatentShards(output)
    finished = {p: p.stat().st_mtime_ns for p in output.glob("out-*.safetensors")}
    assert 5 <= len(finished) < 20
    dropped = packed(faulty / "in", output, workers=1, shard_size=6)
    assert len(dropped) == 6
    assert files_in(output) == files_in(faulty / "one" / "out")
    vouched = sum(p.stat().st_mtime_ns == before for p, before in finished.items())
    assert vouched >= 5  # These were kept.


def alive(group):
    """Return True if a process of the group is alive (not a zombie)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Dying(shard_job.Plan):
    """A plan whose worker exits on reading the last class."""

    def read(self, row):
        if "0002" in self.listing.names[row]:
            os._exit(9)
        return super().read(row)


def test_a_dead_worker_is_one_error_and_the_rest_is_kept(faulty, tmp_path):
    plan = Dying(**vars(pack.make_plan(faulty / "in", tmp_path / "out", shard_size=6)))
    (tmp_path / "out").mkdir()
    with pytest.raises(RuntimeError, match=r"a worker failed \(exit code 9\)"):
        workers.run_workers(plan, tmp_path / "out", list(range(20)), 1, lambda *_: None)
    # 80 files of two classes come before it, six per shard.
    assert len(list((tmp_path / "out").glob("out-*.json"))) == 13


def test_a_killed_worker_is_an_error_in_words():
    assert "a worker was killed (signal 9): not enough memory?" in str(workers.worker_error(-9, ""))
    assert str(workers.worker_error(1, "[data pack] disk full")) == "[data pack] disk full"


def test_a_shard_that_was_cut_or_belongs_to_another_plan_is_made_anew(
    faulty, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    monkeypatch.setattr(pack, "write_all", lambda *_: None)  # As if killed before the manifest.
    packed(faulty / "in", output, shard_size=6)
    monkeypatch.undo()
    shard = output / "out-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    record = output / "out-00004.json"
    record.write_text(record.read_text().replace('"plan": "', '"plan": "x'))
    other = bytearray((output / "out-00004.safetensors").read_bytes())
    other[-200] ^= 1  # Other contents of the same size.
    (output / "out-00004.safetensors").write_bytes(other)
    (output / "out-00005.json").write_text("{")
    (output / "out-00006.safetensors").unlink()
    (output / "out-00007.safetensors.partial").write_bytes(b"half")
    (output / ".tmpfgFDHt").write_bytes(b"safetensors leaves such where it is killed")
    packed(faulty / "in", output, shard_size=6)
    assert files_in(output) == files_in(faulty / "one" / "out")


def test_a_dataset_that_lost_shards_gets_those_back(faulty, tmp_path):
    output = tmp_path / "out"
    packed(faulty / "in", output, shard_size=6)
    (output / "out-00003.safetensors").unlink()
    cut = output / "out-00007.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    kept = {p: p.stat().st_mtime_ns for p in output.glob("*0[0124569].safetensors")}
    assert len(packed(faulty / "in", output, shard_size=6)) == 6
    assert files_in(output) == files_in(faulty / "one" / "out")
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    # Without the report, the dropped files are unknown: those chunks are packed again.
    (output / "dropped.json").unlink()
    (output / "out-00003.safetensors").unlink()
    assert len(packed(faulty / "in", output, shard_size=6)) == 6
    assert files_in(output) == files_in(faulty / "one" / "out")


def test_inputs_that_cannot_be_opened_are_left_out(tmp_path):
    class_folders(tmp_path / "in")
    (tmp_path / "in" / "0001" / "2.npy").unlink()
    (tmp_path / "in" / "0001" / "2.npy").symlink_to(tmp_path / "gone.npy")
    assert packed(tmp_path / "in", tmp_path / "out") == [
        (6, "cannot be opened: No such file or directory")
    ]


def leftover(output):
    output.mkdir()
    (output / "pack.json").write_text('{"plan": "another"}')


def a_dataset(output):
    write_shards(output, latents_of(2), torch.zeros(2).long(), num_classes=1, source="test")


def unclaimed(output):
    output.mkdir()
    (output / "out-00000.safetensors").touch()


def a_users_file(output):
    output.mkdir()
    (output / "thesis.tex").touch()


def a_file(output):
    output.touch()


PLACES = {
    leftover: "holds unfinished shards of other files or options",
    a_dataset: "holds another dataset. Delete it or choose another --output",
    unclaimed: "holds shards of unknown origin, without a manifest.json",
    a_users_file: "is not empty: it holds thesis.tex",
    a_file: "is a file",
}


@pytest.mark.parametrize("make", PLACES)
def test_a_place_that_is_taken_is_refused_and_left_alone(tmp_path, make):
    class_folders(tmp_path / "in")
    make(tmp_path / "out")
    before = files_in(tmp_path)
    assert PLACES[make] in refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert files_in(tmp_path) == before


def test_shards_are_not_put_into_their_own_input(tmp_path):
    class_folders(tmp_path / "in")
    assert "inside the input" in refused(lambda: packed(tmp_path / "in", tmp_path / "in" / "out"))
    packed(tmp_path / "in", tmp_path / "out")
    assert "already packed" in refused(lambda: packed(tmp_path / "out", tmp_path / "again"))


def test_two_processes_do_not_pack_into_one_folder(tmp_path):
    class_folders(tmp_path / "in")
    plan = pack.make_plan(tmp_path / "in", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with claim.claimed(tmp_path / "out", plan.digest()):
        message = refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert "another process is packing" in message


def test_a_claim_that_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    flock = fcntl.flock
    removed = []

    def remove_first(descriptor, how):
        if not removed:  # As if its holder had finished between our open and our lock.
            removed.append((tmp_path / "pack.json").unlink())
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with claim.claimed(tmp_path, "digest"):
        assert "digest" in (tmp_path / "pack.json").read_text()
    assert removed


def test_a_killed_writer_leaves_nothing_that_stops_the_next(tmp_path):
    class_folders(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pack.json").write_text("")  # Killed before its first line.
    assert packed(tmp_path / "in", tmp_path / "out", shard_size=4) == []
    assert "pack.json" not in files_in(tmp_path / "out")


def test_pictures_become_pixels(tmp_path):
    pictures(tmp_path / "in")
    assert packed(tmp_path / "in", tmp_path / "out") == []
    source = LatentShards(tmp_path / "out", verify=True)
    assert source.facts.shape == (3, 10, 10)
    assert (source.facts.scale, source.facts.shift) == (1 / 127.5, 127.5)
    assert source.facts.value_range == (0, 255)
    assert source.facts.class_names == ("cat", "dog")
    assert source.dtype == torch.uint8
    pixels = np.asarray(Image.open(tmp_path / "in" / "dog" / "2.png"))
    assert torch.equal(source[5]["latent"], torch.from_numpy(pixels.copy()).permute(2, 0, 1))


def test_grey_pictures_have_one_channel_unless_others_have_colour(tmp_path):
    pictures(tmp_path / "in", mode="L")
    packed(tmp_path / "in", tmp_path / "grey")
    assert LatentShards(tmp_path / "grey").facts.shape == (1, 10, 10)
    pictures(tmp_path / "in", classes=("emu",), each=20)
    packed(tmp_path / "in", tmp_path / "both")
    source = LatentShards(tmp_path / "both")
    assert source.facts.shape == (3, 10, 10)
    assert len(source) == 26
    assert torch.equal(source[0]["latent"][0], source[0]["latent"][2])


def test_bad_pictures_are_left_out(tmp_path):
    pictures(tmp_path / "in", each=70)
    cat = tmp_path / "in" / "cat"
    (cat / "0.png").write_bytes(b"")
    (cat / "1.png").write_bytes(b"\x89PNG and no more")
    whole = (cat / "3.png").read_bytes()
    (cat / "3.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full((10, 10), 40000, dtype=np.uint16)).save(cat / "4.png")
    Image.new("RGB", (4, 4)).save(cat / "5.png")  # Not among the sampled files.
    reasons = [reason for _, reason in packed(tmp_path / "in", tmp_path / "out")]
    assert reasons == [
        "empty file",
        *["not a readable image: damaged, or cut off"] * 2,
        "I;16 image with more than 8 bits; convert it to 8",
        "shape [3, 4, 4], not [3, 10, 10] like the other files",
    ]


@pytest.mark.parametrize("sizes", [((10, 10), (12, 12)), ((10, 12), (10, 12))])
def test_pictures_that_are_not_squares_of_one_size_need_a_size(tmp_path, sizes):
    for name, size in zip(("cat", "dog"), sizes, strict=True):
        pictures(tmp_path / "in", classes=(name,), size=size)
    message = refused(lambda: packed(tmp_path / "in", tmp_path / "out"))
    assert "not squares of one size (1" in message
    assert "--image-size" in message
    packed(tmp_path / "in", tmp_path / "out", image_size=8)
    assert LatentShards(tmp_path / "out").facts.shape == (3, 8, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_laid_on_white(tmp_path, mode):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (40, 40, 40, 255))
    image.convert(mode).save(tmp_path / "0.png")
    pixels = read_image(tmp_path / "0.png")
    assert pixels.shape[0] == (1 if mode == "LA" else 3)
    assert pixels[:, 0].unique(dim=0).tolist() == [[255, 40]]


def test_the_crop_is_in_the_middle_of_the_height_too():
    ramp = np.linspace(0, 255, 300)[:, None].repeat(40, 1).round().astype(np.uint8)
    cropped = np.asarray(center_crop(Image.fromarray(ramp), 16)).astype(float)
    assert cropped[7:9].mean() == pytest.approx(127.5, abs=6)
    assert cropped[0].mean() == pytest.approx(127.5 - 7.5 * 255 * 40 / 300 / 16, abs=6)


def test_one_value_above_half_precision_is_enough_to_leave_a_file_out(tmp_path):
    class_folders(tmp_path / "in")
    large = latents_of(1)[0]
    large[1, 2, 3] = 1e5
    save(tmp_path / "in" / "0001" / "1.npy", large)
    ((row, reason),) = packed(tmp_path / "in", tmp_path / "out")
    assert (row, "not finite in float16" in reason) == (5, True)


def test_pictures_of_another_size_are_another_plan(tmp_path):
    pictures(tmp_path / "in", size=(40, 40))
    plan = pack.make_plan(tmp_path / "in", tmp_path / "out", image_size=40)
    assert dataclasses.replace(plan, image_size=None).digest() != plan.digest()


@pytest.mark.parametrize("size", [(90, 61), (32, 32), (40, 300), (17, 20)])
def test_the_crop_is_the_middle_of_the_shrunk_picture(size, tmp_path):
    ramp = np.linspace(0, 255, size[0])[None].repeat(size[1], 0).round().astype(np.uint8)
    image = Image.fromarray(ramp)
    cropped = np.asarray(center_crop(image, 16)).astype(float)
    assert cropped.shape == (16, 16)
    assert cropped[:, 7:9].mean() == pytest.approx(127.5, abs=6)  # The centre stays in place.
    step = np.diff(cropped.mean(0)).mean()
    assert step == pytest.approx(255 / size[0] * min(size) / 16, rel=0.1)
    image.save(tmp_path / "0.png")
    assert np.array_equal(read_image(tmp_path / "0.png", 16)[0], cropped)


def test_options_that_do_not_fit_the_input_are_refused(tmp_path):
    pictures(tmp_path / "pictures")
    class_folders(tmp_path / "latents")
    out = tmp_path / "out"
    assert "dtype=float16: images are stored as uint8" in refused(
        lambda: packed(tmp_path / "pictures", out, dtype="float16")
    )
    assert "image_size=16" in refused(lambda: packed(tmp_path / "latents", out, image_size=16))
    assert "num_classes=2, but there are 3" in refused(
        lambda: packed(tmp_path / "latents", out, num_classes=2)
    )


def test_a_plan_is_the_same_wherever_it_is_carried_out(tmp_path):
    for place in ("a", "b"):
        class_folders(tmp_path / place / "in")
    plans = [pack.make_plan(tmp_path / p / "in", tmp_path / p / "out") for p in ("a", "b")]
    assert plans[0].digest() == plans[1].digest()
    other = pack.make_plan(tmp_path / "a" / "in", tmp_path / "a" / "out", scale=0.5)
    assert other.digest() != plans[0].digest()
    assert list_folder(tmp_path / "a" / "in").names[0] == "0000/0.npy"
