"""Every recipe in train_configs/ agrees with its description, and trains."""

import dataclasses

import pytest
import torch
from harness import on_ranks
from tiny_joint import joint_config

from titan_dit.checks import validate
from titan_dit.config import catalog, config_file
from titan_dit.config.config_file import CONFIG_DIR
from titan_dit.plan import resolve

NAMES = sorted(path.stem for path in CONFIG_DIR.glob("*.toml"))
# Trainable parameters, in millions: arXiv:2212.09748 counts XL/2 as 675, L/2 458, B/2 130, S/2 33.
PUBLISHED = {
    "dit_s2": (32.865, 256),
    "dit_b2": (130.316, 256),
    "dit_l2": (457.841, 256),
    "dit_xl2_256": (674.835, 256),
    "dit_xl2_512": (674.835, 1024),
    "sit_xl2": (674.835, 256),
}
# Our own: too large for one device, so they have their own layouts and warm-ups.
LARGE = {
    "dit_3b": (3036.361, 16384),
    "dit_7b": (7304.870, 4096),
    "dit_xl2": (674.835, 1024),
}
SIZES = PUBLISHED | LARGE
TINY = {
    "size": None,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "patch_size": 2,
    "latent_size": 8,
}


def load(name):
    return config_file.load(["--config", name], catalog.variant)


@pytest.mark.parametrize("name", SIZES)
def test_the_models_have_the_published_sizes(name):
    config = load(name)
    with torch.device("meta"):
        model = config.objective.model_spec(config.model).build()
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert (round(count, 3), config.model.token_shape[0]) == SIZES[name]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_recipe_fits_a_node_and_parts_of_it(name, ranks):
    config = load(name)
    validate(config, resolve(config, ranks))


