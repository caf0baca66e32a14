"""The search against all layouts, estimated one by one."""

from dataclasses import replace

import pytest
from hand_made import easy
from made_up_counts import counts_of
from tiny import tiny_config

from titan_dit.config.section import UserError
from titan_dit.parallel.mesh import AXES
from titan_dit.planner import step
from titan_dit.planner.candidates import Space
from titan_dit.planner.choice import preferred
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.memory import DeviceMemory
from titan_dit.planner.search import (
    CostModel,
    Search,
    busy_of,
    coarser_than,
    equally_fast,
    floor_of,
    fullest,
    least_bytes,
    mesh_key,
    scaled,
    work_key,
)

MODEL = CostModel(counts=counts_of)
SMALL = {"hidden_size": 512, "num_layers": 4, "num_heads": 4, "latent_size": 64}
LAYERS = SMALL["num_layers"]


def space_of(gpus=4, device=None, fixed=(), **sections):
    given = {
        "model": SMALL,
        "precision": {"dtype": "bf16"},
        "training": {"global_batch_size": 8},
        "compile": {"enabled": True},
    }
    for section, table in sections.items():
        given[section] = {**given.get(section, {}), **table}
    return Space(tiny_config(**given), gpus, device or DEVICE, fixed)


DEVICE = easy(
    inner_latency_us=5.0, node_latency_us=20.0, launch_us=4.0, error=0.1, gpus_per_node=2,
    inner_gb_per_s={2: 50.0}, memory_gib=3.0,
    peak_tflops={"bf16": 20.0, "float8": 40.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def every():
    """(seconds, GiB, candidate) of every layout, estimated one by one."""
    found, space = [], space_of()
    for candidate in space:
        plan = space.plan(candidate)
        counts = counts_of(plan)
        _, needed, _ = fullest(MODEL, plan, counts, DEVICE)
        found.append((step.estimate(plan, counts, DEVICE).seconds, needed.total, candidate))
    return found


def best_of_meshes(every, memory_gib):
    """The fastest layout of every mesh that fits, the fastest first."""
    rows = {}
    for row in sorted(every):
        if row[1] <= memory_gib:
            rows.setdefault(mesh_key(row[2]), row)
    return list(rows.values())


@pytest.mark.parametrize("memory_gib", [0.8, 0.9, 3.0])
def test_the_search_finds_what_estimating_every_layout_finds(every, memory_gib):
    device = easy(**{**plain(DEVICE), "memory_gib": memory_gib})
    space = space_of(device=device)
    wanted = best_of_meshes(every, memory_gib)
    found = Search(space, device, MODEL).run(top=5)
    assert wanted
    by_mesh = {mesh_key(candidate): seconds for seconds, _, candidate in wanted}
    # tp and cp are rehearsed only if they may be faster by more than the error.
    unsplit = [row for row in wanted if row[2].tp * row[2].cp == 1]
    shown = [row for row in found.rows if row.candidate.tp * row.candidate.cp == 1]
    times = [row.estimate.seconds for row in shown]
    assert times[:5] == pytest.approx([row[0] for row in unsplit[: len(times)]][:5], rel=1e-9)
    for row in found.rows:
        if row.estimate.seconds <= times[min(4, len(times) - 1)]:
            assert row.estimate.seconds == pytest.approx(by_mesh[mesh_key(row.candidate)], rel=1e-9)
    assert found.tally.estimated < found.tally.candidates / 3
    best = preferred(found.rows, device.error)[0]
    limit = wanted[0][0] * (1 + device.error)
    alike = [row for row in wanted if row[0] <= limit]
    fewest, _, least = min((row[2].num_axes, row[2].tp * row[2].cp > 1, row[1]) for row in alike)
    assert best.estimate.seconds <= limit
    assert best.candidate.num_axes == fewest
    assert best.needed.total == pytest.approx(least, rel=1e-9)


def plain(device):
    keys = ("inner_latency_us", "node_latency_us", "launch_us", "error", "gpus_per_node")
    keys += ("inner_gb_per_s", "peak_tflops")
    return {key: getattr(device, key) for key in keys}


@pytest.fixture(scope="module")
def real():
    """A space of four ranks without float8, and its rehearsals."""
    space = space_of(fixed=("precision.float8",), data={"name": "latents", "path": "nowhere"})
    return space, Rehearsals(space.config).counts


def test_no_bound_is_above_the_estimate():
    """Floors of coarser splits and `step.bound`, on every eleventh layout."""
    space = space_of()
    for candidate in list(space)[::11]:
        plan = space.plan(candidate)
        counts = counts_of(plan)
        seconds = step.estimate(plan, counts, DEVICE).seconds * (1 + 1e-9)
        assert step.bound(plan, counts, DEVICE) <= seconds
        known = []
        for coarse in coarser_than(candidate):
            known.append((coarse, counts_of(space.plan(coarse))))
            busy = busy_of(known, candidate, plan, DEVICE)
            floor = floor_of(busy, candidate, plan)
            assert floor <= seconds, (candidate, coarse)
            shares = scaled(known[-1][1], coarse, candidate)
            assert step.bound(plan, shares, DEVICE) <= seconds, (candidate, coarse)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2, "cp": 1, "mode": "none"},
        pytest.param({"tp": 2, "cp": 1, "mode": "selective"}, marks=pytest.mark.long),
        pytest.param({"tp": 1, "cp": 2, "mode": "full"}, marks=pytest.mark.long),
    ],
)
def test_no_bound_is_above_the_estimate_of_a_rehearsal(real, changes):
    """The same with counts of the real model: what a bound rests on is not in made-up ones."""
    space, exact = real
    wanted = {**changes, "dp_shard": 2, "pp": 1, "microbatch_size": 2}
    wanted |= {"cp_method": "ring", "sequence_parallel": True, "reshard_after_forward": "auto"}
    [candidate] = [one for one in space if one._asdict().items() >= wanted.items()]
    plan = space.plan(candidate)
    counts = exact(plan)
    seconds = step.estimate(plan, counts, DEVICE).seconds * (1 + 1e-9)
    _, own, _ = fullest(MODEL, plan, counts, DEVICE)
    assert step.bound(plan, counts, DEVICE) <= seconds
    known, floors = [], []
    for coarse in coarser_than(candidate):
        known.append((coarse, exact(space.plan(coarse))))
        busy = busy_of(known, candidate, plan, DEVICE)
        floors.append(floor_of(busy, candidate, plan))
        shares = scaled(known[-1][1], coarse, candidate)
        assert step.bound(plan, shares, DEVICE) <= seconds, coarse
        if coarse.mode == candidate.mode:
            least = least_bytes(known[-1][1], coarse, candidate, plan)
            assert least <= own.total * 2**30, coarse
            _, held, _ = fullest(MODEL, plan, shares, DEVICE)
            assert held.total <= own.total * (1 + 1e-9), coarse
    assert floors == sorted(floors)
    # A bound that rules nothing out would be none.
    assert 0.3 * seconds < floors[-1] <= seconds


