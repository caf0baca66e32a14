"""The time of a step: every term by hand, or by the simulator of schedules."""

from dataclasses import replace

import pytest
from hand_made_counts import DEVICE, counts, moving, multiplying, part
from tiny import tiny_config

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import StorageKind
from titan_dit.objectives.sections import NO_FROZEN, FrozenWork
from titan_dit.pipeline.schedules.simulator import simulate, stage_costs
from titan_dit.plan import resolve
from titan_dit.planner.memory import memory
from titan_dit.planner.rates import OURS, Runtime, product_s
from titan_dit.planner.step import bound, check_host_steps, estimate, mfu, samples_per_s
from titan_dit.planner.work import Message, Product, Work

F, B = 1.0, 2.0
"""Seconds of a block."""


def plan_of(pp=1, count=1, layers=4, world=None, schedule="1f1b", stages=1, **sections):
    """A plan of `count` microbatches of one sample for each of its data-parallel ranks."""
    parallel = {"pp": pp} | sections.pop("parallel", {})
    world = world or pp
    data = world // pp // parallel.get("tp", 1) // parallel.get("cp", 1)
    if pp > 1:
        num = pp * (2 if schedule in ("zbv_zero_bubble", "dualpipev") else stages)
        split = [layers // num] * num
        sections["pipeline"] = {"schedule": schedule, "virtual_stages": stages, "split": split}
    config = tiny_config(
        model={"num_layers": layers},
        parallel=parallel,
        training={"global_batch_size": count * data, "microbatch_size": 1},
        **sections,
    )
    plan = resolve(config, world)
    assert plan.num_microbatches == count
    return plan


def equal_blocks(**more):
    """Blocks of F and B, and nothing else."""
    return counts(block=part(moving(F), moving(B)), **more)


def added_up(found):
    """The estimate's seconds, which its terms must add up to."""
    assert sum(found.terms.values()) == pytest.approx(found.seconds, abs=1e-9)
    assert min(found.terms.values()) >= -1e-9
    return found.seconds


@pytest.mark.parametrize(("pp", "count"), [(2, 1), (2, 6), (4, 4), (4, 13)])
def test_1f1b_is_idle_as_long_as_its_formula_says(pp, count):
    found = estimate(plan_of(pp, count), equal_blocks(), DEVICE)
    blocks = 4 // pp * (F + B)
    assert added_up(found) == pytest.approx((count + pp - 1) * blocks)
    assert found.terms["bubble"] == pytest.approx((pp - 1) * blocks)
    assert found.terms["elementwise"] == pytest.approx(count * blocks)
    assert found.idle == pytest.approx([(pp - 1) / (count + pp - 1)] * pp)


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "count"),
    [
        ("gpipe", 4, 1, 6),
        ("interleaved_1f1b", 2, 2, 6),
        ("interleaved_zero_bubble", 2, 2, 4),
        ("zbv_zero_bubble", 2, 1, 7),
        ("dualpipev", 2, 1, 8),
    ],
)
def test_every_schedule_takes_what_the_simulator_says(schedule, pp, stages, count):
    plan = plan_of(pp, count, layers=4, schedule=schedule, stages=stages)
    weight = multiplying(1.0, is_weight_gradient=True)
    block = part(moving(F), moving(1.0) + weight)
    found = estimate(plan, counts(block=block), DEVICE)
    costs = stage_costs([len(layers) for layers in plan.stage_layers])
    if plan.splits_backward:
        # All work of the first stage is for its weights.
        for (kind, stage), cost in list(costs.items()):
            if stage == 0 and kind.value in "IW":
                costs[kind, stage] = 0.0 if kind.value == "I" else 2 * cost
    simulated = simulate(plan.order(count), costs)
    assert added_up(found) == pytest.approx(simulated.makespan)
    shares = [idle / simulated.makespan for idle in simulated.idle]
    assert found.idle == pytest.approx(shares)


