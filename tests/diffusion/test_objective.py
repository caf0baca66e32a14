"""The diffusion objective: stored latents to prepared batches."""

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from folders_of_files import latents_of, save
from points import built

from titan_dit.config.section import UserError
from titan_dit.config.training import SamplingConfig
from titan_dit.data import loader
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.data.sections import Latents
from titan_dit.diffusion.fits import check_data
from titan_dit.diffusion.objective import check_std, drawn_latents, scale_hint
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.ranks.process_group import Ranks
from titan_dit.rng import SampleRNG

CPU = torch.device("cpu")
MODEL = DiTConfig(
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    patch_size=2,
    latent_size=8,
    in_channels=4,
    num_classes=3,
)


def opened(root, **keys):
    return Latents(path=str(root), **keys).open()


def batches(source, count, rank=0, ranks=1, cursor=0, workers=0):
    order = RankOrder(BatchPlan(6), EpochOrder(5, len(source)), rank, ranks)
    inspect = DDPMConfig().build(MODEL, source.facts).inspect
    endless = loader.load(source, order, cursor, inspect, CPU, workers=workers)
    return list(itertools.islice(endless, count))


def seen(source, *args, **kwargs):
    """The clean tokens of the first batches."""
    objective = DDPMConfig().build(MODEL, source.facts)
    given = [(b.fields, SampleRNG(5, b.sample_numbers)) for b in batches(source, *args, **kwargs)]
    return [objective.clean_tokens(*of) for of in given]


def test_a_batch_is_tokens_in_fp32_whatever_is_stored(tmp_path):
    write_shards(
        tmp_path / "a", latents_of(12).half(), torch.arange(12) % 3, num_classes=3, source="test",
        scale=0.5,
    )  # fmt: skip
    source = LatentShards(tmp_path / "a")
    objective = RectifiedFlowConfig(condition_dropout=0.0).build(MODEL, source.facts)
    (batch,) = batches(source, 1)
    prepared = objective.prepare(batch, SampleRNG(5, batch.sample_numbers))
    t = prepared.inputs["timestep"][:, None, None] / 1000
    clean = prepared.inputs["tokens"] - t * prepared.targets["velocity"]
    stored = torch.stack([source[row]["latent"] for row in EpochOrder(5, 12).rows(range(6))])
    assert batch.fields["latent"].dtype == torch.float16
    assert prepared.inputs["tokens"].dtype == torch.float32
    torch.testing.assert_close(clean, MODEL.tokenize(stored.float() * 0.5), rtol=0, atol=1e-5)
    assert torch.equal(prepared.static["positions"], MODEL.static(CPU)["positions"])
    assert torch.equal(prepared.inputs["labels"], batch.fields["label"])
    assert prepared.total_tokens == 6 * 16
    assert torch.equal(prepared.weight, batch.weight)


def test_what_is_said_of_samples_are_the_draws_of_their_training(tmp_path):
    write_shards(tmp_path / "a", latents_of(12), torch.arange(12) % 3, num_classes=3, source="test")
    source = LatentShards(tmp_path / "a")
    (batch,) = batches(source, 1)
    for path in (DDPMConfig(), RectifiedFlowConfig()):
        objective, rng = path.build(MODEL, source.facts), SampleRNG(5, batch.sample_numbers)
        timestep = objective.prepare(batch, rng).inputs["timestep"]
        assert torch.equal(objective.describe({}, rng)["timestep"], timestep)
        assert objective.describe({}, rng).keys() == {"timestep"}
        assert torch.equal(objective.describe(batch.fields, rng)["label"], batch.fields["label"])


@pytest.mark.parametrize(
    ("path", "middles"),
    [
        (RectifiedFlowConfig(), [63, 188, 313, 438, 563, 688, 813, 938]),
        (DDPMConfig(), [62, 188, 312, 438, 562, 688, 812, 938]),
        (DDPMConfig(steps=80), [5, 15, 25, 35, 45, 55, 65, 75]),
    ],
)
def test_validation_takes_every_sample_with_its_label_at_the_middle_of_every_bin(
    tmp_path, path, middles
):
    write_shards(tmp_path / "a", latents_of(12), torch.arange(12) % 3, num_classes=3, source="test")
    source = LatentShards(tmp_path / "a")
    (batch,) = batches(source, 1)
    objective, rng = path.build(MODEL, source.facts), SampleRNG(5, batch.sample_numbers)
    found = objective.evaluations(batch, rng)
    assert list(found) == [f"t{middle}" for middle in middles]
    noises = []
    for middle, prepared in zip(middles, found.values(), strict=True):
        assert (prepared.inputs["timestep"] == middle).all()
        assert torch.equal(prepared.inputs["labels"], batch.fields["label"])
        if isinstance(path, DDPMConfig):
            assert prepared.targets["step"].tolist() == [middle] * 6
        noises.append(prepared.targets["noise" if isinstance(path, DDPMConfig) else "velocity"])
    assert all(torch.equal(noise, noises[0]) for noise in noises)


@pytest.mark.parametrize("path", [RectifiedFlowConfig(), DDPMConfig()])
def test_what_cannot_be_drawn_is_refused_of_the_section_sampling(path):
    path.check_sampling(MODEL, SamplingConfig(cfg_channels=4))
    with pytest.raises(UserError, match=r"\[sampling\] cfg_channels=5: a latent has 4 channels"):
        path.check_sampling(MODEL, SamplingConfig(cfg_channels=5))


