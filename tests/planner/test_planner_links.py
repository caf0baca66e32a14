"""Bandwidth and latency of messages, against sums done by hand: 1e9 bytes, 100 and 10 GB/s."""

import itertools
import math

import pytest
from hand_made import EASY, easy

from titan_dit.config.section import UserError
from titan_dit.parallel.mesh import AXES, AxisSizes
from titan_dit.planner.hardware import device_of, names
from titan_dit.planner.links import (
    FLATTENED,
    Network,
    axes_of,
    fills_nodes,
    members,
    slowest_group,
    slowest_of,
    strides,
)
from titan_dit.planner.work import Message

GB = 1e9


def seconds(axis, operation="all-gather", nbytes=GB, device=EASY, **sizes):
    return Network(AxisSizes(**sizes), device).seconds(Message(axis, operation, nbytes))


def group(axis, device=EASY, **sizes):
    found = Network(AxisSizes(**sizes), device).group(axis)
    return found.ranks, found.inside, found.nodes, found.sharing


def test_a_group_inside_a_node_has_the_inner_link_of_its_size():
    assert seconds("tp", dp_shard=8, tp=8) == pytest.approx(1 / 100)
    assert seconds("tp", dp_shard=8, tp=2) == pytest.approx(1 / 50)
    # Of 4 ranks nothing is known: the next smaller size.
    assert seconds("tp", dp_shard=8, tp=4) == pytest.approx(1 / 50)


def test_eight_groups_behind_one_nic_get_an_eighth_each():
    assert group("dp_shard", dp_shard=8, tp=8) == (8, 1, 8, 8)
    assert seconds("dp_shard", dp_shard=8, tp=8) == pytest.approx(8 / 10)


def test_the_only_group_of_a_node_has_the_whole_nic():
    assert group("dp_shard", dp_shard=64) == (64, 8, 8, 1)
    assert seconds("dp_shard", dp_shard=64) == pytest.approx(1 / 10)


def test_two_nics_carry_twice_as_much():
    two = easy(nics_per_node=2)
    assert seconds("dp_shard", device=two, dp_shard=8, tp=8) == pytest.approx(8 / 20)
    assert seconds("dp_shard", device=two, dp_shard=64) == pytest.approx(1 / 20)


def test_the_inner_link_limits_a_group_with_many_nics():
    many = easy(nics_per_node=8, nic_gb_per_s=50.0)
    assert seconds("dp_shard", device=many, dp_shard=64) == pytest.approx(1 / 100)
    # One rank in each node does not use it.
    assert seconds("dp_shard", device=many, dp_shard=8, tp=8) == pytest.approx(1 / 50)


def test_the_order_of_the_axes_says_which_one_leaves_the_node():
    hybrid = {"dp_replicate": 4, "dp_shard": 8}
    assert group("dp_shard", **hybrid) == (8, 8, 1, 0)
    assert group("dp_replicate", **hybrid) == (4, 1, 4, 8)
    assert seconds("dp_shard", **hybrid) == pytest.approx(1 / 100)
    assert seconds("dp_replicate", **hybrid) == pytest.approx(8 / 10)
    assert group("dp_shard", dp_shard=4, cp=2, tp=4) == (4, 1, 4, 8)
    assert group("cp", dp_shard=4, cp=2, tp=4) == (2, 2, 1, 0)
    assert group("cp", dp_shard=4, cp=4, tp=4) == (4, 2, 2, 4)


def test_fsdp_over_cp_is_one_group():
    sizes = {"dp_shard": 4, "cp": 2, "tp": 4}
    assert group("dp_shard x cp", **sizes) == (8, 2, 4, 4)
    assert seconds("dp_shard x cp", **sizes) == pytest.approx(4 / 10)


def test_flattened_groups_have_the_ranks_of_their_axes():
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 4}
    assert group("all", **sizes) == (64, 8, 8, 1)
    assert group("loss", **sizes) == (16, 2, 8, 4)
    # Over the ranks 0, 8, 16, 24 of a pipeline stage of 32.
    assert group("data", **sizes) == (4, 1, 4, 8)


def test_tensor_parallelism_over_two_nodes_has_the_nic_of_a_node():
    assert group("tp", tp=16) == (16, 8, 2, 1)
    assert seconds("tp", tp=16) == pytest.approx(1 / 10)


def test_groups_that_cross_the_end_of_a_node_share_its_nic():
    # Ranks 6, 7, 8 and 15, 16, 17 leave the node of ranks 8 to 15; the others stay inside.
    assert group("tp", dp_shard=8, tp=3) == (3, 2, 2, 2)
    assert seconds("tp", dp_shard=8, tp=3) == pytest.approx(2 / 10)


