"""Sections and keys of older formats: in files, flags and records, next to today's."""

import pytest
from small_config import TEXT

from titan_dit.config import catalog, config_file
from titan_dit.config.config_file import RENAMED, in_new_sections, new_path
from titan_dit.config.section import UserError

OLD = {
    "model.hidden_size": "model.hidden",
    "model.num_layers": "model.layers",
    "model.num_heads": "model.heads",
    "model.patch_size": "model.patch",
    "model.in_channels": "model.channels",
}
MORE = """
[remat]
mode = "full"

[lr_schedule]
warmup_steps = 3

[evaluation]
num = 7

[sampling]
length = 9
vae = ""

[parallel]
prefetch = 0
"""


def written_as_before():
    text = TEXT
    for new, old in OLD.items():
        text = text.replace(f"{new.partition('.')[2]} =", f"{old.partition('.')[2]} =")
    return text


def read(tmp_path, text, *words):
    file = tmp_path / "small.toml"
    file.write_text(text)
    return config_file.load(["--config", str(file), *words], catalog.variant)


def test_an_old_file_is_the_config_of_the_new_one(tmp_path):
    assert "hidden = " in written_as_before()
    assert read(tmp_path, written_as_before()) == read(tmp_path, TEXT)


def test_sections_are_renamed_keys_move_and_old_spellings_of_not_set_are_none(tmp_path):
    config = read(tmp_path, TEXT + MORE)
    assert config.activation_checkpoint.mode == "full"
    assert (config.lr_scheduler.warmup_steps, config.fid.num) == (3, 7)
    assert config.generation.max_new_tokens == 9
    assert (config.sampling.vae, config.parallel.prefetch) == (None, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--remat.mode", "full"), ("--activation_checkpoint.mode", "full")),
        (("--sampling.prompt", "1 2"), ("--generation.prompt", "1 2")),
        (("--model.hidden", "64"), ("--model.hidden_size", "64")),
        (("--model.size", "S/2", "--model.patch", "2"), ("--model.size", "S/2")),
        (("--data.workers", "2"), ("--data.num_workers", "2")),
        (("--checkpoint.dir", ""), ()),
    ],
)
def test_flags_of_old_names_are_aliases(tmp_path, old, new):
    assert read(tmp_path, TEXT, *old) == read(tmp_path, TEXT, *new)


def test_two_values_under_the_old_and_the_new_name_are_refused(tmp_path):
    both = {"remat": {"mode": "full"}, "activation_checkpoint": {"mode": "none"}}
    with pytest.raises(
        UserError, match=r"\[activation_checkpoint\] mode has two values.*\(remat\)"
    ):
        in_new_sections(both)
    with pytest.raises(UserError, match=r"hidden_size has two values.*\(model.hidden\)"):
        read(tmp_path, TEXT, "--model.hidden_size", "32", "--model.hidden", "64")
    text = TEXT.replace("num_heads", "heads = 1\nnum_heads")
    with pytest.raises(UserError, match=r"\[model\] num_heads has two values"):
        read(tmp_path, text)
    both["remat"]["mode"] = "none"
    assert in_new_sections(both) == {"activation_checkpoint": {"mode": "none"}}


def test_no_new_name_is_an_old_one():
    assert not {*RENAMED.values()} & {*RENAMED}
    assert all(new_path(new_path(path)) == new_path(path) for path in RENAMED)
