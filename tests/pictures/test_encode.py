"""What `data encode` stores, law by law, and what it refuses."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoded_sets import CPU, LABELS, encoded, plan_of, save_pictures
from folders_of_files import files_in
from PIL import Image
from refusals import refused
from tiny_vae import save_vae, save_wan_vae

from titan_dit.commands import data_encode
from titan_dit.commands.flags import DataEncodeFlags
from titan_dit.commands.sample_pictures import hint_of_units
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latents import LatentShards
from titan_dit.data.packing.output import classes_without_samples
from titan_dit.data.sections import Latents
from titan_dit.pictures import autoencoder, encode, library
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input

NUM = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Twelve pictures of three classes, encoded with flips."""
    root = tmp_path_factory.mktemp("encoded")
    save_vae(root / "vae")
    save_pictures(root / "in")
    encoded(root / "in", root / "set", str(root / "vae"), flip=True, dtype="float32")
    return root


def wanted(root):
    """Mean and std of every picture and mirror image, by diffusers alone."""
    vae = library.diffusers("the tests").AutoencoderKL.from_pretrained(root / "vae")
    lines = (root / "in" / "metadata.jsonl").read_text().splitlines()
    names = [json.loads(line)["file_name"] for line in lines]
    pixels = np.stack([np.asarray(Image.open(root / "in" / name)) for name in names])
    both = np.stack([pixels, pixels[:, :, ::-1]], 1).reshape(-1, 8, 8, 3)
    inputs = torch.from_numpy(both.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        mean, logvar = vae.quant_conv(vae.encoder(inputs)).chunk(2, 1)
    return mean, torch.exp(logvar / 2)


def test_rows_are_the_unscaled_mean_and_std_of_rgb_pictures_and_their_mirror_images(root):
    source = LatentShards(root / "set", verify=True)
    stored = source.read(range(2 * NUM))
    mean, std = wanted(root)
    torch.testing.assert_close(stored["latent"], torch.cat([mean, std], 1), atol=1e-5, rtol=1e-5)
    assert (std.log() * 2).mean() < -2  # A log variance would be far from its std.
    assert stored["label"].tolist() == [label for label in range(3) for _ in range(8)]
    assert source.facts.class_names == LABELS
    assert (source.facts.scale, source.facts.shift) == (0.5, 0.25)
    captions = [json.loads(x) for x in (root / "set" / "captions.jsonl").read_text().splitlines()]
    assert captions[5] == {"row": 10, "file_name": "dog/1.png", "text": "a dog, 1"}
    assert len(captions) == NUM


def test_a_picture_and_its_mirror_image_are_held_out_together(root):
    source = LatentShards(root / "set")
    for order in ("feistel", "sort"):
        rows = held_out_rows(source, 3, 6, order)
        assert len(rows) == 6
        assert all(row ^ 1 in rows for row in rows)
        assert sorted(source.labels[list(rows)].tolist()) == [0, 0, 1, 1, 2, 2]
    message = refused(lambda: held_out_rows(source, 3, 5, "feistel"))
    assert message.startswith("[validation] samples=5")
    assert "samples = 6" in message


def test_measured_units_make_drawn_latents_standard(root):
    encoded(root / "in", root / "own", str(root / "vae"), units="measured", dtype="float32")
    source = LatentShards(root / "own")
    mean, std = source.read(range(NUM))["latent"].double().chunk(2, 1)
    scale, shift = (
        torch.tensor(x, dtype=torch.float64) for x in (source.facts.scale, source.facts.shift)
    )
    torch.testing.assert_close(shift, mean.mean((0, 2, 3)), atol=1e-12, rtol=1e-12)
    variance = (mean - shift[:, None, None]).square().mean((0, 2, 3)) + std.square().mean((0, 2, 3))
    torch.testing.assert_close(1 / scale.square(), variance, atol=1e-12, rtol=1e-9)


def test_bytes_do_not_depend_on_which_process_encodes_a_chunk_or_on_a_stop(root):
    output = root / "two" / "set"
    how = {"flip": True, "dtype": "float32"}
    plan, vae = plan_of(root / "in", output, str(root / "vae"), **how)
    output.mkdir(parents=True)
    assert encode.missing_chunks(plan, output, verify=False) == [0, 1, 2, 3]
    for threads, chunks in ((1, [3, 1]), (3, [2])):
        encode.encode_chunks(plan, vae, output, chunks, threads, lambda *_: None)
    # As a killed process leaves it: claimed, three chunks whole, one cut off.
    (output / "set-00000.safetensors.partial").write_bytes(b"half")
    (output / "pack.json").write_text(json.dumps({"plan": plan.digest, "command": "data encode"}))
    message = refused(lambda: Latents(path=str(output)).open())
    assert "encoding is unfinished. Run the same `data encode`" in message
    assert encoded(root / "in", output, str(root / "vae"), **how) == []
    assert files_in(output) == files_in(root / "set")
    (output / "set-00002.safetensors").unlink()  # A lost shard is encoded again, alone.
    before = (output / "set-00001.safetensors").stat().st_mtime_ns
    assert encoded(root / "in", output, str(root / "vae"), **how) == []
    assert files_in(output) == files_in(root / "set")
    assert (output / "set-00001.safetensors").stat().st_mtime_ns == before
    assert encoded(root / "in", output, str(root / "vae"), **how) is None


def test_the_autoencoder_has_batches_queued_while_the_host_takes_the_rows_of_one(root):
    plan, vae = plan_of(root / "in", root / "ahead", str(root / "vae"), batch_size=1)
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Noting(autoencoder.Autoencoder):
        def encode(self, pictures):
            seen.append("start")
            return super().encode(pictures)

    noting = Noting(**{f.name: getattr(vae, f.name) for f in dataclasses.fields(vae)})
    batches = encode.decoded(plan, noting, [0, 1], 1, encode.Waited())
    for _ in encode.encoded(plan, noting, batches):
        seen.append("rows")
    ahead = encode.AHEAD
    assert seen == ["start"] * ahead + ["start", "rows"] * (6 - ahead) + ["rows"] * ahead


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_stores_the_latents_of_the_cpu_and_the_same_bytes_again(root):
    how = {"flip": True, "dtype": "float32", "device": torch.device("cuda")}
    for name in ("one", "two"):
        encoded(root / "in", root / name / "set", str(root / "vae"), **how)
    assert files_in(root / "one" / "set") == files_in(root / "two" / "set")
    found, expected = (LatentShards(root / name) for name in ("one/set", "set"))
    rows = range(len(expected))
    there, here = (source.read(rows)["latent"] for source in (found, expected))
    # Convolutions are in TF32.
    torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)


