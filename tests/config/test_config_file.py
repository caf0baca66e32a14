import copy
import json
from pathlib import Path

import pytest
from tiny import tiny_config
from unchecked import unchecked

from titan_dit.config import config_file
from titan_dit.config.catalog import variant
from titan_dit.config.config_file import CONFIG_DIR, build, changes, to_tables, to_toml
from titan_dit.config.section import UserError

TEXT = """
[model]
name = "dit"
hidden = 32
layers = 2
heads = 4
patch = 2
latent_size = 8
channels = 1
num_classes = 10

[objective]
name = "rectified_flow"

[data]
name = "digits"

[training]
steps = 10
global_batch_size = 8

[optimizer]
lr = 1e-3
"""


@pytest.fixture
def load(tmp_path):
    def load(*flags, text=TEXT):
        path = tmp_path / "small.toml"
        path.write_text(text)
        return config_file.load(["--config", str(path), *flags], variant)

    return load


@pytest.fixture
def refused(load):
    """The message with which a config is refused."""

    def refused(*flags, text=TEXT):
        with pytest.raises(UserError) as caught:
            load(*flags, text=text)
        return str(caught.value)

    return refused


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
        ("[zzz]\nlr = 1", "[zzz]: unknown section. Valid: "),
        ("[sampling]\neveri = 1", "[sampling] everi: unknown key. Did you mean every?"),
        ("[metrics]\nqqqq = 1", "[metrics] qqqq: unknown key. Valid: every, tensorboard, wandb."),
        ("[ema]\nname = 1", "[ema] name: unknown key."),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest_valid_one(refused, extra, words):
    assert words in refused(text=TEXT + extra)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden = 32", "hidde = 32", "[model] hidde: unknown key. Did you mean hidden?"),
        ('name = "dit"', 'name = "dits"', '[model] name="dits" is unknown. Did you mean dit?'),
        ('name = "dit"', "name = 3", "[model] name=3 must be text"),
        ('name = "dit"\n', "", "[model] name is missing"),
        ('"rectified_flow"', '"rectfied_flow"', "Did you mean rectified_flow?"),
        ('"digits"', '"digit"', '[data] name="digit" is unknown. Did you mean digits?'),
        ("steps = 10\n", "", "[training] steps is missing and has no default"),
        ("latent_size = 8\n", "", "[model] latent_size is missing and has no default"),
        ("heads = 4\n", "", "[model] heads missing"),
        ("steps = 10", 'steps = "10"', '[training] steps="10" must be a whole number'),
        ("steps = 10", "steps = true", "[training] steps=true must be a whole number"),
        ("lr = 1e-3", "lr = nan", "[optimizer] lr=nan must be"),
        ("lr = 1e-3", "lr = inf", "[optimizer] lr=inf must be below inf"),
        ("lr = 1e-3", 'lr = "1e-3"', '[optimizer] lr="1e-3" must be a number'),
    ],
)
def test_a_mistake_in_the_file_is_named(refused, old, new, words):
    assert old in TEXT
    assert words in refused(text=TEXT.replace(old, new, 1))


@pytest.mark.parametrize("section", ["model", "objective", "data", "training"])
def test_a_section_that_must_be_there_is_asked_for(section):
    tables = {
        "model": {"name": "dit", "size": "S/2", "latent_size": 8, "channels": 1, "num_classes": 2},
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
        ("hidden = 32", 'hidden = "32"', '[model] hidden="32" must be a whole number.'),
        (
            "[data]",
            'timesteps = "normal"\n[data]',
            '[objective] timesteps="normal" is not one of "uniform", "logit_normal".',
        ),
        ('"digits"', '"digits"\nworkers = true', "[data] workers=true must be a whole number."),
    ],
)
def test_a_section_with_a_wrong_type_is_answered_for_models_objectives_and_data_too(
    refused, old, new, words
):
    with unchecked():  # The tests' own check of types would answer first.
        assert refused(text=TEXT.replace(old, new, 1)) == words


