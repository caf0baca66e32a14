"""Every layout gives the loss and the gradients of one process; every checkpoint loads on all."""

import contextlib
import json
import re

import pytest
import shared_captions
import torch
from harness import on_ranks
from tiny import assert_same_gradients, gradients, graphs_alone, randomize, tiny_config, whole
from torch.profiler import profile

from titan_dit.parallel.compile import num_graphs
from titan_dit.ranks.failure import Disruption
from titan_dit.recovery import replicas
from titan_dit.trainer import Trainer

LAYOUTS = {
    2: [
        {"dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 1},
        {"dp_shard": 2, "reshard_after_forward": "never"},
        {"dp_shard": 2, "prefetch": 2},
    ],
    4: [{"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 1}],
}
MICROBATCHES = [None, 2, 1]
"""Of the first layout; the others take microbatches of 2."""


DDPM = {"name": "ddpm", "min_snr_gamma": 5.0}


def loss_and_gradients(world, layout, microbatch_size=None, cursor=0, bug=None, objective=None):
    config = tiny_config(
        parallel=layout,
        training={"microbatch_size": microbatch_size},
        objective=objective or {},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    trainer.cursor = cursor
    if bug:
        bug(trainer)
    return gradients(trainer)


def refusal(world, layout, spoiled):
    """What every rank hears of replicas if one rank's first weight is another one."""
    trainer = Trainer(tiny_config(parallel=layout), world)
    randomize(trainer.parameters)
    if world.rank == spoiled:
        next(iter(trainer.parameters.values())).detach().to_local().view(-1)[0] += 1
    try:
        replicas.check(trainer.config.faults, trainer.parameters, trainer.mesh, 0, "counter")
    except Disruption as error:
        return str(error)
    return None


def all_layouts(world):
    results = {}
    for layout in LAYOUTS[world.size]:
        for size in MICROBATCHES if layout == {"dp_shard": 2} else (2,):
            results[json.dumps([layout, size])] = loss_and_gradients(world, layout, size)
    # A batch across an epoch boundary, with rows of two permutations.
    results["end"] = loss_and_gradients(world, {}, cursor=1790)
    results["ddpm"] = loss_and_gradients(world, LAYOUTS[world.size][1], 2, objective=DDPM)
    return results


def all_of_two_ranks(world):
    return {
        "layouts": all_layouts(world),
        "gathers": gathers(world),
        "weights": initial_weights(world),
        "planted": planted(world),
    }


def one_process(world):
    return {
        "start": loss_and_gradients(world, {}),
        "end": loss_and_gradients(world, {}, cursor=1790),
        "ddpm": loss_and_gradients(world, {}, objective=DDPM),
        "weights": initial_weights(world),
    }


@pytest.fixture(scope="module")
def reference():
    [alone] = on_ranks(1, one_process)
    return alone


@pytest.fixture(scope="module")
def two_ranks():
    return on_ranks(2, all_of_two_ranks)


def all_of_four_ranks(world):
    refusals = [refusal(world, layout, spoiled=3) for layout in LAYOUTS[4]]
    captions = shared_captions.differences(world)
    return {"layouts": all_layouts(world), "refusals": refusals, "captions": captions}


@pytest.fixture(scope="module")
def four_ranks():
    return on_ranks(4, all_of_four_ranks)


def test_all_ranks_hear_which_replica_differs(four_ranks):
    for pair, four in (found["refusals"] for found in four_ranks):
        assert pair.startswith(
            "[parallel] dp_replicate=2: the weights of rank 3 differ from those of rank 1 in "
            "embed.patch.weight at the start."
        )
        assert "dp_replicate=4: the weights of rank 3 differ from those of rank 0 in" in four


def test_ranks_of_a_replica_embed_shares_of_its_captions_by_a_sharded_encoder(four_ranks):
    whole = sum(p.numel() for p in shared_captions.Words().parameters())
    for found in (each["captions"] for each in four_ranks):
        assert len(found) == len(shared_captions.MESHES)
        for mesh, (error, held) in found.items():
            assert error <= 1e-6, mesh
            assert held == whole // 2, mesh


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_layout_gives_the_loss_and_gradients_of_one_process(
    num_ranks, reference, two_ranks, four_ranks
):
    for results in (found["layouts"] for found in (two_ranks if num_ranks == 2 else four_ranks)):
        assert len(results) == {2: 6, 4: 2}[num_ranks] + 2
        for case, (loss, found) in results.items():
            expected_loss, expected = reference[case if case in reference else "start"]
            assert loss == pytest.approx(expected_loss, rel=1e-6), case
            assert_same_gradients(found, expected)


def gathers(world):
    """The order in which blocks are gathered and run forward, by [parallel] prefetch."""
    orders = []
    for prefetch in (0, 1, 2):
        parallel = {"dp_shard": 2, "prefetch": prefetch, "blocks_per_fsdp_unit": 1}
        trainer = Trainer(tiny_config(parallel=parallel), world)
        batch, trainer.step = next(trainer.batches()), 1
        with profile() as trace:
            trainer.train_step(batch)
        pattern = r"FSDP::(all_gather|pre_forward) \(blocks\.(\d)\)"
        events = sorted(trace.events(), key=lambda event: event.time_range.start)
        found = [match.groups() for e in events if (match := re.fullmatch(pattern, e.name))]
        orders.append(found[:6])
    return orders


def test_blocks_are_gathered_ahead_where_that_is_asked_for(two_ranks):
    for without, one, two in (found["gathers"] for found in two_ranks):
        asked = [[block for what, block in order if what == "all_gather"] for order in (one, two)]
        before = [order.index(("pre_forward", "1")) for order in (one, two)]
        assert without.index(("pre_forward", "1")) < without.index(("all_gather", "1"))
        assert one.index(("all_gather", "1")) < before[0] < one.index(("all_gather", "2"))
        assert two.index(("all_gather", "2")) < before[1]
        assert asked[0][:3] == asked[1][:3] == ["0", "1", "2"]


COMPILED = [
    # Keys of [compile], graphs, tolerance of the gradients.
    ({"objective": False}, 1, 1e-6),
    # Timesteps, up to 1000, differ by one rounding: 6e-5 in the angle of their embedding.
    ({}, 3, 5e-5),
    # So do the frequencies.
    ({"ends": True}, 5, 5e-5),
]


def compiled_gradients(world, how, cases):
    found = []
    for keys, _, _ in cases:
        torch._dynamo.reset()
        with how():
            trainer = Trainer(tiny_config(compile={"enabled": True, **keys}), world)
            randomize(trainer.parameters)
            before = num_graphs()
            found.append((gradients(trainer), num_graphs() - before))
    return found


TO_THE_END = [pytest.mark.long, pytest.mark.compiler]


@pytest.mark.parametrize(
    ("how", "cases"),
    [
        (graphs_alone, COMPILED[:2]),
        pytest.param(contextlib.nullcontext, COMPILED, marks=TO_THE_END),
    ],
)
def test_compiled_blocks_share_one_graph_and_give_the_same_gradients(how, cases, reference):
    expected_loss, expected = reference["start"]
    for results in on_ranks(2, compiled_gradients, how, cases):
        assert [graphs for _, graphs in results] == [graphs for _, graphs, _ in cases]
        for ((loss, found), _), (_, _, tolerance) in zip(results, cases, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert_same_gradients(found, expected, tolerance)


def equal_noise_on_all_ranks(trainer):
    """A common bug: every rank draws the noise of rank 0's samples."""
    original = trainer.built.prepare

    def prepare(batch, rng):
        share = len(batch.sample_numbers)
        return original(batch, type(rng)(rng.seed, rng.sample_numbers % share))

    object.__setattr__(trainer.built, "prepare", prepare)


def mean_of_means(trainer):
    """Each rank divides by its own tokens, as for averaged gradients."""
    original = trainer.executor.loss
    trainer.executor.loss = lambda *args: original(*args) * trainer.mesh.sizes.data


def unreduced_accumulation(trainer):
    """Only the last microbatch's gradients are kept."""
    original = trainer.executor.step

    def step(prepared):
        last = list(prepared.microbatches(trainer.executor.microbatch_size))[-1]
        return original(last)

    trainer.executor.step = step


BUGS = {f.__name__: f for f in (equal_noise_on_all_ranks, mean_of_means, unreduced_accumulation)}


def planted(world):
    return {
        name: loss_and_gradients(world, {}, microbatch_size=4, bug=bug)
        for name, bug in reversed(BUGS.items())
    }


def test_the_comparison_catches_planted_bugs(reference, two_ranks):
    expected_loss, expected = reference["start"]
    results = two_ranks[0]["planted"]
    assert results.keys() == BUGS.keys()
    for name, (loss, found) in results.items():
        assert loss != pytest.approx(expected_loss, rel=1e-6), name
        with pytest.raises(AssertionError):
            assert_same_gradients(found, expected)


def initial_weights(world):
    return {name: whole(p) for name, p in Trainer(tiny_config(), world).parameters.items()}


def test_initial_weights_are_the_same_bits_on_every_layout(reference, two_ranks):
    alone = reference["weights"]
    assert any(weight.abs().max() > 0 for weight in alone.values())
    for found in two_ranks:
        for name, weight in alone.items():
            assert torch.equal(found["weights"][name], weight), name
