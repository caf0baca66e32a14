"""From the command line: a few pictures are trained on beside a larger set."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
from captioned_config import write_config
from captioned_sets import write_set
from commands import metrics, only_error, run, train_command
from PIL import Image
from tiny_text import CAPTIONS, save_encoder

from titan_dit.recovery.ledger import logged_samples

SECTIONS = {
    "model": {"num_layers": 2, "patch_size": 2, "latent_size": [8, 12], "in_channels": 3},
    "data": {
        "datasets": [{"path": "many"}, {"path": "few", "repeats": 5, "condition_dropout": 0.0}]
    },
    # 8 wide pictures, or 12 square ones.
    "training": {"steps": 6, "tokens_per_step": 192, "batch_multiple": 4},
    "validation": {"samples": 3},
    "checkpoint": {"keep": 0},
    "faults": {"log_samples": True},
}
PREFIX = "sks toy, "


def write_pictures(folder, sizes, seed):
    folder.mkdir()
    for number, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng([seed, number]).integers(0, 256, (height, width, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        caption = CAPTIONS[number % 3]
        (folder / f"{number}.txt").write_text(caption)


def command(folder, *words):
    return run([sys.executable, "-m", "titan_dit", *map(str, words)], folder)


def encode(folder, pictures, out, *more):
    words = ["--input", pictures, "--out", out, "--vae", "none", "--buckets", "12x8,8x8"]
    words += ["--text-encoder", "t5", "--text-tokens", 10, "--device", "cpu"]
    done = command(folder, "data", "encode", *words, *more)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty pictures in two shapes, and three of the wide one with a trigger word."""
    folder = tmp_path_factory.mktemp("mixed")
    write_pictures(folder / "pictures", [(12, 8) if n % 2 else (8, 8) for n in range(20)], 0)
    write_pictures(folder / "toy", [(12, 8)] * 3, 1)
    save_encoder(folder / "t5")
    encode(folder, "pictures", "many")
    encode(folder, "toy", "few", "--caption-prefix", PREFIX)
    write_config(folder, "mixed", **SECTIONS)
    return folder


def train(folder, *flags, ranks=1):
    return run(train_command(*flags, config="mixed.toml", ranks=ranks), folder)


