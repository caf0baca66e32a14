"""Training on one rank without FSDP2 gives the bits of training with it."""

from functools import partial
from unittest import mock

import torch
from harness import on_ranks
from tiny import randomize, state, tiny_config
from tiny_gpt import gpt_config
from tiny_joint import joint_config
from torch.distributed.fsdp import FSDPModule

from titan_dit.parallel import compute_copies
from titan_dit.trainer import Trainer

CASES = (
    (tiny_config, {}),
    (tiny_config, {"training": {"microbatch_size": 4}}),
    (tiny_config, {"activation_checkpoint": {"mode": "full"}}),
    (tiny_config, {"precision": {"dtype": "bf16", "float8": "rowwise", "float8_emulate": True}}),
    (tiny_config, {"precision": {"dtype": "fp32"}}),
    (tiny_config, {"precision": {"dtype": "fp16"}}),
    # Some of its modules stay in fp32.
    (partial(joint_config, "wan"), {"training": {"microbatch_size": 4}}),
    # A weight that two modules hold. With several microbatches FSDP2 of torch 2.15 adds the
    # gradients of the two in fp32; here, as before, they are added in the compute dtype.
    (gpt_config, {"training": {"microbatch_size": 4}} if torch.__version__ < "2.15" else {}),
)


def both(world):
    """Per case: tensors and losses with copies, and with FSDP2."""
    found = []
    for config_of, tables in CASES:
        pair = []
        for kinds in (compute_copies.FLOAT8, ()):
            with mock.patch.object(compute_copies, "FLOAT8", kinds):
                trainer = Trainer(config_of(**{"precision": {"dtype": "bf16"}, **tables}), world)
            assert isinstance(trainer.executor.model, FSDPModule) == (not kinds)
            randomize(trainer.parameters)
            batches = trainer.batches()
            for trainer.step in (1, 2, 3):
                loss, norm, _ = trainer.train_step(next(batches))
            pair.append({**state(trainer), "loss": loss, "norm": norm})
        found.append(pair)
    return found


def test_one_rank_has_the_bits_of_fsdp():
    [found] = on_ranks(1, both)
    for (_, tables), (own, fsdp) in zip(CASES, found, strict=True):
        assert own.keys() == fsdp.keys()
        for name, value in own.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(fsdp[name])), (tables, name)
