"""Datasets from the command line: train on every layout, resume, pack, show, refuse."""

import json
import shutil
import sys

import pytest
import torch
from commands import metrics, run, sample, train
from folders_of_files import class_folders, files_in, latents_of, pair, pictures, save
from PIL import Image
from safetensors.torch import load_file

from titan_dit.__main__ import as_python
from titan_dit.commands import data_encode, data_pack, data_show, data_tokenize
from titan_dit.commands import flags as flags_encode
from titan_dit.commands import flags as flags_pack
from titan_dit.config.section import UserError

MODEL = (
    "--model.hidden_size",
    32,
    "--model.num_layers",
    1,
    "--model.in_channels",
    4,
    "--model.num_classes",
    3,
)
RUN = ("--training.global_batch_size", 8, "--training.steps", 4, "--checkpoint.every", 2)
RUN += ("--metrics.every", 1, "--metrics.tensorboard", "false", "--sampling.every", 0)
DATA = ("--data.name", "latents", "--data.path", "set")


def data(*words, cwd):
    """`python -m titan_dit data ...`."""
    return run([sys.executable, "-m", "titan_dit", "data", *words], cwd)


def succeeded(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def only_error(done):
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def half_precision_folders(root):
    for i, latent in enumerate(latents_of(12)):
        save(root / f"{i % 3}" / f"{i}.pt", latent.half())


def mean_and_std(root):
    for i, latent in enumerate(latents_of(12)):
        moments = torch.cat([latent, torch.full_like(latent, 0.3)])
        save(root / ("cat", "dog", "emu")[i % 3] / f"{i}.npy", moments)


def packed(root):
    pair(root.parent / "raw")
    flags = ("--input", "raw", "--out", "set", "--dtype", "float32", "--workers", 1)
    succeeded(data("pack", *flags, cwd=root.parent))


LAYOUTS = {
    "class folders": half_precision_folders,
    "safetensors": lambda root: class_folders(root, ".safetensors"),
    "fast-DiT": lambda root: pair(root, "imagenet256_"),
    "mean and std": mean_and_std,
    "shards": packed,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_and_resumes(layout, tmp_path):
    LAYOUTS[layout](tmp_path / "set")
    workers = ("--data.num_workers", 1 if layout == "mean and std" else 0)
    done = train(*MODEL, *RUN, *DATA, *workers, cwd=tmp_path)
    assert "12 samples, 3 classes" in succeeded(done)
    assert done.stderr == ""
    folder = tmp_path / "outputs" / "digits"
    whole = metrics(folder)
    assert len(whole) == 4
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    # Another number of workers, another path.
    (tmp_path / "set").rename(tmp_path / "moved")
    done = train(*MODEL, *RUN, *DATA[:3], "moved", "--data.num_workers", 0, cwd=tmp_path)
    assert "resumed from outputs/digits/checkpoints/step-00000002" in succeeded(done)
    assert [row["loss"] for row in metrics(folder)] == [row["loss"] for row in whole]
    if layout == "mean and std":  # Its class folders have names; the dataset is not needed.
        shutil.rmtree(tmp_path / "moved")
        choose_by_name(tmp_path)


def choose_by_name(cwd):
    flags = ("--run", "outputs/digits", "--num", 4, "--steps", 1, "--labels")
    succeeded(sample(*flags, "emu,Cat", "--out", "named.safetensors", cwd=cwd))
    assert load_file(cwd / "named.safetensors")["labels"].tolist() == [2, 2, 0, 0]
    wrong = only_error(sample(*flags, "emu,kat", "--out", "named.png", cwd=cwd))
    assert 'no class is named "kat". Did you mean cat?' in wrong


def test_unscaled_latents_get_one_line_of_advice_and_another_scale_does_not_resume(tmp_path):
    for i, latent in enumerate(latents_of(12)):
        save(tmp_path / "set" / f"{i % 3}" / f"{i}.npy", latent * 5)
    done = train(*MODEL, *RUN, *DATA, cwd=tmp_path)
    hints = [line for line in succeeded(done).splitlines() if line.startswith("hint")]
    assert len(hints) == 1
    assert "is it missing?" in hints[0]
    done = train(*MODEL, *RUN, *DATA, "--data.scale", 0.2, cwd=tmp_path)
    assert done.returncode == 2
    assert "[data] scale: None -> 0.2" in done.stderr


def test_packing_reports_and_showing_draws(tmp_path):
    pictures(tmp_path / "animals", each=4)
    (tmp_path / "animals" / "cat" / "2.png").write_bytes(b"")
    flags = ("--input", "animals", "--out", "shards", "--image-size", 8, "--source", "a zoo")
    said = succeeded(data("pack", *flags, cwd=tmp_path))
    assert "packing 8 files of 2 classes into 1 shards of uint8 [3, 8, 8]" in said
    assert "dropped 1: empty file" in said
    assert "dropped files are listed in shards/dropped.json" in said
    assert "wrote 7 samples to shards" in said
    before = files_in(tmp_path / "shards")
    again = succeeded(data("pack", *flags, cwd=tmp_path))
    assert "already packed" in again
    assert "1 files were dropped (shards/dropped.json); delete shards" in again
    assert files_in(tmp_path / "shards") == before

    said = succeeded(data("show", "shards", "--num", 4, "--verify", "true", cwd=tmp_path))
    for words in ("[3, 8, 8]", "uint8", "a zoo", "127.5", "2 (cat, dog)", "smallest cat with 3"):
        assert words in said
    assert "verified 1 shards" in said
    assert "channel 2: mean" in said
    assert Image.open(tmp_path / "shards.png").width > 8

    shard = tmp_path / "shards" / "shards-00000.safetensors"
    spoiled = bytearray(shard.read_bytes())
    spoiled[-1] ^= 1
    shard.write_bytes(spoiled)
    message = only_error(data("show", "shards", "--verify", "true", cwd=tmp_path))
    assert "its SHA-256 differs from the manifest's" in message


def test_showing_a_folder_of_means_and_stds_says_so(tmp_path):
    mean_and_std(tmp_path / "set")
    said = succeeded(data("show", "set", "--out", "pictures/few.png", cwd=tmp_path))
    assert "the 8 channels look like a mean and a std of 4" in said
    assert "3 (cat, dog, emu)" in said
    assert (tmp_path / "pictures" / "few.png").is_file()


def test_the_picture_is_not_drawn_into_the_dataset(tmp_path):
    class_folders(tmp_path / "set")
    before = files_in(tmp_path)
    assert "is inside the dataset ." in only_error(data("show", ".", cwd=tmp_path / "set"))
    assert "is inside the dataset" in only_error(
        data("show", "set", "--out", "set/0001/few.png", cwd=tmp_path)
    )
    assert files_in(tmp_path) == before


BAD = {
    "no input": (("pack", "--input", "no", "--out", "out"), "path=no: no such folder"),
    "no dataset": (
        ("show", "empty"),
        "path=empty: no dataset found: the folder is empty.",
    ),
    "classes": (
        ("pack", "--input", "set", "--out", "out", "--classes", "list.txt"),
        "the folders 0001, 0002 are not among the 1 listed classes",
    ),
    "dtype": (("pack", "--input", "set", "--out", "out", "--scale", "0"), "scale=0"),
    "command": (
        ("unpack",),
        "data unpack: no such command. There is: data encode, data pack, data show, data",
    ),
    "text": (
        ("tokenize", "--input", "list.txt", "--out", "out", "--append-eod"),
        "[data tokenize] give one of --tokenizer (a tokenizer.json) and --vocab-file.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_nothing_is_written(case, tmp_path):
    class_folders(tmp_path / "set")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text("0000\n")
    before = files_in(tmp_path)
    words, wanted = BAD[case]
    assert wanted in only_error(data(*words, cwd=tmp_path))
    assert files_in(tmp_path) == before


def test_a_model_of_other_classes_is_told_how_to_fit(tmp_path):
    class_folders(tmp_path / "set")
    flags = (*MODEL[:-1], 1000, *RUN, *DATA)
    message = only_error(train(*flags, cwd=tmp_path))
    assert "num_classes=1000 is more than the 3 classes of [data]. Set num_classes = 3." in message
    assert "data pack --num-classes 1000" in message
    manifest = {"format": "titan_dit.folder/1", "num_classes": 1000}
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    succeeded(train(*flags, cwd=tmp_path))


def test_help_lists_the_commands_of_a_group(tmp_path):
    for words in ((), ("--help",)):
        said = succeeded(data(*words, cwd=tmp_path)) if words else data(cwd=tmp_path).stderr
        assert "data pack" in said
        assert "data show" in said
    assert "Positional" not in succeeded(data("show", "--help", cwd=tmp_path))


def test_reasons_are_grouped_by_kind():
    reasons = [f"shape [3, {i}, 4], not [3, 8, 8] like the other files" for i in range(39)]
    reasons += ["empty file"] * 2 + ["holds 2 entries (a, b)", "holds 3 entries (a, b, c)"]
    assert data_pack.summary(reasons) == [
        "dropped 39: wrong shape, e.g. shape [3, 0, 4], not [3, 8, 8] like the other files",
        "dropped 2: empty file",
        "dropped 2: holds entries, e.g. holds 2 entries (a, b)",
    ]


def test_a_list_of_classes_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "list.txt"
    paths = {"input": str(tmp_path), "out": str(tmp_path / "set"), "classes": str(file)}
    packing = flags_pack.DataPackFlags(**paths)
    encoding = flags_encode.DataEncodeFlags(**paths, vae="vae", image_size=8)
    for content, words in (
        ("na\u00efve", r"is not UTF-8 \(byte 3\)"),
        ("a\na", ": a is listed twice"),
    ):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match=rf"^\[data pack\] classes=.*list.txt ?{words}"):
            data_pack.main(packing)
        with pytest.raises(UserError, match=rf"^\[data encode\] classes=.*list.txt ?{words}"):
            data_encode.run(encoding, torch.device("cpu"))


def test_switches_are_written_as_in_toml():
    for words in (["--verify", "true"], ["--verify=true"]):
        spelled = as_python(["set", *words], data_show.DataShowFlags)
        assert "=".join(spelled[1:]) == "--verify=True"
    assert as_python(["--out=true"], data_show.DataShowFlags) == ["--out=true"]


def test_a_switch_may_stand_alone():
    flags = ["--append-eod", "--lower", "false", "--split_sentences", "--input", "a", "--lower"]
    assert as_python(flags, data_tokenize.DataTokenizeFlags) == [
        *("--append-eod", "True", "--lower", "False", "--split_sentences", "True"),
        *("--input", "a", "--lower", "True"),
    ]
    assert as_python(["set", "--verify"], data_show.DataShowFlags) == ["set", "--verify", "True"]


def test_text_is_tokenized_and_shown(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("To be. Or not to be. " * 3)
    files = ("--input", "0.txt", "1.txt", "2.txt")
    made = ("--out", "t.json", "--vocabulary", 270)
    assert "wrote t.json" in succeeded(data("train-tokenizer", *files, *made, cwd=tmp_path))
    flags = ("--out", "out", "--tokenizer", "t.json", "--workers", 2)
    flags += ("--split-sentences", "--append-eod")
    assert "wrote 3 documents, 18 sequences" in succeeded(
        data("tokenize", *files, *flags, cwd=tmp_path)
    )
    shown = succeeded(data("show", "out_text_sentence", "--tokenizer", "t.json", cwd=tmp_path))
    assert "sequences  18, 6.0 per document" in shown
