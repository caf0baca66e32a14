"""Random pipelines in run-time order, beside the planned one: no hang, its bits, in its window."""

import gc
import json
import random
import threading
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from run_time import beside, expect_equal_bits
from test_grid import schedule
from tiny import gradients, randomize, tiny_config, torch_rng

from titan_dit.pipeline.schedules.placement import stages_per_rank
from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

FOLDED = ("interleaved_1f1b", "interleaved_zero_bubble")
SCHEDULES = ("gpipe", "1f1b", *FOLDED, *FOLDED, "zbv_zero_bubble", "dualpipev")


def random_case(number, ranks):
    """[parallel], [pipeline], what run-time order gets, [training], layers."""
    draw = random.Random(f"{ranks} {number}")
    pp = draw.choice([2, 4]) if ranks == 4 else ranks
    parallel = {"pp": pp}
    if ranks > pp:
        parallel |= draw.choice(
            [{"tp": 2}, {"cp": 2}, {"cp": 2, "cp_method": "ulysses"}, {"dp_shard": 2}]
        )
    name = draw.choice(SCHEDULES)
    virtual = draw.choice([2, 3]) if name in FOLDED else 1
    stages = pp * stages_per_rank(name, virtual)
    split = [draw.choice([1, 1, 1, 2]) for _ in range(stages)]
    size = draw.choice([1, 2])
    count = pp * draw.choice([2, 2, 3] if pp == 4 else [2, 3, 5])
    batch = count * size * parallel.get("dp_shard", 1)
    training = {"global_batch_size": batch, "microbatch_size": size}
    run_time = {
        "memory": round(draw.uniform(1, 2), 2) if draw.random() < 0.7 else 1.0,
        "transport": draw.choice(["auto", "process_group"]),
    }
    return parallel, schedule(name, virtual, split=split), run_time, training, sum(split)


def config_of(parallel, pipeline, training, layers):
    return tiny_config(
        model={"num_layers": layers, "hidden_size": 16},
        parallel=parallel,
        pipeline=pipeline,
        training=training,
    )


def fuzzed(world, numbers):
    """Random cases, each with jitter of its own."""
    found = []
    for number in numbers:
        parallel, pipeline, run_time, training, layers = random_case(number, world.size)
        order = pipeline | {"order": "run_time"} | run_time
        configs = [config_of(parallel, p, training, layers) for p in (pipeline, order)]
        case = json.dumps([number, parallel, pipeline, run_time, training])
        found.append({"case": case} | beside(world, *configs, number))
    return found


def passes(trainer):
    """The losses of two steps; their gradients, and what passes before and between them give."""
    batch = next(trainer.batches())
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    inputs = {name: tensor[:3] for name, tensor in prepared.inputs.items()}
    before = trainer.executor.predict(inputs, prepared.static)
    first, own = gradients(trainer)
    between = trainer.executor.evaluate(prepared)
    second, others = gradients(trainer)
    return [first, second], [before, between, *own.values(), *others.values()]


def interleaved(world):
    """Passes without backward between steps: if they are those of the planned order."""
    pipeline = schedule("interleaved_zero_bubble", 2)
    training = {"global_batch_size": 8, "microbatch_size": 2}
    found = []
    for more in ({}, {"memory": 1.5}, {"transport": "process_group"}):
        order = more and {"order": "run_time"}
        trainer = Trainer(config_of({"pp": 2}, pipeline | order | more, training, 4), world)
        randomize(trainer.parameters)
        found.append(passes(trainer))
    (losses, expected), *others = found
    equal = [all(map(torch.equal, tensors, expected)) for _, tensors in others]
    return equal, [own == losses for own, _ in others]


def in_two_ranks(world, numbers):
    """Random cases, passes without backward, and what is left of all in the process."""
    found = fuzzed(world, numbers), interleaved(world)
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("titan_dit-slot")
    return *found, maps, [thread.name for thread in threading.enumerate()]


@pytest.fixture(scope="module")
def launched():
    return on_ranks(2, in_two_ranks, range(3))


def test_random_pipelines_give_the_planned_bits_within_their_windows(launched):
    for case in zip(*(found for found, *_ in launched), strict=True):
        expect_equal_bits(case)


def test_passes_without_backward_may_come_between_steps(launched):
    for _, (equal, losses), *_ in launched:
        assert equal == [True, True]
        assert losses == [True, True]


def test_neither_memory_nor_a_thread_is_left_of_an_executor_that_nobody_uses(launched):
    for *_, maps, threads in launched:
        assert maps == 0
        assert threads == ["MainThread"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_fifty_random_pipelines_give_the_planned_bits(ranks):
    cases = [*zip(*on_ranks(ranks, fuzzed, range(100, 125), timeout=850), strict=True)]
    assert len(cases) == 25
    for case in cases:
        expect_equal_bits(case)
    assert any(rank["order differs"] for case in cases for rank in case)