def test_unequal_stages_wait_for_the_slowest_as_in_the_simulator():
    pp, count = 4, 6
    plan = plan_of(pp, count)
    given = counts(
        embed=part(moving(0.5), moving(0.25)),
        block=part(moving(F), moving(B)),
        head=part(moving(2.0), moving(3.0)),
    )
    found = estimate(plan, given, DEVICE)
    costs = stage_costs([1.0] * pp)
    for (kind, stage), cost in list(costs.items()):
        more = {"F": (0.5, 2.0), "B": (0.25, 3.0)}.get(kind.value, (0.0, 0.0))
        costs[kind, stage] = cost + more[0] * (stage == 0) + more[1] * (stage == pp - 1)
    simulated = simulate(plan.order(count), costs)
    assert added_up(found) == pytest.approx(simulated.makespan)
    assert found.critical == pp - 1
    assert found.terms["elementwise"] == pytest.approx(simulated.busy[pp - 1])


def test_messages_between_stages_come_on_top_as_in_the_simulator():
    pp, count = 4, 6
    plan = plan_of(pp, count)
    # 5e10 bytes at 100 GB/s: 0.5 s.
    found = estimate(plan, equal_blocks(stream=5e10), DEVICE)
    costs = stage_costs([1.0] * pp)
    simulated = simulate(plan.order(count), costs, latency=0.5)
    without = simulate(plan.order(count), costs)
    assert added_up(found) == pytest.approx(simulated.makespan)
    assert found.terms["bubble"] == pytest.approx(without.makespan - without.busy[0])
    assert found.terms["stage messages"] == pytest.approx(simulated.makespan - without.makespan)
    assert found.idle == pytest.approx([idle / simulated.makespan for idle in simulated.idle])
    # Half of the link: twice the messages' time.
    half = replace(DEVICE.efficiency, inner=0.5)
    slow = estimate(plan, equal_blocks(stream=5e10), replace(DEVICE, efficiency=half))
    assert added_up(slow) == pytest.approx(simulate(plan.order(count), costs, latency=1.0).makespan)


OFFLOAD = {"offload": {"activations": True}}


@pytest.mark.parametrize(("kept", "forward"), [(1.5e10, 1.5), (5e9, F)])
def test_a_block_takes_as_long_as_the_slower_of_computing_and_its_copies(kept, forward):
    device = replace(DEVICE, host_gb_per_s=10.0)
    # 2e5 bytes of small storages stay on the device.
    block = replace(part(moving(F), moving(B)), kept=kept + 2e5, storages=(kept, 1e5, 1e5))
    given = counts(embed=replace(part(moving(0.5)), kept=1e12), block=block)
    found = estimate(plan_of(count=3, **OFFLOAD), given, device)
    assert added_up(found) == pytest.approx(3 * (0.5 + 4 * (forward + B)))
    assert found.terms.get("host link", 0.0) == pytest.approx(3 * 4 * (forward - F), abs=1e-9)
    # A link of 3 s a pass: longer than backward, too; and in a pipeline.
    slow = replace(device, host_gb_per_s=kept / 1e9 / 3)
    piped = estimate(plan_of(2, 6, **OFFLOAD), replace(given, embed=part()), slow)
    assert added_up(piped) == pytest.approx((6 + 2 - 1) * 2 * (3 + 3))
    at_once = estimate(plan_of(count=3), given, device)
    assert added_up(at_once) == pytest.approx(3 * (0.5 + 4 * (F + B)))
    assert "host link" not in at_once.terms


def test_an_offload_without_a_price_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"activations=true has no price on by hand.*host_gb_per_s"):
        estimate(plan_of(**OFFLOAD), equal_blocks(), DEVICE)
    with pytest.raises(UserError, match=r"parameters=true has no price on by hand.*host_gb_per_s"):
        estimate(plan_of(**ON_HOST), equal_blocks(), DEVICE)
    fast = replace(DEVICE, host_gb_per_s=1e9)
    with pytest.raises(UserError, match=r"parameters=true.*host_memory_gb_per_s") as error:
        bound(plan_of(**ON_HOST), equal_blocks(), fast)
    assert "\n" not in str(error.value)


