"""A training step in run-time order beside the same step as planned, with jittered stages."""

import json
import random
import time

import torch
from test_grid import case_config
from tiny import gradients, randomize
from tiny_bert import bert_config
from tiny_gpt import gpt_config

from titan_dit.pipeline.events import PipelineEvent
from titan_dit.pipeline.schedules.placement import stages_per_rank
from titan_dit.trainer import Trainer

LONGEST_S = 4e-3
"""Of the random sleeps before actions."""


class Jitter:
    """A `Mark` that sleeps before actions and notes what runs, and the most that is held."""

    def __init__(self, seed, longest_s=LONGEST_S):
        self.draws, self.longest_s = random.Random(seed), longest_s
        self.ran, self.held, self.peak = [], 0, 0

    def __call__(self, moment, what):
        if moment is not PipelineEvent.BEGINS:
            return
        # A third of the actions, so that some ranks fall behind others.
        time.sleep(max(0.0, self.draws.uniform(-2, 1)) * self.longest_s)
        self.ran.append(what)
        self.held += {"F": 1, "B": -1, "W": -1}.get(what.kind, 0)
        self.peak = max(self.peak, self.held)


def config_of(family, parallel, pipeline, mode="none", dtype="fp32"):
    """A tiny config with eight samples, in microbatches of one, or two in a pipeline alone."""
    per_rank = stages_per_rank(pipeline["schedule"], pipeline["virtual_stages"])
    layers = max(5, parallel["pp"] * per_rank)
    if family == "dit":
        return case_config("dit", parallel, pipeline, {}, dtype, mode, (layers, 8))
    make = {"gpt": gpt_config, "bert": bert_config}[family]
    return make(
        model={"num_layers": layers},
        parallel=parallel,
        pipeline=pipeline,
        training={"microbatch_size": 1},
        activation_checkpoint={"mode": mode},
        precision={"dtype": dtype},
    )


def pipelined(trainer):
    """The executor of the stages, also under context parallelism."""
    return getattr(trainer.executor, "inner", trainer.executor)


def trainer_of(world, config):
    """A trainer with random weights."""
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    return trainer


def ran(trainer, seed, attempt=0):
    """Loss and gradients of the first batch, and what was run; later attempts sleep longer."""
    longest_s = LONGEST_S * min(5, 1 + attempt)
    pipelined(trainer).mark = jitter = Jitter(f"{seed} {trainer.world.rank}", longest_s)
    return *gradients(trainer), jitter


def compared(world, family, parallel, pipeline, run_time, mode="none", dtype="fp32", seed=0):
    """What differs between a planned step and steps in run-time order; see `expect_equal_bits`."""
    planned = config_of(family, parallel, pipeline, mode, dtype)
    deciding = config_of(family, parallel, pipeline | {"order": "run_time"} | run_time, mode, dtype)
    case = json.dumps([family, parallel, pipeline, run_time])
    return {"case": case} | beside(world, planned, deciding, seed, attempts=30)


def beside(world, planned, deciding, seed, attempts=1):
    """What differs between the steps of two configs; repeated until their orders differ."""
    trainer = trainer_of(world, planned)
    executor = pipelined(trainer)
    order, place = list(executor.order[executor.p2p.rank]), executor.p2p.rank
    loss, expected, jitter = ran(trainer, seed)
    assert jitter.ran == order
    trainer = trainer_of(world, deciding)
    same_loss, wrong, held = True, [], 0
    for attempt in range(attempts):
        own, found, decided = ran(trainer, f"{seed} {attempt}", attempt)
        assert sorted(decided.ran) == sorted(order)
        assert found.keys() == expected.keys()
        same_loss = same_loss and own == loss
        wrong += [name for name in expected if not torch.equal(found[name], expected[name])]
        held = max(held, decided.peak)
        everyone = world.gather((place, decided.ran != order, tuple(decided.ran)))
        if differ(everyone, trainer.mesh.sizes.data):
            break
    return {
        "loss": same_loss,
        "gradients": wrong,
        "order differs": differ(everyone, trainer.mesh.sizes.data),
        "ran": [str(action) for action in decided.ran],
        "held": held,
        "window": int(jitter.peak * deciding.pipeline.memory + 1e-9),
    }


def differ(everyone, replicas):
    """Whether a rank left its plan, and of several replicas two ran something else."""
    places = {place for place, _, _ in everyone}
    orders = {(place, actions) for place, _, actions in everyone}
    return any(left for _, left, _ in everyone) and (replicas == 1 or len(orders) > len(places))


def expect_equal_bits(found):
    """The planned bits, within the window, on every rank of a case."""
    for rank in found:
        assert rank["loss"], rank["case"]
        assert not rank["gradients"], (rank["case"], rank["gradients"])
        assert rank["held"] <= rank["window"], rank["case"]


def cases_on(world, cases):
    """Every case on this rank."""
    return [compared(world, *case) for case in cases]