def test_fewer_ranks_than_a_node_has_gpus_need_no_nic():
    alone = easy(nics_per_node=0)
    assert group("dp_shard", device=alone, dp_shard=4) == (4, 4, 1, 0)
    assert seconds("dp_shard", device=alone, dp_shard=4) == pytest.approx(1 / 50)
    with pytest.raises(UserError, match=r"dp_shard 16 = 16 ranks.* nodes of 8 and nics_per_node=0"):
        Network(AxisSizes(dp_shard=16), alone)


def test_full_nodes_and_parts_of_one():
    assert [ranks for ranks in range(1, 26) if fills_nodes(ranks, EASY)] == [*range(1, 9), 16, 24]


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize("nics", [1, 8])
def test_the_formula_of_a_regular_group_is_that_of_every_rank(gpus, nics):
    groups_of = [*AXES, *FLATTENED, "dp_shard x cp", "dp_replicate x cp"]
    for extents in itertools.product((1, 3), (1, 2), (1, 3, 4), (1, 2), (1, 4)):
        sizes = AxisSizes(**dict(zip(AXES, extents, strict=True)))
        world = math.prod(extents)
        for name in groups_of:
            found = slowest_group(sizes, axes_of(name), gpus, nics)
            groups = members(strides(sizes, axes_of(name)), world)
            assert sorted(itertools.chain(*groups)) == list(range(world))
            assert found == slowest_of(groups, gpus, nics), (sizes, name)


def test_a_pass_takes_a_hop_to_every_other_rank():
    late = easy(inner_latency_us=1.0, node_latency_us=100.0)
    assert seconds("tp", nbytes=0, device=late, tp=8) == pytest.approx(7e-6)
    assert seconds("tp", "reduce-scatter", 0, late, tp=8) == pytest.approx(7e-6)
    # Two nodes of 8: 14 hops inside them, one between.
    assert seconds("dp_shard", nbytes=0, device=late, dp_shard=16) == pytest.approx(114e-6)
    # One rank in each of 8 nodes.
    assert seconds("dp_shard", nbytes=0, device=late, dp_shard=8, tp=8) == pytest.approx(700e-6)


def test_an_all_reduce_is_by_ring_or_by_tree():
    late = easy(inner_latency_us=1.0, node_latency_us=100.0)
    # Tree over 8 nodes of 8: 7 hops inside, 3 between, up and down.
    assert seconds("dp_shard", "all-reduce", 0, late, dp_shard=64) == pytest.approx(614e-6)
    # Ring: the bytes that a rank sends, over two passes of 56 and 7 hops.
    ring = 100 * GB / (10 * GB) + 2 * (56e-6 + 700e-6)
    assert seconds("dp_shard", "all-reduce", 100 * GB, late, dp_shard=64) == pytest.approx(ring)


def test_an_all_to_all_sends_each_part_over_its_own_link():
    # 16 ranks on two nodes: of 15 parts 7 stay inside, 8 leave through an eighth of the NIC.
    assert seconds("cp", "all-to-all", 15 * GB, cp=16) == pytest.approx(8 * 8 / 10)
    assert seconds("cp", "all-to-all", 7 * GB, cp=8) == pytest.approx(7 / 100)


def test_a_hop_inside_a_node_has_the_link_of_a_pair():
    late = easy(inner_latency_us=1.0)
    # Not the 100 GB/s that 8 ranks reach together.
    assert Network(AxisSizes(cp=8), late).hop_s(GB, "cp") == pytest.approx(1 / 50 + 1e-6)
    assert Network(AxisSizes(pp=4, tp=2), late).stage_s(GB, 0, 1) == pytest.approx(1 / 50 + 1e-6)
    # A bus that all 8 share.
    bus = easy(inner_gb_per_s={2: 50.0, 8: 5.0})
    assert Network(AxisSizes(cp=8), bus).hop_s(GB, "cp") == pytest.approx(1 / 5)
    assert Network(AxisSizes(pp=4, tp=2), bus).stage_s(GB, 0, 1) == pytest.approx(1 / 5)


def test_a_hop_between_nodes_has_the_nics_near_to_one_gpu():
    late = easy(nics_per_node=8, inner_latency_us=1.0, node_latency_us=100.0)
    hop = pytest.approx(1 / 10 + 1e-4)
    # Rank 7 alone sends to the next node, by its own NIC. An all-gather has rings over all eight.
    links = Network(AxisSizes(cp=16), late)
    assert links.hop_s(GB, "cp") == hop
    assert links.seconds(Message("cp", "send", GB)) == hop
    assert links.seconds(Message("cp", "ring", 15 * GB)) == pytest.approx(15 * (1 / 10 + 1e-4))
    assert links.seconds(Message("cp", "all-gather", GB)) == pytest.approx(1 / 80 + 114e-6)
    # A stage of a node sends to the next: each rank by its own.
    assert Network(AxisSizes(pp=2, tp=8), late).stage_s(GB, 0, 1) == hop
    # Two NICs a GPU; and fewer than GPUs: still the only rank that sends.
    assert Network(AxisSizes(cp=16), easy(nics_per_node=16)).hop_s(GB, "cp") == pytest.approx(
        1 / 20
    )
    assert Network(AxisSizes(cp=16), easy(nics_per_node=2)).hop_s(GB, "cp") == pytest.approx(1 / 10)
    # A NIC faster than the link of a pair.
    fast = easy(nics_per_node=8, nic_gb_per_s=80.0)
    assert Network(AxisSizes(cp=16), fast).hop_s(GB, "cp") == pytest.approx(1 / 50)
    assert Network(AxisSizes(cp=2, tp=8), fast).hop_s(GB, "cp") == pytest.approx(1 / 80)