MANY = {"training.tokens_per_step": 262144, "training.batch_multiple": 64}
ONE_REPLICA = {"parallel.dp_replicate": 1}
LAYOUTS = [
    ("dit_xl2", 8, {}),
    ("dit_3b", 16, {}),
    ("dit_3b", 64, {}),
    ("dit_3b", 32, {"model.latent_size": 512, "parallel.cp": 8}),
    (
        "dit_3b",
        16,
        {
            "model.latent_size": 512,
            "parallel.cp": 1,
            "parallel.pp": 8,
            "activation_checkpoint.mode": "full",
        },
    ),
    ("dit_3b", 16, {"parallel.cp": 1, "parallel.pp": 1}),
    ("dit_3b", 64, {"parallel.cp": 1, "parallel.pp": 1}),
    ("dit_7b", 64, {}),
    ("dit_7b", 1024, {}),
    ("dit_7b", 16, ONE_REPLICA),
    ("dit_7b", 128, ONE_REPLICA),
    *(
        ("dit_7b", ranks, ONE_REPLICA | {"parallel.tp": tp, "parallel.pp": 16 // tp})
        for ranks in (16, 1024)
        for tp in (2, 4, 8)
    ),
    *((name, ranks, {}) for name in ("flux2_klein_lora", "z_image_lora") for ranks in (1, 8)),
    *((name, 64, MANY) for name in ("flux2_klein_lora", "z_image_lora")),
    *(("z_image_6b", ranks, {}) for ranks in (8, 64)),
]
"""The claims of the recipes."""
TEXT_LAYOUTS = {
    "gpt_plays": (1, 2),
    "bert_plays": (1, 2),
    "gpt2_124m": (1, 8, 32),
    "bert_large": (8, 64),
    "gpt_768x12": (1, 8),
    "gpt_1536x16": (1, 8, 16),
    "gpt_2304x24": (16, 32),
    "gpt_3072x16": (16,),
    "gpt_3072x32": (32,),
    "gpt_175b": (512, 1024),
}
"""Ranks of the recipes for text."""
CAPTIONED = {"digits_captioned", "digits_moving"}
"""Trained in tests/pictures/test_captioned_digits.py and test_moving_digits.py, on their data."""
TEXT_TO_IMAGE = {
    *("emoji_captioned", "flux2_klein_lora", "z_image_lora", "z_image_6b"),
    *("wan_1_3b", "wan_14b", "wan_14b_lora"),
}


@pytest.mark.parametrize(("name", "ranks", "flags"), LAYOUTS)
def test_the_layouts_that_a_recipe_names_fit(name, ranks, flags):
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    config = config_file.load(["--config", name, *words], catalog.variant)
    validate(config, resolve(config, ranks))


@pytest.mark.parametrize("name", TEXT_LAYOUTS)
def test_a_recipe_for_text_fits_its_ranks(name):
    config = load(name)
    for ranks in TEXT_LAYOUTS[name]:
        validate(config, resolve(config, ranks))


def test_every_recipe_for_text_is_tested():
    text = {name for name in NAMES if name.startswith(("gpt", "bert"))}
    assert text == set(TEXT_LAYOUTS)
    assert text.isdisjoint({*SIZES, "digits"})


def test_the_7b_is_sharded_over_128_of_1024_ranks_and_a_rank_has_one_sample():
    plan = resolve(load("dit_7b"), 1024)
    assert str(plan.sizes) == "dp_replicate 8 x dp_shard 128"
    assert (plan.global_batch_size, plan.samples_per_rank, plan.num_microbatches) == (1024, 1, 1)


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_says_where_its_numbers_come_from_and_how_to_start_it(name):
    head = (CONFIG_DIR / f"{name}.toml").read_text().split("[job]")[0]
    assert "arXiv:" in head
    assert f"./run_train.sh --config {name}.toml" in head


def tiny_pictures(tables):
    model = {k: v for k, v in (tables["model"] | TINY).items() if v is not None}
    shape = {key: model[key] for key in ("latent_size", "num_classes")}
    shape["channels"] = model["in_channels"]
    tables["model"], tables["data"] = model, {"name": "synthetic", "count": 64, **shape}
    tables["validation"] = {}


def tiny_captions(tables):
    network = tables["model"]["name"]
    tiny = config_file.to_tables(joint_config(network))
    tables["model"], tables["data"] = tiny["model"], tiny["data"]
    tables["text"] = tables["validation"] = tables["lora"] = {}  # No trained weights.
    tables["checkpoint"] = {"every": 0}
    tables["sampling"] = {"every": 0}
    for key in ("tokens_per_step", "tokens_per_microbatch", "batch_multiple"):
        tables["training"].pop(key, None)


def tiny_text(tables):
    tables["model"] |= {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
    tables["model"] |= {"vocab_size": 2100, "sequence_length": 32}
    tables["model"].pop("size", None)
    tables["data"] = {"name": "plays", "sequence_length": 32}
    if "sentence_order" in tables["objective"]:
        tables["objective"]["sentence_order"] = False  # The plays are no sentences.
    tables["precision"] |= {"dtype": "fp32"}  # On a CPU fp16 is slow.
    tables["validation"] = {}


def two_steps_of_each(world):
    """The recipes with a tiny model, synthetic data and no compilation."""
    from titan_dit.trainer import Trainer

    found = {}
    for name in sorted(set(NAMES) - CAPTIONED):
        config = load(name)
        tables = config_file.to_tables(config)
        make_tiny = tiny_text if name in TEXT_LAYOUTS else tiny_pictures
        make_tiny = tiny_captions if name in TEXT_TO_IMAGE else make_tiny
        make_tiny(tables)
        tables["compile"] = {"enabled": False}
        tables["parallel"] = tables["pipeline"] = {}
        tables["training"] |= {"global_batch_size": 4, "microbatch_size": 2, "stages": []}
        trainer = Trainer(config_file.build(tables, catalog.variant), world)
        batches = trainer.batches()
        for trainer.step in (1, 2):
            loss, grad_norm, lr = trainer.train_step(next(batches))
        found[name] = (loss.item(), grad_norm.item(), lr)
    return found


def test_every_recipe_takes_steps():
    [found] = on_ranks(1, two_steps_of_each)
    assert set(found) == set(NAMES) - CAPTIONED
    for name, (loss, grad_norm, lr) in found.items():
        # A zero prediction of standard normal targets has loss 1, of velocities 2.
        # Of text the loss is the entropy of equally likely ids: log 2100.
        assert (7 < loss < 8.5) if name in TEXT_LAYOUTS else (0.5 < loss < 4), name
        assert 0 < grad_norm < 100, name
        warmup = load(name).lr_scheduler.warmup_steps
        peak = load(name).optimizer.lr
        assert lr == (pytest.approx(peak * 2 / warmup) if warmup else peak), name


def test_recipes_of_one_family_differ_only_where_they_mean_to():
    s, xl = load("dit_s2"), load("dit_xl2_256")
    for name in ("dit_b2", "dit_l2"):
        other = load(name)
        assert dataclasses.replace(other, job=s.job, model=s.model) == s
    assert dataclasses.replace(xl, job=s.job, model=s.model, training=s.training) == s
    assert dataclasses.replace(xl.training, steps=s.training.steps) == s.training
