"""A text-to-image DiT on ranks: formats and compiled blocks. Its layouts: test_grid.py."""

import torch
from harness import on_ranks
from tiny import distance, gradients, graphs_alone, randomize
from tiny_joint import joint_config

from titan_dit.trainer import Trainer

BATCH = {"training": {"global_batch_size": 4, "microbatch_size": 2}}


def measured(config, world):
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    return trainer, *gradients(trainer)


def alone(world):
    fp32 = measured(joint_config(**BATCH), world)
    bf16 = measured(joint_config(**BATCH, precision={"dtype": "bf16"}), world)
    return fp32[1:], bf16[1:]


def in_two(world):
    found = {}
    with graphs_alone():
        for axis in ("tp", "cp"):
            config = joint_config(**BATCH, parallel={axis: 2}, compile={"enabled": True})
            found[f"compiled, {axis}"] = measured(config, world)[1:]
    for axis in ("tp", "cp", "pp"):
        config = joint_config(**BATCH, parallel={axis: 2}, precision={"dtype": "bf16"})
        trainer, *found[f"bf16, {axis}"] = measured(config, world)
        if axis == "pp":
            stages = trainer.executor.stages.values()
            found["sent"] = {tensor.dtype for stage in stages for tensor in stage.stream}
    return found


def test_compiled_blocks_and_bf16_give_what_they_give_on_one_process():
    [(fp32, bf16)] = on_ranks(1, alone)
    rounding = distance(bf16[1], fp32[1])
    assert 1e-4 < rounding < 0.05
    for found in on_ranks(2, in_two):
        # The modulation is in fp32 between stages, too.
        assert found.pop("sent") == {torch.bfloat16, torch.float32}
        for name, (loss, grads) in found.items():
            is_exact = name.startswith("compiled")
            assert abs(loss / fp32[0] - 1) <= (1e-6 if is_exact else 5e-3), name
            assert distance(grads, fp32[1]) <= (2e-6 if is_exact else 2 * rounding), name
