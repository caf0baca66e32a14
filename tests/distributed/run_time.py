"""A training step in run-time order beside the same step as planned, with jittered stages."""

import json
import random
import time

import torch
from test_grid import case_config
from tiny import gradients, randomize
from tiny_bert import bert_config
from tiny_gpt import gpt_config

from titan_dit.schedules.moments import Moment
from titan_dit.schedules.placement import stages_per_rank
from titan_dit.trainer import Trainer

LONGEST_S = 4e-3
"""Of the random sleeps before actions."""


class Jitter:
    """A `Mark` that sleeps before actions and notes what runs, and the most that is held."""

    def __init__(self, seed):
        self.draws = random.Random(seed)
        self.ran, self.held, self.peak = [], 0, 0

    def __call__(self, moment, what):
        if moment is not Moment.BEGINS:
            return
        # A third of the actions, so that some ranks fall behind others.
        time.sleep(max(0.0, self.draws.uniform(-2, 1)) * LONGEST_S)
        self.ran.append(what)
        self.held += {"F": 1, "B": -1, "W": -1}.get(what.kind, 0)
        self.peak = max(self.peak, self.held)


def config_of(family, parallel, pipeline, mode="none", dtype="fp32"):
    """A tiny config with eight samples, in microbatches of one, or two in a pipeline alone."""
    per_rank = stages_per_rank(pipeline["schedule"], pipeline["virtual_stages"])
    layers = max(5, parallel["pp"] * per_rank)
    if family == "dit":
        return case_config(parallel, pipeline, {}, dtype, mode, layers)
    make = {"gpt": gpt_config, "bert": bert_config}[family]
    return make(
        model={"layers": layers},
        parallel=parallel,
        pipeline=pipeline,
        training={"microbatch_size": 1},
        remat={"mode": mode},
        precision={"dtype": dtype},
    )


def pipelined(trainer):
    """The executor of the stages, also under context parallelism."""
    return getattr(trainer.executor, "inner", trainer.executor)


def ran(world, config, seed):
    """Loss and gradients, what was run, the most held, the window."""
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    executor = pipelined(trainer)
    executor.mark = jitter = Jitter(f"{seed} {world.rank}")
    loss, found = gradients(trainer)
    return loss, found, jitter, executor


def compared(world, family, parallel, pipeline, run_time, mode="none", dtype="fp32", seed=0):
    """What differs between a planned step and one in run-time order; see `expect`."""
    planned = config_of(family, parallel, pipeline, mode, dtype)
    deciding = config_of(family, parallel, pipeline | {"order": "run_time"} | run_time, mode, dtype)
    case = json.dumps([family, parallel, pipeline, run_time])
    return {"case": case} | beside(world, planned, deciding, seed)


def beside(world, planned, deciding, seed):
    """What differs between the steps of two configs."""
    loss, expected, jitter, executor = ran(world, planned, seed)
    order = list(executor.order[executor.links.rank])
    assert jitter.ran == order
    own, found, decided, executor = ran(world, deciding, seed + 1)
    assert sorted(decided.ran) == sorted(order)
    return {
        "loss": own == loss,
        "names": found.keys() == expected.keys(),
        "gradients": [n for n in expected if not torch.equal(found[n], expected[n])],
        "order differs": decided.ran != order,
        "ran": [str(action) for action in decided.ran],
        "held": decided.peak,
        "window": int(jitter.peak * deciding.pipeline.memory + 1e-9),
    }


def expect_equal_bits(found):
    """The planned bits, within the window, on every rank of a case."""
    for rank in found:
        assert rank["loss"], rank["case"]
        assert rank["names"], rank["case"]
        assert not rank["gradients"], (rank["case"], rank["gradients"])
        assert rank["held"] <= rank["window"], rank["case"]


def cases_on(world, cases):
    """Every case on this rank."""
    return [compared(world, *case) for case in cases]
