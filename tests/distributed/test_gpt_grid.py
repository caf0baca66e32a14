"""A GPT gives the loss, gradients, norm and logits of one process on every mesh."""

import json

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from test_grid import (
    CP,
    DP,
    HSDP,
    PLAIN,
    PP,
    TP,
    ULYSSES,
    WITH_A_GPT,
    compare,
    dtypes_of,
    schedule,
)
from text_grid import check, key_of, measure
from tiny import whole
from tiny_gpt import gpt_config

from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

TIED = {"dropout": 0.1}
UNTIED = {
    "tied": False,
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "positions": "rotary",
    "num_key_value_heads": 2,
}
COPIES = {"dp_replicate": 2, "dp_shard": 1}
FOLDED = schedule("interleaved_1f1b", 2)
CASES = {
    2: [
        (DP, {}, TIED),
        (TP, {}, TIED),
        (TP, {}, UNTIED),
        (CP, {}, TIED),
        (ULYSSES, {}, UNTIED),
        (PP, schedule("1f1b"), TIED),
        (PP, FOLDED, UNTIED),
        (PP, schedule("zbv_zero_bubble"), TIED),
        (PP, schedule("dualpipev"), TIED),
    ],
    4: [
        (HSDP, {}, TIED),
        (DP | TP, {}, TIED),
        (DP | PP, schedule("zbv_zero_bubble"), TIED),
        (PLAIN | PP, FOLDED, TIED),
        (TP | CP, {}, UNTIED),
    ],
    8: [(PP | CP | TP, FOLDED, TIED)],
}
# The whole grid, for ./run_tests.sh --long.
LONG = {
    2: [
        (COPIES, {}, UNTIED),
        (PLAIN, {}, TIED),
        (CP, {}, UNTIED),
        (PP, schedule("interleaved_zero_bubble", 2), TIED),
        (PP, schedule("dualpipev"), UNTIED),
    ],
    4: [
        ({"pp": 4}, FOLDED, TIED),
        (COPIES | PP, schedule("1f1b"), TIED),
        (TP | PP, schedule("dualpipev"), TIED),
        (CP | PP, schedule("1f1b"), TIED),
    ],
    8: [(PP | DP | TP, schedule("interleaved_zero_bubble", 2), TIED, "attention")],
}
IN_FP64 = [TP, PP, CP, HSDP, TP | PP, TP | CP]


def case_config(parallel, pipeline, model, dtype="fp32", mode="none"):
    eight = parallel.get("pp", 1) * pipeline.get("virtual_stages", 1) == 8
    data_ranks = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    # Then the loss's divisor is a sum over ranks, and weights are sliced with their tokens.
    ends = {} if model.get("tied", True) else {"end_of_document": 0}
    return gpt_config(
        data=ends,
        objective={"mask_end_of_document": bool(ends)},
        model={"layers": 8 if eight else 5, **model},
        parallel=parallel,
        pipeline=pipeline,
        precision={"dtype": dtype},
        activation_checkpoint={"mode": mode},
        training={"microbatch_size": 1 if data_ranks > 1 else 2},
    )


def reference(world):
    kinds = [(m, dtype, n) for m in (TIED, UNTIED) for dtype in ("fp32", "fp64") for n in (5, 8)]
    return {
        key_of(m, dtype, n): measure(world, case_config({}, {}, {"layers": n, **m}, dtype))
        for m, dtype, n in kinds
    }


@pytest.fixture(scope="module")
def references():
    return on_ranks(1, reference)[0]


def all_cases(world, references, cases, is_long=False):
    results = {}
    for parallel, pipeline, model, *mode in cases:
        for dtype in dtypes_of(parallel, is_long, IN_FP64):
            config = case_config(parallel, pipeline, model, dtype, *mode)
            expected = references[key_of(model, dtype, config.model.shape[1])]
            key = json.dumps([parallel, pipeline, model, dtype])
            results[key] = compare(measure(world, config), expected)
    return results


def test_the_pairs_that_land_with_a_gpt_alone_are_here():
    pairs = [set(parallel) for parallel, *_ in CASES[4]]
    assert all(pair in pairs for pair in WITH_A_GPT)


@pytest.mark.parametrize("num_ranks", CASES)
def test_every_mesh_gives_what_one_process_gives(num_ranks, references):
    check(on_ranks(num_ranks, all_cases, references, CASES[num_ranks]), references)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", LONG)
def test_the_rest_of_the_grid_gives_what_one_process_gives(num_ranks, references):
    cases = LONG[num_ranks] + [case for case in CASES[num_ranks] if case[0] in IN_FP64]
    check(on_ranks(num_ranks, all_cases, references, cases, True), references)


def drifting(world):
    """The tied weight after 50 steps: of the first stage, and of the last stage's copy."""
    config = gpt_config(parallel=PP, training={"steps": 50}, optimizer={"lr": 1e-2})
    trainer = Trainer(config, world)
    batches = trainer.batches()
    for trainer.step in range(1, 51):
        trainer.train_step(next(batches))
    tied = trainer.executor.tied
    tied.fetch()
    dist.barrier()  # A rank that ends would take its message along.
    return [whole(p) for p in (*tied.owners, *tied.copies)], sorted(trainer.parameters)


def test_tied_weights_have_equal_bits_after_fifty_steps_and_one_name():
    (owned, first), (copied, last) = on_ranks(2, drifting)
    assert torch.equal(owned[0], copied[0])
    assert "embed.token.weight" in first
    assert "head.out.weight" not in first + last