@pytest.mark.parametrize(
    ("flags", "section", "key", "value"),
    [
        (["--training.steps", "99"], "training", "steps", 99),
        (["--training.steps=99"], "training", "steps", 99),
        (["--optimizer.lr", "3e-4"], "optimizer", "lr", 3e-4),
        (["--optimizer.lr", "1"], "optimizer", "lr", 1.0),
        (["--optimizer.betas", "0.8", "0.9"], "optimizer", "betas", (0.8, 0.9)),
        (["--optimizer.betas", "[0.8, 0.9]"], "optimizer", "betas", (0.8, 0.9)),
        (["--optimizer.betas=[0.8, 0.9]"], "optimizer", "betas", (0.8, 0.9)),
        (["--ema.decays", "0.9"], "ema", "decays", (0.9,)),
        (["--ema.decays", "[]"], "ema", "decays", ()),
        (["--objective.logit_mean", "-0.5"], "objective", "logit_mean", -0.5),
        (["--objective.logit-mean", "-1"], "objective", "logit_mean", -1.0),
        (["--parallel.dp_shard", "-1"], "parallel", "dp_shard", -1),
        (["--compile.enabled", "true"], "compile", "enabled", True),
        (["--optimizer.fused", "false"], "optimizer", "fused", False),
        (["--precision.dtype", "fp32"], "precision", "dtype", "fp32"),
        (["--job.name", "7"], "job", "name", "7"),
        (["--job.name", "1e5"], "job", "name", "1e5"),
        (["--job.name", "true"], "job", "name", "true"),
        (["--job.name", "2024-01-01"], "job", "name", "2024-01-01"),
        (["--job.name", '"quoted"'], "job", "name", "quoted"),
        (["--job.name", "a b = c # d"], "job", "name", "a b = c # d"),
        (["--job.dir=out-puts/a=b"], "job", "dir", "out-puts/a=b"),
        (
            ["--checkpoint.resume", "/runs/x/step-00000007"],
            "checkpoint",
            "resume",
            "/runs/x/step-00000007",
        ),
        (["--training.microbatch_size", "4"], "training", "microbatch_size", 4),
        (["--training.steps", "5", "--training.steps", "6"], "training", "steps", 6),
    ],
)
def test_flags_win_over_the_file_and_are_read_as_toml(load, flags, section, key, value):
    got = getattr(getattr(load(*flags), section), key)
    assert got == value
    assert type(got) is type(value)


def test_a_flag_changes_nothing_else(load):
    tables, changed = to_tables(load()), to_tables(load("--training.steps", "99"))
    assert changed["training"].pop("steps") == 99
    tables["training"].pop("steps")
    assert changed == tables


def test_flags_can_choose_another_dataset(load):
    flags = ["--data.name", "synthetic", "--data.latent_size", "8"]
    config = load(*flags, "--data.channels", "1", "--data.num_classes", "10")
    assert config.data.name == "synthetic"
    assert config.data.latent_size == 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--training.stps", "3"], "[training] stps: unknown key. Did you mean steps?"),
        (["--traininx.steps", "3"], "[traininx]: unknown section. Did you mean training?"),
        (["--training.steps"], "--training.steps has no value"),
        (["--compile.enabled"], "--compile.enabled true"),
        (["--steps", "3"], "--steps: flags are written --section.key value"),
        (["--training.steps", "-3"], "[training] steps=-3 must be at least 1"),
        (["--training.steps", "many"], '[training] steps="many" must be a whole number'),
        (["--training.steps", "3", "4"], "[training] steps=[3, 4] must be a whole number"),
        (["--training.steps", "1.5"], "[training] steps=1.5 must be a whole number"),
        (["--compile.enabled", "yes"], '[compile] enabled="yes" must be true or false'),
        (["--compile.enabled", "1"], "[compile] enabled=1 must be true or false"),
        (
            ["--precision.dtype", "fp16"],
            '[precision] dtype="fp16" is not one of "fp64", "fp32", "bf16"',
        ),
        (["--optimizer.betas", "0.9"], "[optimizer] betas=[0.9] must hold two"),
        (["--optimizer.lr", "nan"], "[optimizer] lr=nan must be"),
        (["--optimizer.lr", "-1e-3"], "[optimizer] lr=-0.001 must be above 0"),
    ],
)
def test_a_mistake_in_a_flag_is_named(refused, flags, words):
    assert words in refused(*flags)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--config digits.toml"),
        (["--training.steps", "3"], "--config digits.toml"),
        (["--config"], "--config digits.toml"),
        (["--config", "a", "b"], "Give one file"),
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
    assert "seed=3 stands outside any [section]" in refused(text="seed = 3\n" + TEXT)


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