def test_another_autoencoder_is_not_mixed_in_and_is_named(root):
    other = save_vae(root / "other_vae", seed=1)
    how = {"flip": True, "dtype": "float32"}
    message = refused(lambda: encoded(root / "in", root / "set", other, **how))
    assert "holds another dataset" in message
    vae = autoencoder.load(other, CPU)
    message = refused(lambda: vae.check_fits(LatentShards(root / "set").facts, "--vae"))
    assert vae.facts.digest[:12] in message
    assert LatentShards(root / "set").facts.posterior == "both"
    own = autoencoder.load(str(root / "vae"), CPU)
    message = refused(lambda: own.check_fits(LatentShards(root / "set").facts, "--vae", 4))
    assert "has 2 latent channels, but the model draws samples with 4" in message
    assert str(root / "vae") in message


def test_latents_that_may_have_been_scaled_before_are_reported(root):
    """Decoded as they are stored, those of fast-DiT would be grey."""
    vae, recorded = autoencoder.load(str(root / "vae"), CPU), LatentShards(root / "set").facts
    unknown = dataclasses.replace(recorded, vae=None)

    def hint(facts):
        return hint_of_units(SimpleNamespace(diffusion=SimpleNamespace(data=facts), vae=vae))

    said = hint(dataclasses.replace(unknown, scale=1.0, shift=0.0))
    assert f"have scale 1, but those of {root}/vae 0.5: if they were scaled before" in said
    assert hint(unknown) is hint(recorded) is None


def test_an_autoencoder_without_mean_and_std_decodes_only(tmp_path):
    width = {"encoder_block_out_channels": (4,) * 4, "decoder_block_out_channels": (4,) * 4}
    library.diffusers("the tests").AutoencoderTiny(**width).save_pretrained(tmp_path / "vae")
    tiny = autoencoder.load(str(tmp_path / "vae"), CPU)
    assert tiny.decode(torch.zeros(1, 4, 2, 2)).shape == (1, 3, 16, 16)
    said = refused(lambda: tiny.check_encodes("--vae"))
    assert said.startswith(f"--vae {tmp_path}/vae is AutoencoderTiny, which gives no mean and std")
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    said = refused(lambda: autoencoder.load(str(tmp_path / "vae"), CPU))
    assert said.startswith(f'--vae {tmp_path}/vae is "UNet2DModel". Give an autoencoder')


