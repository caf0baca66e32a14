"""Networks with captions on ranks: formats and compiled blocks. Their layouts: test_grid.py."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from grouped_joint import grouped_config, write_sets
from harness import on_ranks
from PIL import Image
from tiny import distance, gradients, graphs_alone, randomize
from tiny_joint import joint_config

from titan_dit.trainer import Trainer

BATCH = {
    "training": {"global_batch_size": 4, "microbatch_size": 2},
    "sampling": {"every": 4, "num": 10, "steps": 2},
}


def measured(config, world):
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    return trainer, *gradients(trainer)


def measured_wan(world, **sections):
    """Loss and gradients of Wan, and the formats of weights in its forward, by module."""
    trainer = Trainer(joint_config("wan", **BATCH, **sections), world)
    randomize(trainer.parameters)
    seen = {}

    def note(name, module, _):
        if weights := [weight for weight in module._parameters.values() if weight is not None]:
            seen.setdefault(name, {weight.dtype for weight in weights})

    executor = getattr(trainer.executor, "inner", trainer.executor)
    stages = getattr(executor, "stages", {})
    for part in [stage.part for stage in stages.values()] or [executor.model]:
        for name, module in part.named_modules():
            module.register_forward_pre_hook(partial(note, name))
    found = gradients(trainer)
    assert all(weight.dtype == torch.float32 for weight in trainer.parameters.values())
    return *found, seen


def preview(trainer, folder, name):
    """The pixels of a preview of captions; every rank draws it."""
    share, config = trainer.data_share, trainer.config
    drawn = trainer.objective.preview(
        trainer.executor.predict, config.sampling, config.generation, 0, share
    )
    file = Path(folder) / f"{name}-{trainer.world.rank}.png"
    drawn.write(file)
    with Image.open(file) as opened:
        return np.asarray(opened).astype(int)


THREE_SIZES = {
    "data": {"others": [[4, 4], [8, 4]]},
    "training": {"global_batch_size": None, "tokens_per_step": 64},
    "compile": {"enabled": True},
}


def compiled_losses(world, shapes, **sections):
    """The losses of two rounds over three buckets, and what was compiled after the first."""
    torch.compiler.reset()  # Graphs of other runs count against the limit.
    config = joint_config(**THREE_SIZES, **sections)
    config = replace(config, compile=replace(config.compile, shapes=shapes))
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    batches, losses = trainer.batches(), []
    for trainer.step in range(1, 17):
        batch = next(batches)
        with trainer.recompiles.during(batch):
            loss, _, _ = trainer.train_step(batch)
        losses.append(trainer.mesh.sum_loss(loss).item())
    return losses, trainer.recompiles.count


def losses_by_length(world, folder, **sections):
    """Losses of steps over buckets of several sizes and lengths of text, and a preview."""
    sections |= {"sampling": BATCH["sampling"]}
    trainer = Trainer(grouped_config(Path(folder), **sections), world)
    randomize(trainer.parameters)
    batches, losses, lengths = trainer.batches(), [], set()
    for trainer.step in range(1, 11):
        batch = next(batches)
        lengths.add((*batch.fields["latent"].shape[2:], batch.fields["text"].shape[1]))
        loss, _, _ = trainer.train_step(batch)
        losses.append(trainer.mesh.sum_loss(loss).item())
    assert len(lengths) >= 4
    return losses, preview(trainer, folder, f"lengths-{trainer.plan.sizes}")


def alone(world, folder):
    fp32 = measured(joint_config(**BATCH), world)
    drawn = preview(fp32[0], folder, "alone")
    bf16 = measured(joint_config(**BATCH, precision={"dtype": "bf16"}), world)
    with graphs_alone():
        each = compiled_losses(world, "each")
    return fp32[1:], bf16[1:], drawn, each, losses_by_length(world, folder), wan_alone(world)


def in_two(world, folder, compiled, in_buckets):
    """All formats on two ranks; blocks compiled for one size over the axes `compiled`, for three
    over `in_buckets`."""
    found, drawn = {}, {}
    with graphs_alone():
        for axis in compiled:
            config = joint_config(**BATCH, parallel={axis: 2}, compile={"enabled": True})
            trainer, *found[f"compiled, {axis}"] = measured(config, world)
            drawn[axis] = preview(trainer, folder, axis)
        buckets = {axis: compiled_losses(world, "auto", parallel={axis: 2}) for axis in in_buckets}
    for axis in ("tp", "cp", "pp"):
        config = joint_config(**BATCH, parallel={axis: 2}, precision={"dtype": "bf16"})
        trainer, *found[f"bf16, {axis}"] = measured(config, world)
        if axis == "pp":
            stages = trainer.executor.stages.values()
            found["sent"] = {tensor.dtype for stage in stages for tensor in stage.stream}
    by_length = {
        axis: losses_by_length(world, folder, parallel={axis: 2}) for axis in ("tp", "cp", "pp")
    }
    return found, drawn, buckets, by_length, wan_in_two(world, ("tp", "dp_shard"), ())


def wan_alone(world):
    return measured_wan(world), measured_wan(world, precision={"dtype": "bf16"})


def wan_in_two(world, axes, compiled):
    wan = {}
    for axis in axes:
        sections = {"parallel": {axis: 2}, "precision": {"dtype": "bf16"}}
        wan[axis] = measured_wan(world, **sections)
        if axis in compiled:
            with graphs_alone():
                wan[f"compiled, {axis}"] = measured_wan(
                    world, **sections, compile={"enabled": True}
                )
    return wan


@pytest.mark.long
def test_formats_of_wan_are_those_of_one_process():
    [expected] = on_ranks(1, wan_alone)
    for found in on_ranks(2, wan_in_two, ("tp", "cp", "pp", "dp_shard"), ("tp", "dp_shard")):
        assert_formats_of_wan(expected, found)


def test_compiled_blocks_and_bf16_give_what_they_give_on_one_process(tmp_path):
    assert_formats(tmp_path, ("tp",), ())


@pytest.mark.long
def test_compiled_blocks_give_what_they_give_on_one_process_over_every_axis(tmp_path):
    assert_formats(tmp_path, ("tp", "cp"), ("tp", "cp", "pp"))


def assert_formats(tmp_path, axes, in_buckets):
    write_sets(tmp_path)
    [(fp32, bf16, expected, compiled, wanted, wan)] = on_ranks(1, alone, str(tmp_path))
    losses, recompiled = compiled
    assert recompiled == 0
    rounding = distance(bf16[1], fp32[1])
    assert 1e-4 < rounding < 0.05
    for found, drawn, buckets, by_length, of_wan in on_ranks(
        2, in_two, str(tmp_path), axes, in_buckets
    ):
        assert_formats_of_wan(wan, of_wan)
        for axis, (its_losses, pixels) in by_length.items():
            assert its_losses == pytest.approx(wanted[0], rel=1e-5), axis
            assert np.abs(pixels - wanted[1]).max() <= 1, f"prompts of several lengths, {axis}"
        for axis, (its_losses, its_recompiled) in buckets.items():
            assert its_losses == pytest.approx(losses, rel=1e-5)
            # A join of a ring's blocks has its second kind of graph in the second pass.
            assert its_recompiled <= (axis == "cp"), axis
        for axis, pixels in drawn.items():
            assert np.abs(pixels - expected).max() <= 1, f"a preview of captions, {axis}"
        # The modulation is in fp32 between stages, too.
        assert found.pop("sent") == {torch.bfloat16, torch.float32}
        for name, (loss, grads) in found.items():
            is_exact = name.startswith("compiled")
            assert abs(loss / fp32[0] - 1) <= (1e-6 if is_exact else 5e-3), name
            assert distance(grads, fp32[1]) <= (2e-6 if is_exact else 2 * rounding), name


def assert_formats_of_wan(alone, in_two):
    """The time's embedding, tables and norms compute in fp32, all else in bf16."""
    fp32, bf16 = alone
    rounding = distance(bf16[1], fp32[1])
    assert 1e-4 < rounding < 0.05
    for name, (loss, grads, formats) in {"alone": bf16, **in_two}.items():
        assert abs(loss / fp32[0] - 1) <= 5e-3, name
        assert distance(grads, fp32[1]) <= 2 * rounding, name
        assert {torch.float32, torch.bfloat16} == set().union(*formats.values())
        for module, dtypes in formats.items():
            is_exact = module.startswith("embed.timestep") or module.endswith("cross_norm")
            is_exact = is_exact or (module.endswith(".modulation") and "embed" not in module)
            assert dtypes == {torch.float32 if is_exact else torch.bfloat16}, (name, module)