MAY_CHANGE = [
    "job.name",
    "job.dir",
    "job.hooks",
    "training.steps",
    "training.microbatch_size",
    "training.deterministic",
    "parallel.dp_shard",
    "parallel.reshard_after_forward",
    "compile.enabled",
    "checkpoint.every",
    "checkpoint.resume",
    "faults.max_consecutive_bad_steps",
    "metrics.every",
    "sampling.cfg_scale",
    "validation.every",
    "data.name",
    "data.workers",
]
MAY_NOT_CHANGE = [
    "job.seed",
    "model.name",
    "model.hidden",
    "model.qk_norm",
    "model.num_classes",
    "objective.name",
    "objective.timesteps",
    "objective.label_dropout",
    "training.global_batch_size",
    "training.max_grad_norm",
    "precision.dtype",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.weight_decay",
    "lr_schedule.warmup_steps",
    "lr_schedule.decay",
    "ema.decays",
    "ema.every",
]


@pytest.fixture
def changed(load):
    def changed(path):
        section, key = path.split(".")
        old = to_tables(load())
        new = copy.deepcopy(old)
        new[section][key] = "something else"
        return list(changes(old, new))

    return changed


@pytest.mark.parametrize("path", MAY_CHANGE)
def test_a_resumed_run_may_change_what_leaves_the_mathematics_alone(changed, path):
    assert changed(path) == []


@pytest.mark.parametrize("path", MAY_NOT_CHANGE)
def test_a_resumed_run_may_not_change_the_mathematics(changed, path):
    section, key = path.split(".")
    (change,) = changed(path)
    assert change.startswith(f"[{section}] {key}: ")
    assert change.endswith(' -> "something else"')


def test_changes_names_old_and_new_values_one_by_one(load):
    old = to_tables(load())
    new = to_tables(load("--optimizer.lr", "2e-3", "--job.seed", "7", "--training.steps", "11"))
    assert list(changes(old, new)) == ["[job] seed: 0 -> 7", "[optimizer] lr: 0.001 -> 0.002"]
    assert list(changes(old, old)) == []


def test_samplers_are_found_by_name_and_objective():
    from titan_dit.diffusion.ddpm import DDPM
    from titan_dit.diffusion.drawing import sampler_of
    from titan_dit.diffusion.rectified_flow import RectifiedFlow
    from titan_dit.diffusion.samplers.discrete import ddim, ddpm
    from titan_dit.diffusion.samplers.ode import euler, heun

    flow = [sampler_of(RectifiedFlow(), name) for name in ("euler", "heun", "auto")]
    assert flow == [euler, heun, heun]
    assert [sampler_of(DDPM(), name) for name in ("ddpm", "ddim", "auto")] == [ddpm, ddim, ddim]
    with pytest.raises(
        UserError, match=r"\[sampling\] sampler=.huen. is unknown. Did you mean heun"
    ):
        sampler_of(RectifiedFlow(), "huen")


def test_a_sampler_of_another_objective_is_refused_with_those_that_fit():
    from titan_dit.diffusion.ddpm import DDPM
    from titan_dit.diffusion.drawing import sampler_of

    with pytest.raises(
        UserError, match=r"sampler=.heun. does not fit \[objective\] name=.ddpm.*auto, ddim, ddpm"
    ):
        sampler_of(DDPM(), "heun")


def test_the_order_of_flags_does_not_matter(load):
    keys = {"latent_size": 8, "channels": 1, "num_classes": 10}
    flags = [word for k, v in keys.items() for word in (f"--data.{k}", str(v))]
    first = load("--data.name", "synthetic", *flags)
    assert load(*flags, "--data.name", "synthetic") == first
    assert first.data.latent_size == 8


def test_a_number_too_large_for_a_float_is_refused(refused):
    assert "[optimizer] lr" in refused("--optimizer.lr", "1" + "0" * 400)


def test_a_flag_that_chooses_another_objective_drops_what_the_file_says_of_the_old_one(load):
    assert load().objective.timesteps == "logit_normal"
    other = load("--objective.name", "ddpm", "--objective.prediction", "v").objective
    assert (other.name, other.prediction, other.label_dropout) == ("ddpm", "v", 0.1)
    assert load("--objective.name", "rectified_flow") == load()


def test_a_key_of_another_objective_is_still_refused_among_the_flags(refused):
    message = refused("--objective.name", "ddpm", "--objective.shift", "2")
    assert "[objective] shift: unknown key" in message


def test_sections_that_are_not_asked_for_are_neither_read_nor_imported():
    tables = to_tables(tiny_config())
    tables["data"] = {"name": "gone.from_this_machine:Data", "any": "key"}
    tables["job"]["hooks"] = ["gone.from_this_machine:Hook"]
    found = config_file.build_sections(tables, variant, ("model", "objective", "ema"))
    assert sorted(found) == ["ema", "model", "objective"]
    with pytest.raises(UserError, match=r"there is no module gone"):
        build(tables, variant)
