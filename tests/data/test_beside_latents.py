"""References, masks and features of shards on disk, from opening to the end of a training step."""

import math

import pytest
import torch
from captioned_sets import WIDTH, write_beside, write_set
from tiny import TABLES, built
from tiny_joint import NETWORKS
from tiny_joint import TABLES as JOINT

from titan_dit.ranks import process_group
from titan_dit.trainer import Trainer

GIVEN = {"condition_channels": 2}
BOTH = GIVEN | {"reference_tokens": True}
REPA = {"block": 1, "dim": 3, "hidden_size": 8}
BY_TOKENS = {"global_batch_size": None, "tokens_per_step": 256}
TEXT = {"text_dim": WIDTH}
SQUARES, WIDE = {(4, 4): 8}, {(4, 4): 8, (4, 8): 8}
CASES = {
    # Network: (tables, sections, rows of each shape, what is beside one dataset's latents).
    "dit": (
        TABLES,
        {
            "model": {"latent_size": 4, "in_channels": 2, "num_classes": 2} | GIVEN,
            "training": {"global_batch_size": 8},
        },
        SQUARES,
        ("reference", "mask", "features"),
    ),
    "z_image": (
        JOINT | {"model": NETWORKS["z_image"]["model"]},
        {"model": {"latent_size": [4, 4]} | TEXT, "training": BY_TOKENS},
        SQUARES,
        ("mask",),
    ),
    "joint_dit": (
        JOINT,
        {"model": {"latent_size": [4, 8]} | BOTH | TEXT, "training": BY_TOKENS},
        WIDE,
        ("reference", "mask"),
    ),
}


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("network", CASES)
def test_what_lies_beside_latents_is_trained_with(network, is_mixed, tmp_path):
    tables, sections, counts, names = CASES[network]
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    has_two = is_mixed and "reference" in names
    if has_two:
        names = ("reference", "mask")  # Features are of one dataset.
    write_beside(write_set(tmp_path / "one", counts), names)
    dtype = torch.float32 if has_two else torch.float16
    write_beside(write_set(tmp_path / "two", counts, first=50, dtype=dtype), names)
    more = {"data": {"path": one}, "validation": {"every": 1, "path": two}}
    if is_mixed:
        of_two = [{"path": two}] if has_two else []
        more = {"data": {"datasets": [{"path": one, "condition_dropout": 0.5}, *of_two]}}
    if "features" in names:
        more["repa"] = REPA
    tables = tables | {"data": {"name": "latents"}}
    config = built(tables, sections | more | {"job": {"dir": str(tmp_path / "run")}})
    with process_group.start("cpu") as world:
        trainer = Trainer(config, world)
        batches = trainer.batches()
        for trainer.step in (1, 2):
            batch = next(batches)
            loss, norm, _ = trainer.train_step(batch)
        validated = trainer.validate() if not is_mixed else {"validation_loss": 0.0}
        bad, seen = trainer.read_guard().bad, trainer.built.readings()
    assert {*names} <= batch.fields.keys()
    assert {batch.fields[name].dtype for name in {"latent", "reference"} & {*names}} <= {dtype}
    assert math.isfinite(validated["validation_loss"])
    assert loss.isfinite()
    assert norm > 0
    assert not bad
    assert ("repa_loss" in seen) == ("features" in names)