def test_bad_files_are_rows_of_dropped_json(root, tmp_path):
    source = tmp_path / "in"
    lines = save_pictures(source)
    (source / "cat/0.png").write_bytes(b"")
    data = (source / "cat/1.png").read_bytes()
    (source / "cat/1.png").write_bytes(b"")
    (source / "cat/2.png").write_bytes(data[: len(data) // 2])
    Image.fromarray(np.full((8, 8), 60_000, np.uint16)).save(source / "dog/0.png")
    (source / "dog/1.png").unlink()
    lines[8]["label"] = None
    (source / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dropped = encoded(source, tmp_path / "set", str(root / "vae"))
    found = json.loads((tmp_path / "set" / "dropped.json").read_text())
    assert len(dropped) == len(found) == 6
    assert {entry["file"]: entry["reason"].partition("; ")[0] for entry in found} == {
        "cat/0.png": "empty file",
        "cat/1.png": "empty file",
        "cat/2.png": "not a readable image: damaged, or cut off",
        "dog/0.png": "I;16 image with more than 8 bits",
        "dog/1.png": "no such file",
        "owl/0.png": "no label",
    }
    stored = LatentShards(tmp_path / "set", verify=True)
    assert stored.labels.tolist() == [0, 1, 1, 2, 2, 2]
    names = [shard["file"] for shard in stored.manifest["shards"]]
    assert names == [f"set-{chunk:05d}.safetensors" for chunk in (1, 2, 3)]
    plan, _ = plan_of(source, tmp_path / "set", str(root / "vae"))
    assert classes_without_samples(plan, dropped) == []
    others = [(row, "") for row in (6, 7)]  # The last ones of a dog.
    assert classes_without_samples(plan, [*dropped, *others]) == [1]


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_one_line(monkeypatch, capsys):
    def offline(*_, **__):
        try:
            raise ConnectionError("Name or service not known")
        except ConnectionError:
            raise OSError("owner/vae does not appear to have a file named config.json") from None

    monkeypatch.setattr(library.diffusers("the test").AutoencoderKL, "load_config", offline)
    message = refused(lambda: autoencoder.load("owner/vae", CPU))
    assert message == (
        "--vae owner/vae: no such folder, and by this name on the hub no autoencoder can be loaded "
        "from it (Name or service not known). Give the folder of one of diffusers."
    )
    assert capsys.readouterr().err == "there is no folder owner/vae: loading it from the hub\n"
    # A name of the hub has one slash at most.
    assert refused(lambda: autoencoder.load("my/vaes/a", CPU)) == "--vae my/vaes/a: no such folder."


def test_what_cannot_be_encoded_is_one_line(root, tmp_path):
    vae, source = str(root / "vae"), root / "in"
    message = refused(lambda: open_input(root / "none", ListingOptions()))
    assert message.startswith(f"[data encode] input={root / 'none'}: no such folder.")

    def said(**how):
        return refused(lambda: encoded(source, tmp_path / "set", vae, **how))

    assert "--batch-size 4" in said(batch_size=3, flip=True)
    assert "owl are not among the 2 listed classes" in said(classes=["cat", "dog"])
    assert "no pictures of 1 classes: yak" in said(classes=[*LABELS, "yak"])
    assert not (tmp_path / "set").exists()
    blocked = tmp_path / "set" / "set-00001.safetensors"
    (blocked / "a").mkdir(
        parents=True
    )  # A folder of that name makes the write fail, like a full disk.
    encoded_once = plan_of(source, tmp_path / "set", vae)[0].digest
    (tmp_path / "set" / "pack.json").write_text(json.dumps({"plan": encoded_once}))
    assert "set-00001.safetensors cannot be written" in said()
    assert not (tmp_path / "set" / "manifest.json").exists()
    shutil.rmtree(blocked)
    assert said_nothing(source, tmp_path / "set", vae)


def test_sizes_that_an_autoencoder_cannot_encode_are_refused_before_files_are_looked_at(tmp_path):
    vae = autoencoder.load(str(save_wan_vae(tmp_path / "vae")), CPU)
    factor = vae.facts.factor

    def said(**flags):
        options = DataEncodeFlags(input="none", out="set", vae="vae", **flags)
        return refused(lambda: data_encode.plan_of(options, None, vae, None))

    message = said(image_size=7)
    assert message.startswith(f"[data encode] image_size=7 is no multiple of {factor}, by which ")
    assert message.endswith(f"Set --image-size {2 * factor}.")
    message = said(buckets="8x7")
    assert message.startswith(
        f"[data encode] buckets: the sides of 8x7 are no multiples of {factor}"
    )
    assert message.endswith(f"Set 8x8, or --multiple to a multiple of {factor}.")
    message = said(image_size=8, frames="5,16")
    assert message.startswith("[data encode] frames=16: ")
    assert message.endswith("so it takes 4k + 1. Set 17.")


def test_a_picture_that_is_too_thin_for_a_square_is_left_out_by_name(root, tmp_path):
    source = tmp_path / "in"
    save_pictures(source)
    Image.new("RGB", (3, 200 * 3)).save(source / "cat" / "0.png")
    dropped = encoded(source, tmp_path / "set", str(root / "vae"))
    assert dropped == [(0, "3 x 600 pixels: too thin to be cropped to a square")]


def said_nothing(source, output, vae):
    return encoded(source, output, vae) == [] and len(LatentShards(output)) == NUM
