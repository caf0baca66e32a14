"""Every layout gives the loss and the gradients of one process; every checkpoint loads on all."""

import json
import re
import shutil

import pytest
import torch
from harness import on_ranks
from tiny import assert_same_gradients, gradients, randomize, tiny_config, whole
from torch.profiler import profile

from titan_dit.parallel.compile import num_graphs
from titan_dit.trainer import Trainer

LAYOUTS = {
    2: [
        {"dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 1},
        {"dp_shard": 2, "reshard_after_forward": "never"},
        {"dp_shard": 2, "prefetch": 2},
    ],
    4: [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 1}],
}
MICROBATCHES = [None, 2, 1]


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


def all_layouts(world):
    results = {}
    for layout in LAYOUTS[world.size]:
        for size in MICROBATCHES:
            results[json.dumps([layout, size])] = loss_and_gradients(world, layout, size)
    # A batch across the end of the epoch, its rows from two permutations.
    results["end"] = loss_and_gradients(world, {}, cursor=1790)
    results["ddpm"] = loss_and_gradients(world, LAYOUTS[world.size][1], 2, objective=DDPM)
    return results


@pytest.fixture(scope="module")
def reference():
    [alone] = on_ranks(1, one_process)
    return alone


def one_process(world):
    return {
        "start": loss_and_gradients(world, {}),
        "end": loss_and_gradients(world, {}, cursor=1790),
        "ddpm": loss_and_gradients(world, {}, objective=DDPM),
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_layout_gives_the_loss_and_gradients_of_one_process(num_ranks, reference):
    for results in on_ranks(num_ranks, all_layouts):
        assert len(results) == len(LAYOUTS[num_ranks]) * len(MICROBATCHES) + 2
        for case, (loss, found) in results.items():
            expected_loss, expected = reference[case if case in reference else "start"]
            assert loss == pytest.approx(expected_loss, rel=1e-6), case
            assert_same_gradients(found, expected)


def gathers(world):
    """The order in which blocks are gathered and run forward, by [parallel] prefetch."""
    orders = []
    for prefetch in (0, 1, 2):
        trainer = Trainer(tiny_config(parallel={"dp_shard": 2, "prefetch": prefetch}), world)
        batch, trainer.step = next(trainer.batches()), 1
        with profile() as trace:
            trainer.train_step(batch)
        pattern = r"FSDP::(all_gather|pre_forward) \(blocks\.(\d)\)"
        events = sorted(trace.events(), key=lambda event: event.time_range.start)
        found = [match.groups() for e in events if (match := re.fullmatch(pattern, e.name))]
        orders.append(found[:6])
    return orders


def test_blocks_are_gathered_ahead_where_that_is_asked_for():
    for without, one, two in on_ranks(2, gathers):
        asked = [[block for what, block in order if what == "all_gather"] for order in (one, two)]
        before = [order.index(("pre_forward", "1")) for order in (one, two)]
        assert without.index(("pre_forward", "1")) < without.index(("all_gather", "1"))
        assert one.index(("all_gather", "1")) < before[0] < one.index(("all_gather", "2"))
        assert two.index(("all_gather", "2")) < before[1]
        assert asked[0][:3] == asked[1][:3] == ["0", "1", "2"]


def compiled_gradients(world):
    found = []
    for ends in (False, True):
        torch._dynamo.reset()
        trainer = Trainer(tiny_config(compile={"enabled": True, "ends": ends}), world)
        randomize(trainer.parameters)
        before = num_graphs()
        found.append((gradients(trainer), num_graphs() - before))
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_share_one_graph_and_give_the_same_gradients(reference):
    expected_loss, expected = reference["start"]
    # Compiled, the frequencies of the timestep differ by one rounding; times 1000 in an angle.
    cases = {1: 1e-6, 3: 5e-5}
    for results in on_ranks(2, compiled_gradients):
        assert [graphs for _, graphs in results] == list(cases)
        for ((loss, found), _), tolerance in zip(results, cases.values(), strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert_same_gradients(found, expected, tolerance)


def equal_noise_on_all_ranks(trainer):
    """The bug that peers ship: every rank draws the noise of the first one's samples."""
    original = type(trainer.config.objective).prepare

    def prepare(self, batch, rng):
        share = len(batch.sample_numbers)
        return original(self, batch, type(rng)(rng.seed, rng.sample_numbers % share))

    type(trainer.config.objective).prepare = prepare


def mean_of_means(trainer):
    """Each rank divides by its own tokens, as if gradients were averaged afterwards."""
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


def test_the_comparison_catches_planted_bugs(reference):
    expected_loss, expected = reference["start"]
    results = on_ranks(2, planted)[0]
    assert results.keys() == BUGS.keys()
    for name, (loss, found) in results.items():
        assert loss != pytest.approx(expected_loss, rel=1e-6), name
        with pytest.raises(AssertionError):
            assert_same_gradients(found, expected)


def initial_weights(world):
    return {name: whole(p) for name, p in Trainer(tiny_config(), world).parameters.items()}


def test_initial_weights_are_the_same_bits_on_every_layout():
    [alone] = on_ranks(1, initial_weights)
    assert any(weight.abs().max() > 0 for weight in alone.values())
    for found in on_ranks(2, initial_weights):
        for name, weight in alone.items():
            assert torch.equal(found[name], weight), name


def train_and_save(world, folder):
    config = tiny_config(job={"dir": str(folder)}, training={"steps": 4}, checkpoint={"every": 2})
    trainer = Trainer(config, world)
    trainer.fit()
    return state(trainer)


def load_and_continue(world, folder, layout, steps):
    config = tiny_config(
        job={"dir": str(folder)},
        parallel=layout,
        training={"steps": steps},
        checkpoint={"every": 0},
    )
    trainer = Trainer(config, world)
    trainer.resume()
    loaded = state(trainer)
    batches = trainer.batches()
    losses = []
    for trainer.step in range(5, steps + 1):
        loss, _, _ = trainer.train_step(next(batches))
        losses.append(trainer.mesh.sum_loss(loss).item())
    return loaded, losses


def state(trainer):
    tensors = trainer.tensors()
    flat = {f"model.{name}": whole(p) for name, p in tensors["model"].items()}
    for name, moments in tensors["optimizer"].items():
        flat |= {f"optimizer.{name}.{key}": whole(value) for key, value in moments.items()}
    for decay, average in tensors["ema"].items():
        flat |= {f"ema.{decay}.{name}": whole(value) for name, value in average.items()}
    return flat | {"step": torch.tensor(trainer.step), "cursor": torch.tensor(trainer.cursor)}


def load_on_all_layouts(world, folder):
    return [load_and_continue(world, folder, layout, 8) for layout in LAYOUTS.get(world.size, [{}])]


def test_a_checkpoint_loads_bit_exactly_on_every_layout_and_goes_on_the_same(tmp_path):
    saved = on_ranks(2, train_and_save, tmp_path)[0]
    assert saved["step"] == 4
    assert saved["cursor"] == 64
    continued = []
    for num_ranks in (1, 2, 4):
        for loaded, losses in on_ranks(num_ranks, load_on_all_layouts, tmp_path)[0]:
            assert loaded.keys() == saved.keys()
            for name, value in saved.items():
                assert torch.equal(loaded[name], value), name
            continued.append(losses)
    assert len(continued) == 8
    for losses in continued:
        assert losses == pytest.approx(continued[0], rel=1e-6)
