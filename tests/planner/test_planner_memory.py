"""Laws of the composed memory, by hand, on made-up counts."""

import time
from dataclasses import replace

import pytest
from test_planner_memory_steps import DIT, GPT, parallel, pipeline, tables

from titan_dit.config import catalog, config_file
from titan_dit.dry_run.memory import StorageKind
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import Kind, peak_activations
from titan_dit.plan import resolve
from titan_dit.planner.hardware import Device, Efficiency, Overhead
from titan_dit.planner.memory import (
    OptimizerState,
    communicators,
    device_memory,
    fits,
    highest_in_flight,
    memory,
    state_of,
)
from titan_dit.planner.rates import Runtime
from titan_dit.planner.work import Counts, Part, Product, Work

GIB = 2**30
NO_STATE = OptimizerState(embed=0, block=0, head=0)


def part(parameters=0.0, kept=0.0, forward=0.0, backward=0.0, work=None):
    return Part(
        forward=Work(),
        backward=work or Work(),
        update=Work(),
        parameters=parameters,
        trained=parameters,
        buffers=0,
        kept=kept,
        forward_peak=forward,
        backward_peak=backward,
        backward_gradients=0,
        tensors=1,
    )


def counts(embed=None, block=None, head=None, stream=0.0, tied=0.0):
    return Counts(
        embed=embed or part(),
        blocks={"": block or part(kept=1000)},
        head=head or part(),
        prepare=Work(),
        inputs=0,
        static=0,
        stream=stream,
        tied=tied,
    )


def plan_of(world=1, model=DIT, samples=16, size=4, **sections):
    layers = {"model": {"num_layers": 8}}
    batch = {"training": {"global_batch_size": samples, "microbatch_size": size}}
    config = config_file.build(tables(model, **layers, **batch, **sections), catalog.variant)
    return resolve(config, world)


def on_last(sections, world, samples, found, kind=StorageKind.ACTIVATIONS):
    plan = plan_of(world, samples=samples, size=1, **sections)
    return [held[kind] for held in memory(plan, found, state=NO_STATE)]


def test_the_state_is_that_of_a_rank_s_shards():
    found = counts(part(100), part(10), part(20))
    [held] = memory(plan_of(4), found, state=OptimizerState(averages=2))
    elements = (100 + 8 * 10 + 20) / 4
    assert held[StorageKind.PARAMETERS] == 4 * elements
    assert held[StorageKind.OPTIMIZER] == 2 * 4 * elements
    assert held[StorageKind.EMA] == 2 * 4 * elements
    [muon] = memory(plan_of(4), found, state=OptimizerState(block=1))
    assert muon[StorageKind.OPTIMIZER] == 4 * (2 * 120 + 80) / 4


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_1f1b_holds_a_microbatch_for_every_later_rank(microbatches):
    found = on_last(pipeline(4, "1f1b"), 4, microbatches, counts())
    assert found == [2 * 1000 * min(microbatches, 4 - rank) for rank in range(4)]


def test_messages_are_held_before_they_are_used_and_until_the_next_one_is_sent():
    found = on_last(pipeline(4, "1f1b"), 4, 8, counts(stream=10))
    # Inputs of two layers and of the next two actions, and a gradient: that of its output, or on
    # the last rank the one that it sent. The last rank receives for every other action alone.
    assert found[1:] == [3 * 2010 + 30, 2 * 2010 + 30, 2010 + 20]


def test_gpipe_holds_every_microbatch():
    assert on_last(pipeline(4, "gpipe"), 4, 24, counts()) == [2 * 1000 * 24] * 4


def test_a_run_time_order_may_fill_its_window():
    order = {"order": "run_time", "memory": 1.5, "schedule": "1f1b"}
    sections = parallel(pp=4) | {"pipeline": order}
    assert on_last(sections, 4, 24, counts()) == [2 * 1000 * held for held in (6, 4, 3, 1)]


SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 3),
    ("zbv_zero_bubble", 1),
    ("dualpipev", 1),
]


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("count", [8, 12, 20])
def test_no_moment_of_a_profile_is_lost(schedule, stages, count):
    how = {"num_ranks": 4, "num_microbatches": count, "virtual_stages": stages}
    order = pipeline_order(schedule, **how)
    for moments, peak in zip(highest_in_flight(order), peak_activations(order), strict=True):
        held = [sum(m.held) + (m.kind is Kind.FORWARD) for m in moments]
        assert max(held) == peak


def test_the_second_half_of_a_backward_holds_gradients_of_its_products():
    product = Product(1, 30, 20, 10, "bf16", is_weight_gradient=True)
    other = product._replace(m=7, is_weight_gradient=False)
    block = part(kept=1000, work=Work(products={product: 2, other: 1}))
    sections = pipeline(2, "interleaved_zero_bubble")
    _, last = on_last(sections, 2, 8, counts(block=block), StorageKind.TEMPORARY)
    # Rank 1 delays one weight gradient; two are without it while the next input gradient runs.
    layers, gradients = 4, 2 * 30 * 10 * 2
    assert last == 2 * layers * gradients


