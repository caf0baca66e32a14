"""What is recommended of a search's rows, whose exact counts are not what they were derived as."""

import itertools
from unittest.mock import patch

import pytest
from hand_made import easy
from made_up_counts import counts_of
from tiny import tiny_config

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import Peak, StorageKind
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.planner.candidates import Candidate, Space
from titan_dit.planner.choice import MAX_SEARCHES, search
from titan_dit.planner.memory import device_memory
from titan_dit.planner.search import (
    CostModel,
    PredictedLayout,
    Search,
    SearchResult,
    Tally,
    memory_key,
    mesh_key,
)
from titan_dit.planner.step import Estimate

GIB = 2**30
DEVICE = easy(memory_gib=10.0, error=0.1)
MESHES = {
    "shards": AxisSizes(dp_shard=4),
    "stages": AxisSizes(pp=2, dp_shard=2),
    "replicas": AxisSizes(dp_replicate=2, dp_shard=2),
}
NAMES = {sizes: name for name, sizes in MESHES.items()}


def bytes_of(gib):
    return {StorageKind.PARAMETERS: gib * GIB, StorageKind.INPUTS: 0.0}


def chosen(derived, exact=(), gib=(), whole=()):
    """(best, runner-up, meshes by time, whole fake steps) of layouts with these seconds and GiB."""
    exact, gib, rehearsed = derived | dict(exact), dict(gib), []
    space = Space(tiny_config(training={"global_batch_size": 8}), 4, DEVICE)

    def estimate(name, seconds):
        return Estimate(seconds=seconds[name], terms={}, critical=0, idle=())

    def memory(plan, counts):
        return [bytes_of(gib.get(NAMES.get(plan.sizes), 1.0))] * plan.sizes.pp

    def peak_of(plan, rank):
        name = NAMES[plan.sizes]
        rehearsed.append(name)
        return Peak(bytes_of(dict(whole).get(name, gib.get(name, 1.0))), "forward")

    rows = []
    for name, sizes in MESHES.items():
        if name in derived:
            last = "ring", True, "auto", "1f1b", 1, 2, "none", "off"
            candidate = Candidate(*vars(sizes).values(), *last)
            plan = space.plan(candidate)
            held = bytes_of(gib.get(name, 1.0))
            fit = device_memory(held, plan, DEVICE)
            rows.append(
                PredictedLayout(candidate, plan, estimate(name, derived), held, fit, rank=0)
            )
    model = CostModel(
        counts=counts_of,
        estimate=lambda plan, *_: estimate(NAMES[plan.sizes], exact),
        memory=memory,
    )
    rows.sort(key=lambda row: row.estimate.seconds)

    class Found:
        """A search that finds these rows."""

        def __init__(self, *_, too_large, **__):
            self.too_large = too_large

        def run(self, top):
            left = [row for row in rows if memory_key(row.candidate) not in self.too_large]
            return SearchResult(left, Tally(candidates=3))

    with patch("titan_dit.planner.choice.Search", Found):
        found = search(space, model, counts_of, peak_of, top=3)
    names = [NAMES[row.plan.sizes] for row in (found.best, found.runner_up) if row]
    return *names, [NAMES[row.plan.sizes] for row in found.rows], rehearsed


def test_the_fastest_is_exact_before_its_equals_are_preferred():
    # By derived counts "shards" are 20% behind "stages", which are no faster by exact ones.
    derived = {"stages": 1.0, "replicas": 1.05, "shards": 1.2}
    best, _, order, rehearsed = chosen(derived, exact={"stages": 1.3, "replicas": 1.3})
    assert best == "shards"
    assert order[0] == "shards"
    assert len(rehearsed) == 2
    # By derived counts "shards" are within the error of "stages", which are faster still.
    best, runner_up, *_ = chosen({"stages": 1.0, "shards": 1.05}, exact={"stages": 0.8})
    assert (best, runner_up) == ("stages", "shards")