def trained(folder, *flags, ranks=1):
    done = train(folder, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trigger_word_stands_in_front_of_every_caption(folder):
    lines = [json.loads(line) for line in (folder / "few" / "captions.jsonl").open()]
    assert [line["text"] for line in lines] == [PREFIX + caption for caption in CAPTIONS[:3]]
    report = command(folder, "data", "report", "few").stdout
    assert f'"{PREFIX}{CAPTIONS[0]}"' in report


def test_a_few_pictures_are_trained_on_beside_many_and_a_run_goes_on_in_another_layout(folder):
    said = trained(folder, "--job.dir", "whole")
    # One picture of each bucket of each set is held out: 9 + 9 and 2 are left.
    assert "data    latents: 23 samples (3 of them for validation)" in said
    many = "20 rows, of which 18 are trained on, 1 times an epoch: 64.3% of the samples"
    assert f"dataset many: {many}\n" in said
    assert (
        "dataset few: 3 rows, of which 2 are trained on, 5 times an epoch: 35.7% of the samples, "
        "condition_dropout 0\n" in said
    )
    whole = metrics(folder / "whole")
    assert {"validation_loss_3x8x12", "validation_loss_3x8x8"} <= whole[-1].keys()
    checkpoint = folder / "whole" / "checkpoints" / "step-00000006" / "manifest.json"
    record = json.loads(checkpoint.read_text())
    assert record["ledger"]["samples_per_epoch"] == 9 + 9 + 5 * 2
    assert record["data"]["repeats"] == [1, 5]
    listed = command(folder, "checkpoint", "list", "whole").stdout.splitlines()[-2].split()
    assert listed[:3] == ["6", str(record["cursor"]), f"{record['cursor'] / 28:.2f}"]

    done = command(folder, "replay", "--run", "whole", "--step", 5, "--device", "cpu")
    assert "\n0 of 8 samples are at fault\n" in done.stdout, done.stdout + done.stderr
    done = command(folder, "evaluate", "--run", "whole", "--device", "cpu", "--weights", "model")
    assert f"{whole[-1]['validation_loss']:.6g}"[:6] in done.stdout, done.stdout + done.stderr

    trained(folder, "--job.dir", "parts", "--training.steps", 2)
    trained(folder, "--job.dir", "parts", "--parallel.pp", 2, ranks=2)
    parts = metrics(folder / "parts")
    assert [row["loss"] for row in parts] == pytest.approx([r["loss"] for r in whole], rel=1e-5)
    seen = sum(logged_samples(folder / "parts").values(), Counter())
    assert seen == Counter(range(record["cursor"]))


CHANGES = {
    "repeats": ("[{path = 'many'}, {path = 'few', repeats = 4, condition_dropout = 0}]", "repeats"),
    "weights": (
        "[{path = 'many', weight = 1}, {path = 'few', weight = 1, condition_dropout = 0}]",
        "weights: [] -> [1.0, 1.0]",
    ),
    "dropout": ("[{path = 'many'}, {path = 'few', repeats = 5}]", "condition_dropouts"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_mixture_is_refused_at_a_resume(change, folder):
    tables, words = CHANGES[change]
    if not (folder / "kept").is_dir():
        trained(folder, "--job.dir", "kept", "--training.steps", 2)
    said = train(folder, "--job.dir", "kept", "--data.datasets", tables).stderr
    assert "[data]: the contents differ from those the checkpoint was trained on" in said
    assert f"[data] {words}" in said


def test_a_moved_dataset_goes_on(folder):
    trained(folder, "--job.dir", "moved", "--training.steps", 2)
    (folder / "few").rename(folder / "elsewhere")
    tables = "[{path = 'many'}, {path = 'elsewhere', repeats = 5, condition_dropout = 0}]"
    said = trained(folder, "--job.dir", "moved", "--training.steps", 3, "--data.datasets", tables)
    (folder / "elsewhere").rename(folder / "few")
    assert "steps   2 of 3 done" in said


def test_a_path_replaces_the_datasets_of_a_config_and_few_rows_repeat_in_a_step(folder):
    flags = ("--validation.every", 0, "--validation.samples", "None", "--training.steps", 2)
    said = trained(folder, "--job.dir", "alone", "--data.path", "few", *flags)
    assert "data    latents: 3 samples, " in said
    assert "dataset" not in said
    tables = "[{path = 'few', repeats = 100}]"
    said = trained(folder, "--job.dir", "again", "--data.datasets", tables, *flags)
    assert "dataset few: 3 rows, 100 times an epoch: 100.0% of the samples" in said


def test_a_dry_run_counts_the_samples_of_all_datasets(folder):
    said = trained(folder, "--job.dir", "dry", "--dry-run")
    # 10 wide of many and 5 x 3 of few in steps of 8; 10 square ones in steps of 12.
    wide, square = 25 / 8, 10 / 12
    assert f"; {wide / (wide + square):.1%} of the steps" in said
    assert f"; {square / (wide + square):.1%} of the steps" in said


def test_some_buckets_of_a_folder_are_trained_on_and_others_are_refused_at_a_resume(folder):
    sizes = {(12, 8): 9, (8, 12): 10, (8, 8): 12}
    write_set(folder / "sizes", sizes, tokens=12)
    network = ("--model.in_channels", 2, "--model.text_dim", 4, "--training.steps", 4)
    flags = ("--data.path", "sizes", *network, "--job.dir", "chosen")
    said = trained(folder, *flags, "--data.buckets", '["8x8", "12x8"]')
    assert "data    latents: 22 samples (3 of them for validation)" in said
    assert "left out by [data] buckets: 9 samples (9 of 8x12)\n" in said
    assert "buckets 2x8x12: 24 latent tokens a sample, 8 samples a step; 2x8x8: 16 " in said
    row = metrics(folder / "chosen")[-1]
    names = {key for key in row if key.startswith("validation_loss_2x") and "ema" not in key}
    assert names == {"validation_loss_2x8x12", "validation_loss_2x8x8"}
    checkpoint = folder / "chosen" / "checkpoints" / "step-00000004" / "manifest.json"
    record = json.loads(checkpoint.read_text())
    assert record["ledger"]["samples_per_epoch"] == 22 - 3
    assert record["data"]["bucket_counts"] == [10, 12]
    said = train(folder, *flags, "--data.buckets", '["12x8"]').stderr
    assert "[data]: the contents differ from those the checkpoint was trained on" in said
    assert '[data] buckets: ["8x8", "12x8"] -> ["12x8"]' in said


BAD = {
    "same": (
        "[{path = 'many'}, {path = 'many', repeats = 2}]",
        "many and many hold the same data.",
    ),
    "weights": (
        "[{path = 'many'}, {path = 'few', weight = 2}]",
        "[data] datasets: many has no weight, but others have. Give all of them a weight, or none.",
    ),
    "zero": ("[{path = 'many', weight = 0}]", "[data] datasets[0] weight=0.0 must be above 0."),
    "gone": ("[{path = 'many'}, {path = 'none'}]", "[data] path=none"),
}


@pytest.mark.parametrize("case", BAD)
def test_datasets_that_do_not_fit_are_one_line_before_the_first_step(case, folder):
    tables, words = BAD[case]
    said = only_error(train(folder, "--job.dir", "bad", "--data.datasets", tables))
    assert words in said
    assert not (folder / "bad").exists()
