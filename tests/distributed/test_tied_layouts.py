"""Tied weights through training, validation, checkpoints and optimizers, in several layouts."""

import pytest
import torch
from harness import on_ranks
from test_grid import CP, PP, TP, schedule
from test_layout_checkpoints import joined, load, tensors_of
from tiny import randomize
from tiny_gpt import gpt_config

from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

ADAMW = {}
MUON = {"optimizer": {"name": "muon", "lr": 1e-3, "ns_dtype": "fp32"}}
FROZEN = {"optimizer": {"groups": [{"pattern": "embed.token.weight", "frozen": True}]}}
ADAPTED = {"lora": {"rank": 2, "trained": ["embed.token.*"]}}
"""The table is trained beside adapters; its copy on the last stage has another name."""
ZERO_BUBBLE, FOLDED = schedule("zbv_zero_bubble"), schedule("interleaved_1f1b", 2)
CASES = {
    "adamw": [(PP, schedule("1f1b"), ADAMW), (TP, {}, ADAMW)],
    "muon": [(PP, FOLDED, MUON)],
    "frozen": [(PP, ZERO_BUBBLE, FROZEN), (TP, {}, FROZEN)],
    "adapted": [(PP, schedule("1f1b"), ADAPTED)],
}
LOADS = [(PP, ZERO_BUBBLE), (TP, {}), (CP, {})]


def trainer_in(world, folder, parallel, pipeline, sections):
    config = gpt_config(
        model={"num_layers": 4},
        parallel=parallel,
        pipeline=pipeline,
        job={"dir": str(folder)},
        training={"microbatch_size": 2},
        validation={"every": 2, "samples": 6},
        checkpoint={"every": 2, "init": "not loaded" if "lora" in sections else ""},
        **sections,
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    trainer.ema.restart()
    return trainer


def trained(world, folder, parallel, pipeline, sections):
    """Two steps; validation losses between and after them, of weights and average; a checkpoint."""
    trainer = trainer_in(world, folder, parallel, pipeline, sections)
    trainer.open_run_directory()
    batches, losses = trainer.batches(), []
    for trainer.step in (1, 2):
        trainer.train_step(next(batches))
        losses.append(trainer.validate())
    for copy in trainer.built.copies.values():
        assert copy.requires_grad == (sections != FROZEN)
    trainer.save()
    trainer.checkpoints.finish()
    return tensors_of(trainer), losses


def trained_on_two(world, folder):
    trains = {
        name: [trained(world, f"{folder}/{name}-{n}", *case) for n, case in enumerate(cases)]
        for name, cases in CASES.items()
    }
    loads = [
        load(trainer_in(world, f"{folder}/new", *to, ADAMW), f"{folder}/adamw-0") for to in LOADS
    ]
    return trains, loads


def trained_alone(world, folder):
    trains = {
        name: trained(world, f"{folder}/{name}", {}, {}, cases[0][2])
        for name, cases in CASES.items()
    }
    return trains, load(trainer_in(world, f"{folder}/new", {}, {}, ADAMW), f"{folder}/adamw-0")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tied"))
    return on_ranks(2, trained_on_two, folder), on_ranks(1, trained_alone, folder)[0]


@pytest.mark.parametrize("name", CASES)
def test_two_steps_and_their_validations_are_those_of_one_process(launched, name):
    together, (alone, _) = launched
    expected, expected_losses = alone[name]
    for number in range(len(CASES[name])):
        ranks = [trains[name][number] for trains, _ in together]
        found = joined(tensors for tensors, _ in ranks)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if "attn.qkv.bias" in key:  # The true gradient of the keys' bias is 0.
                continue
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=2e-6, msg=key)
        for _, losses in ranks:
            for step, wanted in zip(losses, expected_losses, strict=True):
                assert step == pytest.approx(wanted, rel=1e-6)


def test_the_average_and_the_weights_give_different_losses(launched):
    _, (alone, _) = launched
    for losses in alone["adamw"][1]:
        assert len(set(losses.values())) == len(losses) > 1


def test_a_pipelines_checkpoint_loads_to_the_bit_on_every_layout_and_has_one_tensor(launched):
    together, (_, on_one) = launched
    saved = joined(trains["adamw"][0][0] for trains, _ in together)
    assert "model.embed.token.weight." in saved
    assert not [key for key in saved if "head.out" in key]
    loads = [[rank[number] for _, rank in together] for number in range(len(LOADS))]
    for ranks in (*loads, [on_one]):
        found = joined(tensors for tensors, _ in ranks)
        assert found.keys() == saved.keys()
        for key, tensor in saved.items():
            assert torch.equal(found[key], tensor), key
        for _, loss in ranks:
            assert loss == pytest.approx(on_one[1], rel=1e-6)
