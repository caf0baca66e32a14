"""Data-parallel messages against the dry run's traffic, and what hides, by hand."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import forked
import pytest
import torch
from hand_made_counts import DEVICE, counts_of
from tiny import tiny_config
from tiny_gpt import gpt_config

from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.parallel import fsdp
from titan_dit.plan import resolve
from titan_dit.planner.data_parallel import Compute, DataParallel, Gather, Reduction
from titan_dit.planner.links import Network
from titan_dit.planner.rates import OURS, Runtime
from titan_dit.planner.step import NORM_BYTES

EVEN = {"num_classes": 11}  # 12 rows: FSDP pads no tensor on 2 or 4 ranks.
AXES = ("dp_shard", "dp_shard x cp", "dp_replicate")


def parts_of(config, world):
    """Arguments of a fake step from a config, with matching data."""
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    return (
        resolve(config, world),
        objective,
        fields,
        config.training,
        config.optimizer,
        config.ema,
    )


def traffic_of(config, world):
    """(calls, bytes) of every pipeline rank."""
    ranks = take_fake_step(*parts_of(config, world)).ranks
    return [(rank.traffic.calls, rank.traffic.bytes) for rank in ranks]


@pytest.fixture(scope="module")
def dry_run():
    """Another process: the shape checks of the tests reject sharded tokens."""
    with ProcessPoolExecutor(1, forked.context()) as pool:

        def run(config, world):
            return pool.submit(traffic_of, config, world).result()

        yield run


MANY = {"global_batch_size": 12, "microbatch_size": 2}
CASES = {
    "always resharded": (4, {"parallel": {"reshard_after_forward": "always"}}),
    "kept, three microbatches": (
        2,
        {"parallel": {"reshard_after_forward": "never"}, "training": MANY},
    ),
    "replicas, units of two blocks, three microbatches": (
        4,
        {"parallel": {"dp_replicate": 2, "blocks_per_fsdp_unit": 2}, "training": MANY},
    ),
    "replicas alone": (2, {"parallel": {"dp_replicate": 2, "dp_shard": 1}}),
    "with cp": (4, {"parallel": {"cp": 2}, "precision": {"dtype": "bf16"}}),
    "V of stages": (
        4,
        {
            "model": {**EVEN, "num_layers": 5},
            "parallel": {"pp": 2},
            "pipeline": {"schedule": "zbv_zero_bubble"},
            "precision": {"dtype": "bf16"},
        },
    ),
}


LATER = ("kept, three microbatches", "replicas alone")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n in LATER else n for n in CASES],
)
def test_messages_are_those_of_the_dry_run(name, dry_run):
    world, sections = CASES[name]
    config = tiny_config(**{"model": EVEN} | sections)
    check(config, world, dry_run(config, world))


def test_the_copy_of_a_tied_weight_is_gathered_and_reduced(dry_run):
    config = gpt_config(parallel={"pp": 2}, training={"microbatch_size": 1})
    found = dry_run(config, 4)
    check(config, 4, found)


def check(config, world, found):
    """Compare the messages of every pipeline rank."""
    plan = resolve(config, world)
    data = DataParallel(plan, counts_of(plan), Network(plan.sizes, DEVICE), OURS)
    assert len(found) == plan.sizes.pp
    for rank, logged in enumerate(found):
        calls, sent = Counter(), Counter()
        for message, count in data.traffic(rank).items():
            calls[message[:2]] += count
            sent[message[:2]] += round(count * message.bytes)
        assert (calls, sent) == without_norm(*logged, world)


def without_norm(calls, sent, world):
    """A rank's data-parallel traffic without the gradient norm.

    Its all-reduce over all ranks has the name of an axis that has all ranks.
    """
    calls, sent = Counter(calls), Counter(sent)
    named = any((axis, "all-reduce") in calls for axis in ("all", "loss", "data"))
    for axis in () if named else AXES:
        if (axis, "all-reduce") in calls:
            calls[axis, "all-reduce"] -= 1
            sent[axis, "all-reduce"] -= round(2 * (world - 1) / world * NORM_BYTES)
    ours = [key for key in calls if key[0] in AXES and calls[key]]
    return {key: calls[key] for key in ours}, {key: sent[key] for key in ours}


def test_units_double_up_to_the_largest():
    for numbers, width, size in ((7, 16, 0), (12, 64, 0), (5, 16, 2), (1, 16, 0)):
        blocks = [torch.nn.Linear(width, width, bias=False) for _ in range(numbers)]
        made = tuple(len(unit) for unit in fsdp.units(blocks, size))
        assert fsdp.unit_sizes(numbers, width**2, size) == made
    assert fsdp.unit_sizes(7, 16, 0) == (1, 2, 4)
    assert fsdp.unit_sizes(4, 2**27, 0) == (1, 1, 1, 1)
    assert fsdp.unit_sizes(4, 2**26, 0) == (1, 2, 1)
    assert fsdp.unit_sizes(5, 16, 2) == (2, 2, 1)


# Six blocks of one unit each.
COMPUTE = Compute(
    embed_forward=1,
    block_forward={"": 10},
    head_forward=2,
    embed_backward=1,
    block_backward={"": 20},
    head_backward=4,
)
COMPUTED = 3 + 60 + 5 + 120


class ByHand(DataParallel):
    """Messages whose seconds are given: (of a block, of embed and head)."""

    def gather_s(self, unit):
        return Gather(*(self.times[key][not unit.blocks] for key in ("gather", "fetch")))

    def reduce_s(self, unit):
        return Reduction(
            *(self.times[key][not unit.blocks] for key in ("reduce", "copies", "store"))
        )


def by_hand(
    gather=(0.0, 0.0),
    reduce=(0.0, 0.0),
    copies=(0.0, 0.0),
    fetch=(0.0, 0.0),
    store=(0.0, 0.0),
    runtime=OURS,
    count=1,
    world=4,
    **sections,
):
    sections["model"] = EVEN | {"num_layers": 6}
    sections["parallel"] = {"blocks_per_fsdp_unit": 1} | sections.get("parallel", {})
    ranks = world // sections["parallel"].get("pp", 1)
    sections["training"] = {"global_batch_size": 2 * ranks * count, "microbatch_size": 2}
    plan = resolve(tiny_config(**sections), world)
    assert plan.num_microbatches == count
    found = ByHand(plan, counts_of(plan), Network(plan.sizes, DEVICE), runtime)
    times = {"gather": gather, "fetch": fetch, "reduce": reduce, "copies": copies, "store": store}
    object.__setattr__(found, "times", times)
    return found


def test_only_the_first_gathers_and_the_last_reductions_are_exposed():
    assert by_hand().step_s(COMPUTE) == COMPUTED
    # The root's gather; the embedding hides the first block's.
    assert by_hand(gather=(0.5, 5)).step_s(COMPUTE) == COMPUTED + 5
    # It hides it but for 1 s.
    assert by_hand(gather=(2, 5)).step_s(COMPUTE) == COMPUTED + 5 + 1
    # The first block's reduction, which embed's backward hides but for 2 s, and the root's.
    assert by_hand(reduce=(3, 5)).step_s(COMPUTE) == COMPUTED + 2 + 5


def test_slow_links_set_the_pace():
    # Forward: root, then six gathers of 30 s, each longer than a block; the last block and head
    # follow. Backward: each block waits for its gather.
    slow = by_hand(gather=(30, 5)).step_s(COMPUTE)
    forward = 5 + 6 * 30 + 10 + 2
    backward = 6 * 30 + 20 + 1
    assert slow == forward + backward
    kept = by_hand(gather=(30, 5), parallel={"reshard_after_forward": "never"})
    assert kept.step_s(COMPUTE) == forward + 4 + 120 + 1
    # In backward gathers and reductions share the link.
    both = by_hand(gather=(30, 0), reduce=(30, 0)).step_s(COMPUTE)
    assert both == 6 * 30 + 10 + 2 + 12 * 30


ACROSS = {"world": 8, "parallel": {"dp_replicate": 2}}
"""FSDP fills a node of four; its replicas are on another node."""
INSIDE = {"parallel": {"dp_replicate": 2}}


def test_replicas_on_other_nodes_hold_up_no_gather_and_no_reduction():
    first = 3 + 60 + 4 + 20  # Forward, head, and the first block's backward.
    slow = {"gather": (2, 0), "reduce": (3, 0), "copies": (30, 5)}
    apart = by_hand(**slow, **ACROSS)
    assert apart.is_apart
    # Forward waits 1 s for its first gather. Six all-reduces and the root's follow each other.
    assert apart.step_s(COMPUTE) == 1 + first + 3 + 6 * 30 + 5
    # One link for all: it sends gathers, too, but for the last two blocks.
    shared = by_hand(**slow, **INSIDE)
    assert not shared.is_apart
    assert shared.step_s(COMPUTE) == 1 + first + 6 * 33 + 4 * 2 + 5
    # Hidden behind the other blocks' backward but for the last one, embed's backward and all.
    quick = by_hand(reduce=(3, 0), copies=(10, 5), **ACROSS)
    assert quick.step_s(COMPUTE) == COMPUTED - 1 + 3 + 10 + 5
    exposed = by_hand(**slow, runtime=Runtime(overlaps_data=False), **ACROSS)
    assert exposed.step_s(COMPUTE) == COMPUTED + 12 * 2 + 6 * 33 + 5


def test_replicas_of_a_pipeline_are_reduced_while_shards_are():
    slow = {"reduce": (3, 7), "copies": (30, 5), "count": 2}
    # The root's 7 + 5 first; then three blocks, the first of which has a reduction before it.
    apart = by_hand(**slow, world=16, parallel={"pp": 2, "dp_replicate": 2})
    assert apart.after_s(0, COMPUTE) == 7 + 5 + 3 * 30
    shared = by_hand(**slow, world=8, parallel={"pp": 2, "dp_replicate": 2})
    assert shared.after_s(0, COMPUTE) == 7 + 5 + 3 * 33


def test_a_reduction_has_the_links_of_its_groups():
    sections = {"parallel": {"dp_replicate": 2}, "precision": {"dtype": "bf16"}}
    plan = resolve(tiny_config(model=EVEN, **sections), 8)
    data = DataParallel(plan, counts_of(plan), Network(plan.sizes, DEVICE), OURS)
    _, (unit, *_) = data.units(data.shapes[0])
    # fp32; 3/4 to the others of a node at 100 GB/s, then a quarter by one's own NIC of 10 GB/s.
    wanted = 3 / 4 * 4 * unit.trained / 1e11, 4 * unit.trained / 4 / 1e10
    assert data.reduce_s(unit) == pytest.approx((*wanted, 0.0))


def test_every_microbatch_gathers_and_the_last_one_reduces():
    gathers = by_hand(gather=(2, 5), count=3)
    assert gathers.step_s(COMPUTE) == 3 * (COMPUTED + 6)
    reductions = by_hand(reduce=(3, 5), count=3)
    assert reductions.step_s(COMPUTE) == 3 * COMPUTED + 7
    every = by_hand(reduce=(3, 5), count=3, runtime=Runtime(reduces_each_microbatch=True))
    assert every.step_s(COMPUTE) == 3 * (COMPUTED + 7)


def test_without_overlap_all_of_it_is_exposed():
    exposed = Runtime(overlaps_data=False)
    found = by_hand(gather=(2, 5), reduce=(3, 7), runtime=exposed).step_s(COMPUTE)
    # The blocks are gathered twice, the root once.
    assert found == COMPUTED + 2 * 6 * 2 + 5 + 6 * 3 + 7


def test_a_pipeline_waits_for_its_first_gathers_and_reduces_after_its_pass():
    sections = {"parallel": {"pp": 2}}
    found = by_hand(gather=(12, 5), reduce=(3, 7), count=2, **sections)
    assert [len(layers) for layers in found.plan.stage_layers] == [3, 3]
    # Root, then three blocks' gathers while embed and blocks compute: 11, 2 and 2 s late.
    assert found.before_s({0: COMPUTE}) == 5 + 11 + 2 + 2
    assert found.before_s({1: COMPUTE}) == 5 + 12 + 2 + 2
    assert found.after_s(0, COMPUTE) == 3 * 3 + 7
    replicas = Runtime(sharding="replicas")
    hidden = by_hand(reduce=(3, 7), count=2, runtime=replicas, **sections)
    assert hidden.after_s(0, COMPUTE) == 2 + 7
    exposed = by_hand(
        reduce=(3, 7),
        count=2,
        runtime=Runtime(sharding="replicas", overlaps_data=False),
        **sections,
    )
    assert exposed.after_s(0, COMPUTE) == 3 * 3 + 7


def test_copies_from_the_host_come_before_gathers_and_beside_computing():
    # Of root and first block they are exposed, as gathers are.
    assert by_hand(fetch=(2, 5)).step_s(COMPUTE) == COMPUTED + 5 + 1
    # In forward a unit's copy runs beside the gather of the unit before it; in backward it starts
    # with the computing of that unit, and its gather follows.
    slow = by_hand(fetch=(30, 0), gather=(30, 0)).step_s(COMPUTE)
    assert slow == 30 + 6 * 30 + 10 + 2 + 6 * 60 + 20 + 1


def test_a_single_shard_is_copied_while_nothing_computes():
    found = by_hand(fetch=(2, 5), world=1, count=3, offload={"parameters": True})
    assert found.step_s(COMPUTE) == 3 * (COMPUTED + 5 + 6 * 2 * 2)
    kept = {"blocks_per_fsdp_unit": 1, "reshard_after_forward": "never"}
    found = by_hand(fetch=(2, 5), world=1, offload={"parameters": True}, parallel=kept)
    assert found.step_s(COMPUTE) == COMPUTED + 5 + 6 * 2


def test_copies_to_the_host_hold_up_the_next_reduction_but_not_that_of_replicas():
    # The first block's is hidden by embed's backward but for 2 s; the root's follows.
    assert by_hand(store=(3, 5)).step_s(COMPUTE) == COMPUTED + 2 + 5
    first = 3 + 60 + 4 + 20  # Forward, head, and the backward of the last block.
    slow = {"reduce": (10, 0), "store": (30, 0)}
    assert by_hand(**slow).step_s(COMPUTE) == first + 6 * (10 + 30)
    assert by_hand(**slow, copies=(1, 0), **ACROSS).step_s(COMPUTE) == first + 11 + 6 * 30
    assert by_hand(store=(3, 5), count=3).step_s(COMPUTE) == 3 * COMPUTED + 7


def test_a_pipeline_copies_all_weights_before_its_first_forward():
    found = by_hand(fetch=(12, 5), gather=(20, 0), count=2, parallel={"pp": 2})
    # The root's 5 s and three copies of 12 s. Gathers end at 37, 57 and 77 s, of which the second
    # and the third are waited for.
    assert found.before_s({0: COMPUTE}) == 5 + 3 * 12 + 5 + 10
    assert by_hand(store=(3, 5), count=2, parallel={"pp": 2}).after_s(0, COMPUTE) == 5 + 3 * 3


def test_replicas_all_reduce_whole_gradients_once():
    plan = resolve(
        tiny_config(model=EVEN, training={"global_batch_size": 24, "microbatch_size": 2}), 4
    )
    counts = counts_of(plan)
    data = DataParallel(
        plan, counts, Network(plan.sizes, DEVICE), Runtime(sharding="replicas", gradient_bytes=2)
    )
    whole = counts.embed.trained + 3 * counts.block.trained + counts.head.trained
    sent = sum(count * message.bytes for message, count in data.traffic().items())
    assert {message.operation for message in data.traffic()} == {"all-reduce"}
    assert sent == pytest.approx(2 * 3 / 4 * 2 * whole)
    assert data.splits == 1


def test_kept_gathers_are_once_per_microbatch():
    plan = resolve(
        tiny_config(model=EVEN, training={"global_batch_size": 24, "microbatch_size": 2}), 4
    )
    found = {
        name: sum(
            count
            for message, count in DataParallel(
                plan, counts_of(plan), Network(plan.sizes, DEVICE), Runtime(sharding=name)
            )
            .traffic()
            .items()
            if message.operation == "all-gather"
        )
        for name in ("fsdp", "gradients")
    }
    # Units of one and two blocks, and the root, which stays gathered until backward.
    assert found == {"fsdp": 3 * (2 * 2 + 1), "gradients": 3 * 3}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_fsdp_copies(world):
    """bf16: casts from and to fp32 are 6 bytes; those of once a step belong to the update."""
    sizes = {"dp_replicate": 2} if world == 4 else {}
    found = {}
    for count in (1, 3):
        config = tiny_config(
            model=EVEN,
            parallel=sizes,
            precision={"dtype": "bf16"},
            training={"global_batch_size": 2 * world * count, "microbatch_size": 2},
        )
        plan = resolve(config, world)
        data = DataParallel(plan, counts_of(plan), Network(plan.sizes, DEVICE), OURS)
        root, blocks = data.units(data.shapes[0])
        found[count] = [
            (gathered / unit.parameters, added / unit.trained)
            for unit in (root, blocks[0])
            for gathered, added in [data.copied(unit)]
        ]
    if world == 1:
        # Three microbatches: two more casts of the weights, and two sums of 2 + 4 + 4 bytes.
        assert found == {1: [(0, 0)] * 2, 3: [(12, 20)] * 2}
    else:
        # A gather is copied out of its buffer, 2 + 2 bytes; half of a weight is cast on each of two
        # shards. A block is gathered again for backward. Gradients go to a buffer in fp32.
        assert found[1] == [(4, 6), (8 + 3, 6)]
        assert found[3] == [(12 + 2 * 3, 20 + 3 + 8), (24 + 5 * 3, 20 + 3 + 8)]