def test_only_adamw_in_fp32_has_a_price_on_the_host():
    check_host_steps(tiny_config(**ON_HOST))
    check_host_steps(tiny_config(optimizer={"name": "adamw8bit"}))
    with pytest.raises(UserError, match=r'AdamW alone, not for .optimizer. name="adamw8bit"'):
        check_host_steps(tiny_config(optimizer={"name": "adamw8bit"}, **ON_HOST))
    narrow = {"dtype": "bf16", "weights": "bf16"}
    with pytest.raises(
        UserError, match=r'no price in plan with .precision. weights="bf16"'
    ) as error:
        check_host_steps(tiny_config(precision=narrow, **ON_HOST))
    assert "\n" not in str(error.value)


ON_HOST = {"offload": {"parameters": True}}
HOST = replace(DEVICE, host_gb_per_s=10.0, host_memory_gb_per_s=2000.0)
"""10 GB/s to the host; each of a node's four ranks has 500 GB/s of its memory."""
AT_ONCE = replace(HOST, host_gb_per_s=1e15)


def held(**more):
    """Blocks of 1e9 fp32 elements, whose update takes 1 s on DEVICE and 6e12 bytes on the host."""
    block = part(moving(F), moving(B), moving(7.0), parameters=1e9)
    return counts(block=replace(block, on_host=moving(6.0)), **more)


def test_weights_come_from_the_host_and_gradients_go_there():
    # 0.4 s a block: 4 blocks are copied for forward and backward of 3 microbatches, one after the
    # other on a single rank; the gradients of all but the first block beside the backward.
    plan = plan_of(count=3, parallel={"blocks_per_fsdp_unit": 1}, **ON_HOST)
    found, quick = (estimate(plan, held(), device) for device in (HOST, AT_ONCE))
    assert added_up(found) - added_up(quick) == pytest.approx(3 * 4 * 2 * 0.4 + 0.4)
    assert found.terms["host link"] == pytest.approx(found.seconds - quick.seconds)
    assert found.terms["data parallel"] == pytest.approx(quick.terms["data parallel"])
    # A fourth of it on each of four ranks; only the first block's copies are waited for.
    sharded = plan_of(count=3, world=4, parallel={"blocks_per_fsdp_unit": 1}, **ON_HOST)
    first = estimate(sharded, held(), HOST).terms["host link"]
    assert first == pytest.approx(3 * 0.1 * 2 + 0.1, rel=1e-2)
    assert bound(sharded, held(), HOST) == pytest.approx(estimate(sharded, held(), HOST).seconds)


def test_a_pipeline_waits_for_its_weights_and_for_the_last_gradients():
    plan = plan_of(2, 4, parallel={"blocks_per_fsdp_unit": 1}, **ON_HOST)
    found, quick = (estimate(plan, held(), device) for device in (HOST, AT_ONCE))
    # The last rank's two blocks arrive while the first rank computes; all gradients follow its end.
    assert added_up(found) - added_up(quick) == pytest.approx(2 * 0.4 + 2 * 0.4)
    assert bound(plan, held(), HOST) <= found.seconds


def test_the_host_takes_the_steps_of_the_optimizer():
    plan = plan_of(**ON_HOST)
    host_s = 6e12 / (2000e9 / 4)
    assert estimate(plan, held(), HOST).terms["optimizer"] == pytest.approx(4 * (1 + host_s))
    on_four = estimate(plan_of(world=4, **ON_HOST), held(), HOST).terms["optimizer"]
    assert on_four == pytest.approx(1 + host_s)
    assert estimate(plan_of(), held(), HOST).terms["optimizer"] == pytest.approx(4 * 7)