def test_logits_count_on_the_rank_of_the_head_alone():
    head = part(kept=5e5, backward=2e5)
    plan = plan_of(2, samples=4, size=1, **pipeline(2, "1f1b"))
    first, last = memory(plan, counts(head=head), state=NO_STATE)
    before, without = memory(plan, counts(), state=NO_STATE)
    assert first == before
    assert sum(last.values()) == sum(without.values()) + 7e5
    assert last[StorageKind.ACTIVATIONS] == without[StorageKind.ACTIVATIONS] + 5e5
    assert last[StorageKind.TEMPORARY] == 2e5


def test_gradients_of_several_microbatches_are_whole_and_fp32():
    found = counts(part(100), part(1000, kept=1e6), part(20))
    one, several = (
        memory(plan_of(4, samples=samples), found, state=NO_STATE)[0] for samples in (16, 32)
    )
    more = several[StorageKind.UNREDUCED] - one[StorageKind.UNREDUCED]
    assert more == 4 * (100 + 8 * 1000 + 20)


def test_a_copy_of_tied_weights_has_no_state():
    found = counts(part(100), part(), part(20), tied=60)
    first, last = memory(plan_of(2, GPT, **pipeline(2, "1f1b")), found, state=OptimizerState())
    assert first[StorageKind.PARAMETERS] == 4 * 100
    assert last[StorageKind.PARAMETERS] == 4 * (20 + 60)
    assert last[StorageKind.OPTIMIZER] == 2 * 4 * 20


def test_kept_parameters_are_all_gathered():
    found = counts(part(100), part(1000, kept=1e6), part(20))
    kept, freed = (
        memory(plan_of(4, **parallel(reshard_after_forward=how)), found, state=NO_STATE)[0]
        for how in ("never", "auto")
    )
    assert kept[StorageKind.GATHERED] >= 2 * (120 + 8 * 1000)
    # Embed and head, a unit of up to four blocks and the buffer of its all-gather.
    assert freed[StorageKind.GATHERED] <= 2 * (120 + 2 * 4 * 1000)


def test_other_trainers_hold_the_bytes_that_they_say():
    found = counts(part(100), part(10), part(20))
    states = StorageKind.PARAMETERS, StorageKind.GRADIENTS, StorageKind.OPTIMIZER
    for sharding, shards in (("replicas", 1), ("fsdp", 4), ("gradients", 4)):
        runtime = Runtime(sharding=sharding, state_bytes=18)
        [held] = memory(plan_of(4), found, runtime)
        assert sum(held[kind] for kind in states) == pytest.approx(18 * 200 / shards)
        assert (held[StorageKind.UNREDUCED] == 0) == (sharding == "replicas")
    whole, found = Runtime(sharding="gradients"), counts(block=part(1000, kept=1e6))
    assert memory(plan_of(4), found, whole) == memory(
        plan_of(4, **parallel(reshard_after_forward="never")), found
    )


def test_an_optimizer_s_state_follows_from_shapes():
    def state(**sections):
        return state_of(config_file.build(tables(DIT, **sections), catalog.variant))

    assert state() == OptimizerState(averages=2)
    muon = state(optimizer={"name": "muon"}, ema={"decays": []})
    # Of a DiT's block, 18 h^2 in matrices and 15 h in biases.
    assert muon.block == pytest.approx(1 + 15 / (18 * 128 + 15))
    assert (muon.embed, muon.head, muon.averages, muon.num_matrices) == (2, 2, 0, 5)
    assert muon.matrices == pytest.approx(18 * 128 / (18 * 128 + 15))


DEVICE = Device(
    name="made up",
    memory_gib=16.0,
    peak_tflops={"bf16": 100},
    copy_gb_per_s=1000,
    gpus_per_node=8,
    inner_gb_per_s={8: 100},
    inner_latency_us=1,
    nics_per_node=1,
    nic_gb_per_s=10,
    node_latency_us=1,
    launch_us=1,
    efficiency=Efficiency(products=1, attention=1, moved=1, inner=1, node=1),
    overhead=Overhead(context_mib=512, communicator_mib=256, allocator=1.25),
    error=0.1,
)


def test_a_device_needs_more_than_tensors():
    plan = plan_of(8, **parallel(tp=2))
    assert communicators(plan) == ("dp_shard", "tp", "all")
    assert communicators(plan_of(1)) == ()
    found = device_memory(
        {StorageKind.PARAMETERS: 8 * GIB, StorageKind.ACTIVATIONS: 2 * GIB}, plan, DEVICE
    )
    assert (found.allocated, found.reserved) == (10, 12.5)
    assert (found.context, found.communicators, found.total) == (0.5, 0.75, 13.75)
    assert fits(found, DEVICE)
    assert not fits(found, replace(DEVICE, memory_gib=13.5))


def test_a_layout_takes_less_than_milliseconds():
    found = counts(part(100), part(1000, kept=1e6), part(20), stream=10)
    sections = [
        (64, parallel(tp=2)),
        (64, pipeline(8, "1f1b")),
        (64, pipeline(4, "interleaved_1f1b", 2)),
        (64, pipeline(4, "zbv_zero_bubble")),
    ]
    plans = [plan_of(world, samples=512, size=1, **table) for world, table in sections]
    for plan in plans:
        memory(plan, found)
    begin = time.process_time()
    for plan in plans * 20:
        memory(plan, found)
    # 0.1 to 0.7 ms on an idle core.
    assert (time.process_time() - begin) / 80 < 5e-3
