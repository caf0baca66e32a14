"""The layouts that a planner may choose."""

import itertools
from dataclasses import replace

import pytest
from hand_made import easy
from tiny import tiny_config

from titan_dit.checks import validate
from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError
from titan_dit.plan import resolve
from titan_dit.planner.candidates import KEYS, Candidate, Space, all_on_dp_shard, divisors

FLOAT8 = {"bf16": 100.0, "float8": 200.0}


def tiny(**sections):
    given = {"model": {"num_layers": 4, "latent_size": 32}, "precision": {"dtype": "bf16"}}
    for section, table in sections.items():
        given[section] = {**given.get(section, {}), **table}
    return tiny_config(**given)


@pytest.fixture(scope="module")
def space():
    return Space(tiny(), 4, easy())


@pytest.fixture(scope="module")
def found(space):
    return list(space)


def test_every_layout_passes_the_checks_of_a_start(space, found):
    for candidate in found[:: max(1, len(found) // 100)]:
        space.check(candidate)
        assert space.plan(candidate).world_size == 4


def test_no_layout_stands_twice(found):
    assert len(set(found)) == len(found) > 200


def test_the_plan_of_a_layout_is_that_of_its_config(space, found):
    for candidate in found[::97]:
        plan, own = space.plan(candidate), resolve(space.config_of(candidate), 4)
        for name in (
            "sizes",
            "microbatch_size",
            "num_microbatches",
            "activation_checkpoint",
            "precision",
        ):
            assert getattr(plan, name) == getattr(own, name)
        assert plan.parallel == own.parallel
        assert plan.pipeline == own.pipeline


def test_every_layout_that_the_checks_accept_is_found(found):
    """All values of all keys, one by one, against the enumeration."""
    config = tiny()
    seen = {replace_free(candidate) for candidate in found}
    sizes = (1, 2, 4)
    missing = []
    for pp, copies, shard, cp, tp in itertools.product(sizes, repeat=5):
        if pp * copies * shard * cp * tp != 4:
            continue
        methods = ("ring", "ulysses") if cp > 1 else ("ring",)
        share = 16 // (copies * shard)
        schedules = [("1f1b", 1)] if pp == 1 else [("1f1b", 1), ("zbv_zero_bubble", 1)]
        for method, (schedule, virtual), size, mode in itertools.product(
            methods, schedules, divisors(share), ("none", "full")
        ):
            candidate = Candidate(
                *(pp, copies, shard, cp, tp, method, True, "auto"),
                *(schedule, virtual, size, mode, "off"),
            )
            space = Space(config, 4, easy())
            try:
                validate(space.config_of(candidate), resolve(space.config_of(candidate), 4))
            except UserError:
                continue
            # cp leaves 256 tokens to a rank at least; the model has as many.
            if cp == 1 and replace_free(candidate) not in seen:
                missing.append(candidate)
    assert not missing


def replace_free(candidate):
    """Without keys that are not told apart where they have no effect."""
    return candidate._replace(reshard_after_forward="auto")


def test_compiled_blocks_are_not_given_a_split_backward():
    compiled = Space(tiny(compile={"enabled": True}), 4, easy())
    schedules = {candidate.schedule for candidate in compiled if candidate.pp > 1}
    assert schedules == {"1f1b", "interleaved_1f1b"}
    eager = {candidate.schedule for candidate in Space(tiny(), 4, easy()) if candidate.pp > 1}
    assert {"zbv_zero_bubble", "dualpipev"} <= eager


def test_a_schedule_has_only_numbers_of_microbatches_that_it_runs(space, found):
    several = [one for one in found if one.schedule.startswith("interleaved") and one.pp > 1]
    assert several
    for candidate in several:
        plan = space.plan(candidate)
        assert plan.schedule_runs(plan.num_microbatches)
        assert plan.num_microbatches * plan.microbatch_size == plan.samples_per_rank


@pytest.mark.parametrize(
    ("fixed", "sections", "field", "value"),
    [
        ("parallel.tp", {"parallel": {"tp": 2}}, "tp", 2),
        ("parallel.dp_shard", {"parallel": {"dp_shard": 2}}, "dp_shard", 2),
        ("pipeline.schedule", {"pipeline": {"schedule": "gpipe"}}, "schedule", "gpipe"),
        ("training.microbatch_size", {"training": {"microbatch_size": 4}}, "microbatch_size", 4),
        ("activation_checkpoint.mode", {"activation_checkpoint": {"mode": "full"}}, "mode", "full"),
    ],
)
def test_a_fixed_key_keeps_its_value(fixed, sections, field, value):
    found = list(Space(tiny(**sections), 4, easy(), [fixed]))
    assert found
    assert {getattr(one, field) for one in found} == {value}


def test_the_rest_of_the_ranks_is_no_fixed_size(found):
    free = list(Space(tiny(parallel={"dp_shard": -1}), 4, easy(), ["parallel.dp_shard"]))
    assert set(free) == set(found)


def test_plans_are_for_the_device_by_torchs_name():
    space = Space(tiny(), 2, easy(torch_name="NVIDIA H200"))
    assert {space.plan(one).device for one in space} == {"NVIDIA H200"}


def test_float8_needs_a_device_that_has_it_and_bf16():
    recipes = {one.float8 for one in Space(tiny(), 2, easy())}
    assert recipes == {"off"}
    able = easy(peak_tflops=FLOAT8)
    assert {one.float8 for one in Space(tiny(), 2, able)} == {"off", "tensorwise"}
    adapted = tiny(lora={"rank": 2}, checkpoint={"init": "a run"})
    assert {one.float8 for one in Space(adapted, 2, able)} == {"off"}
    fp32 = tiny(precision={"dtype": "fp32"})
    assert {one.float8 for one in Space(fp32, 2, easy(peak_tflops=FLOAT8))} == {"off"}


def test_tp_stays_inside_a_node_unless_it_is_fixed():
    small = easy(gpus_per_node=2, inner_gb_per_s={2: 50.0})
    assert max(one.tp for one in Space(tiny(), 4, small)) == 2
    across = Space(tiny(parallel={"tp": 4}), 4, small, ["parallel.tp"])
    assert {one.tp for one in across} == {4}
    # Two nodes of 6: the second of three groups of 4 has ranks on both.
    odd = easy(gpus_per_node=6, inner_gb_per_s={2: 50.0})
    model = {"num_heads": 4, "hidden_size": 64}
    assert {one.tp for one in Space(tiny(model=model), 12, odd)} == {1, 2}
    fixed = Space(tiny(model=model, parallel={"tp": 4}), 12, odd, ["parallel.tp"])
    assert {one.tp for one in fixed} == {4}
    assert {one.tp for one in Space(tiny(model=model), 4, odd)} == {1, 2, 4}


def test_keys_of_another_layout_are_dropped():
    config = tiny(
        parallel={"async_tp": True, "tp": 2},
        compile={"enabled": True},
        pipeline={"split": [1, 1, 1, 1], "order": "run_time"},
    )
    space = Space(config, 4, easy())
    for candidate in itertools.islice(space, 0, None, 50):
        own = space.config_of(candidate)
        assert own.parallel.async_tp == (candidate.tp > 1)
        assert own.pipeline.split == ()
        assert own.pipeline.order == PipelineConfig().order


def test_flags_turn_the_config_into_the_layout(space, found):
    candidate = next(one for one in found if one.tp == 2 and one.pp == 2 and one.mode == "full")
    flags = space.flags(candidate)
    assert "--parallel.tp 2" in flags
    assert "--parallel.pp 2" in flags
    assert "--activation_checkpoint.mode full" in flags
    assert len(KEYS) == len(candidate)


def test_the_last_refusal_is_kept():
    space = Space(tiny(training={"global_batch_size": 3}), 4, easy(), ["parallel.tp"])
    config = replace(space.config.parallel, tp=1)
    assert all_on_dp_shard(config).dp_shard == -1
    narrow = Space(
        tiny(training={"global_batch_size": 1}, parallel={"pp": 1, "tp": 1, "cp": 1}),
        4,
        easy(),
        ["parallel.tp", "parallel.pp", "parallel.cp"],
    )
    assert list(narrow) == []
    assert "global_batch_size=1" in narrow.refusal
