"""Bytes that [offload] parameters copies between host and device, against FSDP2's own copies."""

import sys
from contextlib import contextmanager

import pytest
import torch
from hand_made_counts import DEVICE, counts_of
from harness import on_ranks
from tiny import gradients, tiny_config

from titan_dit.plan import resolve
from titan_dit.planner.data_parallel import DataParallel
from titan_dit.planner.links import Network
from titan_dit.planner.rates import OURS
from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

EVEN = {"num_classes": 11, "num_layers": 4}  # 12 rows: FSDP pads no tensor on 2 or 4 ranks.
DATA = {"name": "synthetic", "latent_size": 8, "channels": 1, "num_classes": 11}
IN_BF16 = {"precision": {"dtype": "bf16", "weights": "bf16"}}


def layout(data, count=1, **parallel):
    """`count` microbatches on each of `data` ranks with samples of their own."""
    batch = {"global_batch_size": 4 * count * data, "microbatch_size": 4}
    return {"parallel": parallel, "training": batch}


def piped(schedule, data=1, **parallel):
    return layout(data, 4, pp=2, **parallel) | {"pipeline": {"schedule": schedule}}


CASES = {
    1: [
        layout(1),
        layout(1, 3),
        layout(1, 2, reshard_after_forward="never"),
        layout(1, 2, reshard_after_forward="always"),
        layout(1, 2) | {"precision": {"dtype": "bf16"}},
        layout(1, 2) | IN_BF16,
    ],
    2: [
        layout(2),
        layout(2, 3, blocks_per_fsdp_unit=2),
        layout(2, 2, reshard_after_forward="never"),
        layout(2, 2, dp_replicate=2, dp_shard=1),
        layout(1, 2, cp=2),
        piped("1f1b"),
        piped("zbv_zero_bubble"),
    ],
    4: [
        layout(4, 2, dp_replicate=2, dp_shard=2, reshard_after_forward="always"),
        piped("gpipe", data=2, dp_shard=2),
    ],
}


@contextmanager
def counting(copied):
    """Adds to `copied` the bytes of every copy of FSDP2: "in" to the device, "out" to the host.

    On a CPU a copy between its memory and itself is the tensor itself; FSDP2 asks for it all the
    same.
    """
    original = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
        way = {"_fsdp_param": "in", "_fsdp_collectives": "out"}.get(caller)
        if way and "non_blocking" in kwargs:
            copied[way] += tensor.nbytes
        return original(tensor, *args, **kwargs)

    torch.Tensor.to = to
    try:
        yield
    finally:
        torch.Tensor.to = original


def config_of(case):
    return tiny_config(**{"model": EVEN, "data": DATA, "offload": {"parameters": True}} | case)


def copies_of(world, cases):
    """By case, the bytes that a step copies (to the device, to the host)."""
    found = []
    for case in cases:
        trainer = Trainer(config_of(case), world)
        copied = {"in": 0, "out": 0}
        with counting(copied):
            gradients(trainer)
        found.append((copied["in"], copied["out"]))
    return found


@pytest.mark.parametrize("num_ranks", CASES)
def test_planned_copies_are_those_of_fsdp2(num_ranks):
    ranks = on_ranks(num_ranks, copies_of, CASES[num_ranks])
    for number, case in enumerate(CASES[num_ranks]):
        plan = resolve(config_of(case), num_ranks)
        data = DataParallel(plan, counts_of(plan), Network(plan.sizes, DEVICE), OURS)
        stage = num_ranks // plan.sizes.pp
        planned = [data.host_traffic(rank // stage) for rank in range(num_ranks)]
        assert all(into > 0 and out > 0 for into, out in planned)
        assert [found[number] for found in ranks] == planned, case


def test_nothing_is_copied_without_offload():
    plan = resolve(tiny_config(model=EVEN), 2)
    data = DataParallel(plan, counts_of(plan), Network(plan.sizes, DEVICE), OURS)
    assert data.host_traffic() == (0.0, 0.0)