def mean_and_std(root, mean=2.0, std=0.5, count=12):
    """Every latent with this mean and std."""
    latent = torch.cat([torch.full((4, 8, 8), mean), torch.full((4, 8, 8), std)])
    for i in range(count):
        save(root / f"{i % 3}" / f"{i}.npy", latent)


def test_a_mean_and_a_std_are_drawn_from_and_then_scaled(tmp_path):
    mean_and_std(tmp_path)
    source = opened(tmp_path, scale=0.5, shift=1.0)
    check_data(source.facts, MODEL, "ddpm")
    drawn = torch.cat([MODEL.detokenize(tokens) for tokens in seen(source, 20)])
    assert drawn.shape == (120, 4, 8, 8)
    assert drawn.mean().item() == pytest.approx((2.0 - 1.0) * 0.5, abs=0.01)
    assert drawn.std().item() == pytest.approx(0.5 * 0.5, abs=0.01)
    noise = SampleRNG(5, torch.arange(120)).normal("latent", (4, 8, 8))
    torch.testing.assert_close(drawn, (2.0 + 0.5 * noise - 1.0) * 0.5)


def test_the_draw_is_the_same_on_every_layout_and_fresh_in_every_epoch(tmp_path):
    mean_and_std(tmp_path)
    source = opened(tmp_path)
    whole = seen(source, 4)
    shares = [seen(source, 4, rank, 2, workers=rank) for rank in range(2)]
    for step, tokens in enumerate(whole):
        assert torch.equal(torch.cat([share[step] for share in shares]), tokens)
    assert torch.equal(seen(source, 2, cursor=12)[0], whole[2])
    # All stored latents are equal and an epoch has 12: only the draws differ.
    drawn = torch.cat(whole)
    assert len(drawn.unique(dim=0)) == 24


def test_a_std_below_zero_is_a_log_variance(tmp_path):
    mean_and_std(tmp_path)
    source = opened(tmp_path)
    logvar = torch.cat([torch.zeros(4, 8, 8), torch.full((4, 8, 8), -3.0)])
    for path in tmp_path.rglob("*.npy"):
        np.save(path, logvar.numpy())
    with pytest.raises(UserError) as caught:
        batches(source, 1, workers=1)
    message = str(caught.value)
    assert "8 channels and [model] in_channels=4" in message
    assert "mean and log variance" in message
    check_std(torch.zeros(1, 8, 8, 8), source.facts, 4)  # A std of 0 is valid.
    check_std(logvar[None], source.facts, 8)  # A model of 8 channels may have any values.


@pytest.mark.parametrize(("std", "words"), [(5.4, "is it missing?"), (0.2, "scaled twice?")])
def test_latents_far_from_unit_std_get_a_hint(tmp_path, std, words):
    latents, labels = latents_of(64) * std, torch.zeros(64).long()
    write_shards(tmp_path / "a", latents, labels, num_classes=1, source="test")
    source = LatentShards(tmp_path / "a")
    hint = scale_hint(source, source.facts, 4)
    assert hint.startswith(f"hint    after [data] scale=1, 64 latents have std {std:.1f}")
    assert "0.18215" in hint
    assert words in hint
    write_shards(tmp_path / "b", latents, labels, num_classes=1, source="test", scale=1 / std)
    source = LatentShards(tmp_path / "b")
    assert scale_hint(source, source.facts, 4) is None


def test_dark_pictures_get_no_hint_but_pictures_without_their_scale_do(tmp_path):
    pixels = torch.randint(20, 60, (8, 3, 16, 16), dtype=torch.uint8)
    labels = torch.zeros(8).long()
    for name, facts, words in (
        ("scaled", {"scale": 1 / 127.5, "shift": 127.5}, None),
        ("not", {}, "is it missing?"),
    ):
        write_shards(tmp_path / name, pixels, labels, num_classes=1, source="test", **facts)
        source = LatentShards(tmp_path / name)
        hint = scale_hint(source, source.facts, 3)
        assert (hint is None) if words is None else (words in hint)


def test_whole_numbers_become_the_units_of_the_model():
    facts = LatentFacts(
        shape=(3, 2, 2), count=1, num_classes=1, scale=1 / 127.5, shift=127.5, value_range=(0, 255)
    )
    stored = torch.tensor([0, 255]).byte().view(2, 1, 1, 1).expand(2, 3, 2, 2)
    seen = drawn_latents(stored, facts, 3, SampleRNG(0, torch.arange(2)))
    assert seen.flatten(1).unique(dim=1).flatten().tolist() == [-1, 1]
    torch.testing.assert_close(facts.to_stored_units(seen), stored.float(), rtol=0, atol=1e-4)


def test_a_network_of_classes_without_previews_imports_nothing_that_draws(monkeypatch):
    for package, name in (
        ("titan_dit.diffusion", "drawing"),
        ("titan_dit.diffusion", "previews"),
        ("titan_dit.diffusion", "row_conditions"),
        ("titan_dit.pictures", "autoencoder"),
    ):
        # Importing a module that is None raises ImportError.
        monkeypatch.delattr(importlib.import_module(package), name, raising=False)
        monkeypatch.setitem(sys.modules, f"{package}.{name}", None)
    objective, sampling = built(RectifiedFlowConfig()), SamplingConfig(every=0)
    assert objective.imported(sampling) == {}
    source = object.__new__(LatentShards)
    objective.open_drawing(sampling, source, Ranks().run_on_first, Path("none"))
    objective.remember(Path("none"))