def test_activations_and_weights_share_the_way_back():
    block = replace(held().block, kept=2.5e10)
    given = replace(held(), blocks={"": block})
    alone, both = (
        estimate(plan_of(world=4, parallel={"blocks_per_fsdp_unit": 1}, offload=keys), given, HOST)
        for keys in ({"activations": True}, {"activations": True, "parameters": True})
    )
    # A block's backward takes the 2.5 s of its activations, and 0.1 s for its fourth of the
    # weights, in place of the 0.008 s of FSDP's copies. A forward, a backward and the end wait
    # for a copy of 0.1 s.
    more = {name: both.terms.get(name, 0) - seconds for name, seconds in alone.terms.items()}
    assert more.pop("host link") == pytest.approx(4 * (0.1 - 0.008) + 3 * 0.1)
    more.pop("optimizer")
    assert more == pytest.approx(dict.fromkeys(more, 0.0), abs=1e-9)


def test_messages_between_nodes_take_the_nodes_link():
    # Two ranks of a stage fill half a node of four: stages 1 and 2 are on different nodes.
    plan = plan_of(4, 4, world=8)
    found = estimate(plan, equal_blocks(stream=1e10), DEVICE)
    costs = stage_costs([1.0] * 4)

    def latency(source, target):
        # 100 GB/s inside; across, each rank has a NIC of 10 GB/s.
        return 1.0 if {source, target} == {1, 2} else 0.1

    simulated = simulate(plan.order(4), costs, latency=latency)
    assert added_up(found) == pytest.approx(simulated.makespan)


def test_slow_messages_between_stages_set_the_pace():
    # 4e12 bytes at 100 GB/s: 40 s for each of 8 microbatches, forward and back.
    plan = plan_of(2, 8, schedule="gpipe")
    found = estimate(plan, equal_blocks(stream=4e12), DEVICE)
    assert added_up(found) == pytest.approx(2 * F + 8 * 40 + 2 * F + 2 * B + 8 * 40 + 2 * B)


def test_blocking_messages_keep_both_ranks_busy():
    pp, count = 4, 8
    blocking = Runtime(blocking_messages=True)
    found = estimate(plan_of(pp, count), equal_blocks(stream=1e10), DEVICE, blocking)
    # 0.1 s for each send, in which the rank receives, too: a rank in the middle has two of them.
    costs = stage_costs([1.0] * pp)
    for (kind, stage), cost in list(costs.items()):
        sends = stage < pp - 1 if kind.value == "F" else stage > 0
        costs[kind, stage] = cost + 0.1 * sends
    simulated = simulate(plan_of(pp, count).order(count), costs)
    assert added_up(found) == pytest.approx(simulated.makespan)
    assert found.terms["stage messages"] > 0.2 * (count - 1)
    assert found.terms["elementwise"] == pytest.approx(count * (F + B))
    hidden = estimate(plan_of(pp, count), equal_blocks(stream=1e10), DEVICE)
    assert hidden.terms["stage messages"] < found.terms["stage messages"]
    scattered = Runtime(blocking_messages=True, scattered_messages=True)
    assert estimate(plan_of(pp, count), equal_blocks(stream=1e10), DEVICE, scattered) == found


def test_scattered_messages_are_cut_over_tp_and_gathered_inside_the_node():
    plan = plan_of(2, 4, world=4, parallel={"tp": 2})
    whole = estimate(plan, equal_blocks(stream=2e10), DEVICE)
    cut = estimate(plan, equal_blocks(stream=2e10), DEVICE, Runtime(scattered_messages=True))
    # 0.2 s; or half of it, then half of the stream from the other tp rank.
    assert added_up(whole) == pytest.approx(added_up(cut))
    across = plan_of(2, 4, world=8, parallel={"tp": 4})
    whole = estimate(across, equal_blocks(stream=2e10), DEVICE)
    cut = estimate(across, equal_blocks(stream=2e10), DEVICE, Runtime(scattered_messages=True))
    costs = stage_costs([2.0] * 2)
    for found, seconds in ((whole, 2.0), (cut, 0.5 + 0.15)):
        simulated = simulate(across.order(4), costs, latency=seconds)
        assert added_up(found) == pytest.approx(simulated.makespan)


