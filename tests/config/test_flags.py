import pytest
from small_config import TEXT

from titan_dit.config import catalog, config_file
from titan_dit.config.config_file import to_tables


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
        # As Python and --help print values, and as people write lists.
        (["--compile.enabled", "True"], "compile", "enabled", True),
        (["--optimizer.fused=False"], "optimizer", "fused", False),
        (["--training.microbatch_size", "None"], "training", "microbatch_size", None),
        (["--ema.warmup", "None"], "ema", "warmup", None),
        (["--job.name", "None"], "job", "name", "None"),
        (["--job.name", "True"], "job", "name", "True"),
        (["--training.steps", "1e4"], "training", "steps", 10_000),
        (["--training.steps", "10_000"], "training", "steps", 10_000),
        (["--job.seed", "007"], "job", "seed", 7),
        (["--optimizer.lr", ".001"], "optimizer", "lr", 0.001),
        (["--training.epochs", "1."], "training", "epochs", 1.0),
        (["--optimizer.betas", "0.8,0.9"], "optimizer", "betas", (0.8, 0.9)),
        (["--optimizer.betas", "0.8,", "0.9"], "optimizer", "betas", (0.8, 0.9)),
        (["--optimizer.betas", "[0.8,", "0.9]"], "optimizer", "betas", (0.8, 0.9)),
        (["--optimizer.betas", "(0.8, .9)"], "optimizer", "betas", (0.8, 0.9)),
        (["--pipeline.split", "2 2"], "pipeline", "split", (2, 2)),
        (["--ema.decays", "()"], "ema", "decays", ()),
        (["--checkpoint.resume", "C:\\runs\\a"], "checkpoint", "resume", "C:\\runs\\a"),
        (["--job.dir=-odd"], "job", "dir", "-odd"),
        (["--job.dir=~/runs"], "job", "dir", "/home/me/runs"),
        (["--checkpoint.resume", "~/runs"], "checkpoint", "resume", "/home/me/runs"),
        (["--checkpoint.dir=s3://bucket/~run"], "checkpoint", "dir", "s3://bucket/~run"),
        (["--job.dir", "training.steps=5"], "job", "dir", "training.steps=5"),
        (["--model.size", "S/2"], "model", "hidden_size", 384),
    ],
)
def test_flags_win_over_the_file_and_are_read_as_toml(
    load, monkeypatch, flags, section, key, value
):
    monkeypatch.setenv("HOME", "/home/me")
    got = getattr(getattr(load(*flags), section), key)
    assert got == value
    assert type(got) is type(value)


def test_a_path_below_the_home_directory_is_found_in_a_file_and_after_an_equals_sign(
    load, tmp_path, monkeypatch
):
    """Shells leave `~` as it is in `--config=~/a.toml`, and TOML has none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data = '[data]\nname = "latents"\npath = "~/latents"\n'
    found = load(text=TEXT.replace('[data]\nname = "digits"\n', data))
    assert found.data.path == str(tmp_path / "latents")
    assert config_file.load(["--config=~/small.toml"], catalog.variant) == found


def test_a_flag_changes_nothing_else(load):
    tables, changed = to_tables(load()), to_tables(load("--training.steps", "99"))
    assert changed["training"].pop("steps") == 99
    tables["training"].pop("steps")
    assert changed == tables


def test_the_order_of_flags_does_not_matter(load):
    keys = {"latent_size": 8, "channels": 1, "num_classes": 10}
    flags = [word for k, v in keys.items() for word in (f"--data.{k}", str(v))]
    first = load("--data.name", "synthetic", *flags)
    assert load(*flags, "--data.name", "synthetic") == first
    assert first.data.latent_size == 8


def test_flags_can_choose_another_dataset(load):
    flags = ["--data.name", "synthetic", "--data.latent_size", "8"]
    config = load(*flags, "--data.channels", "1", "--data.num_classes", "10")
    assert config.data.name == "synthetic"
    assert config.data.latent_size == 8


def test_a_flag_that_chooses_another_objective_drops_what_the_file_says_of_the_old_one(load):
    assert load().objective.timesteps == "logit_normal"
    other = load("--objective.name", "ddpm", "--objective.prediction", "v").objective
    assert (other.name, other.prediction, other.condition_dropout) == ("ddpm", "v", 0.1)
    assert load("--objective.name", "rectified_flow") == load()


def test_a_key_of_another_objective_is_still_refused_among_the_flags(refused):
    message = refused("--objective.name", "ddpm", "--objective.shift", "2")
    assert "[objective] shift: unknown key" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--training.stps", "3"], "[training] stps: unknown key. Did you mean steps?"),
        (["--traininx.steps", "3"], "[traininx]: unknown section. Did you mean training?"),
        (["--training.steps"], "--training.steps has no value"),
        (["--compile.enabled"], "--compile.enabled true"),
        (["--steps", "3"], "--steps: flags have the form --section.key value"),
        (["--training.steps", "-3"], "[training] steps=-3 must be at least 1"),
        (["--training.steps", "many"], '[training] steps="many" must be a whole number'),
        (["--training.steps", "3", "4"], "[training] steps=[3, 4] must be a whole number"),
        (["--training.steps", "1.5"], "[training] steps=1.5 must be a whole number"),
        (["--compile.enabled", "yes"], '[compile] enabled="yes" must be true or false'),
        (["--compile.enabled", "1"], "[compile] enabled=1 must be true or false"),
        (
            ["--precision.dtype", "tf32"],
            '[precision] dtype="tf32" is not one of "fp64", "fp32", "bf16", "fp16"',
        ),
        (["--optimizer.betas", "0.9"], "[optimizer] betas=[0.9] must hold two"),
        (["--optimizer.lr", "nan"], "[optimizer] lr=nan must be"),
        (["--optimizer.lr", "-1e-3"], "[optimizer] lr=-0.001 must be above 0"),
    ],
)
def test_a_mistake_in_a_flag_is_named(refused, flags, words):
    assert words in refused(*flags)


def test_a_number_too_large_for_a_float_is_refused(refused):
    assert "[optimizer] lr" in refused("--optimizer.lr", "1" + "0" * 400)
