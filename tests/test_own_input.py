"""No command writes onto what it reads: the path flags of every command, by introspection."""

import dataclasses
import os
from pathlib import Path
from typing import get_args

import pytest

from titan_dit.__main__ import COMMANDS
from titan_dit.commands import flags, own_input
from titan_dit.config.section import UserError, Written, hints_of, path_rule

OPTIONS = {
    command.replace(" ", "_").replace("-", "_"): flags.of_command(command)
    for command in COMMANDS
    if command != "train"
}
TEXT = {
    *("device", "format", "features", "metrics", "labels", "sampler", "prompt", "source"),
    *("split", "size", "eod_token", "language", "schedule", "dtype", "name", "weights"),
    *("backends", "json_keys", "fix", "kind", "posterior", "units", "prediction", "noise_schedule"),
    *("buckets", "no_caption", "caption_prefix", "text_layer", "text_template", "negative"),
    *("frames", "clip", "vae_dtype", "vae_tiles", "features_grid"),
}
"""Options whose text is no path of a file."""
NEEDED = {"vocabulary": 300, "sigma_rel": 0.1, "image_size": 32, "name": "pictures", "step": 1}
FILE = "in/given.safetensors"


def path_fields(options):
    """The options that hold a path, and whether it is written."""
    rules = {name: path_rule(hint) for name, hint in hints_of(options).items()}
    return {name: isinstance(rule, Written) for name, rule in rules.items() if rule}


def pairs():
    """Every (command, option that is written, option that is read)."""
    for command, options in OPTIONS.items():
        fields = path_fields(options)
        for written in (name for name, writes in fields.items() if writes):
            for read in (name for name, writes in fields.items() if not writes):
                yield command, written, read


def built(options, **paths):
    """Options of a command with these paths, and anything where it needs more."""
    missing = dataclasses.MISSING
    needed = {
        f.name: NEEDED.get(f.name, "x")
        for f in dataclasses.fields(options)
        if f.default is missing and f.default_factory is missing
    }
    tuples = {name for name, hint in hints_of(options).items() if "tuple" in str(hint)}
    given = needed | paths
    return options(
        **{k: (v,) if k in tuples and isinstance(v, str) else v for k, v in given.items()}
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a file that is read, a link to it, and a hard link."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path(FILE).write_text("read")
    Path("link").symlink_to(Path(FILE).resolve())
    os.link(FILE, "hard")
    return tmp_path


def test_every_option_of_text_says_whether_it_is_a_path():
    for command, options in OPTIONS.items():
        known = path_fields(options)
        for name, hint in hints_of(options).items():
            holds_text = hint is str or str in get_args(hint)
            assert not holds_text or name in known or name in TEXT, (command, name)


def test_every_command_that_writes_declares_it():
    writers = {command for command, written, _ in pairs()}
    alone = {"bench_attention", "data_example", "pipeline_draw"}  # They read no path.
    readers = {"checkpoint_list", "checkpoint_show", "checkpoint_verify", "data_report", "replay"}
    assert writers | alone | readers == set(OPTIONS)


@pytest.mark.parametrize("output", [FILE, "in/../in/given.safetensors", "link", "hard"])
@pytest.mark.parametrize(("command", "written", "read"), list(pairs()))
def test_an_output_that_is_an_input_is_refused(place, command, written, read, output):
    options = built(OPTIONS[command], **{written: output, read: FILE})
    with pytest.raises(UserError, match="which is read") as error:
        own_input.check(options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("output", [FILE, "hard"])
@pytest.mark.parametrize(("command", "written", "read"), list(pairs()))
def test_a_file_of_a_folder_that_is_read_is_refused(place, command, written, read, output):
    (place / "in" / "manifest.json").touch()  # Of a checkpoint: all of its files are read.
    options = built(OPTIONS[command], **{written: output, read: "in"})
    with pytest.raises(UserError, match=r"is a file of .*which is read"):
        own_input.check(options)


def test_results_may_stand_in_a_runs_folder_and_be_written_again(place):
    runs = built(OPTIONS["runs"], dirs=("outputs",), out="outputs/runs.png")
    for name in ("runs.png", "digits/grid.png", "digits/metrics.jsonl", "digits/checkpoints/x"):
        (place / "outputs" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "outputs" / name).touch()
    own_input.check(runs)
    sample = OPTIONS["sample"]
    own_input.check(built(sample, run="outputs/digits", out="outputs/digits/grid.png"))
    for own in ("metrics.jsonl", "checkpoints/x"):
        with pytest.raises(UserError, match="is a file of --run outputs/digits"):
            own_input.check(built(sample, run="outputs/digits", out=f"outputs/digits/{own}"))


def test_other_files_and_urls_are_no_conflict(place):
    predict = OPTIONS["predict"]
    own_input.check(built(predict, run="s3://a/run", input=FILE, out="new.safetensors"))
    own_input.check(built(predict, run="run", input=FILE, out="in/new.safetensors"))


def test_files_that_a_command_names_itself_are_compared_too(place, monkeypatch):
    Path("c_bad_lines.txt").touch()
    tokenize = built(OPTIONS["data_tokenize"], input=("c_bad_lines.txt",), out="c")
    with pytest.raises(UserError, match=r"is --input c_bad_lines.txt"):
        own_input.check(tokenize)
    Path("x.safetensors.parts").mkdir()
    Path("x.safetensors.parts/noise").touch()
    sample = built(
        OPTIONS["sample"], run="r", out="x.safetensors", noise="x.safetensors.parts/noise"
    )
    with pytest.raises(UserError, match="temporary files of its name"):
        own_input.check(sample)
    config = Path("digits.toml")
    config.touch()
    plan = built(OPTIONS["plan"], config="digits", write="digits.toml")
    with pytest.raises(UserError, match=r"--write digits\.toml is --config"):
        own_input.check(plan)
    keyed = built(OPTIONS["evaluate"], run="r", out=FILE)
    with pytest.raises(UserError, match=r"is --data\.path"):
        own_input.check(keyed, ("--data.path", FILE))


def test_two_outputs_are_two_files(place):
    same = {"save_samples": "a.npz", "save_reference": "./a.npz"}
    with pytest.raises(UserError, match=r"--save-reference a.npz is --save-samples a.npz, too"):
        own_input.check(built(OPTIONS["evaluate"], run="r", reference="in", **same))
