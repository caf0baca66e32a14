"""A causal decoder with grouped queries, rotary positions and dropout, on every axis."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from harness import on_ranks
from tiny import assert_same_gradients, graphs_alone, randomize, torch_rng, whole

from titan_dit.config import catalog, config_file
from titan_dit.parallel import context
from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(600)

TP, PP, RING, ULYSSES = {"tp": 2}, {"pp": 2}, {"cp": 2}, {"cp": 2, "cp_method": "ulysses"}
PLAIN = {"tp": 2, "sequence_parallel": False}
# [parallel], query groups, more sections.
COMPILED = {"compile": {"enabled": True, "objective": False}}
FP64 = {"precision": {"dtype": "fp64"}}
RECOMPUTED = {"activation_checkpoint": {"mode": "full"}}
CASES = {
    2: [(RING, 2, COMPILED), (RING, 0, RECOMPUTED), (ULYSSES, 1, {}), (TP, 2, {}), (PP, 2, {})],
    4: [(RING | TP, 2, {}), (RING | {"cp": 4}, 2, FP64)],
}
LONG = {
    2: [
        (RING, 2, FP64),
        (ULYSSES, 2, FP64),
        (ULYSSES, 1, COMPILED),
        (TP, 2, RECOMPUTED),
        (PLAIN, 2, {}),
    ],
    4: [
        (RING | {"cp": 4}, 0, COMPILED),
        (RING | {"cp": 4}, 1, {}),
        (ULYSSES | {"cp": 4}, 1, FP64),
        (RING | PLAIN, 2, FP64),
        (ULYSSES | TP, 2, FP64),
        (RING | PP, 2, FP64),
        (RING | {"dp_shard": 2}, 2, FP64),
    ],
}
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-9}


def config_of(layout, groups, folder, dropout=0.2, **sections):
    tables = {
        "model": {
            "name": "decoder:DecoderConfig",
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "context": 24,
            "groups": groups,
            "dropout": dropout,
        },
        "objective": {"name": "decoder:Dropped"},
        "data": {"name": "examples.gpt:Text", "path": f"{folder}/text", "context": 24},
        "parallel": {"tensor_plan": "decoder:plan", **layout},
        "training": {"steps": 1, "global_batch_size": 4, "microbatch_size": 2},
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every": 0},
        "metrics": {"tensorboard": False},
        "job": {"name": "decoder"},
        **sections,
    }
    return config_file.build(tables, catalog.variant)


def measured(world, config):
    """Loss, gradients, and the losses per token without dropout."""
    torch._dynamo.reset()
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    batch = next(trainer.batches())
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    off = replace(prepared, context={"keys": torch.full_like(prepared.context["keys"], -1)})
    losses = trainer.data_share.gather(trainer.executor.evaluate(off))
    loss = trainer.mesh.sum_loss(trainer.executor.step(prepared)).item()
    return loss, {name: whole(p.grad) for name, p in trainer.parameters.items()}, losses


def on_this_world(world, folder, cases):
    with graphs_alone():
        return {
            json.dumps(case): measured(world, config_of(case[0], case[1], folder, **case[2]))
            for case in cases
        }


def dtype_of(case):
    return case[2].get("precision", {"dtype": "fp32"})["dtype"]


def alone(world, folder):
    """What every case should give, by (groups, dtype); and without dropout."""
    found = {}
    for case in itertools.chain(*CASES.values(), *LONG.values()):
        groups, dtype = case[1], dtype_of(case)
        if (groups, dtype) not in found:
            config = config_of({}, groups, folder, precision={"dtype": dtype})
            found[groups, dtype] = measured(world, config)
    undropped = measured(world, config_of({}, 2, folder, dropout=0.0))
    assert abs(undropped[0] - found[2, "fp32"][0]) > 1e-3
    torch.testing.assert_close(undropped[2], found[2, "fp32"][2])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "text").write_bytes(bytes(range(256)) * 4)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    [found] = on_ranks(1, alone, folder)
    return found


def check(size, cases, reference, folder):
    ranks = on_ranks(size, on_this_world, folder, cases)
    for case in cases:
        dtype = dtype_of(case)
        loss, gradients, losses = reference[case[1], dtype]
        seen = {}
        for rank in ranks:
            found_loss, found, found_losses = rank[json.dumps(case)]
            assert found_loss == pytest.approx(loss, rel=1e-6), case
            # In the order of the sample, whatever the slices.
            torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-6)
            seen |= found
        assert_same_gradients(seen, gradients, TOLERANCE[dtype])


@pytest.mark.parametrize("size", CASES)
def test_every_layout_of_a_causal_decoder_gives_what_one_process_gives(size, reference, folder):
    check(size, CASES[size], reference, folder)


@pytest.mark.long
@pytest.mark.parametrize("size", LONG)
def test_more_layouts_of_a_causal_decoder_give_it_too(size, reference, folder):
    check(size, LONG[size], reference, folder)


def generated(world, folder):
    return measured(world, config_of(RING, 2, folder, **COMPILED))


@pytest.mark.long
@pytest.mark.compiler
def test_the_compiled_code_of_a_causal_ring_does_what_the_graphs_do(reference, folder):
    loss, gradients, _ = reference[2, "fp32"]
    for found_loss, found, _ in on_ranks(2, generated, folder):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_same_gradients(found, gradients)


def planted(world, folder):
    """The gradients of a ring whose slices are contiguous."""
    context.chunks_of.__globals__["chunks_of"] = lambda rank, size, slicing: (rank,)
    return measured(world, config_of(RING, 2, folder))


def test_contiguous_slices_in_a_ring_change_the_loss(reference, folder):
    for loss, _, _ in on_ranks(2, planted, folder):
        assert loss != pytest.approx(reference[2, "fp32"][0], rel=1e-4)
