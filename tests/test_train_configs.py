"""Every TOML in train_configs/ is what it says it is, and trains."""

import dataclasses

import pytest
import torch
from harness import on_ranks

from titan_dit import catalog, config_file
from titan_dit.config_file import CONFIG_DIR
from titan_dit.parallel.mesh import check_batch, solve

NAMES = sorted(path.stem for path in CONFIG_DIR.glob("*.toml"))
# Trainable parameters, in millions: arXiv:2212.09748 counts XL/2 as 675, L/2 458, B/2 130, S/2 33.
PUBLISHED = {
    "dit_s2": (32.865, 256),
    "dit_b2": (130.316, 256),
    "dit_l2": (457.841, 256),
    "dit_xl2_256": (674.835, 256),
    "dit_xl2_512": (674.835, 1024),
    "sit_xl2": (674.816, 256),
}
# Ours: too large for one device, so their layouts and their warm-ups are of their own.
LARGE = {
    "dit_7b": (7304.870, 4096),
}
SIZES = PUBLISHED | LARGE
TINY = {"size": None, "hidden": 32, "layers": 2, "heads": 4, "patch": 2, "latent_size": 8}


def load(name):
    return config_file.load(["--config", name], catalog.variant)


@pytest.mark.parametrize("name", SIZES)
def test_the_models_have_the_published_sizes(name):
    config = load(name)
    with torch.device("meta"):
        model = config.model.build(config.objective.output_channels(config.model.channels))
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert (round(count, 3), config.model.token_shape[0]) == SIZES[name]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_batch_divides_over_a_node(name, ranks):
    config = load(name)
    check_batch(config.training, solve(config.parallel, ranks))


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_says_where_its_numbers_come_from_and_how_to_start_it(name):
    head = (CONFIG_DIR / f"{name}.toml").read_text().split("[job]")[0]
    assert "arXiv:" in head
    assert f"./run_train.sh --config {name}.toml" in head


def two_steps_of_each(world):
    """The recipes as they stand, but for a tiny model, made-up data and no compilation."""
    from titan_dit.trainer import Trainer

    found = {}
    for name in NAMES:
        config = load(name)
        tables = config_file.to_tables(config)
        channels = config.model.channels
        model = {k: v for k, v in (tables["model"] | TINY).items() if v is not None}
        tables["model"] = model
        shape = {"latent_size": 8, "channels": channels, "num_classes": model["num_classes"]}
        tables["data"] = {"name": "synthetic", "count": 64, **shape}
        tables["compile"] = {"enabled": False}
        tables["parallel"] |= {"tp": 1, "cp": 1, "pp": 1}
        tables["training"] |= {"global_batch_size": 4, "microbatch_size": 2}
        trainer = Trainer(config_file.build(tables, catalog.variant), world)
        batches = trainer.batches()
        for trainer.step in (1, 2):
            loss, grad_norm, lr = trainer.train_step(next(batches))
        found[name] = (loss.item(), grad_norm.item(), lr)
    return found


def test_every_recipe_takes_steps():
    [found] = on_ranks(1, two_steps_of_each)
    assert set(found) == set(NAMES)
    for name, (loss, grad_norm, lr) in found.items():
        # Predicting nothing of standard normal targets costs about 1, a velocity twice that.
        assert 0.5 < loss < 4, name
        assert 0 < grad_norm < 100, name
        if name in LARGE:
            assert 0 < lr < 1e-4, name  # warming up
        else:
            assert lr == (1e-4 if name in PUBLISHED else pytest.approx(6e-5)), name


def test_recipes_of_one_family_differ_only_where_they_mean_to():
    s, xl = load("dit_s2"), load("dit_xl2_256")
    for name in ("dit_b2", "dit_l2"):
        other = load(name)
        assert dataclasses.replace(other, job=s.job, model=s.model) == s
    assert dataclasses.replace(xl, job=s.job, model=s.model, training=s.training) == s
    assert dataclasses.replace(xl.training, steps=s.training.steps) == s.training