def test_without_a_pipeline_microbatches_follow_each_other():
    update = moving(0.5)
    given = counts(
        embed=part(moving(0.5), moving(0.25), update),
        block=part(moving(F), moving(B), update),
        head=part(moving(2.0), moving(3.0), update),
        prepare=moving(0.125),
    )
    found = estimate(plan_of(count=3), given, DEVICE)
    assert added_up(found) == pytest.approx(3 * (4 * 3 + 5.75 + 0.125) + 6 * 0.5)
    assert found.terms["optimizer"] == pytest.approx(3.0)
    assert (found.critical, found.idle) == (0, (0.0,))


def test_repeated_work_of_backward_is_charged_with_its_messages():
    message = Message("tp", "all-reduce", 1e10)  # 0.1 s
    sends = Work(messages={message: 2.0})
    plain = counts(block=part(moving(F) + sends, moving(B) + sends))
    repeated = counts(block=part(moving(F) + sends, moving(B + F) + sends.times(2)))
    plan = plan_of(2, 4, world=4, parallel={"tp": 2})
    first, second = (estimate(plan, given, DEVICE) for given in (plain, repeated))
    assert first.terms["tp"] == pytest.approx(4 * 2 * 4 * 0.1)
    assert second.terms["tp"] == pytest.approx(4 * 2 * 6 * 0.1)
    more = (4 + 1) * 2 * (F + 0.2)  # m + p - 1 times two blocks
    assert added_up(second) - added_up(first) == pytest.approx(more)


def test_a_split_backward_leaves_weight_gradients_for_later():
    weight = multiplying(1.5, is_weight_gradient=True)
    block = part(moving(1.0), moving(0.5) + weight)
    plan = plan_of(2, 8, schedule="zbv_zero_bubble")
    found = estimate(plan, counts(block=block), DEVICE)
    assert found.terms["products"] == pytest.approx(8 * 2 * 1.5)
    costs = stage_costs([1] * 4, backward_input=0.5, backward_weight=1.5)
    for kind, stage in list(costs):
        if stage == 0 and kind.value in "IW":
            costs[kind, stage] = 0.0 if kind.value == "I" else 2.0
    assert added_up(found) == pytest.approx(simulate(plan.order(8), costs).makespan)


def test_launches_are_host_time_beyond_the_devices():
    device = replace(DEVICE, launch_us=1e5)  # 0.1 s
    host = equal_blocks()
    short = part(moving(F, operators=4, kernels=2), moving(B, operators=50, kernels=50))
    found = estimate(plan_of(), replace(host, blocks={"": short}), device)
    assert found.terms["launches"] == pytest.approx(4 * (50 * 0.1 - B))
    assert added_up(found) == pytest.approx(4 * (F + 5.0))


def test_fused_work_is_that_of_compiled_blocks():
    work = replace(moving(F), fused=moving(F / 4).fused)
    given = counts(embed=part(work), block=part(work))
    eager, runtime = plan_of(), Runtime(is_fused=True)
    assert added_up(estimate(eager, given, DEVICE)) == pytest.approx(5 * F)
    assert added_up(estimate(eager, given, DEVICE, runtime)) == pytest.approx(5 * F / 4)
    compiled = plan_of(compile={"enabled": True})
    assert added_up(estimate(compiled, given, DEVICE)) == pytest.approx(F + F)


