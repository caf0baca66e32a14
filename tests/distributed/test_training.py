"""What happens to a run: bad numbers, previews, precision, several ranks at once."""

import json
import math

import pytest
import torch
from harness import on_ranks
from tiny import randomize, state, tiny_config

from titan_dit.config.section import UserError
from titan_dit.trainer import Trainer

SKIPPING = {
    1: [{}],
    2: [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}],
}


def nan_on_one_rank(world):
    return [nan_in(world, layout) for layout in SKIPPING[world.size]]


def nan_in(world, layout):
    """Step 1 is fine, step 2 has a NaN in one sample of the last rank only, step 3 is fine."""
    config = tiny_config(parallel=layout, training={"microbatch_size": 4})
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    batches, snapshots = trainer.batches(), []
    for trainer.step in (1, 2, 3):
        batch = next(batches)
        if trainer.step == 2 and world.rank == world.size - 1:
            batch.fields["latent"][0] = math.nan
        trainer.train_step(batch)
        tensors = {k: v for k, v in state(trainer).items() if k not in ("step", "cursor")}
        snapshots.append(tensors)
    trainer.guard.read(trainer.mesh.sum_loss)
    return snapshots, trainer.guard.nan_steps, trainer.cursor


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_nan_on_one_rank_skips_the_step_on_all(num_ranks):
    found = [result for rank in on_ranks(num_ranks, nan_on_one_rank) for result in rank]
    for (first, second, third), nan_steps, cursor in found:
        assert nan_steps == 1
        assert cursor == 48
        for name, value in first.items():
            # Weights, moments, AdamW's step count and the averages stay as they were.
            assert torch.equal(second[name], value), name
        assert any(not torch.equal(third[name], value) for name, value in second.items())
        assert all(value.isfinite().all() for value in third.values())


def overflowing_loss(world):
    """A loss that is infinite while its gradients are finite must be skipped as well."""
    trainer = Trainer(tiny_config(), world)
    original = trainer.executor.loss

    def loss(prediction, targets):
        per_token = original(prediction, targets)
        return per_token + (math.inf if world.rank == 0 else 0.0)

    trainer.executor.loss = loss
    trainer.step = 1
    trainer.train_step(next(trainer.batches()))
    trainer.guard.read(trainer.mesh.sum_loss)
    return trainer.guard.nan_steps


def test_an_infinite_loss_with_finite_gradients_skips_the_step():
    assert on_ranks(2, overflowing_loss) == [1, 1]


def previewed(world, folder, every):
    config = tiny_config(
        job={"dir": str(folder)},
        training={"steps": 5},
        sampling={"every": every, "num": 6, "steps": 2},
    )
    trainer = Trainer(config, world)
    trainer.fit()
    return state(trainer)


def test_previews_change_nothing(tmp_path):
    """A stale gathered parameter after sampling with averaged weights would change them."""
    plain = on_ranks(2, previewed, tmp_path / "plain", 0)[0]
    drawn = on_ranks(2, previewed, tmp_path / "drawn", 2)[0]
    for name, value in plain.items():
        assert torch.equal(drawn[name], value), name
    pictures = sorted(path.name for path in (tmp_path / "drawn" / "samples").iterdir())
    assert pictures == [f"step-0000000{step}.png" for step in (2, 4, 5)]
    assert not (tmp_path / "plain" / "samples").exists()


def bf16_run(world, folder):
    config = tiny_config(
        job={"dir": str(folder)},
        precision={"dtype": "bf16"},
        training={"steps": 30, "max_grad_norm": 0.0},
        objective={"condition_dropout": 0.0},
    )
    trainer = Trainer(config, world)
    dtypes = set()

    def note_dtype(module, inputs, output):
        dtypes.add(str(output.dtype))

    for name, module in trainer.executor.model.named_modules():
        if name.endswith("attn.qkv"):
            module.register_forward_hook(note_dtype)
    seen = []
    embed = trainer.executor.model.embed
    embed.timestep.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    trainer.fit()
    stored = {str(p.dtype) for p in trainer.parameters.values()}
    return dtypes, stored, set(map(str, seen))


def test_bf16_computes_in_bf16_and_keeps_weights_and_timesteps_in_fp32(tmp_path):
    computed, stored, timesteps = on_ranks(2, bf16_run, tmp_path)[0]
    assert computed == {"torch.bfloat16"}
    assert stored == {"torch.float32"}
    assert timesteps == {"torch.float32"}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def endless_nan(world, folder):
    config = tiny_config(
        job={"dir": str(folder)},
        training={"steps": 100},
        faults={"max_consecutive_bad_steps": 3},
    )
    trainer = Trainer(config, world)
    trainer.executor.loss = lambda prediction, targets: prediction.mean(-1) * math.nan
    try:
        trainer.fit()
    except UserError as error:
        return str(error), trainer.step
    return None


def test_a_run_that_only_meets_nan_stops_and_says_so(tmp_path):
    for result in on_ranks(2, endless_nan, tmp_path):
        assert result is not None
        message, step = result
        assert "[faults] max_consecutive_bad_steps=3" in message
        assert step == 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [None] * 3
    assert [row["skipped_steps"] for row in rows] == [1, 2, 3]
    assert [row["nan_steps"] for row in rows] == [1, 2, 3]