def test_rings_that_leave_a_node_together_share_its_nics():
    late = easy(inner_latency_us=1.0, node_latency_us=100.0)
    assert Network(AxisSizes(cp=4, tp=8), late).hop_s(GB, "cp") == pytest.approx(8 / 10 + 1e-4)
    hops = seconds("cp", "ring", 3 * GB, late, cp=4, tp=8)
    assert hops == pytest.approx(3 * (8 / 10 + 1e-4))
    # Two ranks of each of four rings in a node, of which one sends to the next node.
    assert Network(AxisSizes(cp=4, tp=4), late).hop_s(GB, "cp") == pytest.approx(4 / 10 + 1e-4)
    four = easy(nics_per_node=4)
    assert Network(AxisSizes(cp=4, tp=4), four).hop_s(GB, "cp") == pytest.approx(1 / 10)
    assert Network(AxisSizes(cp=4, tp=8), four).hop_s(GB, "cp") == pytest.approx(2 / 10)


def test_no_hop_is_faster_than_a_gpu_and_its_nic():
    for name in names():
        device = device_of(name)
        nodes = 2 if device.nics_per_node else 1
        for cp in (2, 4, 8, 16):
            tp = max(1, nodes * device.gpus_per_node // cp)
            if cp * tp > nodes * device.gpus_per_node:
                continue
            links = Network(AxisSizes(cp=cp, tp=tp), device)
            leaves = links.group("cp").nodes > 1
            nic = device.nic_gb_per_s * max(1, device.nics_per_node / device.gpus_per_node)
            assert GB / links.hop_s(GB, "cp") <= 1e9 * (nic if leaves else device.inner(2))


def test_all_ranks_of_a_stage_send_at_once():
    late = easy(inner_latency_us=1.0, node_latency_us=100.0)
    assert Network(AxisSizes(pp=4, tp=8), late).stage_s(GB, 0, 1) == pytest.approx(8 / 10 + 1e-4)
    assert Network(AxisSizes(pp=4, dp_shard=4, tp=8), late).stage_s(GB, 1, 2) == pytest.approx(
        0.8001
    )
    assert Network(AxisSizes(pp=4, tp=2), late).stage_s(GB, 0, 3) == pytest.approx(1 / 50 + 1e-6)
    two = easy(nics_per_node=2)
    assert Network(AxisSizes(pp=4, tp=8), two).stage_s(GB, 3, 0) == pytest.approx(8 / 20)


def test_only_stages_on_different_nodes_use_the_nic():
    links = Network(AxisSizes(pp=3, tp=4), EASY)
    assert links.stage_s(GB, 0, 1) == pytest.approx(1 / 50)
    assert links.stage_s(GB, 1, 2) == pytest.approx(4 / 10)
    # Ranks 0 to 5, 6 to 11: two of them stay inside, four leave the first node.
    assert Network(AxisSizes(pp=2, tp=6), EASY).stage_s(GB, 0, 1) == pytest.approx(4 / 10)
    assert links.seconds(Message("pp", "send", GB)) == pytest.approx(4 / 10)


def test_one_rank_alone_reaches_the_nics_near_to_it():
    many = easy(nics_per_node=8)
    # Of 16 stages of one rank, only rank 7 sends to another node.
    assert Network(AxisSizes(pp=16), many).stage_s(GB, 7, 8) == pytest.approx(1 / 10)


def test_efficiencies_apply_to_their_own_links():
    slow = easy(inner=0.5, node=0.25)
    assert seconds("tp", device=slow, tp=8) == pytest.approx(1 / 50)
    assert seconds("dp_shard", device=slow, dp_shard=8, tp=8) == pytest.approx(8 / 2.5)
    assert Network(AxisSizes(pp=2, tp=8), slow).stage_s(GB, 0, 1) == pytest.approx(8 / 2.5)


def test_a_group_of_one_sends_nothing():
    assert seconds("cp", tp=8) == 0
    assert Network(AxisSizes(), EASY).stage_s(GB, 0, 0) == 0


def test_nodes_of_one_gpu_send_nothing_inside():
    device = easy(gpus_per_node=1, nics_per_node=1, inner_gb_per_s={})
    assert seconds("tp", device=device) == 0
    sent = seconds("dp_shard", device=device, dp_shard=4)
    assert sent == pytest.approx(1 / device.nic_gb_per_s + 3e-6 * device.node_latency_us)