def test_shards_update_their_part_and_replicas_everything():
    given = equal_blocks()
    given = replace(given, blocks={"": replace(given.block, update=moving(1.0), trained=1e9)})
    plan = plan_of(world=4)
    assert estimate(plan, given, DEVICE).terms["optimizer"] == pytest.approx(1.0)
    bytes_given = Runtime(update_bytes=50)
    sharded = estimate(plan, given, DEVICE, bytes_given)
    assert sharded.terms["optimizer"] == pytest.approx(4 * 50e9 / 1e12 / 4)
    whole = Runtime(sharding="replicas", update_bytes=50)
    assert estimate(plan, given, DEVICE, whole).terms["optimizer"] == pytest.approx(0.2)


def test_every_shard_waits_for_whole_sums_over_tp():
    """FSDP shards gradients once they are summed over tp: a latency and all bytes each."""
    device = replace(DEVICE, inner_latency_us=1e5)  # 0.1 s a hop; 0.1 s for the bytes
    sums = Work(messages={Message("tp", "all-reduce", 1e10): 3.0})
    given = counts(block=part(update=moving(1.0) + sums))
    found = estimate(plan_of(world=4, parallel={"tp": 2}), given, device)
    assert found.terms["optimizer"] == pytest.approx(4 * (1.0 / 2 + 3 * (0.1 + 2 * 0.1)))


def test_a_pipeline_updates_as_long_as_its_largest_rank():
    given = equal_blocks(head=part(update=moving(3.0)))
    given = replace(given, blocks={"": replace(given.block, update=moving(1.0))})
    found = estimate(plan_of(2, 2, world=4), given, DEVICE)
    assert found.terms["optimizer"] == pytest.approx((2 * 1.0 + 3.0) / 2)
    assert added_up(found) == pytest.approx(3 * 2 * (F + B) + 2.5)


def test_replicas_reduce_over_the_link_that_they_really_have():
    # Eight ranks on two nodes of four: pp is outermost, so data ranks are inside a node.
    whole = Runtime(sharding="replicas", overlaps_data=False, update_bytes=0)
    given = equal_blocks()
    given = replace(given, blocks={"": replace(given.block, parameters=1e10, trained=1e10)})
    inside = estimate(plan_of(2, 2, world=8), given, DEVICE, whole)
    # 2 x 3/4 of two blocks' 4e10 bytes each, at 100 GB/s.
    assert inside.terms["data parallel"] == pytest.approx(1.5 * 2 * 4e10 / 1e11)
    across = estimate(plan_of(count=2, world=8), given, DEVICE, whole)
    # Four blocks; a ring of eight over four NICs of 10 GB/s each.
    assert across.terms["data parallel"] == pytest.approx(7 / 4 * 4 * 4e10 / 4e10)
    added_up(across)


def test_tied_weights_travel_between_the_ends_of_a_pipeline():
    plan = plan_of(2, 1)
    # fp32, 100 GB/s: 0.4 s each way, while the other end waits for its first or last action.
    hidden = estimate(plan, equal_blocks(tied=1e10), DEVICE)
    assert added_up(hidden) == pytest.approx(4 * (F + B))
    # 40 s: the last stage waits for its copy, then takes 2 F + 2 B; its gradient takes as long.
    found = estimate(plan, equal_blocks(tied=1e12), DEVICE)
    assert added_up(found) == pytest.approx(40 + 2 * (F + B) + 40)
    assert found.terms["tied weights"] == pytest.approx(added_up(found) - 4 * (F + B))
    # Copies of other trainers are summed after the step.
    replicas = Runtime(sharding="replicas", update_bytes=0)
    summed = estimate(plan, equal_blocks(tied=1e10), DEVICE, replicas)
    assert summed.terms["tied weights"] == pytest.approx(0.4)
    v_shaped = plan_of(2, 4, schedule="zbv_zero_bubble")
    found = estimate(v_shaped, equal_blocks(tied=1e12), DEVICE)
    assert found.terms["tied weights"] == 0


