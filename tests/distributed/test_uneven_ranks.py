"""Ranks that do not divide the batch: padding of weight 0 does not change loss or gradients."""

import json
from dataclasses import replace

import pytest
import torch
from harness import on_ranks
from test_layouts import DDPM, loss_and_gradients
from tiny import assert_same_gradients, gradients, randomize, tiny_config

from titan_dit.config.section import UserError
from titan_dit.data import loader
from titan_dit.trainer import Trainer

# A batch of 16 on 6 ranks. (layout, samples of a microbatch, rows of all ranks)
CASES = [
    ({}, 2, 24),
    ({"cp": 2, "dp_shard": 8}, None, 18),
    ({"dp_replicate": 3, "dp_shard": 1, "pp": 2}, 4, 18),
]
LONG = [
    ({"dp_replicate": 4, "dp_shard": 1}, 1, 18),  # 2 x 3 instead, which the ranks allow.
    ({"tp": 2}, 4, 18),
]


def uneven(world, folder, layout, size, objective=None):
    """Rows of all ranks, loss and gradients of a run resumed from another layout."""
    config = tiny_config(
        job={"dir": str(folder)},
        parallel=layout,
        training={"microbatch_size": size},
        objective=objective or {},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    rows = next(trainer.batches()).weight.shape[0]
    return rows * trainer.mesh.sizes.data, gradients(trainer)


def all_cases(world, folder, cases):
    results = {
        json.dumps([layout, size, rows]): uneven(world, folder, layout, size)
        for layout, size, rows in cases
    }
    results["ddpm"] = uneven(world, folder, {}, None, DDPM)
    try:
        Trainer(tiny_config(job={"dir": str(folder / "fresh")}), world)
    except UserError as error:
        results["fresh"] = str(error)
    # The bug: padding counts as samples. Last, because it stays planted.
    original = loader.Batch
    loader.Batch = lambda *given: replace(original(*given), weight=torch.ones_like(given[2]))
    results["planted"] = uneven(world, folder, {}, None)
    return results


def reference(world):
    return loss_and_gradients(world, {}), loss_and_gradients(world, {}, objective=DDPM)


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.long)])
def test_ranks_that_do_not_divide_the_batch_give_the_gradients_of_one_process(cases, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # A step has been taken.
    [alone] = on_ranks(1, reference)
    for results in on_ranks(6, all_cases, tmp_path, cases):
        assert "global_batch_size=16 does not divide into 6 data-par" in results.pop("fresh")
        _, (loss, found) = results.pop("planted")
        assert loss != pytest.approx(alone[0][0], rel=1e-6)
        with pytest.raises(AssertionError):
            assert_same_gradients(found, alone[0][1])
        assert len(results) == len(cases) + 1
        for case, (rows, (loss, found)) in results.items():
            expected_loss, expected = alone[case == "ddpm"]
            if case != "ddpm":
                layout, _, expected_rows = json.loads(case)
                assert rows == expected_rows, case
                if "pp" in layout:  # A rank holds the parameters of its stages alone.
                    assert 0 < len(found) < len(expected)
                    expected = {name: expected[name] for name in found}
            assert loss == pytest.approx(expected_loss, rel=1e-6), case
            assert_same_gradients(found, expected)
