"""Muon, and groups with frozen parameters, train a DiT in every layout as one process does."""

from fnmatch import fnmatchcase

import pytest
import torch
from harness import on_ranks
from test_grid import COPIES, CP, DP, HSDP, PP, TP, ULYSSES, schedule
from tiny import randomize, tiny_config, whole

from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

MUON = {"name": "muon", "lr": 1e-3, "ns_dtype": "fp32"}
FROZEN = ("embed.*", "blocks.1.*", "blocks.2.attn.qkv.weight")
GROUPED = MUON | {
    "groups": [{"pattern": pattern, "frozen": True} for pattern in FROZEN]
    + [{"pattern": "head.*", "lr_factor": 0.5, "weight_decay": 0.0}]
}
LION = {"name": "examples.lion:LionConfig", "weight_decay": 0.1}
ZERO_BUBBLE = schedule("zbv_zero_bubble")
CASES = {
    2: [
        (DP, {}, MUON),
        (TP, {}, GROUPED),
        (CP, {}, MUON),
        (PP, ZERO_BUBBLE, GROUPED),
        (DP, {}, GROUPED),
    ],
    4: [(DP | TP, {}, MUON), (HSDP, {}, GROUPED), (DP | TP, {}, LION)],
}
LONG = {
    2: [(COPIES, {}), (ULYSSES, {}), (PP, schedule("1f1b"))],
    4: [(HSDP, {}), (DP | CP, {}), (TP | CP, {}), (DP | PP, ZERO_BUBBLE), (TP | PP, ZERO_BUBBLE)],
    8: [(PP | DP | TP, schedule("interleaved_1f1b", 2)), (HSDP | TP, {}), (DP | CP | TP, {})],
}
STEPS = 3


def trained(world, parallel, pipeline, optimizer):
    """Every tensor after some steps, whole, and which names have an optimizer's state."""
    config = tiny_config(
        model={"layers": 4},
        parallel=parallel,
        pipeline=pipeline,
        optimizer=optimizer,
        training={"microbatch_size": 2},
        remat={"mode": "full" if "tp" in parallel else "none"},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    trainer.ema.restart(except_for=())
    batches = trainer.batches()
    before = {name: whole(p) for name, p in trainer.parameters.items()}
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(next(batches))
    tensors = trainer.tensors()
    found = {name: whole(p) for name, p in tensors["model"].items()}
    average = {name: whole(p) for name, p in tensors["ema"]["0.9"].items()}
    return before, found, average, set(tensors["optimizer"])


def all_cases(world, cases):
    return [trained(world, *case) for case in cases]


@pytest.fixture(scope="module")
def references():
    kinds = [({}, {}, MUON), ({}, {}, GROUPED), ({}, {}, LION)]
    return on_ranks(1, all_cases, kinds)[0]


@pytest.mark.parametrize("num_ranks", CASES)
def test_steps_are_those_of_one_process(num_ranks, references):
    by_rank = on_ranks(num_ranks, all_cases, CASES[num_ranks])
    for number, (parallel, _, optimizer) in enumerate(CASES[num_ranks]):
        _, expected, *_ = references[[MUON, GROUPED, LION].index(optimizer)]
        seen, frozen = {}, set(frozen_of(expected) if optimizer is GROUPED else ())
        for ranks in by_rank:
            before, found, _, states = ranks[number]
            seen |= found
            assert not frozen & set(states)
            for name in frozen & set(found):
                assert torch.equal(found[name], before[name]), f"{parallel} {name}"
        assert seen.keys() == expected.keys()
        for name, values in seen.items():
            # The true gradient of the keys' bias is 0, and AdamW makes steps of its rounding.
            if "attn.qkv.bias" not in name:
                torch.testing.assert_close(
                    values, expected[name], rtol=0, atol=1e-5, msg=f"{parallel} {name}"
                )


def frozen_of(names):
    """The names that GROUPED freezes."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in FROZEN)]


def test_frozen_parameters_stay_and_have_no_state(references):
    before, found, average, states = references[1]
    frozen = frozen_of(found)
    assert len(frozen) > 10
    for name, values in found.items():
        is_frozen = name in frozen
        assert torch.equal(values, before[name]) == is_frozen, name
        assert (name in states) != is_frozen, name
        if is_frozen:
            assert torch.equal(average[name], values), name


def digits(world, layouts):
    """The mean loss of the first and the last ten steps."""
    found = []
    for parallel, pipeline in layouts:
        config = tiny_config(
            model={"layers": 4},
            parallel=parallel,
            pipeline=pipeline,
            optimizer={"name": "muon", "lr": 3e-3},
            training={"steps": 60, "global_batch_size": 32, "microbatch_size": 4},
        )
        trainer = Trainer(config, world)
        losses, batches = [], trainer.batches()
        for trainer.step in range(1, 61):
            loss, _, _ = trainer.train_step(next(batches))
            losses.append(trainer.mesh.sum_loss(loss).item())
        found.append((sum(losses[:10]) / 10, sum(losses[-10:]) / 10))
    return found


@pytest.mark.long
def test_muon_trains_digits_in_every_layout():
    for num_ranks, layouts in {**LONG, 1: [({}, {})]}.items():
        cases = layouts + [case[:2] for case in CASES.get(num_ranks, [])]
        for (first, last), case in zip(on_ranks(num_ranks, digits, cases)[0], cases, strict=True):
            assert last < 0.6 * first, case
