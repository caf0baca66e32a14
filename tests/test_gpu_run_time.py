"""A pipeline of two ranks on one GPU, in run-time order; skipped without a GPU.

NCCL refuses two ranks on one GPU. Streams go through CUDA IPC instead, and the planned sequence is
played by a `Decider` that keeps to it.
"""

from unittest import mock

import pytest
import torch
from harness import on_ranks
from run_time import Jitter
from test_grid import case_config, schedule
from tiny import randomize, torch_rng, whole

from titan_dit.parallel.init import put
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline import run_time
from titan_dit.pipeline.events import PipelineEvent
from titan_dit.pipeline.schedules.decider import Decider, Waiting
from titan_dit.ranks.process_group import set_deterministic
from titan_dit.trainer import Trainer


class AsPlanned(Decider):
    """Decides what the plan says."""

    def __init__(self, actions, *more):
        super().__init__(actions, *more)
        self.actions = tuple(actions)

    def next(self):
        action = self.actions[self._num_done]
        ready = [found for stage in self._stages for found in self.ready_of(stage)]
        return action if action in ready else Waiting.INPUT


class Uneven(Jitter):
    """Sleeps on the device, too."""

    def __call__(self, moment, what):
        if moment is PipelineEvent.BEGINS and torch.cuda.is_available():
            torch.cuda._sleep(int(max(0.0, self.draws.uniform(-2, 1)) * 10**7))
        super().__call__(moment, what)


def a_step(world, decider, seed):
    """The loss of this rank, its gradients, and what ran."""
    pipeline = schedule("interleaved_zero_bubble", 2, order="run_time", memory=1.5)
    config = case_config("dit", {"pp": 2}, pipeline | {"transport": "shared_memory"}, {})
    with mock.patch.object(P2PGroups, "open"), mock.patch.object(run_time, "Decider", decider):
        trainer = Trainer(config, world)
        weights = {name: torch.empty(p.shape) for name, p in trainer.parameters.items()}
        randomize(weights)
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                put(parameter, weights[name].to(world.device))
        batch = next(trainer.batches())
        prepared = trainer.built.prepare(batch, torch_rng(trainer, batch))
        trainer.executor.mark = jitter = Uneven(f"{seed} {world.rank}")
        loss = trainer.executor.step(prepared)
    found = {name: whole(p.grad).cpu() for name, p in trainer.parameters.items()}
    return loss.cpu(), found, [str(action) for action in jitter.ran]


def both_orders(world):
    """A planned step, and what differs from it in steps in run-time order."""
    set_deterministic()
    loss, expected, order = a_step(world, AsPlanned, 0)
    found = []
    for seed in (1, 2, 3):
        own, gradients, ran = a_step(world, Decider, seed)
        wrong = [name for name in expected if not torch.equal(gradients[name], expected[name])]
        found.append((torch.equal(own, loss), wrong, ran != order))
    return loss, expected, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_on_one_gpu_give_the_planned_bits_and_the_gradients_of_a_cpu():
    device = {"RANKS_ON": "cuda", "LOCAL_RANK": "0"}
    ranks = on_ranks(2, both_orders, variables=device, timeout=300)
    on_cpu = on_ranks(2, both_orders)
    for (loss, gradients, found), (cpu_loss, cpu_gradients, _) in zip(ranks, on_cpu, strict=True):
        for same_loss, wrong, _ in found:
            assert same_loss
            assert not wrong
        torch.testing.assert_close(loss, cpu_loss, rtol=1e-4, atol=1e-6)
        assert gradients.keys() == cpu_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, cpu_gradients[name], rtol=1e-3, atol=1e-4)
    assert any(differs for *_, found in ranks for *_, differs in found)
