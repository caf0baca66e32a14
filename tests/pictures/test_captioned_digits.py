"""`data example digits_captioned`: pictures show what their captions say, and some pairs never."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from commands import metrics, run, train_command
from encoded_sets import CPU
from folders_of_files import files_in
from PIL import Image
from refusals import refused

from titan_dit.commands import data_encode, data_example
from titan_dit.commands.flags import DataEncodeFlags, DataExampleFlags
from titan_dit.data.latents import LatentShards
from titan_dit.data.sections import Digits
from titan_dit.pictures import captioned_digits, text_encoder
from titan_dit.pictures.captioned_digits import COLOURS, DIGITS, captions

FEW = 40
"""Handwritten digits of the small example."""


def few_strokes(strokes=captioned_digits.strokes):
    return tuple(part[:FEW] for part in strokes())


def write(out):
    pytest.importorskip("transformers")
    data_example.main(DataExampleFlags(name="digits_captioned", out=str(out)))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The example of a few digits, and their shards."""
    root = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captioned_digits, "strokes", few_strokes)
        write(root / "example")
    words = ["--input", "example/pictures", "--out", "set", "--vae", "none"]
    words += ["--buckets", "8x8,8x12,12x8", "--text-encoder", "example/text_encoder"]
    done = run([sys.executable, "-m", "titan_dit", "data", "encode", *words], root, NGPU=1)
    assert done.returncode == 0, done.stderr
    assert "into 3 shards of uint8 in 3 buckets, 1 ranks" in done.stdout
    return root


def test_three_pairs_of_colours_of_each_digit_are_in_no_picture():
    held_out, seen = captions(held_out=True), captions(held_out=False)
    assert Counter(caption.digit for caption in held_out) == dict.fromkeys(range(10), 3)
    assert Counter(caption.digit for caption in seen) == dict.fromkeys(range(10), 27)
    assert len({*held_out, *seen}) == 300
    drawn = Counter(caption for _, caption, _ in captioned_digits.pictures())
    assert drawn.keys() == set(seen), "every other pair is there"
    assert drawn.total() == captioned_digits.num_pictures() == 3 * 1797


