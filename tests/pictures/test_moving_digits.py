"""The clips of `data example digits_moving`, and how drawn ones are scored."""

import json
import sys

import pytest
import torch
from commands import metrics, run, train_command
from folders_of_files import files_in

from titan_dit.commands import data_example
from titan_dit.commands.flags import DataExampleFlags
from titan_dit.data.latents import LatentShards
from titan_dit.data.sections import Digits
from titan_dit.pictures import clips, moving_digits
from titan_dit.pictures.captioned_digits import DIGITS
from titan_dit.pictures.moving_digits import captions

pytest.importorskip("av")
FEW = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("moving")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving_digits, "strokes", all_strokes(FEW))
        patch.setattr(moving_digits, "captions", few_captions)
        data_example.main(DataExampleFlags(name="digits_moving", out=str(root / "example")))
    return root


def all_strokes(most):
    """The first digits of each class, `most` of them in all."""

    def found():
        source = Digits().open()
        labels = source.read(range(len(source)))["label"].tolist()
        rows = [labels.index(digit) for digit in range(most)]
        return (source.read(rows)["latent"][:, 0].float() + 1) / 2, list(range(most))

    return found


def few_captions(held_out):
    return tuple(c for c in captions(held_out) if max(of.digit for of in c) < FEW)


def test_seen_and_held_out_captions_are_all_that_there_are():
    seen, held_out = captions(False), captions(True)
    assert (len(seen), len(held_out)) == (1440, 160)
    every = {str(caption) for caption in (*seen, *held_out)}
    assert len(every) == 1600
    assert "a white seven moves left and a black two moves up" in every
    # Every digit and every direction is seen in both halves.
    for place in (0, 1):
        assert {(c[place].digit, c[place].direction) for c in seen} == {
            (digit, way) for digit in range(10) for way in ("left", "right", "up", "down")
        }


@pytest.mark.parametrize(("way", "turns"), [("left", 0), ("up", 1), ("right", 2), ("down", 3)])
def test_a_digit_moves_straight_through_the_middle(way, turns):
    ink = torch.zeros(8, 8)
    ink[3:5, 3:5] = 1
    frames = moving_digits.moved(ink, way)
    assert frames.shape == (9, 12, 12)
    left = torch.rot90(frames, turns, (1, 2))
    for number, frame in enumerate(left):
        mass = frame.sum(0)
        x = float((mass * torch.arange(12)).sum() / mass.sum())
        assert x == pytest.approx(5.5 + 2 - number / 2)
        assert frame.sum() == pytest.approx(4)
    assert torch.equal(frames[4, 2:10, 2:10], ink)


def test_clips_show_what_their_captions_and_the_list_say(root):
    lines = [json.loads(x) for x in (root / "example" / "clips.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * FEW
    assert {line["left"] for line in lines} == {0, 1}
    inks, _ = all_strokes(FEW)()
    for line in lines:
        file = root / "example" / "clips" / line["file_name"]
        words = [
            f"a {ink} {DIGITS[digit]} moves {way}"
            for ink, digit, way in zip(
                ("white", "black"), line["digits"], line["directions"], strict=True
            )
        ]
        assert file.with_suffix(".txt").read_text() == " and ".join(words) + "\n"
        found = clips.look(file)
        (clip,) = found.clips((9,), clips.rate_of(16), "all")
        pixels = clips.read_clip(file, clip, clips.rate_of(16), (24, 12))
        middle = pixels[0, 4, 2:10].float() / 255
        halves = middle[:, 2:10], middle[:, 14:22]
        white, black = halves[:: -1 if line["left"] else 1]
        for half, digit in zip((white, 1 - black), line["digits"], strict=True):
            assert (half - inks[digit]).abs().max() < 0.04  # H.264
        assert line["rows"] == line["digits"]


def test_the_same_files_are_written_again(root, tmp_path, monkeypatch):
    monkeypatch.setattr(moving_digits, "strokes", all_strokes(FEW))
    monkeypatch.setattr(moving_digits, "captions", few_captions)
    data_example.main(DataExampleFlags(name="digits_moving", out=str(tmp_path / "again")))
    assert files_in(tmp_path / "again") == files_in(root / "example")


def test_the_recipe_trains_on_the_encoded_clips_and_shows_its_prompts(root):
    words = ["--input", "example/clips", "--out", "set", "--vae", "none", "--buckets", "24x12"]
    words += ["--frames", "9", "--text-encoder", "example/text_encoder"]
    done = run([sys.executable, "-m", "titan_dit", "data", "encode", *words], root, NGPU=1)
    assert done.returncode == 0, done.stderr
    source = LatentShards(root / "set", verify=True)
    assert source.facts.shape == (3, 9, 12, 24)
    assert source.facts.text.tokens == 12
    flags = ("--data.path", "set", "--training.steps", 3, "--training.global_batch_size", 4)
    flags += ("--metrics.every", 1, "--sampling.steps", 1, "--sampling.every", 3)
    done = run(train_command(*flags, config="digits_moving"), root)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in metrics(root / "outputs/digits_moving")]
    assert len(losses) == 3
    assert all(1 < loss < 3 for loss in losses)
    assert list((root / "outputs/digits_moving/samples").glob("step-00000003*"))
