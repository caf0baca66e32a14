"""Ranks that do not divide the batch: rows of weight 0 leave loss and gradients as they are."""

import json

import pytest
from harness import on_ranks
from test_layouts import DDPM, loss_and_gradients
from tiny import assert_same_gradients, gradients, randomize, tiny_config

from titan_dit.data import loader
from titan_dit.section import UserError
from titan_dit.trainer import Trainer

# A batch of 16. (layout, samples of a microbatch)
CASES = {
    5: [
        ({}, None),
        ({}, 3),
        ({"dp_replicate": 5, "dp_shard": 1}, 1),
    ],
    6: [
        ({"tp": 2}, 4),
        ({"cp": 2, "dp_shard": 8}, None),  # dp_shard as it was before the ranks changed.
        ({"pp": 2}, 2),
        ({"dp_replicate": 4, "dp_shard": 1, "pp": 2}, 4),
    ],
}


def uneven(world, layout, size, folder, objective=None):
    """Loss and gradients of a run that has begun elsewhere."""
    config = tiny_config(
        job={"dir": str(folder)},
        parallel=layout,
        training={"microbatch_size": size},
        objective=objective or {},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    rows = len(next(trainer.batches()).tokens)
    return rows * trainer.mesh.sizes.data, gradients(trainer)


def all_cases(world, folder):
    results = {json.dumps(case): uneven(world, *case, folder) for case in CASES[world.size]}
    results["ddpm"] = uneven(world, *CASES[world.size][0], folder, objective=DDPM)
    try:
        Trainer(tiny_config(job={"dir": str(folder / "fresh")}), world)
    except UserError as error:
        results["fresh"] = str(error)
    return results


def reference(world):
    return loss_and_gradients(world, {}), loss_and_gradients(world, {}, objective=DDPM)


@pytest.fixture(scope="module")
def alone():
    return on_ranks(1, reference)[0]


@pytest.mark.parametrize("num_ranks", [5, 6])
def test_ranks_that_do_not_divide_the_batch_give_the_gradients_of_one_process(
    num_ranks, alone, tmp_path
):
    (tmp_path / "config.toml").touch()
    for rank, results in enumerate(on_ranks(num_ranks, all_cases, tmp_path)):
        refused = results.pop("fresh")
        assert "global_batch_size=16 does not divide into" in refused
        assert len(results) == len(CASES[num_ranks]) + 1
        for case, (rows, (loss, found)) in results.items():
            assert 16 < rows <= 24, case
            expected_loss, expected = alone[case == "ddpm"]
            assert loss == pytest.approx(expected_loss, rel=1e-6), case
            held = {name: g for name, g in expected.items() if name in found}
            # A pipeline's rank holds its stages alone.
            assert len(held) == len(expected) or '"pp"' in case, (case, rank)
            assert_same_gradients(found, held)


def weighted_filling(world, folder):
    """The bug: rows that only fill up count as samples."""
    original = loader.Batches.__call__
    loader.Batches.__call__ = lambda self, share, weight: original(self, share, weight * 0 + 1)
    return uneven(world, {}, None, folder)


def test_the_comparison_catches_rows_that_count_although_they_only_fill_up(alone, tmp_path):
    (tmp_path / "config.toml").touch()
    (_, (loss, found)), *_ = on_ranks(3, weighted_filling, tmp_path)
    expected_loss, expected = alone[0]
    assert loss != pytest.approx(expected_loss, rel=1e-6)
    with pytest.raises(AssertionError):
        assert_same_gradients(found, expected)