def test_a_picture_shows_the_digit_the_colours_and_the_shape_that_it_says():
    """Read back without the module's own drawing."""
    numbers = range(0, 1797, 300)
    source = Digits().open().read(numbers)
    seen = 0
    for name, caption, pixels in captioned_digits.pictures():
        number, size = name.split("-")
        if int(number) not in numbers:
            continue
        row = numbers.index(int(number))
        article, colour, digit, on, background = str(caption).split()
        assert (article, on) == ("a", "on")
        assert DIGITS.index(digit) == source["label"][row]
        width, height = map(int, size.split("x"))
        assert pixels.shape == (3, height, width)
        ends = torch.tensor([COLOURS[background], COLOURS[colour]], dtype=torch.float32)
        channel = int((ends[1] - ends[0]).abs().argmax())
        low, high = ends[:, channel]
        ink = (pixels[channel] - low) / (high - low)
        middle = ink[height // 2 - 4 : height // 2 + 4, width // 2 - 4 : width // 2 + 4]
        wanted = (source["latent"][row, 0].float() + 1) / 2
        torch.testing.assert_close(middle, wanted, atol=0.01, rtol=0)
        assert ink.sum() == pytest.approx(wanted.sum().item(), abs=0.5), "nothing beside it"
        seen += 1
    assert seen == 3 * len(numbers)


def test_the_same_files_are_written_again(root, tmp_path, monkeypatch):
    monkeypatch.setattr(captioned_digits, "strokes", few_strokes)
    state = torch.get_rng_state()
    write(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    assert files_in(tmp_path / "again") == files_in(root / "example")
    assert "again exists. Choose another folder" in refused(lambda: write(tmp_path / "again"))


def test_the_folder_is_flat_and_lists_what_was_held_out(root, monkeypatch):
    monkeypatch.setattr(captioned_digits, "strokes", few_strokes)
    files = files_in(root / "example")
    assert sum(name.startswith("pictures/") for name in files) == 2 * 3 * FEW
    for name, caption, pixels in captioned_digits.pictures():
        assert files[f"pictures/{name}.txt"].decode() == f"{caption}\n"
        stored = np.array(Image.open(root / "example" / "pictures" / f"{name}.png"))
        assert torch.equal(torch.from_numpy(stored).permute(2, 0, 1), pixels)
    assert files["prompts.txt"].decode().splitlines() == list(map(str, captions(False)))
    assert files["held_out.txt"].decode().splitlines() == list(map(str, captions(True)))


def test_the_tokenizer_and_the_encoder_are_read_as_any(root):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "example/text_encoder")
    ids = tokenizer("a red seven on blue")["input_ids"]
    words = ["a", "red", "seven", "on", "blue", "</s>"]
    assert tokenizer.convert_ids_to_tokens(ids) == words
    every = {
        token for c in captions(False) + captions(True) for token in tokenizer(str(c)).input_ids
    }
    assert tokenizer.unk_token_id not in every
    encoder = text_encoder.load(str(root / "example/text_encoder"), CPU)
    one, other = encoder.encode(["a red seven on blue", "a blue seven on red"])
    assert one.shape == (6, captioned_digits.WIDTH)
    assert (one - other).abs().max() > 0.1


def test_shards_hold_the_pixels_of_three_shapes_and_their_captions(root):
    source = LatentShards(root / "set", verify=True)
    assert [bucket.shape for bucket in source.buckets] == [(3, 8, 8), (3, 12, 8), (3, 8, 12)]
    facts = source.facts
    assert (facts.vae, facts.value_range, facts.posterior) == (None, (0.0, 255.0), "")
    assert (facts.text.width, facts.text.tokens) == (captioned_digits.WIDTH, 6)
    encoder = text_encoder.load(str(root / "example/text_encoder"), CPU)
    lines = [json.loads(line) for line in (root / "set/captions.jsonl").read_text().splitlines()]
    for row in (0, FEW + 1, 2 * FEW + 2):
        file = root / "example/pictures" / lines[row]["file_name"]
        pixels = torch.from_numpy(np.array(Image.open(file)))
        found = source[row]
        assert torch.equal(found["latent"], pixels.permute(2, 0, 1))
        caption = file.with_suffix(".txt").read_text().strip()
        torch.testing.assert_close(found["text"], encoder.encode([caption])[0].half())
    units = facts.to_model_units(torch.tensor([[[[0.0, 255.0]]]]))
    assert units.flatten().tolist() == pytest.approx([-1, 1])


def test_flags_about_latents_are_refused_for_pixels(root):
    for flag, value in (("posterior", "mean"), ("dtype", "float32"), ("units", "measured")):
        options = DataEncodeFlags(input="x", out="y", vae="none", image_size=8, **{flag: value})
        message = refused(lambda options=options: data_encode.vae_of(options, CPU))
        assert message.endswith(f"Leave --{flag} out.")


def test_the_recipe_trains_on_buckets_and_shows_its_prompts(root):
    flags = ("--data.path", "set", "--training.steps", 3, "--training.tokens_per_step", 384)
    flags += ("--metrics.every", 1, "--sampling.steps", 1, "--sampling.num", 4)
    done = run(train_command(*flags, config="digits_captioned"), root)
    assert done.returncode == 0, done.stderr
    assert "buckets 3x8x8: 16 latent tokens a sample, 24 samples a step; 3x12x8: " in done.stdout
    losses = [row["loss"] for row in metrics(root / "outputs/digits_captioned")]
    assert len(losses) == 3
    assert all(1 < loss < 2.5 for loss in losses)
    assert (root / "outputs/digits_captioned/samples/step-00000003.png").is_file()


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    options = DataExampleFlags(name="digits_captioned", out=str(tmp_path / "x"))
    message = refused(lambda: data_example.main(options))
    assert message.startswith("data example digits_captioned needs the library transformers")
    assert "titan_dit[pictures]" in message
    assert not list(tmp_path.iterdir())
