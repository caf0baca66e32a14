"""[offload]: activations and parameters in host memory change no bit."""

import pytest
import torch
from harness import on_ranks
from tiny import gradients, graphs_alone, randomize, state, tiny_config

from titan_dit.parallel import offload
from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

LAYERS = 4
COMPILED = {"compile": {"enabled": True, "objective": False}}
FULL = {"activation_checkpoint": {"mode": "full"}}
SELECTIVE = {"activation_checkpoint": {"mode": "selective"}}
ATTENTION = {"activation_checkpoint": {"mode": "attention"}}
SMALL = {"training": {"microbatch_size": 4}}


def piped(schedule, **keys):
    return {"parallel": {"pp": 2}, "pipeline": {"schedule": schedule, **keys}, **SMALL}


CASES = {
    1: [{}, SMALL, FULL, ATTENTION, COMPILED, COMPILED | SELECTIVE, COMPILED | FULL],
    2: [
        {"parallel": {"dp_shard": 2}},
        {"parallel": {"tp": 2}},
        {"parallel": {"tp": 2}} | FULL,
        {"parallel": {"cp": 2}},
        piped("1f1b"),
        piped("interleaved_1f1b", virtual_stages=2) | FULL,
        piped("gpipe"),
    ],
}


class Watched(offload.Offload):
    """Notes the most blocks on the device at once, and the order of copies back."""

    every: list = []

    def __init__(self, ahead):
        super().__init__(ahead)
        self.saved, self.most, self.order = [], 0, []
        Watched.every.append(self)

    def end_forward(self):
        self.saved.append(self.last)
        super().end_forward()
        self.count()

    def use(self, saved):
        if not (self.arriving and self.arriving[0]() is saved):
            self.order.append(next(i for i, one in enumerate(self.saved) if one() is saved))
        super().use(saved)
        self.count()

    def count(self):
        blocks = offload.alive(self.saved)
        here = [b for b in blocks if any(s.here is not None for s in b.storages.values())]
        self.most = max(self.most, len(here))


def run(world, case, **keys):
    """Loss and gradients of a step."""
    tables = {"model": {"num_layers": LAYERS}, "offload": keys} | case
    trainer = Trainer(tiny_config(**tables), world)
    randomize(trainer.parameters)
    return gradients(trainer)


def all_cases(world, cases, ahead):
    """By case: what differs, and what the copies of activations were."""
    offload.LEAST_BYTES, offload.Offload = 0, Watched
    found = []
    for case in cases:
        with graphs_alone():
            loss, expected = run(world, case)
            Watched.every = []
            again, others = run(world, case, activations=True, ahead=ahead)
        same = loss == again and all(torch.equal(others[n], g) for n, g in expected.items())
        states = Watched.every
        found.append(
            {
                "same": same,
                "out": [s.bytes_out for s in states],
                "back": [s.bytes_back for s in states],
                "most": [s.most for s in states],
                "order": [s.order for s in states],
                "left": [len(offload.alive(s.saved)) for s in states],
                "buffers": [sum(b() is not None for b in s.buffers.every) for s in states],
            }
        )
    return found


def from_the_host(world, cases):
    """By case, names of weights, states and averages that parameters in host memory change."""
    found = []
    for case in cases:
        states = []
        for keys in ({}, {"parameters": True}):
            config = tiny_config(**{"model": {"num_layers": LAYERS}, "offload": keys} | case)
            trainer = Trainer(config, world)
            randomize(trainer.parameters)
            trainer.ema.restart()
            batches = trainer.batches()
            for trainer.step in (1, 2):
                trainer.train_step(next(batches))
            states.append(state(trainer))
        one, other = states
        assert one.keys() == other.keys()
        found.append([name for name in one if not torch.equal(one[name], other[name])])
    return found


def everything(world, on_host):
    """By blocks ahead what `all_cases` finds, and what `from_the_host` does."""
    cases = {1: CASES[world.size], 2: CASES[world.size][:2]}
    by_ahead = {ahead: all_cases(world, some, ahead) for ahead, some in cases.items()}
    return by_ahead, from_the_host(world, on_host)


IN_BF16 = {"precision": {"dtype": "bf16", "weights": "bf16"}}
ON_HOST = {
    1: [{}, IN_BF16, {"precision": {"dtype": "bf16"}} | SMALL],
    2: [{"parallel": {"dp_shard": 2}}, {"parallel": {"tp": 2}} | IN_BF16, piped("1f1b")],
}


@pytest.fixture(scope="module")
def launched():
    """Ranks -> what every rank found."""
    return {n: on_ranks(n, everything, ON_HOST[n]) for n in CASES}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("num_ranks", CASES)
def test_activations_come_back_to_the_bit_block_by_block(launched, num_ranks, ahead):
    for by_ahead, _ in launched[num_ranks]:
        found = by_ahead[ahead]
        for case, one in zip(CASES[num_ranks][: len(found)], found, strict=True):
            assert one["same"], case
            # Nothing outlives the backward.
            assert not any(one["left"]), case
            is_piped = "pp" in case.get("parallel", {})
            for out, back, most, order in zip(
                one["out"], one["back"], one["most"], one["order"], strict=True
            ):
                # A pipeline's rank may be in the backward of one microbatch and the forward of
                # another.
                assert most <= (2 * ahead + 1 if is_piped else ahead + 1), case
                assert out > 0, case
                if not is_piped:
                    # The last blocks are still on the device.
                    assert back * LAYERS == out * (LAYERS - ahead), case
                    steps = range(0, len(order), LAYERS)
                    expected = [n + i for n in steps for i in reversed(range(LAYERS))]
                    assert order == expected, case
                assert back <= out, case


def test_full_recomputation_offloads_the_blocks_inputs_alone(launched):
    [(by_ahead, _)] = launched[1]
    by_case = dict(zip(map(str, CASES[1]), by_ahead[1], strict=True))
    [whole], [inputs] = by_case[str({})]["out"], by_case[str(FULL)]["out"]
    # 16 samples x 16 tokens x 32 channels and a condition of 32, in fp32.
    assert inputs == LAYERS * 16 * (16 + 1) * 32 * 4
    assert whole > 15 * inputs


def test_host_buffers_are_used_again(launched):
    [(by_ahead, _)] = launched[1]
    by_case = dict(zip(map(str, CASES[1]), by_ahead[1], strict=True))
    # Four microbatches take no more than one: each a quarter of the bytes.
    assert by_case[str(SMALL)]["buffers"] == by_case[str({})]["buffers"]


@pytest.mark.parametrize("num_ranks", ON_HOST)
def test_parameters_in_host_memory_change_no_bit(launched, num_ranks):
    for _, found in launched[num_ranks]:
        assert found == [[]] * len(ON_HOST[num_ranks])