def test_rates_of_samples_and_of_flops():
    plan = plan_of(count=4, world=2)
    found = estimate(plan, equal_blocks(), DEVICE)
    assert added_up(found) == pytest.approx(4 * 4 * (F + B))
    assert samples_per_s(found, plan) == pytest.approx(8 / 48)
    # 12e12 FLOPs in a sample, 2 devices of 1 TFLOP/s.
    assert mfu(found, plan, DEVICE, 12e12) == pytest.approx(12 * 8 / 48 / 2)


LAYOUTS = [
    {"pp": 2, "count": 3},
    {"pp": 4, "count": 4, "world": 8},
    {"pp": 4, "count": 9, "world": 16},
    {"count": 3, "world": 8},
    {"pp": 2, "count": 4, "stages": 2, "schedule": "interleaved_1f1b", "world": 4},
    {"pp": 2, "count": 4, "stages": 2, "schedule": "interleaved_zero_bubble", "world": 4},
    {"pp": 2, "count": 5, "schedule": "zbv_zero_bubble", "world": 8},
    {"pp": 2, "count": 5, "schedule": "dualpipev", "world": 4},
    {"pp": 4, "count": 5, "schedule": "gpipe", "world": 4},
]
RUNTIMES = [
    OURS,
    Runtime(blocking_messages=True, sharding="replicas", overlaps_data=False),
    Runtime(sharding="replicas", update_bytes=10),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("runtime", RUNTIMES, ids=["ours", "megatron", "replicas"])
def test_no_step_is_faster_than_its_bound(layout, runtime):
    plan = plan_of(**layout)
    weight = multiplying(0.7, is_weight_gradient=True)
    ends = part(moving(0.4), moving(0.6), moving(0.1), parameters=1e8)
    given = counts(
        embed=ends,
        block=part(moving(F), moving(1.3) + weight, moving(0.2), parameters=1e9),
        head=ends,
        prepare=moving(0.1),
        stream=1e9,
        tied=1e8,
    )
    found = estimate(plan, given, DEVICE, runtime)
    least = bound(plan, given, DEVICE, runtime)
    assert least <= added_up(found) * (1 + 1e-9)
    # It is of use: a search drops what is this much slower.
    assert least > 0.6 * found.seconds


def test_the_bound_of_a_pipeline_of_equal_stages_is_its_time():
    plan, given = plan_of(4, 6), equal_blocks()
    assert bound(plan, given, DEVICE) == pytest.approx(estimate(plan, given, DEVICE).seconds)


@pytest.mark.parametrize("axis", ["pp", "tp", "dp_shard"])
def test_frozen_modules_take_the_time_of_a_rank_s_share_of_the_samples(axis):
    work = FrozenWork(parameters=10**6, element_bytes=4, flops=2 * 10**9, tokens=10, width=1000)
    given = {"pp": 2} if axis == "pp" else {"parallel": {axis: 2}}
    plan = plan_of(count=4, world=2, **given)
    both = [replace(plan, frozen=each) for each in (NO_FROZEN, work)]
    plain, found = (estimate(each, equal_blocks(), DEVICE) for each in both)
    took = added_up(found) - added_up(plain)
    assert "frozen" not in plain.terms
    assert found.terms["frozen"] == pytest.approx(took)
    least = [bound(each, equal_blocks(), DEVICE) for each in both]
    assert least[1] - least[0] == pytest.approx(took)
    # Four samples of each data rank; with pp or tp two ranks share them.
    samples = 4 if axis == "dp_shard" else 2
    product = Product(1, samples * 10, 1000, samples * 2e9 / (2 * samples * 10 * 1000), "fp32")
    assert product.flops == samples * work.flops
    computing = product_s(product, DEVICE)
    if axis == "dp_shard":
        assert took >= computing
    else:
        assert took == pytest.approx(computing)
    held = memory(both[1], equal_blocks())[0][StorageKind.FROZEN]
    assert held == 4 * 10**6 / plan.sizes.data