def test_the_fastest_fits_in_a_whole_fake_step_before_its_equals_are_preferred():
    # "shards" are 20% behind a layout that does not fit after all, and 4% behind the next.
    derived = {"stages": 1.0, "replicas": 1.15, "shards": 1.2}
    best, runner_up, order, rehearsed = chosen(derived, whole={"stages": 11.0})
    assert (best, runner_up) == ("shards", "replicas")
    assert order == ["replicas", "shards"]
    assert rehearsed == ["stages", "replicas", "shards"]


def test_a_runner_up_that_becomes_the_fastest_decides_who_is_equal():
    # All are equal; then the runner-up's own counts leave the best behind.
    derived = {"shards": 1.0, "stages": 1.05}
    best, runner_up, *_ = chosen(derived, exact={"stages": 0.8})
    assert (best, runner_up) == ("stages", "shards")


def test_equals_are_preferred_by_axes_and_the_two_are_rehearsed_whole():
    derived = {"stages": 1.0, "replicas": 1.02, "shards": 1.09}
    best, runner_up, order, rehearsed = chosen(derived)
    assert (best, runner_up) == ("shards", "stages")
    assert order == ["stages", "replicas", "shards"]
    assert rehearsed == ["stages", "shards"]


def test_nothing_that_fits_after_all_is_an_error_that_names_more_gpus():
    text = "--gpus 4 --device easy: no layout fits.*Take --gpus 8, which hold it"
    with pytest.raises(UserError, match=text) as error:
        chosen({"shards": 1.0}, whole={"shards": 11.0}, gib={"shards": 9.0})
    assert "\n" not in str(error.value)
    words = "some do by composed memory; dp_shard 4, microbatches of 2: needs 11.7 GiB, more than"
    assert words in str(error.value)


def test_a_layout_that_does_not_fit_after_all_leaves_its_mesh_to_another():
    config = tiny_config(
        model={"hidden_size": 64, "num_heads": 4, "num_layers": 4, "latent_size": 64},
        training={"global_batch_size": 8},
    )
    space, model = Space(config, 4, DEVICE), CostModel(counts=counts_of)
    asked = []

    def peak_of(plan, rank):
        asked.append(plan)
        return Peak(bytes_of(11.0 if plan == asked[0] else 1.0), "forward")

    small = search(space, model, counts_of, lambda *_: Peak(bytes_of(1.0), ""), top=4).best
    found = search(space, model, counts_of, peak_of, top=4)
    assert asked[0] == small.plan
    rows = {mesh_key(row.candidate): row for row in found.rows}
    instead = rows[mesh_key(small.candidate)]
    assert instead.candidate != small.candidate
    assert instead.estimate.seconds >= small.estimate.seconds
    assert any("needs" in note and "10.0 of easy" in note for note in found.notes)
    assert len(asked) == len({repr(plan) for plan in asked})


def test_where_no_fake_step_fits_the_search_ends_after_a_few_rounds():
    config = tiny_config(
        model={"hidden_size": 64, "num_heads": 4, "num_layers": 4, "latent_size": 64},
        training={"global_batch_size": 8},
    )
    space, rounds, steps = Space(config, 4, DEVICE), [], []

    class Counted(Search):
        def run(self, top):
            rounds.append(dict(self.known_too_large))
            return super().run(top)

    def peak_of(plan, rank):
        steps.append(plan)
        return Peak(bytes_of(11.0), "forward")

    with patch("titan_dit.planner.choice.Search", Counted), pytest.raises(UserError) as error:
        search(space, CostModel(counts=counts_of), counts_of, peak_of, top=4)
    assert "though some do by composed memory; " in str(error.value)
    assert len(rounds) == MAX_SEARCHES
    for one, other in itertools.pairwise(rounds):
        assert one != other
        assert all(other[kind] <= most for kind, most in one.items())