def test_a_coarser_split_needs_no_more_memory():
    space = space_of()
    for candidate in list(space)[::11]:
        plan = space.plan(candidate)
        _, own, _ = fullest(MODEL, plan, counts_of(plan), DEVICE)
        quick = least_bytes(counts_of(plan), candidate, candidate, plan)
        assert quick <= own.total * 2**30
        for coarse in coarser_than(candidate):
            if coarse.mode == candidate.mode:
                least = scaled(counts_of(space.plan(coarse)), coarse, candidate)
                _, bound, _ = fullest(MODEL, plan, least, DEVICE)
                assert bound.total <= own.total * (1 + 1e-9)


def test_coarser_splits_are_counted_with_microbatches_of_the_same_size():
    asked = []

    def counts(plan):
        asked.append(plan.microbatch_size)
        return counts_of(plan)

    # Two slices leave a rank 4 of the 8 samples that four slices have in a microbatch.
    whole = [one for one in space_of() if one.cp == 4 and one.microbatch_size == 8]
    search = Search(space_of(), DEVICE, CostModel(counts=counts))
    for candidate in whole:
        for coarse in coarser_than(candidate):
            search._counts(coarse)
    assert asked
    assert set(asked) == {8}


def test_few_splits_are_rehearsed_to_rule_out_the_others():
    space, asked = space_of(), set()

    def counts(plan):
        asked.add(
            (plan.sizes.tp, plan.sizes.cp, plan.activation_checkpoint.mode, plan.precision.float8)
        )
        return counts_of(plan)

    Search(space, DEVICE, CostModel(counts=counts)).run(top=1)
    every = {work_key(one)._replace(microbatch_size=1)[:6] for one in space}
    assert len(asked) < len(every) / 2


def test_a_layout_whose_counts_cannot_be_had_is_left_out_and_noted():
    def counts(plan):
        if plan.precision.float8 != "off":
            raise ImportError("No module named 'torchao'")
        return counts_of(plan)

    found = Search(space_of(gpus=2), DEVICE, CostModel(counts=counts)).run(top=3)
    assert {row.candidate.float8 for row in found.rows} == {"off"}
    assert found.notes[0] == "layouts left out: No module named 'torchao'"


def test_nothing_that_fits_is_an_empty_outcome():
    tiny = easy(**{**plain(DEVICE), "memory_gib": 0.7})
    found = Search(space_of(device=tiny), tiny, MODEL).run()
    assert found.rows == []
    assert found.tally.too_large > 0


def test_equals_are_preferred_by_axes_then_without_tp_then_memory_and_others_by_time():
    found = Search(space_of(), DEVICE, MODEL).run(top=8)
    [some, *_] = found.rows

    def row(seconds, gib, **sizes):
        candidate = some.candidate._replace(**dict.fromkeys(AXES, 1) | sizes)
        estimate = replace(some.estimate, seconds=seconds)
        needed = DeviceMemory(allocated=gib, reserved=gib, context=0.0, communicators=0.0)
        return replace(some, candidate=candidate, estimate=estimate, needed=needed)

    best_first = [
        row(1.09, 9.0, dp_shard=4),
        row(1.00, 2.0, cp=4),
        row(1.03, 3.0, tp=4),
        row(1.05, 2.0, pp=2, dp_shard=2),
        row(1.02, 3.0, dp_replicate=2, dp_shard=2),
        row(1.01, 1.0, tp=2, dp_shard=2),
        # Not within the error of the fastest: by time.
        row(1.11, 5.0, dp_replicate=4),
        row(1.20, 1.0, pp=4),
    ]
    for rows in (best_first, best_first[::-1], best_first[3:] + best_first[:3]):
        assert preferred(rows, 0.1) == best_first
    order = preferred(found.rows, DEVICE.error)
    assert len(order) == len(found.rows)
    assert {id(row) for row in order[: len(equally_fast(found.rows, 0.1))]} == {
        id(row) for row in equally_fast(found.rows, 0.1)
    }
    assert preferred([], 0.1) == []


def test_an_error_of_the_device_comes_through():
    space = space_of(gpus=16, device=easy(nics_per_node=0))
    with pytest.raises(UserError, match="nics_per_node"):
        Search(space, space.device, MODEL).run()
