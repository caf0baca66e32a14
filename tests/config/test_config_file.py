import json
from pathlib import Path

import pytest
from small_config import TEXT
from tiny import tiny_config
from unchecked import unchecked

from titan_dit.config import config_file
from titan_dit.config.catalog import variant
from titan_dit.config.config_file import CONFIG_DIR, build, to_tables, to_toml
from titan_dit.config.section import UserError


def test_values_defaults_and_the_name_of_the_file(load):
    config = load()
    assert config.job.name == "small"
    assert config.training.steps == 10
    assert config.model.shape == (32, 2, 4, 2)
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.ema.decays == (0.9999,)
    assert (config.model.name, config.objective.name, config.data.name) == (
        "dit",
        "rectified_flow",
        "digits",
    )


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("[optimiser]\nlr = 1", "[optimiser]: unknown section. Did you mean optimizer?"),
        ("[zzz]\nqqqq = 1", "[zzz]: unknown section. Valid: "),
        ("[sampling]\neveri = 1", "[sampling] everi: unknown key. Did you mean every?"),
        (
            "[metrics]\nqqqq = 1",
            "[metrics] qqqq: unknown key. Valid: every, tensorboard, wandb, "
            "wandb_entity, wandb_project.",
        ),
        ("[ema]\nname = 1", "[ema] name: unknown key."),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest_valid_one(refused, extra, words):
    assert words in refused(text=TEXT + extra)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "hidden_size = 32",
            "hidden_siz = 32",
            "[model] hidden_siz: unknown key. Did you mean hidden_size?",
        ),
        ('name = "dit"', 'name = "dits"', '[model] name="dits" is unknown. Did you mean dit?'),
        ('name = "dit"', "name = 3", "[model] name=3 must be text"),
        ('name = "dit"\n', "", "[model] name is missing"),
        ('"rectified_flow"', '"rectfied_flow"', "Did you mean rectified_flow?"),
        ('"digits"', '"digit"', '[data] name="digit" is unknown. Did you mean digits?'),
        ("steps = 10\n", "", "[training] steps is missing. Set steps, or epochs."),
        ("latent_size = 8\n", "", "[model] latent_size is missing and has no default"),
        ("num_heads = 4\n", "", "[model] num_heads missing"),
        ("steps = 10", 'steps = "10"', '[training] steps="10" must be a whole number'),
        ("steps = 10", "steps = true", "[training] steps=true must be a whole number"),
        ("lr = 1e-3", "lr = nan", "[optimizer] lr=nan must be"),
        ("lr = 1e-3", "lr = inf", "[optimizer] lr=inf must be at most 1e+30"),
        ("lr = 1e-3", 'lr = "1e-3"', '[optimizer] lr="1e-3" must be a number'),
    ],
)
def test_a_mistake_in_the_file_is_named(refused, old, new, words):
    assert old in TEXT
    assert words in refused(text=TEXT.replace(old, new, 1))


@pytest.mark.parametrize("section", ["model", "objective", "data", "training"])
def test_a_section_that_must_be_there_is_asked_for(section):
    tables = {
        "model": {
            "name": "dit",
            "size": "S/2",
            "latent_size": 8,
            "in_channels": 1,
            "num_classes": 2,
        },
        "objective": {"name": "rectified_flow"},
        "data": {"name": "digits"},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    assert build(tables, variant).training.steps == 1
    del tables[section]
    with pytest.raises(UserError, match=rf"\[{section}\] \w+ is missing"):
        build(tables, variant)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "hidden_size = 32",
            'hidden_size = "32"',
            '[model] hidden_size="32" must be a whole number. Write 32, without quotes.',
        ),
        (
            "[data]",
            'timesteps = "normal"\n[data]',
            '[objective] timesteps="normal" is not one of "uniform", "logit_normal", "mode". Did '
            "you mean logit_normal?",
        ),
        (
            '"digits"',
            '"digits"\nnum_workers = true',
            "[data] num_workers=true must be a whole number.",
        ),
    ],
)
def test_a_section_with_a_wrong_type_is_answered_for_models_objectives_and_data_too(
    refused, old, new, words
):
    with unchecked():  # Otherwise the tests' type checks raise first.
        assert refused(text=TEXT.replace(old, new, 1)) == words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config digits.toml"),
        (["--training.steps", "3"], "--config digits.toml"),
        (["--config"], "--config digits.toml"),
        (["--config", "a", "b"], "Give one config file"),
        (["digits.toml"], "Write --config digits.toml"),
    ],
)
def test_a_run_without_a_config_is_told_how_to_give_one(arguments, words):
    with pytest.raises(UserError) as caught:
        config_file.load(arguments, variant)
    assert words in str(caught.value)


def test_an_unknown_config_lists_the_known_ones():
    with pytest.raises(UserError) as caught:
        config_file.load(["--config", "digit.toml"], variant)
    message = str(caught.value)
    assert message.startswith("--config digit.toml: no such file")
    assert all(path.name in message for path in CONFIG_DIR.glob("*.toml"))


@pytest.mark.parametrize("name", ["digits", "digits.toml"])
def test_a_config_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert config_file.load(["--config", name], variant).job.name == "digits"
    assert config_file.load([f"--config={name}"], variant).job.name == "digits"


def test_a_file_here_goes_before_one_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits.toml").write_text(TEXT)
    assert config_file.load(["--config", "digits"], variant).model.shape[0] == 32


def test_a_syntax_error_names_file_and_line(refused):
    message = refused(text=TEXT + "lr =\n")
    assert "small.toml is not valid TOML" in message
    assert f"line {len((TEXT + 'lr =').splitlines())}" in message


def test_a_key_outside_any_section_is_named(refused):
    assert "seed=3 is outside any [section]" in refused(text="seed = 3\n" + TEXT)


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.toml")), ids=lambda path: path.name)
def test_every_config_of_ours_is_valid_and_survives_being_written(tmp_path, path):
    config = config_file.load(["--config", str(path)], variant)
    assert config.job.name == path.stem
    written = tmp_path / "config.toml"
    written.write_text(to_toml(to_tables(config)))
    assert config_file.load(["--config", str(written)], variant) == config
    # The tables go through JSON in a checkpoint's manifest.
    assert build(json.loads(json.dumps(to_tables(config))), variant) == config


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "two\nlines", "ünï", "7", ""])
def test_any_text_survives_being_written(load, tmp_path, name):
    config = build(to_tables(load()) | {"job": {"name": name}}, variant)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(to_tables(config)))
    assert config_file.load(["--config", str(written)], variant).job.name == name


def test_the_written_config_names_every_key_that_is_set(load):
    tables = to_tables(load())
    assert tables["model"]["name"] == "dit"
    assert tables["checkpoint"]["keep"] == 3
    assert "microbatch_size" not in tables["training"]  # unset: TOML has no null
    assert tables["optimizer"]["betas"] == [0.9, 0.999]


def test_sections_that_are_not_asked_for_are_neither_read_nor_imported():
    tables = to_tables(tiny_config())
    tables["data"] = {"name": "gone.from_this_machine:Data", "any": "key"}
    tables["job"]["hooks"] = ["gone.from_this_machine:Hook"]
    found = config_file.build_sections(tables, variant, ("model", "objective", "ema"))
    assert sorted(found) == ["ema", "model", "objective"]
    with pytest.raises(UserError, match=r"there is no module gone"):
        build(tables, variant)
